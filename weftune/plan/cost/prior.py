"""Initial terms of the time model, computed from the shape of a base before anything is measured.

A term is the cost per token, sample or other unit of a pass. Only the ratios of the costs are known, not
their seconds. The terms are computed separately for the embedding, one layer, the head with the loss, and the
adapters of all layers together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weftune.core.shapes import ModelShape
from weftune.plan.cost.estimate import ADAPTER_BACKWARD, ATTENTION_BACKWARD, base_layers
from weftune.plan.cost.time import CostModel, Rate, Terms

FIXED_ROWS = 16
"""Fixed time of a pass (a forward or a backward), in units of the time of one row (token)."""
SEGMENT_ROWS = 2
"""Fixed time that each job adds to a pass (a forward or a backward), in units of the time of one row
(token)."""
ADAPTER_COST = 4.0
"""Time per FLOP of an adapter relative to the base. The value is above 1, since the matrix products of
adapters are narrow."""
HEAD_PASSES = 2.0
"""Time of the head's forward relative to its matrix product alone. The forward also computes the gradient of
the head's input."""


@dataclass(frozen=True, slots=True)
class KindTerms:
    """Coefficients of the time model of a forward or of a backward, for each part of the base. The field
    `layer` is for a single layer, and `adapter` for the adapters of all layers together."""

    embedding: Terms
    layer: Terms
    head: Terms
    adapter: Terms

    def base_terms(self, layers: int) -> Terms:
        return self.embedding.add(self.layer.multiply_by(layers)).add(self.head).add(self.adapter)

    def multiply_by(self, factor: float) -> KindTerms:
        parts = (self.embedding, self.layer, self.head, self.adapter)
        return KindTerms(*(part.multiply_by(factor) for part in parts))


@dataclass(frozen=True, slots=True)
class DirectionTerms:
    """Coefficients of the time models of a training forward, its backward, and a forward for evaluation."""

    forward: KindTerms
    backward: KindTerms
    evaluation: KindTerms

    def base_cost(self, layers: int, source: str, step: Rate | None = None) -> CostModel:
        return CostModel(
            forward=self.forward.base_terms(layers),
            backward=self.backward.base_terms(layers),
            evaluation=self.evaluation.base_terms(layers),
            step=step or Rate(),
            source=source,
        )

    def multiply_by(self, factor: float) -> DirectionTerms:
        """Return these coefficients of the time model multiplied by `factor`."""
        return DirectionTerms(
            *(one.multiply_by(factor) for one in (self.forward, self.backward, self.evaluation))
        )


def flop_terms(shape: ModelShape) -> DirectionTerms:
    """Return the coefficients of the time model of a base of this shape. The coefficients are in FLOPs
    instead of seconds, since the seconds per FLOP are unknown."""
    layer = next(one for one in base_layers(shape, 0, has_separate_ends=False) if one.kind == "layer")
    head = 2.0 * shape.vocabulary * shape.hidden
    return DirectionTerms(
        forward=_direction_terms(layer.flops, layer.square_flops, HEAD_PASSES * head, 2 * ADAPTER_COST),
        backward=_direction_terms(
            layer.flops,
            ATTENTION_BACKWARD * layer.square_flops,
            # The forward of the head has computed the gradient; the backward only scales it, row by row.
            2.0 * shape.hidden,
            2 * ADAPTER_COST * ADAPTER_BACKWARD,
        ),
        evaluation=_direction_terms(layer.flops, layer.square_flops, head, 2 * ADAPTER_COST),
    )


def uncalibrated_cost_model(shape: ModelShape) -> CostModel:
    """Return a time model whose coefficients have the right proportions but no unit. The first measured
    passes of a run determine the seconds."""
    model = flop_terms(shape).base_cost(shape.layers, "counted, without a profile of the device")
    return replace(model, is_measured=False)


def _direction_terms(token: float, square: float, supervised: float, adapter: float) -> KindTerms:
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
