"""How long every job of a run takes, and all of them, from what a round of them takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

EVALUATED = 0.4
"""What a token takes that is only evaluated, over one that is trained: a forward without a backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotal:
    """What a job's whole run comes to."""

    steps: int
    tokens: float
    """Of a step, with its share of the evaluations, in tokens that take as long as trained ones."""
    state_bytes: int
    """Its adapter with gradient and optimizer state."""
    at_least: bool = False
    """Whether the number of its steps is only known not to be smaller."""


@dataclass(frozen=True, slots=True)
class WholeRun:
    ends: Mapping[str, float]
    """Job → seconds from the start of the run to its end."""
    need_bytes: int
    """On the device that needs most."""
    budget_bytes: int

    @property
    def seconds(self) -> float:
        return max(self.ends.values())


RoundSeconds = Callable[[Collection[str]], float]
"""What a round takes, a global batch of each of these jobs."""


def tokens_of(batches: Collection[Collection[int]], held_out: int, evaluations: int, steps: int) -> float:
    """Of a step, as `JobTotal` counts them; `batches` stand for all."""
    trained = sum(map(sum, batches)) / max(1, len(batches))
    return trained + EVALUATED * held_out * evaluations / max(1, steps)


def endings(
    totals: Mapping[str, JobTotal], aboard: Iterable[str], waiting: Iterable[str], seconds: RoundSeconds
) -> dict[str, float]:
    """Job → seconds from the start of the run to its end. Whoever waits comes aboard when another ends."""
    left = {name: totals[name].steps for name in aboard}
    queue, now, ends = list(waiting), 0.0, {}
    while left:
        rounds = min(left.values())
        now += rounds * seconds(left.keys())
        done = [name for name, steps in left.items() if steps == rounds]
        left = {name: steps - rounds for name, steps in left.items() if steps > rounds}
        for name in done:
            ends[name] = now
            if queue:
                left[queue[0]] = totals[queue[0]].steps
                del queue[0]
    return ends


def at_rate(totals: Mapping[str, JobTotal], tokens_per_second: float) -> RoundSeconds:
    """Where a round takes as long as its tokens do."""
    return lambda names: sum(totals[name].tokens for name in names) / tokens_per_second
