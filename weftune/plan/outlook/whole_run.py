"""Time of every job of a run and of the whole run, computed from the time of a round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

EVALUATION_COST = 0.4
"""Time of an evaluated or scored token relative to a trained one: a forward without a backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotal:
    """Totals of a job's whole run."""

    steps: int
    tokens: float
    """Tokens per step, with evaluated and scored tokens converted into trained tokens that take equally
    long."""
    state_bytes: int
    """Bytes of the job's adapter, with gradient and optimizer state."""
    is_lower_bound: bool = False
    """Whether `steps` is only a lower bound."""


@dataclass(frozen=True, slots=True)
class WholeRun:
    ends: Mapping[str, float]
    """Maps each job to the seconds from the start of the run to the end of the job."""
    need_bytes: int
    """Bytes needed on the device that needs most."""
    budget_bytes: int

    @property
    def seconds(self) -> float:
        return max(self.ends.values())


RoundSeconds = Callable[[Collection[str]], float]
"""Function that returns the seconds of a round, which is one global batch of each of the given jobs."""


def tokens_per_step(
    batches: Collection[Collection[int]], held_out: int, evaluations: int, steps: int, scored: float = 0.0
) -> float:
    """Return the tokens per step as `JobTotal` counts them; `batches` are representative of all. `scored` is
    the number of tokens that are scored once, before the first step."""
    trained = sum(map(sum, batches)) / max(1, len(batches))
    return trained + EVALUATION_COST * (held_out * evaluations + scored) / max(1, steps)


def job_ends(
    totals: Mapping[str, JobTotal], attached: Iterable[str], waiting: Iterable[str], seconds: RoundSeconds
) -> dict[str, float]:
    """Return the seconds until the end of each job. A waiting job is admitted when another ends."""
    left = {name: totals[name].steps for name in attached}
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


def rounds_at_rate(totals: Mapping[str, JobTotal], tokens_per_second: float) -> RoundSeconds:
    """Return a function that computes the seconds of a round in proportion to its tokens."""
    return lambda names: sum(totals[name].tokens for name in names) / tokens_per_second
