"""Assignment of jobs to fusion groups by dynamic programming over the jobs sorted by tokens (MuxTune's
equation 6).

F(m, n) is the least time of the first m jobs in n groups: the first group counts end to end, each further one
by what it adds to a full pipeline, so F(m, n) = min over k of F(k, n−1) + added(jobs k+1 … m). Groups that do
not fit in memory are never formed. The result is exact among groupings that are contiguous in the sorted
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise, takewhile
from operator import add

from weftune.errors import Mistake, PlanError
from weftune.plan.cost.memory import gib
from weftune.plan.studies.stage import GroupLoad, PipelineCost, Shortage


@dataclass(frozen=True, slots=True)
class FusionGroup:
    load: GroupLoad
    seconds: float
    """Its part of the predicted seconds: end to end for the first group, the added time for the others."""
    reason: str
    """Reason why the next job did not join."""

    @property
    def jobs(self) -> tuple[str, ...]:
        return self.load.jobs


@dataclass(frozen=True, slots=True)
class FusionGroups:
    groups: tuple[GroupLoad, ...]
    seconds: float
    """Predicted seconds of one round: every group's microbatches once."""


@dataclass(frozen=True, slots=True)
class Fusion:
    groups: tuple[FusionGroup, ...]
    seconds: float
    """Predicted seconds of the best grouping."""
    by_count: dict[int, FusionGroups]
    """Number of groups → best grouping, for the numbers that memory allows."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """The best way to group the first jobs, up to some number: its time, and where its last group starts."""

    seconds: float
    start: int


_Row = dict[int, _Cell]
_Added = Sequence[Sequence[float]]
"""Seconds that the groups starting with each job add, from the shortest to the longest that fits."""


def fuse(loads: Sequence[GroupLoad], pipeline: PipelineCost) -> Fusion:
    """Return the grouping of least predicted time; PlanError names every job that does not fit even alone."""
    ordered = sorted(loads, key=lambda load: (load.tokens, load.jobs))
    misfits = [(load, sentence) for load in ordered if (sentence := why_not(load, pipeline))]
    if misfits:
        raise PlanError(Mistake(_names(load), sentence) for load, sentence in misfits)
    if not ordered:
        return Fusion((), 0.0, {})
    added = [_added(ordered[start:], pipeline) for start in range(len(ordered))]
    rows = _rows(ordered, added, pipeline)
    edges = {
        count: [*_starts(rows[:count], len(ordered)), len(ordered)]
        for count, row in enumerate(rows, 1)
        if len(ordered) in row
    }
    by_count = {
        count: FusionGroups(
            tuple(reduce(add, ordered[start:stop]) for start, stop in pairwise(cut)),
            rows[count - 1][len(ordered)].seconds,
        )
        for count, cut in edges.items()
    }
    count = min(by_count, key=lambda groups: (by_count[groups].seconds, groups))
    reasons = _Reasons(ordered, pipeline, added, rows)
    return Fusion(reasons.groups(edges[count]), by_count[count].seconds, by_count)


def why_not(load: GroupLoad, pipeline: PipelineCost) -> str | None:
    """Return a sentence that says why this job cannot run even alone, or None if it can."""
    if load.tokens < 1:
        return "has no tokens to train on"
    shortage = pipeline.shortage(load)
    if shortage is None:
        return None
    return f"alone, with {load.tokens} tokens a microbatch, it {_needs(shortage)}"


def price(groups: Sequence[GroupLoad], pipeline: PipelineCost) -> float:
    """Return the predicted time of any grouping; the first of `groups` fills the pipeline."""
    return pipeline.first_seconds(groups[0]) + sum(pipeline.added_seconds(load) for load in groups[1:])


def _growing(ordered: Sequence[GroupLoad], pipeline: PipelineCost) -> Iterator[GroupLoad]:
    """Return the fitting groups that start with the first of these jobs; a longer one never needs less
    memory."""
    return takewhile(lambda load: pipeline.shortage(load) is None, accumulate(ordered, add))


def _added(ordered: Sequence[GroupLoad], pipeline: PipelineCost) -> list[float]:
    # The loads are not kept: with many jobs there are so many that garbage collection would dominate.
    return [pipeline.added_seconds(load) for load in _growing(ordered, pipeline)]


def _rows(ordered: Sequence[GroupLoad], added: _Added, pipeline: PipelineCost) -> list[_Row]:
    """Return one row per number of groups, with a cell for each number of jobs that they can hold."""
    first = [pipeline.first_seconds(load) for load in _growing(ordered, pipeline)]
    rows = [{stop: _Cell(seconds, 0) for stop, seconds in enumerate(first, 1)}]
    for _ in ordered[1:]:
        row: _Row = {}
        for start, before in rows[-1].items():
            longer = added[start] if start < len(added) else ()
            for stop, more in enumerate(longer, start + 1):
                seconds = before.seconds + more
                if stop not in row or seconds < row[stop].seconds:
                    row[stop] = _Cell(seconds, start)
        rows.append(row)
    return rows


def _starts(rows: Sequence[_Row], jobs: int) -> list[int]:
    """Return the start of each group in the best grouping of `jobs` jobs, with one group per row."""
    starts = []
    for row in reversed(rows):
        jobs = row[jobs].start
        starts.append(jobs)
    return starts[::-1]


class _Reasons:
    """Computes the cost of a plan in which one group is longer by one job and all else is optimal."""

    def __init__(
        self,
        ordered: Sequence[GroupLoad],
        pipeline: PipelineCost,
        added: _Added,
        rows: Sequence[_Row],
    ) -> None:
        self.ordered = ordered
        self.pipeline = pipeline
        self.added = added
        self.before = [
            min((row[jobs].seconds for row in rows if jobs in row), default=0.0)
            for jobs in range(len(ordered) + 1)
        ]
        self.after = [0.0] * (len(ordered) + 1)
        for start in reversed(range(len(ordered))):
            tails = enumerate(added[start], start + 1)
            self.after[start] = min(more + self.after[stop] for stop, more in tails)

    def groups(self, edges: Sequence[int]) -> tuple[FusionGroup, ...]:
        """Return the groups of the best plan, cut at `edges`, each with its time and reason."""
        total = self.before[edges[-1]]
        made = []
        for start, stop in pairwise(edges):
            load = reduce(add, self.ordered[start:stop])
            made.append(FusionGroup(load, self._cost(start, stop), self.why_not_next(start, stop, total)))
        return tuple(made)

    def why_not_next(self, start: int, stop: int, total: float) -> str:
        """Return why the group of jobs `start` to `stop` is not longer, in a plan of `total` seconds."""
        if stop == len(self.ordered):
            return "no job is left to join"
        following = self.ordered[stop]
        name = _names(following)
        if len(self.added[start]) == stop - start:
            shortage = self.pipeline.shortage(reduce(add, self.ordered[start : stop + 1]))
            assert shortage is not None, "a group was cut short although it fits"
            return f"with {name} the group {_needs(shortage)}"
        more = self.before[start] + self._cost(start, stop + 1) + self.after[stop + 1] - total
        if more <= 1e-9 * total:
            return f"with {name} in the group the best plan takes no less than {total:.3g} s"
        return f"with {name} in the group the best plan takes {more:.2g} s more than {total:.3g} s"

    def _cost(self, start: int, stop: int) -> float:
        if start:
            return self.added[start][stop - start - 1]
        return self.pipeline.first_seconds(reduce(add, self.ordered[:stop]))


def _needs(shortage: Shortage) -> str:
    return f"needs {gib(shortage.need)} on stage {shortage.stage}, but {gib(shortage.budget)} are available"


def _names(load: GroupLoad) -> str:
    return ", ".join(load.jobs)
