"""Partition of consecutive layers into stages, one per device, with the slowest stage as fast as possible.

Embedding and head count as layers. The result is exact, by dynamic programming over (stage, layers placed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weftune.errors import PlanError
from weftune.plan.cost.layers import LayerCost, StageCost, stage_cost
from weftune.plan.cost.memory import gib

Costs = NDArray[np.float64]
"""Cost of each possible stage, [stage, first layer, layer after the last]; infinite if it is not allowed."""


@dataclass(frozen=True, slots=True)
class StageLimit:
    """Limits of the device of one stage."""

    memory_bytes: int
    in_flight: int = 1
    """Number of microbatches that hold activations there at once."""
    pace: float = 1.0
    """Time for the same work relative to the device that the layers were measured on."""


def stage_bytes(stage: StageCost, in_flight: int) -> int:
    return stage.weight_bytes + stage.state_bytes + in_flight * stage.kept_bytes


def balance(layers: Sequence[LayerCost], limits: Sequence[StageLimit]) -> tuple[StageCost, ...]:
    """Return one stage per limit, in order, with the smallest maximum time and, among those, the smallest
    maximum memory."""
    if len(layers) < len(limits):
        raise PlanError(f"{len(limits)} stages need as many layers, but the base has {len(layers)}")
    memory = _memory(layers, limits)
    rooms = np.array([limit.memory_bytes for limit in limits], dtype=float)[:, None, None]
    fits = memory <= rooms
    seconds = np.where(fits, _seconds(layers, limits), np.inf)
    slowest, _ = least_largest(seconds)
    if np.isinf(slowest):
        _, cuts = least_largest(memory - rooms)
        raise PlanError(_why_not(layers, limits, cuts))
    _, cuts = least_largest(np.where(seconds <= slowest, memory, np.inf))
    return tuple(stage_cost(layers, start, stop) for start, stop in pairwise(cuts))


def least_largest(costs: Costs) -> tuple[float, list[int]]:
    """Return the smallest possible maximum of the stage costs, and the cuts [0, …, layers] that reach it."""
    return _least(costs, np.maximum, nothing=-np.inf)


def least_sum(costs: Costs) -> tuple[float, list[int]]:
    """Return the smallest possible sum of the stage costs, and the cuts [0, …, layers] that reach it."""
    return _least(costs, np.add, nothing=0.0)


def _least(costs: Costs, joined: np.ufunc, nothing: float) -> tuple[float, list[int]]:
    """Return the least cost and its cuts. `joined` combines the cost of the stages so far, at first
    `nothing`, with that of the next one."""
    stages, size, _ = costs.shape
    best = np.full(size, np.inf)
    best[0] = nothing
    starts = np.empty((stages, size), dtype=int)
    for stage in range(stages):
        together = joined(best[:, None], costs[stage])
        starts[stage] = together.argmin(axis=0)
        best = together.min(axis=0)
    cuts = [size - 1]
    for stage in reversed(range(stages)):
        cuts.append(int(starts[stage, cuts[-1]]))
    return float(best[-1]), cuts[::-1]


def layer_sums(layers: Sequence[LayerCost], value: Callable[[LayerCost], float]) -> Costs:
    """Return sums over ranges of layers, [first layer, layer after the last]; infinite if a range is
    empty."""
    ends = np.concatenate([[0.0], np.cumsum([value(layer) for layer in layers])])
    between = ends[None, :] - ends[:, None]
    empty = np.tri(len(ends), dtype=bool)
    return np.where(empty, np.inf, between)


def _seconds(layers: Sequence[LayerCost], limits: Sequence[StageLimit]) -> Costs:
    one = layer_sums(layers, lambda layer: layer.forward + layer.backward)
    return np.stack([limit.pace * one for limit in limits])


def _memory(layers: Sequence[LayerCost], limits: Sequence[StageLimit]) -> Costs:
    fixed = layer_sums(layers, lambda layer: layer.weight_bytes + layer.state_bytes)
    kept = layer_sums(layers, lambda layer: layer.kept_bytes)
    return np.stack([fixed + limit.in_flight * kept for limit in limits])


def _why_not(layers: Sequence[LayerCost], limits: Sequence[StageLimit], cuts: Sequence[int]) -> str:
    """Describe the stage with the largest excess, in the cut whose largest excess is smallest."""

    def excess(number: int) -> int:
        stage = stage_cost(layers, cuts[number], cuts[number + 1])
        return stage_bytes(stage, limits[number].in_flight) - limits[number].memory_bytes

    worst = max(range(len(limits)), key=excess)
    limit = limits[worst]
    need = excess(worst) + limit.memory_bytes
    return (
        f"no cut of {len(layers)} layers into {len(limits)} stages fits: in the closest, stage {worst} needs "
        f"{gib(need)} with {limit.in_flight} microbatches in flight, but its device has "
        f"{gib(limit.memory_bytes)}"
    )
