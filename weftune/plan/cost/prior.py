"""Proportions of the time model's terms, counted from the shape of a base before anything is measured.

Terms are counted by kind of layer: outside the layers (embedding), one layer, the head with the loss, and
adapters, whose parameters already count all the layers that they touch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weftune.core.shapes import ModelShape
from weftune.plan.cost.estimate import ADAPTER_BACKWARD, ATTENTION_BACKWARD, base_layers
from weftune.plan.cost.time import CostModel, Rate, Terms

FIXED_ROWS = 16
"""Fixed time of a pass, in rows that add as much time."""
SEGMENT_ROWS = 2
"""Time that each job adds to a pass, in rows that add as much time."""
ADAPTER_COST = 4.0
"""Time of an adapter's operations relative to those of the base: its products are narrow."""
HEAD_PASSES = 2.0
"""Forward passes that the head's forward counts for, since it also computes the gradient."""


@dataclass(frozen=True, slots=True)
class KindTerms:
    """Terms of one direction of a pass by kind of layer; `layer` is one of many."""

    embedding: Terms
    layer: Terms
    head: Terms
    adapter: Terms

    def whole(self, layers: int) -> Terms:
        return self.embedding.plus(self.layer.times(layers)).plus(self.head).plus(self.adapter)

    def times(self, factor: float) -> KindTerms:
        parts = (self.embedding, self.layer, self.head, self.adapter)
        return KindTerms(*(part.times(factor) for part in parts))


@dataclass(frozen=True, slots=True)
class Directions:
    forward: KindTerms
    backward: KindTerms
    evaluation: KindTerms

    def whole(self, layers: int, source: str, step: Rate | None = None) -> CostModel:
        return CostModel(
            forward=self.forward.whole(layers),
            backward=self.backward.whole(layers),
            evaluation=self.evaluation.whole(layers),
            step=step or Rate(),
            source=source,
        )

    def times(self, factor: float) -> Directions:
        """Return the same proportions scaled by `factor`."""
        return Directions(*(one.times(factor) for one in (self.forward, self.backward, self.evaluation)))


def counted(shape: ModelShape) -> Directions:
    """Return the terms in operations of the base, not in seconds: their scale is unknown."""
    layer = next(one for one in base_layers(shape, 0, apart=False) if one.kind == "layer")
    head = 2.0 * shape.vocabulary * shape.hidden
    return Directions(
        forward=_kinds(layer.flops, layer.square_flops, HEAD_PASSES * head, 2 * ADAPTER_COST),
        backward=_kinds(
            layer.flops,
            ATTENTION_BACKWARD * layer.square_flops,
            # The gradient is only scaled, row by row.
            2.0 * shape.hidden,
            2 * ADAPTER_COST * ADAPTER_BACKWARD,
        ),
        evaluation=_kinds(layer.flops, layer.square_flops, head, 2 * ADAPTER_COST),
    )


def arithmetic(shape: ModelShape) -> CostModel:
    """Return a model that knows only proportions; the first measured passes determine its scale."""
    model = counted(shape).whole(shape.layers, "counted, without a profile of the device")
    return replace(model, measured=False)


def _kinds(token: float, square: float, supervised: float, adapter: float) -> KindTerms:
    return KindTerms(
        embedding=Terms(fixed=FIXED_ROWS * token, token=0.01 * token),
        layer=Terms(
            fixed=FIXED_ROWS * token,
            token=token,
            square=square,
            sample=0.5 * token,
            segment=SEGMENT_ROWS * token,
        ),
        head=Terms(supervised=supervised),
        adapter=Terms(adapter=adapter),
    )
