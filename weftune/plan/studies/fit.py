"""Placement of jobs on a cluster: the base cut into stages, the token capacity, and bytes on every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import ModelShape
from weftune.errors import PlanError
from weftune.plan.cost.cluster import Cluster
from weftune.plan.cost.estimate import (
    BaseLayer,
    JobOutline,
    RowCounts,
    Speed,
    base_layers,
    layer_costs,
    sheet_speed,
)
from weftune.plan.cost.layers import LayerCost, StageCost, stage_cost
from weftune.plan.cost.memory import FUSED_SLACK_BYTES, SLACK_BYTES, MemoryModel, gib, longest
from weftune.plan.layout.choose import MAX_TOKENS
from weftune.plan.layout.partition import StageLimit, balance, stage_bytes
from weftune.plan.program.program import NOTHING, Recompute


@dataclass(frozen=True, slots=True)
class ClusterCase:
    """A base on a cluster."""

    shape: ModelShape
    cluster: Cluster
    speeds: tuple[Speed, ...]
    """Speed of each device."""
    layers: tuple[BaseLayer, ...]
    recompute: Recompute = NOTHING
    """Recomputation in the backward; either no whole layer is recomputed or all are."""
    held_bytes: int = 0
    """Bytes per token of one microbatch for the layer that is being recomputed."""

    @property
    def stages(self) -> int:
        """Number of stages: one per device, unless the base has fewer layers."""
        return min(len(self.cluster.devices), self.shape.layers + 2)

    @property
    def most(self) -> int:
        return MAX_TOKENS[self.is_gpu]

    @property
    def is_gpu(self) -> bool:
        return self.cluster.devices[0].is_gpu

    @property
    def slack(self) -> int:
        return FUSED_SLACK_BYTES if self.is_gpu else SLACK_BYTES

    @property
    def budgets(self) -> tuple[int, ...]:
        """Bytes that the run may use on each device."""
        return tuple(device.budget for device in self.cluster.devices)

    def costs(self, jobs: Sequence[JobOutline], rows: RowCounts) -> tuple[LayerCost, ...]:
        """Return the cost of each layer for a microbatch on the first device."""
        per_parameter = MemoryModel(self.shape, self.budgets[0]).bytes_per_parameter
        costs = layer_costs(self.layers, jobs, rows, self.speeds[0], per_parameter)
        if not self.recompute.layers:
            return costs
        return tuple(
            replace(cost, backward=cost.backward + cost.forward) if cost.kind == "layer" else cost
            for cost in costs
        )


def make_ground(
    shape: ModelShape, cluster: Cluster, speeds: Sequence[Speed] = (), recompute: Recompute = NOTHING
) -> ClusterCase:
    """Return a base on a cluster. `speeds` may be measured; the default is those of the data sheets."""
    speeds = speeds or [sheet_speed(device) for device in cluster.devices]
    first = cluster.devices[0]
    memory = MemoryModel(shape, first.memory_bytes, fused=first.is_gpu)
    whole = memory.bytes_per_token(replace(recompute, layers=0)) // shape.layers
    kept = shape.hidden * shape.bytes_per_value if recompute.layers else whole
    layers = base_layers(shape, kept, apart=len(cluster.devices) > 1)
    return ClusterCase(shape, cluster, tuple(speeds), layers, recompute, whole if recompute.layers else 0)


def frugal(ground: ClusterCase) -> list[ClusterCase]:
    """Return the ground with increasing recomputation in the backward; only fused layers (GPU) support it."""
    if not ground.is_gpu:
        return [ground]
    more = [NOTHING, Recompute(outputs=True)]
    less = [make_ground(ground.shape, ground.cluster, ground.speeds, one) for one in more]
    return [*less, most_frugal(ground)]


def most_frugal(ground: ClusterCase) -> ClusterCase:
    """Return only the last of `frugal`, with the most recomputation."""
    if not ground.is_gpu:
        return ground
    everything = Recompute(outputs=True, layers=ground.shape.layers)
    return make_ground(ground.shape, ground.cluster, ground.speeds, everything)


@dataclass(frozen=True, slots=True)
class Placement:
    """The base cut into stages for a token capacity."""

    capacity: int
    stages: tuple[StageCost, ...]
    need_bytes: tuple[int, ...]
    """Bytes needed on each device, slack included, with as many full microbatches in flight as in 1F1B."""
    budgets: tuple[int, ...]
    beside_bytes: int
    """Bytes on each device besides weights, adapters and kept activations: part of its need."""


def capacities(jobs: Sequence[JobOutline], most: int) -> list[int]:
    """Return the capacities worth trying, the largest first: `most` halved repeatedly, never below the
    longest sample."""
    least = longest(job.shape for job in jobs)
    halves = [most >> power for power in range(6) if most >> power >= max(least, 256)]
    return halves or [max(least, 1)]


def ground_capacities(ground: ClusterCase, jobs: Sequence[JobOutline]) -> list[int]:
    """Return the capacities worth trying on a cluster; one device goes down to the longest sample, like a
    run."""
    halves, least = capacities(jobs, ground.most), max(1, longest(job.shape for job in jobs))
    return halves if ground.stages > 1 or least in halves else [*halves, least]


def lay_out(ground: ClusterCase, jobs: Sequence[JobOutline], capacity: int, ends: bool = True) -> Placement:
    """Return the cut whose slowest stage is fastest; without `ends`, embedding and head are not counted."""
    costs = ground.costs(jobs, full_rows(jobs, capacity))
    counted = costs if ends else [_free(cost) for cost in costs]
    beside = ground.slack + ground.held_bytes * capacity
    limits = [
        StageLimit(
            memory_bytes=max(0, ground.budgets[number] - beside),
            in_flight=ground.stages - number,
            pace=ground.speeds[0].flops / ground.speeds[number].flops,
        )
        for number in range(ground.stages)
    ]
    cuts = balance(counted, limits)
    stages = tuple(stage_cost(costs, stage.start, stage.stop) for stage in cuts)
    needs = tuple(
        stage_bytes(stage, limit.in_flight) + beside for stage, limit in zip(stages, limits, strict=True)
    )
    return Placement(capacity, stages, needs, ground.budgets[: ground.stages], beside)


def full_rows(jobs: Sequence[JobOutline], capacity: int) -> RowCounts:
    """Return the counts of a full microbatch in which every job has its share of the tokens."""
    lengths = {job.name: [length for batch in job.batches for length in batch] for job in jobs}
    total = sum(map(sum, lengths.values()))
    squares = sum(length * length for each in lengths.values() for length in each)
    by_job = {name: capacity * sum(each) // total for name, each in lengths.items()} if total else {}
    return RowCounts(capacity, squares * capacity // max(1, total), by_job)


def why_not(ground: ClusterCase, jobs: Sequence[JobOutline]) -> str | None:
    """Return a sentence that says why these jobs do not fit together, or None if they do."""
    ground = most_frugal(ground)
    least = ground_capacities(ground, jobs)[-1]
    try:
        lay_out(ground, jobs, least)
    except PlanError as error:
        others = len(jobs) - 1
        beside = f"with {others} other job{'s' if others > 1 else ''} aboard and " if others else ""
        if ground.stages > 1:
            return f"does not fit {beside}with {least} tokens in a microbatch: {error}"
        costs = ground.costs(jobs, full_rows(jobs, least))
        need = stage_bytes(stage_cost(costs, 0, len(costs)), 1) + ground.slack + ground.held_bytes * least
        return (
            f"needs {gib(need)} {beside}with {least} tokens in a microbatch, "
            f"but {gib(ground.budgets[0])} are available"
        )
    return None


def _free(cost: LayerCost) -> LayerCost:
    return cost if cost.kind == "layer" else replace(cost, forward=0.0, backward=0.0)
