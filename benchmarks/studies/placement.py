"""Placement of jobs on a cluster: the base is cut into stages, with a token capacity and the bytes per
device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import ModelShape
from weftune.errors import PlanError
from weftune.plan.cost.cluster import Cluster
from weftune.plan.cost.estimate import (
    BaseLayer,
    JobOutline,
    LayerCost,
    RowCounts,
    Speed,
    StageCost,
    base_layers,
    data_sheet_speed,
    layer_costs,
    stage_cost,
)
from weftune.plan.cost.memory import MemoryModel, format_bytes, max_sample_tokens
from weftune.plan.layout.choose import MAX_TOKENS
from weftune.plan.layout.stages import StageLimit, balance_stages
from weftune.plan.program.program import NOTHING, Recompute

SAME_TIME_SHARE = 1e-3
"""Relative difference of times below which they count as equal, so that the first of several is chosen."""
PATIENCE = 2
"""Number of consecutive smaller capacities without improvement after which the search stops."""


@dataclass(frozen=True, slots=True)
class ClusterCase:
    """The base and the cluster for which a placement is searched."""

    shape: ModelShape
    cluster: Cluster
    speeds: tuple[Speed, ...]
    """Speed of each device."""
    layers: tuple[BaseLayer, ...]
    recompute: Recompute = NOTHING
    """Recomputation in the backward. Either no layer or all layers are recomputed completely."""
    held_bytes: int = 0
    """Bytes per token that one microbatch needs for the layer that is being recomputed."""

    @property
    def stages(self) -> int:
        """Number of stages: one per device, unless the base has fewer layers."""
        return min(len(self.cluster.devices), self.shape.layers + 2)

    @property
    def is_gpu(self) -> bool:
        return self.cluster.devices[0].is_gpu

    @property
    def max_tokens(self) -> int:
        return MAX_TOKENS[self.is_gpu]

    @property
    def memory(self) -> MemoryModel:
        """Memory model for the whole base on the first device."""
        return MemoryModel(self.shape, self.budgets[0], uses_fused_ops=self.is_gpu)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Bytes that the run may use on each device."""
        return tuple(device.budget for device in self.cluster.devices)

    def costs(self, jobs: Sequence[JobOutline], rows: RowCounts) -> tuple[LayerCost, ...]:
        """Return the cost of each layer for a microbatch on the first device."""
        costs = layer_costs(self.layers, jobs, rows, self.speeds[0], self.memory.bytes_per_parameter)
        if not self.recompute.recomputed_layers:
            return costs
        return tuple(
            replace(cost, backward=cost.backward + cost.forward) if cost.kind == "layer" else cost
            for cost in costs
        )


def cluster_case(
    shape: ModelShape, cluster: Cluster, speeds: Sequence[Speed] = (), recompute: Recompute = NOTHING
) -> ClusterCase:
    """Return the case of a base on a cluster. The default of `speeds` is the speed of each device's data
    sheet."""
    speeds = speeds or [data_sheet_speed(device) for device in cluster.devices]
    first = cluster.devices[0]
    memory = MemoryModel(shape, first.memory_bytes, uses_fused_ops=first.is_gpu)
    whole = memory.bytes_per_token(replace(recompute, recomputed_layers=0)) // shape.layers
    kept = shape.hidden * shape.bytes_per_value if recompute.recomputed_layers else whole
    layers = base_layers(shape, kept, has_separate_ends=len(cluster.devices) > 1)
    return ClusterCase(
        shape, cluster, tuple(speeds), layers, recompute, whole if recompute.recomputed_layers else 0
    )


def recompute_cases(case: ClusterCase) -> list[ClusterCase]:
    """Return variants of the case with more and more recomputation in the backward. On a CPU, which does not
    support recomputation, return only the case itself."""
    if not case.is_gpu:
        return [case]
    everything = Recompute(recomputes_outputs=True, recomputed_layers=case.shape.layers)
    return [
        cluster_case(case.shape, case.cluster, case.speeds, one)
        for one in (NOTHING, Recompute(recomputes_outputs=True), everything)
    ]


@dataclass(frozen=True, slots=True)
class Placement:
    """The base of a case cut into stages for a token capacity."""

    case: ClusterCase
    capacity: int
    stages: tuple[StageCost, ...]
    need_bytes: tuple[int, ...]
    """Bytes needed on each device, including slack, with as many full microbatches in flight as in 1F1B."""
    other_bytes: int
    """Part of `need_bytes` on each device that is not weights, adapters or kept activations."""

    @property
    def budgets(self) -> tuple[int, ...]:
        return self.case.budgets[: len(self.stages)]

    def layers(self, stage: int) -> tuple[BaseLayer, ...]:
        return self.case.layers[self.stages[stage].start : self.stages[stage].stop]


def capacities(case: ClusterCase, jobs: Sequence[JobOutline]) -> list[int]:
    """Return the token capacities to try, the largest first: the maximum, half of it, and so on, but never
    less than the longest sample. On one device, the length of the longest sample is included."""
    largest, least = case.max_tokens, max_sample_tokens(job.shape for job in jobs)
    halves = [largest >> power for power in range(6) if largest >> power >= max(least, 256)]
    least = max(1, least)
    if not halves:
        return [least]
    return halves if case.stages > 1 or least in halves else [*halves, least]


def cut_stages(
    case: ClusterCase, jobs: Sequence[JobOutline], capacity: int, count_ends: bool = True
) -> Placement:
    """Return the placement whose slowest stage is as fast as possible. If `count_ends` is False, the times of
    embedding and head are ignored. Raise PlanError if no placement fits in memory."""
    costs = case.costs(jobs, full_rows(jobs, capacity))
    counted = costs
    if not count_ends:
        counted = tuple(
            one if one.kind == "layer" else replace(one, forward=0.0, backward=0.0) for one in costs
        )
    beside = case.memory.slack_bytes + case.held_bytes * capacity
    limits = [
        StageLimit(
            memory_bytes=max(0, case.budgets[number] - beside),
            microbatches_in_flight=case.stages - number,
            relative_time=case.speeds[0].flops / case.speeds[number].flops,
        )
        for number in range(case.stages)
    ]
    stages = tuple(stage_cost(costs, stage.start, stage.stop) for stage in balance_stages(counted, limits))
    needs = (
        stage.resident_bytes(limit.microbatches_in_flight) + beside
        for stage, limit in zip(stages, limits, strict=True)
    )
    return Placement(case, capacity, stages, tuple(needs), beside)


def full_rows(jobs: Sequence[JobOutline], capacity: int) -> RowCounts:
    """Return the counts of a full microbatch in which every job has its share of the tokens."""
    lengths = {job.name: [length for batch in job.batches for length in batch] for job in jobs}
    total = sum(map(sum, lengths.values()))
    squares = sum(length * length for each in lengths.values() for length in each)
    by_job = {name: capacity * sum(each) // total for name, each in lengths.items()} if total else {}
    return RowCounts(capacity, squares * capacity // max(1, total), by_job)


def misfit_reason(case: ClusterCase, jobs: Sequence[JobOutline]) -> str | None:
    """Return a sentence that says why these jobs do not fit together, or None if they do."""
    case = recompute_cases(case)[-1]
    least = capacities(case, jobs)[-1]
    try:
        cut_stages(case, jobs, least)
    except PlanError as error:
        others = len(jobs) - 1
        beside = f"with {others} other job{'s' if others > 1 else ''} running and " if others else ""
        if case.stages > 1:
            return f"does not fit {beside}with {least} tokens in a microbatch: {error}"
        costs = case.costs(jobs, full_rows(jobs, least))
        need = stage_cost(costs, 0, len(costs)).resident_bytes(1)
        need += case.memory.slack_bytes + case.held_bytes * least
        return (
            f"needs {format_bytes(need)} {beside}with {least} tokens in a microbatch, "
            f"but {format_bytes(case.budgets[0])} are available"
        )
    return None


def placements(case: ClusterCase, jobs: Sequence[JobOutline]) -> list[Placement]:
    """Return the placements that fit in memory, the largest token capacity first.

    One device has no waits that smaller capacities could shorten, but several choices of what to recompute. A
    pipeline recomputes as little as possible.
    """
    found: list[Placement] = []
    for choice in recompute_cases(case):
        fitting = _fitting(choice, jobs)
        if case.stages > 1:
            found = list(fitting)
            if found:
                break
        else:
            largest = next(fitting, None)
            found += [largest] if largest else []
            if largest and largest.capacity >= case.max_tokens:
                break
    return found


def _fitting(case: ClusterCase, jobs: Sequence[JobOutline]) -> Iterator[Placement]:
    for capacity in capacities(case, jobs):
        try:
            yield cut_stages(case, jobs, capacity)
        except PlanError:
            continue


def best_placement(candidates: Iterable[Placement], seconds: Callable[[Placement], float]) -> None:
    """Evaluate the function `seconds` for the placements, until `PATIENCE` consecutive token capacities of a
    pipeline have not improved the time.

    With every halving of the capacity, waits become shorter and passes more expensive. The trend is uneven,
    because the number of microbatches is rounded.
    """
    least, worse = float("inf"), 0
    for placement in candidates:
        now = seconds(placement)
        worse = worse + 1 if now > least * (1 + SAME_TIME_SHARE) else 0
        if len(placement.stages) > 1 and worse == PATIENCE:
            break
        least = min(least, now)
