"""Partition of the layers of a base into stages of consecutive layers.

The optimal partition is found by dynamic programming over (stage, layers placed); embedding and head count as
layers. The stages of a pipeline are balanced by the times of a measured profile, or else by the number of
multiplications. The number of stages is chosen in `division.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weftune.core.shapes import LayerRange, ModelShape
from weftune.errors import PlanError
from weftune.plan.cost.estimate import LayerCost, StageCost, stage_cost
from weftune.plan.cost.memory import format_bytes
from weftune.plan.cost.profile import Profile
from weftune.plan.cost.profile_cost import pass_terms
from weftune.plan.cost.time import PassWork

ANY = 1 << 62
ROUNDING = 1e-9
RANK, LENGTH = 16, 256
"""Adapter rank and sample length in tokens that are assumed when stages are balanced."""

Costs = NDArray[np.float64]
"""Array of the cost of each possible stage, indexed by [stage, first layer, layer after the last]. The cost
is infinite if the stage is not allowed."""


@dataclass(frozen=True, slots=True)
class StageLimit:
    """Memory limit and relative speed of the device that holds one stage."""

    memory_bytes: int
    microbatches_in_flight: int = 1
    """Maximum number of microbatches whose activations the stage's device keeps at a time."""
    relative_time: float = 1.0
    """Time that this device takes for a layer, relative to the device on which layers were measured."""


def balance_stages(layers: Sequence[LayerCost], limits: Sequence[StageLimit]) -> tuple[StageCost, ...]:
    """Return a partition of the layers into one stage per limit. The slowest stage is as fast as possible
    and, with equal speed, the stage that needs the most memory needs as little as possible. Raise PlanError
    if no partition fits in memory."""
    if len(layers) < len(limits):
        raise PlanError(f"{len(limits)} stages need as many layers, but the base has {len(layers)}")
    memory = _stage_memory(layers, limits)
    rooms = np.array([limit.memory_bytes for limit in limits], dtype=float)[:, None, None]
    fits = memory <= rooms
    seconds = np.where(fits, _stage_seconds(layers, limits), np.inf)
    slowest, _ = minimise_largest(seconds)
    if np.isinf(slowest):
        _, cuts = minimise_largest(memory - rooms)
        raise PlanError(_shortage_reason(layers, limits, cuts))
    _, cuts = minimise_largest(np.where(seconds <= slowest, memory, np.inf))
    return tuple(stage_cost(layers, start, stop) for start, stop in pairwise(cuts))


def minimise_largest(costs: Costs) -> tuple[float, list[int]]:
    """Return the smallest possible maximum of the stage costs, and the cuts [0, …, layers] that reach it."""
    return _minimise_costs(costs, np.maximum, initial_cost=-np.inf)


def minimise_sum(costs: Costs) -> tuple[float, list[int]]:
    """Return the smallest possible sum of the stage costs, and the cuts [0, …, layers] that reach it."""
    return _minimise_costs(costs, np.add, initial_cost=0.0)


def _minimise_costs(costs: Costs, combine: np.ufunc, initial_cost: float) -> tuple[float, list[int]]:
    """Return the smallest total cost of a partition, and the cuts [0, …, layers] that reach it. `combine`
    computes the total cost from the total of the stages so far, which begins with `initial_cost`, and the
    cost of the next stage."""
    stages, size, _ = costs.shape
    best = np.full(size, np.inf)
    best[0] = initial_cost
    starts = np.empty((stages, size), dtype=int)
    for stage in range(stages):
        together = combine(best[:, None], costs[stage])
        starts[stage] = together.argmin(axis=0)
        best = together.min(axis=0)
    cuts = [size - 1]
    for stage in reversed(range(stages)):
        cuts.append(int(starts[stage, cuts[-1]]))
    return float(best[-1]), cuts[::-1]


def layer_sums(layers: Sequence[LayerCost], value: Callable[[LayerCost], float]) -> Costs:
    """Return the sums of the function `value` of a layer over all ranges of layers, indexed by [first layer,
    layer after the last]. Empty ranges have an infinite sum."""
    ends = np.concatenate([[0.0], np.cumsum([value(layer) for layer in layers])])
    between = ends[None, :] - ends[:, None]
    empty = np.tri(len(ends), dtype=bool)
    return np.where(empty, np.inf, between)


def _stage_seconds(layers: Sequence[LayerCost], limits: Sequence[StageLimit]) -> Costs:
    one = layer_sums(layers, lambda layer: layer.forward + layer.backward)
    return np.stack([limit.relative_time * one for limit in limits])


def _stage_memory(layers: Sequence[LayerCost], limits: Sequence[StageLimit]) -> Costs:
    fixed = layer_sums(layers, lambda layer: layer.weight_bytes + layer.state_bytes)
    kept = layer_sums(layers, lambda layer: layer.kept_bytes)
    return np.stack([fixed + limit.microbatches_in_flight * kept for limit in limits])


def _shortage_reason(layers: Sequence[LayerCost], limits: Sequence[StageLimit], cuts: Sequence[int]) -> str:
    """Return an error message that names the stage that exceeds its memory most, in the best partition."""

    def excess_bytes(number: int) -> int:
        stage = stage_cost(layers, cuts[number], cuts[number + 1])
        return stage.resident_bytes(limits[number].microbatches_in_flight) - limits[number].memory_bytes

    worst = max(range(len(limits)), key=excess_bytes)
    limit = limits[worst]
    need = excess_bytes(worst) + limit.memory_bytes
    return (
        f"no cut of {len(layers)} layers into {len(limits)} stages fits: in the closest, stage {worst} needs "
        f"{format_bytes(need)} with {limit.microbatches_in_flight} microbatches in flight, but its "
        "device has "
        f"{format_bytes(limit.memory_bytes)}"
    )


# -- stages of a pipeline ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartCosts:
    """Costs of the embedding, of one layer and of the head, each for one forward and one backward. The unit
    is seconds per microbatch or multiplications per token."""

    embedding: float
    layer: float
    head: float

    def stage_cost(self, layer_range: LayerRange) -> float:
        """Return the cost of a stage with these layers, including embedding and head if the stage has
        them."""
        ends = layer_range.is_first * self.embedding + layer_range.is_last * self.head
        return (layer_range.stop - layer_range.start) * self.layer + ends


def cut_layers(shape: ModelShape, stages: int, costs: PartCosts | None = None) -> tuple[LayerRange, ...]:
    """Return the layers of each stage of a pipeline. The slowest stage is as fast as possible, and the others
    are as even as possible. Without `costs`, the number of multiplications counts as the cost."""
    if stages < 2:
        raise PlanError(f"--pipeline {stages}: a pipeline has at least 2 stages")
    if stages > shape.layers:
        raise PlanError(f"--pipeline {stages}: the base has {shape.layers} layers, and each stage needs one")
    known = multiplication_costs(shape) if costs is None else costs
    each = [known.stage_cost(LayerRange(number, number + 1, shape.layers)) for number in range(shape.layers)]
    layers = [LayerCost("layer", forward=cost / 2, backward=cost / 2, weight_bytes=0) for cost in each]
    slowest = max(one.seconds for one in balance_stages(layers, [StageLimit(ANY)] * stages))
    taken = layer_sums(layers, lambda layer: layer.forward + layer.backward)
    squares = np.where(taken > slowest * (1 + ROUNDING), np.inf, taken**2)
    _, cuts = minimise_sum(np.broadcast_to(squares, (stages, *squares.shape)))
    return tuple(LayerRange(start, stop, shape.layers) for start, stop in pairwise(cuts))


def multiplication_costs(shape: ModelShape) -> PartCosts:
    """Return the costs of the parts of a base in multiplications per token. The forward of the head counts
    twice and its backward not at all, since the forward also computes the gradient of the head's input."""
    inside = sum(site.active_weights for site in shape.sites)
    return PartCosts(0.0, 2 * inside / shape.layers, 2 * shape.hidden * shape.vocabulary)


def measured_costs(profile: Profile, shape: ModelShape, work: PassWork) -> PartCosts:
    """Return the seconds that a profile predicts for each part of the base, for a microbatch with the counts
    in `work`. Adapters are assumed to be spread evenly over the layers."""
    found = pass_terms(profile, shape)
    both = found.forward, found.backward
    return PartCosts(
        embedding=sum(one.embedding(work) for one in both),
        layer=sum(one.layer(work) + one.adapter(work) / shape.layers for one in both),
        head=sum(one.head(work) for one in both),
    )


def typical_work(shape: ModelShape, tokens: int) -> PassWork:
    """Return the counts of a typical microbatch of one job with `tokens` tokens, for which stages are
    balanced.

    All rows are assumed to go through the head. If fewer rows do in the run, only the last stage is idle for
    a while; if too few were assumed, all other stages would wait for the last one.
    """
    length = min(LENGTH, shape.context, tokens)
    per_row = sum(RANK * site.values_per_token for site in shape.sites if not site.experts)
    return PassWork(
        tokens=tokens,
        squares=tokens * length,
        samples=max(1, tokens // length),
        supervised=tokens,
        adapted=tokens * per_row,
        segments=1,
    )
