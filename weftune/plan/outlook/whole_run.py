"""Time of every job of a run and of the whole run, computed from the time of a round.

A round is one global batch of every running job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

EVALUATION_COST = 0.4
"""Time of a token that is evaluated or scored (by its log-probability), without a backward, relative to the
time of a trained token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotal:
    """Totals of the whole training of a job: steps, tokens and bytes."""

    steps: int
    tokens: float
    """Tokens per optimizer step. Tokens that are evaluated or scored (by their log-probability) are converted
    into the number of trained tokens that take equally long."""
    state_bytes: int
    """Bytes of the job's adapter, including gradient and optimizer state."""
    is_lower_bound: bool = False
    """Whether `steps`, the job's number of optimizer steps, is only a lower bound."""


@dataclass(frozen=True, slots=True)
class WholeRun:
    """Predicted time and memory of a whole run."""

    end_seconds: Mapping[str, float]
    """Maps each job to the seconds from the start of the run to the end of the job."""
    need_bytes: int
    """Predicted bytes that the run needs on the fullest device."""
    budget_bytes: int

    @property
    def seconds(self) -> float:
        return max(self.end_seconds.values())


RoundSeconds = Callable[[Collection[str]], float]
"""Function that returns the seconds of a round, which is one global batch of each of the given jobs."""


def tokens_per_step(
    batches: Collection[Collection[int]],
    held_out: int,
    evaluations: int,
    steps: int,
    scored_tokens: float = 0.0,
) -> float:
    """Return the number of tokens per optimizer step of a job, where tokens that are evaluated or scored (by
    their log-probability) are converted into the number of trained tokens that take equally long.

    `batches` contains the sample lengths of a few typical global batches. `held_out` is the number of tokens
    per evaluation, and `scored_tokens` the number of tokens that a reference policy scores once."""
    trained = sum(map(sum, batches)) / max(1, len(batches))
    return trained + EVALUATION_COST * (held_out * evaluations + scored_tokens) / max(1, steps)


def job_ends(
    totals: Mapping[str, JobTotal],
    attached_jobs: Iterable[str],
    waiting_jobs: Iterable[str],
    seconds: RoundSeconds,
) -> dict[str, float]:
    """Return, for each job, the seconds from the start of the run to the end of the job. `attached_jobs` are
    the jobs that run from the start; a job of `waiting_jobs` is admitted whenever another job ends."""
    left = {name: totals[name].steps for name in attached_jobs}
    queue, now, ends = list(waiting_jobs), 0.0, {}
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
    """Return a function that computes the seconds of a round (one global batch of every job) in proportion to
    the tokens of the round."""
    return lambda names: sum(totals[name].tokens for name in names) / tokens_per_second
