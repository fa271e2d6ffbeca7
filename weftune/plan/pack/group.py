"""Groups of jobs whose rounds alternate, so that a job's batches are far enough apart in a pipeline.

With several stages, a job's next batch must wait until the last microbatch of the previous one has come back
(the bubble lemma). Rounds of other groups fill that wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobLengths:
    """The lengths of a job that grouping depends on."""

    job: str
    mean: float
    """Average tokens per sample."""
    tokens: int
    """Tokens per global batch."""


@dataclass(frozen=True, slots=True)
class Grouping:
    groups: tuple[tuple[str, ...], ...]
    """Jobs of each group, in the order in which the groups' rounds run."""
    microbatches: tuple[int, ...]
    """Minimum number of microbatches in each group's round."""
    waits: int
    """Number of no-ops per round of all groups."""

    def why(self, stages: int) -> str:
        """Return one sentence for a reader of the plan."""
        return (
            f"{len(self.groups)} groups take turns on {stages} stages: a round of all is "
            f"{sum(self.microbatches)} microbatches and {self.waits} no-ops"
        )


def earliest(last: int, stages: int) -> int:
    """Return the first microbatch allowed for batch j+1 of a job whose batch j ends in `last` (the bubble
    lemma).

    In plain 1F1B the first stage runs the backward of microbatch k right before the forward of k + `stages`.
    """
    return last + stages


def waits(microbatches: Sequence[int], stages: int) -> int:
    """Return the no-ops per round if groups with these numbers of microbatches take turns.

    The rounds of all others lie between two rounds of a group; the lemma requires `stages` − 1 microbatches
    there.
    """
    between = min((sum(microbatches) - own for own in microbatches), default=stages)
    return max(0, stages - 1 - between)


def head_tail(jobs: Sequence[JobLengths], count: int) -> tuple[tuple[JobLengths, ...], ...]:
    """Return `count` similar groups of pairs, each a job with short samples and one with long samples."""
    assert 1 <= count <= len(jobs), "every group has a job"
    ordered = sorted(jobs, key=lambda job: (job.mean, job.job))
    groups: list[list[JobLengths]] = [[] for _ in range(count)]
    turn = 0
    while ordered:
        # With more groups left than pairs, a job goes alone, so that no group stays empty.
        alone = len(ordered) == 1 or len(ordered) <= sum(not group for group in groups)
        pair = [ordered.pop()] if alone else [ordered.pop(0), ordered.pop()]
        groups[turn % count] += pair
        turn += 1
    return tuple(tuple(group) for group in groups)


def group(jobs: Sequence[JobLengths], capacity: int, stages: int) -> Grouping:
    """Return the head-tail grouping with the fewest microbatches and no-ops per round, then the fewest
    groups.

    Fewer groups pack better; more groups leave less to wait for. On one stage all jobs form one group.
    """
    assert jobs, "there is a job to group"
    choices = [_grouping(head_tail(jobs, count), capacity, stages) for count in range(1, len(jobs) + 1)]
    return min(choices, key=lambda one: (sum(one.microbatches) + one.waits, len(one.groups)))


def _grouping(groups: Sequence[Sequence[JobLengths]], capacity: int, stages: int) -> Grouping:
    needed = tuple(-(-sum(job.tokens for job in members) // capacity) for members in groups)
    return Grouping(
        groups=tuple(tuple(job.job for job in members) for members in groups),
        microbatches=needed,
        waits=waits(needed, stages),
    )
