"""Partition of layers into stages that are streamed from host memory or stay resident on a GPU (Mobius).

The search is branch and bound over prefixes of a partition (its first stages), layer by layer, and starts
with the best result of a local search. The result is optimal as long as no level has more prefixes than the
search may examine, which is the case for up to eleven layers. Otherwise the most promising prefixes are kept,
and the result includes a lower bound on the step time of any partition. The amount to prefetch is not
searched: prefetching more is never slower, so each prefetch is as large as memory allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TypeVar

from weftune.errors import PlanError
from weftune.plan.cost.estimate import LayerCost, StageCost, stage_cost
from weftune.plan.cost.memory import format_bytes
from weftune.plan.layout.mobius_step import Host, StreamPartition, free_bytes, stages_seconds, temporary_bytes

T = TypeVar("T")
PREFIXES = 200_000
"""Maximum number of prefixes (first stages of a partition) that a search examines. There is no time limit,
since a plan must not depend on the clock."""
STARTS = 6
"""Number of partitions from which the local search for the best partition starts."""
CHANGES = 2_000
"""Maximum number of changes to a partition that the local search tries from each start."""
CLOSE = 1 - 1e-9
"""A time counts as shorter than another if their ratio is at most this number. Ratios closer to 1 are
attributed to rounding errors."""


@dataclass(frozen=True, slots=True)
class StreamedPartition:
    """A partition of the layers into streamed and resident stages, its predicted step time in seconds, and a
    lower bound on the step time of any partition."""

    partition: StreamPartition
    seconds: float
    bound: float

    @property
    def is_optimal(self) -> bool:
        return self.bound >= self.seconds


class _Problem:
    def __init__(self, layers: Sequence[LayerCost], host: Host, microbatches: int) -> None:
        self.layers = layers
        self.host = host
        self.microbatches = microbatches
        self._stages: dict[tuple[int, int], StageCost] = {}

    def stage(self, start: int, stop: int) -> StageCost:
        if (start, stop) not in self._stages:
            self._stages[start, stop] = stage_cost(self.layers, start, stop)
        return self._stages[start, stop]

    def stages(self, partition: StreamPartition) -> list[StageCost]:
        return [self.stage(start, stop) for start, stop in pairwise(partition.cuts)]

    def seconds(self, partition: StreamPartition) -> float:
        return stages_seconds(self.stages(partition), partition.resident_stages, self.host, self.microbatches)

    def excess_bytes(self, partition: StreamPartition) -> int:
        """Return the bytes by which the fullest GPU exceeds its memory. The result is 0 or negative if the
        partition fits."""
        return -min(free_bytes(self.stages(partition), partition.resident_stages, self.host))


def search_partition(
    layers: Sequence[LayerCost],
    host: Host,
    microbatches: int,
    prefixes: int = PREFIXES,
    starts: int = STARTS,
) -> StreamedPartition:
    """Return the fastest partition found, which is never slower than the results of `largest_stages` and
    `smallest_stages`.

    A local search from `starts` partitions comes first; then branch and bound examines at most `prefixes`
    prefixes. Raise PlanError if no partition fits in memory.
    """
    problem = _Problem(layers, host, microbatches)
    best = _search_locally(problem, starts)
    return _branch_and_bound(problem, best, prefixes)


def largest_stages(layers: Sequence[LayerCost], host: Host) -> StreamPartition:
    """Return a partition with as many layers per stage as memory holds (Mobius's maximum-stage partition)."""
    return _largest_fitting_stages(_Problem(layers, host, 1))


def smallest_stages(layers: Sequence[LayerCost], host: Host) -> StreamPartition:
    """Return a partition with one layer per stage (Mobius's minimum-stage partition)."""
    problem = _Problem(layers, host, 1)
    partition = _streamed_partition(tuple(range(len(layers) + 1)))
    if problem.excess_bytes(partition) > 0:
        raise PlanError(_shortage_reason(problem))
    return partition


def _streamed_partition(cuts: tuple[int, ...]) -> StreamPartition:
    return StreamPartition(cuts, (False,) * (len(cuts) - 1))


def _largest_fitting_stages(problem: _Problem) -> StreamPartition:
    """Return a partition into streamed stages that are as large as memory allows beside the adapter state."""
    limit = problem.host.memory_bytes
    while True:
        cuts = [0]
        for layer in range(len(problem.layers)):
            stage = problem.stage(cuts[-1], layer + 1)
            if stage.weight_bytes + stage.kept_bytes > limit:
                if layer == cuts[-1]:
                    raise PlanError(_shortage_reason(problem))
                cuts.append(layer)
        partition = _streamed_partition((*cuts, len(problem.layers)))
        excess_bytes = problem.excess_bytes(partition)
        if excess_bytes <= 0:
            return partition
        limit -= excess_bytes


def _shortage_reason(problem: _Problem) -> str:
    smallest = _streamed_partition(tuple(range(len(problem.layers) + 1)))
    rooms = free_bytes(problem.stages(smallest), smallest.resident_stages, problem.host)
    tight = min(range(len(rooms)), key=rooms.__getitem__)
    need = problem.host.memory_bytes - rooms[tight]
    layer = problem.layers[tight]
    own = layer.weight_bytes + layer.kept_bytes
    return (
        f"layer {tight} ({layer.kind}) needs {format_bytes(own)} and {format_bytes(need - own)} of "
        "adapter state and "
        f"inputs beside it, "
        f"but a GPU has {format_bytes(problem.host.memory_bytes)}"
    )


def _search_locally(problem: _Problem, starts: int) -> StreamPartition | None:
    """Return the best partition that local searches from `starts` partitions find, or None if none fits in
    memory."""
    ranked = sorted(_starting_partitions(problem), key=problem.seconds)
    descents = [_improve_partition(problem, partition) for partition in ranked[:starts]]
    best = min(descents, key=problem.seconds, default=None)
    return best if best and problem.seconds(best) < math.inf else None


def _starting_partitions(problem: _Problem) -> Iterator[StreamPartition]:
    """Yield the partitions from which the local search may start: stages of equal size for every number of
    stages, streamed or as many resident as fit, and the partition with the largest stages."""
    count = len(problem.layers)
    for stages in range(1, count + 1):
        cuts = tuple(round(count * number / stages) for number in range(stages + 1))
        yield _streamed_partition(cuts)
        yield _make_stages_resident(problem, cuts)
    try:
        yield _largest_fitting_stages(problem)
    except PlanError:
        return


def _make_stages_resident(problem: _Problem, cuts: tuple[int, ...]) -> StreamPartition:
    """Return the partition with these boundaries between stages, in which as many of the first stages as fit
    are resident."""
    partition = _streamed_partition(cuts)
    for number in range(len(partition.resident_stages)):
        longer = _toggle_resident(partition, number)
        if problem.excess_bytes(longer) <= 0:
            partition = longer
    return partition


def _improve_partition(problem: _Problem, partition: StreamPartition) -> StreamPartition:
    """Return a locally optimal partition: the first change that reduces the step time is applied, repeatedly,
    until no change reduces it."""
    seconds, tried = problem.seconds(partition), 0
    better: StreamPartition | None = partition
    while better:
        partition, better = better, None
        for change in islice(_neighbouring_partitions(partition, problem.host.gpus), CHANGES - tried):
            tried += 1
            changed = problem.seconds(change)
            if changed < seconds * CLOSE:
                better, seconds = change, changed
                break
    return partition


def _neighbouring_partitions(partition: StreamPartition, gpus: int) -> Iterator[StreamPartition]:
    """Yield partitions that differ a little from `partition`: one boundary is moved, removed or added, one
    stage becomes resident or streamed, or a resident and a streamed stage exchange their roles."""
    cuts, resident = partition.cuts, partition.resident_stages
    for number in range(1, len(cuts) - 1):
        for cut in (cuts[number] - 1, cuts[number] + 1):
            if cuts[number - 1] < cut < cuts[number + 1]:
                yield StreamPartition((*cuts[:number], cut, *cuts[number + 1 :]), resident)
    for number in range(len(resident)):
        yield _toggle_resident(partition, number)
    for number in range(len(resident)):
        for other in range(number + 1, min(number + gpus + 1, len(resident))):
            if resident[number] != resident[other]:
                yield _toggle_resident(_toggle_resident(partition, number), other)
    for number in range(1, len(cuts) - 1):
        yield StreamPartition(
            (*cuts[:number], *cuts[number + 1 :]), (*resident[: number - 1], *resident[number:])
        )
    for number, (start, stop) in enumerate(pairwise(cuts)):
        if stop - start > 1:
            middle = (start + stop) // 2
            both = (*resident[:number], resident[number], *resident[number:])
            yield StreamPartition((*cuts[: number + 1], middle, *cuts[number + 1 :]), both)


def _toggle_resident(partition: StreamPartition, number: int) -> StreamPartition:
    resident = partition.resident_stages
    return StreamPartition(
        partition.cuts, (*resident[:number], not resident[number], *resident[number + 1 :])
    )


def _branch_and_bound(problem: _Problem, best: StreamPartition | None, prefixes: int) -> StreamedPartition:
    bounds = Bounds(problem.layers, problem.host, problem.microbatches)
    count = len(problem.layers)
    seconds = problem.seconds(best) if best else math.inf
    levels: list[list[Prefix]] = [[bounds.empty_prefix()], *([] for _ in range(count))]
    dropped = math.inf
    for level in range(count):
        # Two children for every layer that the next stage may end at, here and on later levels.
        width = prefixes // ((count - level) * (count - level + 1))
        promising = sorted((p for p in levels[level] if p.seconds < seconds * CLOSE), key=lambda p: p.seconds)
        levels[level] = []
        dropped = min([dropped, *(p.seconds for p in promising[width:])])
        for prefix in promising[:width]:
            prefixes -= 2 * (count - level)
            for child in _extend_prefix(problem, bounds, prefix):
                if child.seconds >= seconds * CLOSE:
                    continue
                if child.layers < count:
                    levels[child.layers].append(child)
                    continue
                partition = StreamPartition(child.cuts, child.resident_stages)
                exact = problem.seconds(partition)
                if exact < seconds * CLOSE:
                    best, seconds = partition, exact
    if best is None:
        raise PlanError(_shortage_reason(problem))
    return StreamedPartition(best, seconds, min(dropped, seconds))


def _extend_prefix(problem: _Problem, bounds: Bounds, prefix: Prefix) -> Iterator[Prefix]:
    for stop in range(prefix.layers + 1, len(problem.layers) + 1):
        stage = problem.stage(prefix.layers, stop)
        streamed = bounds.extend(prefix, stage, is_resident=False)
        if streamed is None:
            return
        yield streamed
        kept = bounds.extend(prefix, stage, is_resident=True)
        if kept:
            yield kept


# -- bounds ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartialPlacement:
    """A stage in a prefix (the first stages of a partition), with lower bounds on its times in seconds.
    Stages that are added later take up memory and can therefore only increase these times."""

    stage: StageCost
    is_resident: bool
    first_start: float
    last_start: float
    """Start time, in seconds, of the forward of the last microbatch on the stage. `first_start` is the start
    time of the first microbatch's forward."""
    first_tail: float
    last_tail: float
    """Seconds from the start of the last microbatch's backward on the stage to the end of the step.
    `first_tail` is counted from the start of the first microbatch's backward."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of a partition: the first of the stages into which the layers are divided, with lower bounds
    on the step time of all partitions that begin with these stages."""

    cuts: tuple[int, ...]
    resident_stages: tuple[bool, ...]
    latest_stages: tuple[PartialPlacement | None, ...]
    """Last stage that has been placed on each GPU, or None for a GPU without stages."""
    fixed_bytes: tuple[int, ...]
    """Bytes that each GPU holds permanently."""
    temporary_bytes: tuple[int, ...]
    """Peak bytes that each GPU needs temporarily while one of its stages computes."""
    seconds: float
    """Lower bound on the seconds of any partition that begins with this prefix."""

    @property
    def layers(self) -> int:
        return self.cuts[-1]


class Bounds:
    """Lower bounds on the step time of partitions whose first stages are given.

    Times follow the recurrence of `mobius_step`. Both the forward and the backward are computed from the
    first stage on. For the backward this is possible because its times are expressed as tails: seconds from
    the start of a stage to the end of the step.
    """

    def __init__(self, layers: Sequence[LayerCost], host: Host, microbatches: int) -> None:
        self.host = host
        self.microbatches = microbatches
        self.rests = [LayerCost("rest", 0.0, 0.0, 0)]
        """For each layer, the costs of this layer and all later layers together."""
        for layer in reversed(layers):
            after = self.rests[-1]
            forward, backward = layer.forward + after.forward, layer.backward + after.backward
            self.rests.append(LayerCost("rest", forward, backward, layer.weight_bytes + after.weight_bytes))
        self.rests.reverse()

    def empty_prefix(self) -> Prefix:
        zeros, recent = (0,) * self.host.gpus, (None,) * self.host.gpus
        return Prefix((0,), (), recent, zeros, zeros, self._least_seconds(self.rests[0], recent, zeros, None))

    def extend(self, prefix: Prefix, stage: StageCost, is_resident: bool) -> Prefix | None:
        """Return the prefix of a partition extended by one stage, or None if the stage does not fit in
        memory."""
        number = len(prefix.resident_stages)
        gpu = number % self.host.gpus
        own_bytes = self.host.stage_bytes + stage.state_bytes + (stage.weight_bytes if is_resident else 0)
        fixed = _replace_at(prefix.fixed_bytes, gpu, prefix.fixed_bytes[gpu] + own_bytes)
        passing = _replace_at(
            prefix.temporary_bytes, gpu, max(prefix.temporary_bytes[gpu], temporary_bytes(stage, is_resident))
        )
        room = self.host.memory_bytes - fixed[gpu]
        if passing[gpu] > room:
            return None
        before = prefix.latest_stages[(number - 1) % self.host.gpus]
        placement = self._bound_placement(stage, is_resident, before, prefix.latest_stages[gpu], room)
        recent = _replace_at(prefix.latest_stages, gpu, placement)
        seconds = self._least_seconds(self.rests[stage.stop], recent, fixed, placement)
        cuts, bits = (*prefix.cuts, stage.stop), (*prefix.resident_stages, is_resident)
        return Prefix(cuts, bits, recent, fixed, passing, seconds)

    def _bound_placement(
        self,
        stage: StageCost,
        is_resident: bool,
        previous_stage: PartialPlacement | None,
        previous_gpu_stage: PartialPlacement | None,
        free_bytes: int,
    ) -> PartialPlacement:
        """Return a stage with lower bounds on its start times and on the seconds from then to the end of the
        step. `previous_stage` is the stage before it in the base, and `previous_gpu_stage` the previous stage
        on the same GPU. `free_bytes` is the free memory of that GPU, apart from the stage that computes."""
        bandwidth, more = self.host.bandwidth, self.microbatches - 1
        first = last = 0.0
        last_tail = stage.backward
        first_tail = 0.0
        if previous_stage:
            alone = self.host.gpus == 1
            arrival = previous_stage.stage.forward + (
                0 if alone else previous_stage.stage.activation_bytes / bandwidth
            )
            first, last = previous_stage.first_start + arrival, previous_stage.last_start + arrival
            hop = stage.backward + (0 if alone else stage.gradient_bytes / bandwidth)
            last_tail, first_tail = hop + previous_stage.last_tail, hop + previous_stage.first_tail
        if previous_gpu_stage:
            weights = 0 if is_resident else stage.weight_bytes
            late = max(
                0,
                weights
                - free_bytes
                + temporary_bytes(previous_gpu_stage.stage, previous_gpu_stage.is_resident),
            )
            freed = previous_gpu_stage.last_start + previous_gpu_stage.stage.forward
            first = max(first, freed + late / bandwidth, previous_gpu_stage.first_start + weights / bandwidth)
            again = 0 if previous_gpu_stage.is_resident else previous_gpu_stage.stage.weight_bytes
            late = max(0, again - free_bytes + temporary_bytes(stage, is_resident))
            last_tail = max(last_tail, stage.backward + late / bandwidth + previous_gpu_stage.first_tail)
            first_tail = max(first_tail, again / bandwidth + previous_gpu_stage.first_tail)
        last = max(last, first + more * stage.forward)
        first_tail = max(first_tail, more * stage.backward + last_tail)
        return PartialPlacement(stage, is_resident, first, last, first_tail, last_tail)

    def _least_seconds(
        self,
        remaining_cost: LayerCost,
        recent_placements: Sequence[PartialPlacement | None],
        fixed_bytes: Sequence[int],
        newest_placement: PartialPlacement | None,
    ) -> float:
        """Return a lower bound on the seconds of a step: for the forward and for the backward, the largest of
        the bounds by compute, by uploads and by the path of one microbatch."""
        gpus, work = self.host.gpus, self.microbatches
        placed = [one for one in recent_placements if one]
        freed = sum(one.last_start + one.stage.forward for one in placed)
        begun = sum(one.first_start for one in placed)
        tails = sum(one.first_tail for one in placed)
        # A GPU's resident stages and the one it need not load again lie in its memory together.
        rooms = gpus * self.host.memory_bytes - sum(fixed_bytes)
        moved = max(0, remaining_cost.weight_bytes - rooms) / self.host.bandwidth
        forward = max(freed + work * remaining_cost.forward, begun + moved) / gpus
        backward = (tails + max(work * remaining_cost.backward, moved)) / gpus
        if newest_placement:
            forward = max(
                forward, newest_placement.last_start + newest_placement.stage.forward + remaining_cost.forward
            )
            backward = max(backward, remaining_cost.backward + newest_placement.first_tail)
        else:
            forward, backward = max(forward, remaining_cost.forward), max(backward, remaining_cost.backward)
        return forward + backward


def _replace_at(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
