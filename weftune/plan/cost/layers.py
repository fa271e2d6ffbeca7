"""Costs of the layers of a base, one by one and combined into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import LayerRange, ModelShape, layer_of


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer; times and activations are per microbatch."""

    kind: str
    forward: float
    backward: float
    weight_bytes: int
    activation_bytes: int = 0
    """Bytes handed to the next layer."""
    gradient_bytes: int = 0
    """Bytes of gradients handed back to the previous layer."""
    state_bytes: int = 0
    """Bytes of the attached adapters: parameters, gradients and moments, which never leave the device."""
    kept_bytes: int = 0
    """Bytes that a microbatch keeps on the device from its forward to its backward."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Combined cost of layers `start` to `stop`."""

    start: int
    stop: int
    forward: float
    backward: float
    weight_bytes: int
    activation_bytes: int
    gradient_bytes: int
    state_bytes: int
    kept_bytes: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def resident_bytes(self, in_flight: int) -> int:
        """Return the bytes of the resident stage with activations of `in_flight` microbatches."""
        return self.weight_bytes + self.state_bytes + in_flight * self.kept_bytes


def stage_cost(layers: Sequence[LayerCost], start: int, stop: int) -> StageCost:
    assert 0 <= start < stop <= len(layers), "a stage holds at least one layer"
    held = layers[start:stop]
    return StageCost(
        start,
        stop,
        forward=sum(layer.forward for layer in held),
        backward=sum(layer.backward for layer in held),
        weight_bytes=sum(layer.weight_bytes for layer in held),
        activation_bytes=held[-1].activation_bytes,
        gradient_bytes=held[0].gradient_bytes,
        state_bytes=sum(layer.state_bytes for layer in held),
        kept_bytes=sum(layer.kept_bytes for layer in held),
    )


def stage_shape(shape: ModelShape, held: LayerRange) -> ModelShape:
    """Return the shape of one stage of the base; sites outside the layers count for every stage."""
    sites = tuple(site for site in shape.sites if _held(site.name, held))
    inside = sum(site.weights for site in sites)
    ends = shape.hidden * shape.vocabulary * (held.first + held.last)
    return replace(shape, layers=held.stop - held.start, parameters=inside + ends, sites=sites)


def _held(site: str, held: LayerRange) -> bool:
    layer = layer_of(site)
    return layer is None or held.start <= layer < held.stop
