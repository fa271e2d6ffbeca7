"""What the time model knows of a base before anything was measured: the proportions of its terms, counted.

By kind of layer: what is outside the layers (embedding), one layer, the head with the loss, and adapters,
whose parameters already count all the layers that they touch.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftune.core.shapes import ModelShape
from weftune.plan.cost.estimate import ADAPTER_BACKWARD, ATTENTION_BACKWARD, base_layers
from weftune.plan.cost.time import CostModel, Rate, Terms

FIXED_ROWS = 16
"""A pass over no rows takes about as long as so many rows add."""
SEGMENT_ROWS = 2
"""Another job in a pass takes about as long as so many rows add."""
ADAPTER_COST = 4.0
"""Operations of an adapter take so many times as long as those of the base: their products are narrow."""
HEAD_PASSES = 2.0
"""The head's forward makes its gradient too."""


@dataclass(frozen=True, slots=True)
class KindTerms:
    """One direction of a pass by kind of layer; `layer` is one of many."""

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
        """The same proportions at another level."""
        return Directions(*(one.times(factor) for one in (self.forward, self.backward, self.evaluation)))


def counted(shape: ModelShape) -> Directions:
    """In operations of the base, not in seconds: their level is not known."""
    layer = next(one for one in base_layers(shape, 0, apart=False) if one.kind == "layer")
    head = 2.0 * shape.vocabulary * shape.hidden
    return Directions(
        forward=_kinds(layer.flops, layer.square_flops, HEAD_PASSES * head, 2 * ADAPTER_COST),
        backward=_kinds(
            layer.flops,
            ATTENTION_BACKWARD * layer.square_flops,
            # Only scaled, row by row.
            2.0 * shape.hidden,
            2 * ADAPTER_COST * ADAPTER_BACKWARD,
        ),
        evaluation=_kinds(layer.flops, layer.square_flops, head, 2 * ADAPTER_COST),
    )


def arithmetic(shape: ModelShape) -> CostModel:
    """A model that knows proportions only; the first measured passes give it its level."""
    model = counted(shape).whole(shape.layers, "counted, without a profile of the device")
    return model.unmeasured()


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
