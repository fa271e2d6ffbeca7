"""Fusion groups and buckets (MuxTune): which jobs share a pass, and which groups interleave in a stage.

The cost of a group in a pipeline follows equations 3 to 5. Communication is kept separate from the compute
seconds: whether it can be hidden is decided by which groups share a bucket.

Fusion (equation 6) is dynamic programming over the jobs sorted by tokens: F(m, n) is the least time of the
first m jobs in n groups. The first group counts end to end, each further one by what it adds to a full
pipeline, so F(m, n) = min over k of F(k, n−1) + added(jobs k+1 … m). Groups that do not fit in memory are
never formed. The result is exact among groupings that are contiguous in the sorted order.

Groups of one bucket (equation 7) interleave within a stage: one computes while another communicates. Buckets
follow one another through the pipeline. For each number of buckets, the groups are spread as evenly as
possible; the number with the shortest predicted end-to-end time is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise, takewhile
from operator import add

from benchmarks.studies.placement import Placement
from benchmarks.studies.scheme import Groups, recomputed_share
from benchmarks.studies.search import mean_length, round_tokens
from weftune.errors import Mistake, PlanError
from weftune.plan.cost.estimate import (
    ADAPTER_BACKWARD,
    ATTENTION_BACKWARD,
    JobOutline,
    adapter_seconds,
    base_pass_time,
    square_seconds,
)
from weftune.plan.cost.memory import format_bytes
from weftune.plan.cost.time import Line
from weftune.plan.layout.balanced import balance_latencies

NO_TIME = Line(0.0, 0.0)
ADAPTER_SHARE = 0.5
"""Fraction of the device that the matrix products of one adapter keep busy. Fused adapters use the rest."""
COUNT_INTERVAL = 16
"""Number of groups or buckets up to which every number is tried. Of larger numbers, only its multiples and
the largest one are tried."""


@dataclass(frozen=True, slots=True)
class AdapterTime:
    """Time of one or several adapters that run fused in one pass over a stage."""

    busy_seconds: float
    """Sum over the adapters of their seconds times the fraction of the device that they keep busy."""
    longest_seconds: float
    """Seconds of the slowest adapter alone."""

    @property
    def seconds(self) -> float:
        return max(self.busy_seconds, self.longest_seconds)

    def __add__(self, other: AdapterTime) -> AdapterTime:
        return AdapterTime(
            self.busy_seconds + other.busy_seconds, max(self.longest_seconds, other.longest_seconds)
        )


@dataclass(frozen=True, slots=True)
class StageAdapters:
    """Adapter times of a job, or of a fusion group, on one stage."""

    forward: AdapterTime
    backward: AdapterTime

    def __add__(self, other: StageAdapters) -> StageAdapters:
        return StageAdapters(self.forward + other.forward, self.backward + other.backward)


def one_adapter(forward: float, backward: float, share: float) -> StageAdapters:
    """Return the times of one job's adapter on a stage. `share` is the fraction of the device that it keeps
    busy."""
    return StageAdapters(AdapterTime(share * forward, forward), AdapterTime(share * backward, backward))


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """The work that a job adds to every microbatch. The load of a fusion group is the sum over its jobs."""

    jobs: tuple[str, ...]
    tokens: int
    squares: int
    """Sum of squared sample lengths, to which the cost of attention is proportional."""
    adapters: tuple[StageAdapters, ...]
    """Adapter times on each stage."""

    def __add__(self, other: GroupLoad) -> GroupLoad:
        return GroupLoad(
            self.jobs + other.jobs,
            self.tokens + other.tokens,
            self.squares + other.squares,
            tuple(mine + theirs for mine, theirs in zip(self.adapters, other.adapters, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class StagePass:
    """Time of one pass, forward or backward, of the base's operators in a stage, as a function of the
    work."""

    line: Line
    per_square: float = 0.0
    communication: Line = NO_TIME
    """Time of collectives inside the stage, during which the device could compute for another fusion
    group."""

    def seconds(self, load: GroupLoad) -> float:
        return self.line(load.tokens) + self.per_square * load.squares


@dataclass(frozen=True, slots=True)
class Stage:
    """The costs and the memory of one pipeline stage."""

    forward: StagePass
    backward: StagePass
    resident_bytes: int
    """Bytes of the stage's part of the base and of the state of all adapters."""
    activation_bytes: int
    """Bytes per token that a microbatch in flight keeps for its backward."""
    gradient_bytes: int
    """Bytes per token of the input gradients while the backward runs."""
    budget: int
    shards: int = 1
    """Number of devices that divide each operator of the base. `forward` and `backward` are times on one
    device."""


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one microbatch's pass over one stage."""

    base: float
    adapters: AdapterTime
    communication: float

    @property
    def compute(self) -> float:
        return self.base + self.adapters.seconds

    @property
    def unoverlapped_seconds(self) -> float:
        """Seconds of the work if no other work overlaps with its communication."""
        return self.compute + self.communication


@dataclass(frozen=True, slots=True)
class Shortage:
    """The first stage on which a load does not fit, with the bytes that it needs there."""

    stage: int
    need: int
    budget: int

    def __str__(self) -> str:
        return (
            f"needs {format_bytes(self.need)} on stage {self.stage}, "
            f"but {format_bytes(self.budget)} are available"
        )


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """The cost model of a pipeline: its stages, and the number of microbatches that every fusion group sends
    through it per round."""

    stages: tuple[Stage, ...]
    microbatches: int

    @property
    def communicates(self) -> bool:
        """Whether any pass has collectives within its stage."""
        return any(
            stage.forward.communication != NO_TIME or stage.backward.communication != NO_TIME
            for stage in self.stages
        )

    def times(self, load: GroupLoad) -> list[tuple[PassSeconds, PassSeconds]]:
        """Return the seconds of the forward and of the backward on each stage."""
        return [
            (
                _pass_seconds(stage.forward, stage.shards, load, adapters.forward),
                _pass_seconds(stage.backward, stage.shards, load, adapters.backward),
            )
            for stage, adapters in zip(self.stages, load.adapters, strict=True)
        ]

    def paces(self, load: GroupLoad) -> list[float]:
        """Return, for each stage, the compute seconds of a forward and a backward together. This is faster
        than `times`."""
        return [
            (stage.forward.seconds(load) + stage.backward.seconds(load)) / stage.shards
            + adapters.forward.seconds
            + adapters.backward.seconds
            for stage, adapters in zip(self.stages, load.adapters, strict=True)
        ]

    def first_seconds(self, load: GroupLoad) -> float:
        """Return the seconds of a round of this group alone, in which the pipeline fills, runs at the pace of
        the slowest stage, and drains."""
        each = self.paces(load)
        return sum(each) + (self.microbatches - 1) * max(each)

    def added_seconds(self, load: GroupLoad) -> float:
        """Return the seconds that a round of this group adds to a full pipeline, at the mean pace of the
        stages."""
        each = self.paces(load)
        return self.microbatches * sum(each) / len(each)

    def peak_bytes(self, load: GroupLoad) -> tuple[int, ...]:
        """Return the peak bytes of each stage if all microbatches in flight are of this group, and as many
        are in flight as with 1F1B: one per stage from this stage to the last."""
        flights = range(len(self.stages), 0, -1)
        return tuple(
            stage.resident_bytes + load.tokens * (stage.gradient_bytes + in_flight * stage.activation_bytes)
            for stage, in_flight in zip(self.stages, flights, strict=True)
        )

    def shortage(self, load: GroupLoad) -> Shortage | None:
        for index, (stage, need) in enumerate(zip(self.stages, self.peak_bytes(load), strict=True)):
            if need > stage.budget:
                return Shortage(index, need, stage.budget)
        return None


def _pass_seconds(stage_pass: StagePass, shards: int, load: GroupLoad, adapters: AdapterTime) -> PassSeconds:
    return PassSeconds(stage_pass.seconds(load) / shards, adapters, stage_pass.communication(load.tokens))


# -- fusion -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """Jobs that share microbatches, as chosen by `fuse`."""

    load: GroupLoad
    seconds: float
    """Predicted seconds of the group: end to end for the first group, and added seconds for the others."""
    reason: str
    """Sentence that says why the group contains no further job."""

    @property
    def jobs(self) -> tuple[str, ...]:
        return self.load.jobs


@dataclass(frozen=True, slots=True)
class FusionGroups:
    """A grouping of all jobs with its predicted time."""

    groups: tuple[GroupLoad, ...]
    seconds: float
    """Predicted seconds of one round, in which the microbatches of every group run once."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """The best grouping of the jobs, and the best one for every other number of groups."""

    groups: tuple[FusionGroup, ...]
    seconds: float
    """Predicted seconds of the best grouping."""
    by_count: dict[int, FusionGroups]
    """Maps each number of groups that memory allows to the best grouping."""


_Row = dict[int, tuple[float, int]]
"""Maps a number n to the least seconds in which the first n jobs run, and the index of the job with which
their last group starts."""
_Added = Sequence[Sequence[float]]
"""For each job, the seconds added by the groups that start with this job, from the group of one job to the
longest group that fits."""


def fuse(loads: Sequence[GroupLoad], pipeline: PipelineCost) -> Fusion:
    """Return the grouping of the jobs with the least predicted time. Raise a PlanError that names every job
    that does not fit even alone."""
    ordered = sorted(loads, key=lambda load: (load.tokens, load.jobs))
    misfits = [(load, sentence) for load in ordered if (sentence := misfit_reason(load, pipeline))]
    if misfits:
        raise PlanError(Mistake(", ".join(load.jobs), sentence) for load, sentence in misfits)
    if not ordered:
        return Fusion((), 0.0, {})
    # The loads are not kept: with many jobs there are so many that garbage collection would dominate.
    added = [
        [pipeline.added_seconds(load) for load in _growing_groups(ordered[start:], pipeline)]
        for start in range(len(ordered))
    ]
    rows = _rows(ordered, added, pipeline)
    edges = {count: _group_boundaries(rows[:count], len(ordered)) for count in range(1, len(rows) + 1)}
    by_count = {
        count: FusionGroups(
            tuple(reduce(add, ordered[start:stop]) for start, stop in pairwise(cut)),
            rows[count - 1][len(ordered)][0],
        )
        for count, cut in edges.items()
        if cut
    }
    count = min(by_count, key=lambda groups: (by_count[groups].seconds, groups))
    reasons = _Reasons(ordered, pipeline, added, rows)
    return Fusion(reasons.groups(edges[count]), by_count[count].seconds, by_count)


def misfit_reason(load: GroupLoad, pipeline: PipelineCost) -> str | None:
    """Return a sentence that says why this job cannot run even alone, or None if it can."""
    if load.tokens < 1:
        return "has no tokens to train on"
    shortage = pipeline.shortage(load)
    return f"alone, with {load.tokens} tokens per microbatch, it {shortage}" if shortage else None


def predict_seconds(groups: Sequence[GroupLoad], pipeline: PipelineCost) -> float:
    """Return the predicted seconds of a round with any grouping. The first of `groups` fills the pipeline."""
    return pipeline.first_seconds(groups[0]) + sum(pipeline.added_seconds(load) for load in groups[1:])


def _growing_groups(sorted_loads: Sequence[GroupLoad], pipeline: PipelineCost) -> Iterator[GroupLoad]:
    """Return the groups of consecutive jobs that start with the first job and fit in memory, the shortest
    first."""
    return takewhile(lambda load: pipeline.shortage(load) is None, accumulate(sorted_loads, add))


def _rows(sorted_loads: Sequence[GroupLoad], added_seconds: _Added, pipeline: PipelineCost) -> list[_Row]:
    """Return the table of the dynamic programming: one row per number of groups, with an entry for each
    number of jobs that so many groups can contain."""
    first = [pipeline.first_seconds(load) for load in _growing_groups(sorted_loads, pipeline)]
    rows: list[_Row] = [{stop: (seconds, 0) for stop, seconds in enumerate(first, 1)}]
    for _ in sorted_loads[1:]:
        row: _Row = {}
        for start, (before, _) in rows[-1].items():
            longer = added_seconds[start] if start < len(added_seconds) else ()
            for stop, more in enumerate(longer, start + 1):
                if stop not in row or before + more < row[stop][0]:
                    row[stop] = (before + more, start)
        rows.append(row)
    return rows


def _group_boundaries(rows: Sequence[_Row], jobs: int) -> list[int]:
    """Return the index of the first job of each group in the best grouping of `jobs` jobs into one group per
    row, followed by `jobs`. Return an empty list if so many groups cannot contain the jobs."""
    if jobs not in rows[-1]:
        return []
    edges = [jobs]
    for row in reversed(rows):
        edges.append(row[edges[-1]][1])
    return edges[::-1]


class _Reasons:
    """Computes why each group is not longer: the cost of a plan in which it has one more job and everything
    else is optimal."""

    def __init__(
        self,
        sorted_loads: Sequence[GroupLoad],
        pipeline: PipelineCost,
        added_seconds: _Added,
        rows: Sequence[_Row],
    ) -> None:
        self.ordered, self.pipeline, self.added = sorted_loads, pipeline, added_seconds
        self.before = [
            min((row[jobs][0] for row in rows if jobs in row), default=0.0)
            for jobs in range(len(sorted_loads) + 1)
        ]
        self.after = [0.0] * (len(sorted_loads) + 1)
        for start in reversed(range(len(sorted_loads))):
            tails = enumerate(added_seconds[start], start + 1)
            self.after[start] = min(more + self.after[stop] for stop, more in tails)

    def groups(self, edges: Sequence[int]) -> tuple[FusionGroup, ...]:
        """Return the groups of the best plan, cut at `edges`, each with its time and reason."""
        total = self.before[edges[-1]]
        found = []
        for start, stop in pairwise(edges):
            load = reduce(add, self.ordered[start:stop])
            found.append(FusionGroup(load, self._cost(start, stop), self.stop_reason(start, stop, total)))
        return tuple(found)

    def stop_reason(self, start: int, stop: int, total: float) -> str:
        """Return a sentence that says why the group of the jobs from `start` up to `stop` has no further job,
        in a plan of `total` seconds."""
        if stop == len(self.ordered):
            return "no job is left to join"
        name = ", ".join(self.ordered[stop].jobs)
        if len(self.added[start]) == stop - start:
            shortage = self.pipeline.shortage(reduce(add, self.ordered[start : stop + 1]))
            return f"with {name} the group {shortage}"
        more = self.before[start] + self._cost(start, stop + 1) + self.after[stop + 1] - total
        if more <= 1e-9 * total:
            return f"with {name} in the group the best plan takes no less than {total:.3g} s"
        return f"with {name} in the group the best plan takes {more:.2g} s more than {total:.3g} s"

    def _cost(self, start: int, stop: int) -> float:
        if start:
            return self.added[start][stop - start - 1]
        return self.pipeline.first_seconds(reduce(add, self.ordered[:stop]))


# -- buckets ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bucket:
    """Fusion groups that interleave within each stage."""

    groups: tuple[GroupLoad, ...]
    forward: tuple[float, ...]
    """Seconds of the interleaved forwards of one microbatch of each group, for each stage."""
    backward: tuple[float, ...]
    """Seconds of the interleaved backwards of one microbatch of each group, for each stage."""

    @property
    def paces(self) -> list[float]:
        return [forward + backward for forward, backward in zip(self.forward, self.backward, strict=True)]


@dataclass(frozen=True, slots=True)
class Bucketing:
    """A division of the fusion groups into buckets."""

    buckets: tuple[Bucket, ...]
    """Buckets from the slowest to the fastest, as the template order of pipelines requires."""
    seconds: float
    """Predicted seconds of one round end to end."""
    trials: Mapping[int, float | None]
    """Maps each number of buckets to the seconds of one round, or to None if a bucket does not fit."""
    reason: str = ""
    """Reason for the number of fusion groups."""


def make_buckets(groups: Sequence[GroupLoad], pipeline: PipelineCost) -> Bucketing:
    """Return the best division of fusion groups into buckets. Each group must fit in memory alone."""
    assert groups, "no fusion group to put into a bucket"
    latencies = [pipeline.paces(load)[0] for load in groups]
    trials: dict[int, float | None] = {}
    best: Bucketing | None = None
    for count in _group_counts(len(groups)):
        spread = [
            [groups[index] for index in sorted(indices)] for indices in balance_latencies(latencies, count)
        ]
        trials[count] = None
        if any(pipeline.shortage(reduce(add, together)) for together in spread):
            continue
        found = [make_bucket(together, pipeline) for together in spread]
        found.sort(key=lambda one: (-one.paces[0], one.groups[0].jobs))
        trials[count] = seconds = end_to_end(found, pipeline.microbatches)
        if best is None or seconds < best.seconds:
            best = Bucketing(tuple(found), seconds, trials)
    assert best is not None, "a fusion group does not fit even in a bucket of its own"
    return best


def arrange_buckets(fusion: Fusion, pipeline: PipelineCost) -> Bucketing:
    """Return the best buckets for any number of fusion groups.

    Fusion assumes that communication overlaps with compute of other groups, but a few large groups allow
    little overlap. If there is any communication, the best groupings for other numbers of groups are tried as
    well.
    """
    own = len(fusion.groups)
    tried = {own: make_buckets([group.load for group in fusion.groups], pipeline)}
    if not pipeline.communicates:
        return replace(
            tried[own], reason=f"as many groups as fused, {own}: there is no communication to hide"
        )
    for count in {*_group_counts(max(fusion.by_count))} & fusion.by_count.keys() - {own}:
        tried[count] = make_buckets(fusion.by_count[count].groups, pipeline)
    chosen = min(tried, key=lambda count: (tried[count].seconds, count))
    reason = (
        f"{chosen} groups, not {own} as fused: communication hides behind other groups' compute, and a round "
        f"takes {tried[chosen].seconds:.3g} s end to end, not {tried[own].seconds:.3g} s"
    )
    if chosen == own:
        reason = f"as many groups as fused, {own}: no other number of them takes less time"
    return replace(tried[chosen], reason=reason)


def make_bucket(groups: Sequence[GroupLoad], pipeline: PipelineCost) -> Bucket:
    stages = list(zip(*(pipeline.times(load) for load in groups), strict=True))
    # Adapters of different groups may run fused only if no group holds several jobs.
    fused = all(len(load.jobs) == 1 for load in groups)
    return Bucket(
        tuple(groups),
        tuple(_interleaved_seconds([forward for forward, _ in times], fused) for times in stages),
        tuple(_interleaved_seconds([backward for _, backward in times], fused) for times in stages),
    )


def _interleaved_seconds(passes: Sequence[PassSeconds], fused: bool) -> float:
    """Return a stage's seconds for the interleaved passes of several groups: the total of compute or of
    communication, whichever is longer, but at least the time of any group alone.

    This is a lower bound: the two-lane timeline of `shards.overlap` comes close to it if operators are many
    and small.
    """
    adapters = [one.adapters for one in passes]
    together = reduce(add, adapters).seconds if fused else sum(each.seconds for each in adapters)
    compute = sum(one.base for one in passes) + together
    return max(
        compute, sum(one.communication for one in passes), *(one.unoverlapped_seconds for one in passes)
    )


def end_to_end(buckets: Sequence[Bucket], microbatches: int) -> float:
    """Return the seconds of one round: the first bucket fills the pipeline, all buckets pass through the
    slowest stage, and the last bucket drains the pipeline."""
    busy = [sum(paces) for paces in zip(*(one.paces for one in buckets), strict=True)]
    slowest = busy.index(max(busy))
    others = [stage for stage in range(len(busy)) if stage != slowest]
    filling = sum(buckets[0].forward[stage] for stage in others)
    draining = sum(buckets[-1].backward[stage] for stage in others)
    return filling + microbatches * busy[slowest] + draining


def _group_counts(max_count: int) -> list[int]:
    counts = range(1, max_count + 1)
    return [
        count
        for count in counts
        if count <= COUNT_INTERVAL or count % COUNT_INTERVAL == 0 or count == max_count
    ]


# -- groups of jobs on a cluster ----------------------------------------------------------------------------


def fused_groups(jobs: Sequence[JobOutline], placement: Placement) -> dict[str, Groups]:
    """Return the groups of jobs that the mechanisms `fusion` and `buckets` propose. Without collectives,
    neither was ever best (`benchmarks/plan_mechanisms.py`). A round is assumed to have as few microbatches as
    possible, each with an equal part of every job's tokens."""
    stages = range(len(placement.stages))
    count = max(1, -(-sum(map(round_tokens, jobs)) // placement.capacity))
    pipeline = PipelineCost(tuple(_stage(placement, number) for number in stages), count)
    loads = []
    for job in jobs:
        tokens = -(-round_tokens(job) // count)
        adapters = []
        for number in stages:
            speed = placement.case.speeds[number]
            seconds = tokens * adapter_seconds(placement.layers(number), job, speed)
            adapters.append(one_adapter(seconds, ADAPTER_BACKWARD * seconds, ADAPTER_SHARE))
        loads.append(GroupLoad((job.name,), tokens, int(tokens * mean_length(job)), tuple(adapters)))
    fusion = fuse(loads, pipeline)
    return {
        "fusion": tuple(one.jobs for one in fusion.groups),
        "buckets": tuple(
            load.jobs for one in arrange_buckets(fusion, pipeline).buckets for load in one.groups
        ),
    }


def _stage(placement: Placement, number: int) -> Stage:
    case, cut, layers = placement.case, placement.stages[number], placement.layers(number)
    line, square = base_pass_time(layers, case.speeds[number]), square_seconds(layers, case.speeds[number])
    again = recomputed_share(layers, case)
    twice = Line((1 + again) * line.fixed, (1 + again) * line.per_token)
    return Stage(
        forward=StagePass(line, square),
        backward=StagePass(twice, (ATTENTION_BACKWARD + again) * square),
        resident_bytes=cut.resident_bytes(0) + case.memory.slack_bytes,
        activation_bytes=cut.kept_bytes // placement.capacity,
        gradient_bytes=case.held_bytes,
        budget=placement.budgets[number],
    )
