"""The layers of a base to the stages of a pipeline, by the arithmetic that each costs, the head counted."""

from __future__ import annotations

from dataclasses import replace

from weft.errors import PlanError
from weft.plan.partition import LayerCost, StageLimit, balance
from weft.shapes import LayerRange, ModelShape, layer_of

ANY = 1 << 62


def cut_layers(shape: ModelShape, stages: int) -> tuple[LayerRange, ...]:
    """One range for each stage, the slowest as fast as can be."""
    if stages < 2:
        raise PlanError(f"--pipeline {stages}: a pipeline has at least 2 stages")
    if stages > shape.layers:
        raise PlanError(f"--pipeline {stages}: the base has {shape.layers} layers, and each stage needs one")
    work = sum(site.in_features * site.out_features for site in shape.sites) / shape.layers
    head = shape.hidden * shape.vocabulary
    costs = [work] * (shape.layers - 1) + [work + head]
    layers = [LayerCost("layer", forward=cost, backward=cost, weight_bytes=0) for cost in costs]
    found = balance(layers, [StageLimit(ANY)] * stages)
    return tuple(LayerRange(one.start, one.stop, shape.layers) for one in found)


def stage_shape(shape: ModelShape, held: LayerRange) -> ModelShape:
    """What of the base one stage holds; sites outside the layers count for every stage."""
    sites = tuple(site for site in shape.sites if _held(site.name, held))
    inside = sum(site.in_features * site.out_features for site in sites)
    ends = shape.hidden * shape.vocabulary * (held.first + held.last)
    return replace(shape, layers=held.stop - held.start, parameters=inside + ends, sites=sites)


def _held(site: str, held: LayerRange) -> bool:
    layer = layer_of(site)
    return layer is None or held.start <= layer < held.stop
