"""Partition of a base's layers into pipeline stages by their cost, including embedding and head. Costs are
the times of a profile if there is one, otherwise arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from weftune.core.shapes import LayerRange, ModelShape
from weftune.errors import PlanError
from weftune.plan.cost.layers import LayerCost
from weftune.plan.cost.profile import Profile
from weftune.plan.cost.profile_cost import directions
from weftune.plan.cost.time import PassWork
from weftune.plan.layout.partition import StageLimit, balance, layer_sums, least_sum

ANY = 1 << 62
ROUNDING = 1e-9
RANK, LENGTH = 16, 256
"""Adapter rank and sample length that stages are balanced for, before any job is known."""


@dataclass(frozen=True, slots=True)
class PartCosts:
    """Costs of the parts of a base for one microbatch, forward and backward together. `layer` is the cost of
    a single layer."""

    embedding: float
    layer: float
    head: float

    def of(self, held: LayerRange) -> float:
        """Return the cost of a stage."""
        ends = held.first * self.embedding + held.last * self.head
        return (held.stop - held.start) * self.layer + ends


def cut_layers(shape: ModelShape, stages: int, costs: PartCosts | None = None) -> tuple[LayerRange, ...]:
    """Return one range per stage: the slowest is as fast as possible, and the others are as even as that
    allows. Without `costs`, arithmetic is counted."""
    if stages < 2:
        raise PlanError(f"--pipeline {stages}: a pipeline has at least 2 stages")
    if stages > shape.layers:
        raise PlanError(f"--pipeline {stages}: the base has {shape.layers} layers, and each stage needs one")
    known = counted_costs(shape) if costs is None else costs
    each = [known.of(LayerRange(number, number + 1, shape.layers)) for number in range(shape.layers)]
    layers = [LayerCost("layer", forward=cost / 2, backward=cost / 2, weight_bytes=0) for cost in each]
    slowest = max(one.seconds for one in balance(layers, [StageLimit(ANY)] * stages))
    taken = layer_sums(layers, lambda layer: layer.forward + layer.backward)
    squares = np.where(taken > slowest * (1 + ROUNDING), np.inf, taken**2)
    _, cuts = least_sum(np.broadcast_to(squares, (stages, *squares.shape)))
    return tuple(LayerRange(start, stop, shape.layers) for start, stop in pairwise(cuts))


def counted_costs(shape: ModelShape) -> PartCosts:
    """Return multiplications per token: a frozen matrix is applied once in each direction, and the head's
    forward does both."""
    inside = sum(site.active_weights for site in shape.sites)
    return PartCosts(0.0, 2 * inside / shape.layers, 2 * shape.hidden * shape.vocabulary)


def measured_costs(profile: Profile, shape: ModelShape, work: PassWork) -> PartCosts:
    """Return the seconds of a microbatch like `work`, whose adapters are spread evenly over the layers."""
    found = directions(profile, shape)
    both = found.forward, found.backward
    return PartCosts(
        embedding=sum(one.embedding(work) for one in both),
        layer=sum(one.layer(work) + one.adapter(work) / shape.layers for one in both),
        head=sum(one.head(work) for one in both),
    )


def typical_work(shape: ModelShape, tokens: int) -> PassWork:
    """Return a microbatch of one job with `tokens` tokens. All rows are supervised: a head that turns out
    cheaper leaves one stage idle for a while, whereas a more expensive one would make all the others wait."""
    length = min(LENGTH, shape.context, tokens)
    per_row = sum(RANK * site.widths for site in shape.sites if not site.experts)
    return PassWork(
        tokens=tokens,
        squares=tokens * length,
        samples=max(1, tokens // length),
        supervised=tokens,
        adapted=tokens * per_row,
        segments=1,
    )
