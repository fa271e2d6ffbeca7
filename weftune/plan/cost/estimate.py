"""What a pass takes before anything was measured: FLOPs over a stated share of the data-sheet peak.

The seam for measurements is `Speed`: one made from a profile of the device takes the data sheet's place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weftune.core.shapes import JobShape, ModelShape, SiteShape, layer_of
from weftune.plan.cost.cluster import Device
from weftune.plan.cost.layers import LayerCost
from weftune.plan.cost.time import Line

GPU_PART, CPU_PART = 0.6, 0.45
"""The share of the peak that the base's products reach, set by one measured step each, on an H200 and on a
CPU of two cores; on any other device it is a guess."""
ADAPTER_PART = 0.1
"""The same for adapters: their products are narrow, and re-read what the base's have read."""
GPU_LAUNCH, CPU_LAUNCH = 60e-6, 30e-6
"""Seconds that one pass over one layer takes however few its rows are."""
CODED_SPEED = 1.7
"""Products of 8-bit floats over those in bfloat16: on an H200 a step of the 8B shape saves 138 of 440 ms, of
which 330 are products of the layers."""
ATTENTION_BACKWARD = 2.5
"""Attention's backward over its forward."""
ADAPTER_BACKWARD = 2.0
"""Adapters have gradients of their own, the base has none."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device reaches."""

    flops: float
    adapter_flops: float
    bandwidth: float
    launch: float
    source: str
    """Where these numbers come from, for the reader."""
    attention_flops: float = 0.0
    """Of attention's products; 0 where they are as fast as the others."""


@dataclass(frozen=True, slots=True)
class JobOutline:
    """What the outlook must know of a job."""

    shape: JobShape
    ranks: Mapping[str, int]
    """Site → rank, for the sites that it targets."""
    batches: tuple[tuple[int, ...], ...]
    """The lengths of the samples of its next global batches."""

    @property
    def name(self) -> str:
        return self.shape.name


@dataclass(frozen=True, slots=True)
class BaseLayer:
    """A layer of the base, its embedding, or its head."""

    kind: Literal["embedding", "layer", "head"]
    flops: int
    """Of one pass over one token, at the rate of the base's dtype: products of codes count as fewer. The
    backward of a frozen layer takes as many."""
    square_flops: int
    """Attention: of a forward, for each squared token of a sample's length."""
    weight_bytes: int
    kept_bytes: int
    """For each token, between forward and backward."""
    handed_bytes: int
    """For each token, to the next layer or back."""
    sites: tuple[SiteShape, ...]
    matrix_bytes: int = 0
    """What its weights are dequantised into for every pass, where they are quantised."""


def sheet_speed(device: Device) -> Speed:
    part = GPU_PART if device.is_gpu else CPU_PART
    return Speed(
        flops=part * device.peak,
        adapter_flops=ADAPTER_PART * device.peak,
        bandwidth=device.bandwidth,
        launch=GPU_LAUNCH if device.is_gpu else CPU_LAUNCH,
        source=f"estimated from the data sheet at {part:.0%} of its peak, not measured",
    )


def base_layers(shape: ModelShape, kept: int, apart: bool) -> tuple[BaseLayer, ...]:
    """Embedding, layers and head; a layer keeps `kept` bytes of a token for its backward.

    `apart`: the two ends live on different devices, each with its matrix.
    """
    by_layer: dict[int, list[SiteShape]] = {number: [] for number in range(shape.layers)}
    outside: list[SiteShape] = []
    for site in shape.sites:
        number = layer_of(site.name)
        (outside if number is None else by_layer[number]).append(site)
    matrix = shape.vocabulary * shape.hidden
    inside = sum(site.weights for sites in by_layer.values() for site in sites)
    tied = shape.parameters < inside + 2 * matrix
    # Norms, biases and positions are not told apart in the shape; they are small and counted here.
    first = shape.parameters - inside - (0 if tied else matrix)
    handed = shape.hidden * shape.bytes_per_value
    layers = [_layer(shape, tuple(sites), kept, handed) for sites in by_layer.values()]
    head = 0 if tied and not apart else matrix
    return (
        BaseLayer("embedding", 0, 0, first * shape.bytes_per_value, 0, handed, tuple(outside)),
        *layers,
        BaseLayer("head", 2 * matrix, 0, head * shape.bytes_per_value, 0, handed, ()),
    )


def layer_bytes(shape: ModelShape) -> int:
    """Of the weights of one layer, the largest."""
    layers = base_layers(shape, 0, apart=False)
    return max(layer.weight_bytes for layer in layers if layer.kind == "layer")


def dequantised_bytes(shape: ModelShape) -> int:
    """What a pass over one layer reads and writes so that its weights are matrices, the most; 0 where they
    are stored so, or multiplied as they are stored."""
    layers = base_layers(shape, 0, apart=False)
    return max(_moved_bytes(layer) if layer.matrix_bytes else 0 for layer in layers if layer.kind == "layer")


def _moved_bytes(layer: BaseLayer) -> int:
    """What a pass reads and writes of a layer's weights: a matrix that was dequantised has been written, and
    is read again."""
    return layer.weight_bytes + 2 * layer.matrix_bytes


def layer_flops(shape: ModelShape) -> int:
    """Of a pass over one token in one layer, the most."""
    layers = base_layers(shape, 0, apart=False)
    return max(layer.flops for layer in layers if layer.kind == "layer")


def _layer(shape: ModelShape, sites: tuple[SiteShape, ...], kept: int, handed: int) -> BaseLayer:
    flops = 2 * sum(site.active_weights for site in sites)
    flops = round(flops / CODED_SPEED) if shape.multiplied_as_stored else flops
    held = round(sum(site.weights for site in sites) * shape.weight_bytes_per_value)
    # Two products of the width of all heads, half of each masked; that width is close to the hidden one.
    matrices = sum(site.weights for site in sites) * shape.bytes_per_value if shape.matrix_bytes else 0
    return BaseLayer("layer", flops, 2 * shape.hidden, held, kept, handed, sites, matrices)


def adapter_flops(layer: BaseLayer, job: JobOutline) -> int:
    """Of a forward over one token."""
    return sum(2 * job.ranks.get(site.name, 0) * site.widths for site in layer.sites)


def adapter_parameters(layer: BaseLayer, job: JobOutline) -> int:
    return sum(
        max(1, site.experts) * job.ranks.get(site.name, 0) * (site.in_features + site.out_features)
        for site in layer.sites
    )


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What a microbatch holds, as far as its time hangs on it."""

    tokens: int
    squares: int
    """Squared lengths, summed."""
    by_job: Mapping[str, int]
    """Tokens."""


def base_line(layers: Sequence[BaseLayer], speed: Speed) -> Line:
    """One pass, forward or backward, over these layers without attention and adapters."""
    worked = [layer for layer in layers if layer.flops]
    moved = sum(map(_moved_bytes, worked))
    fixed = len(worked) * speed.launch + moved / speed.bandwidth
    return Line(fixed, sum(layer.flops for layer in worked) / speed.flops)


def square_seconds(layers: Sequence[BaseLayer], speed: Speed) -> float:
    """A forward's attention for each squared token."""
    return sum(layer.square_flops for layer in layers) / (speed.attention_flops or speed.flops)


def adapter_seconds(layers: Sequence[BaseLayer], job: JobOutline, speed: Speed) -> float:
    """A forward's adapters for each token."""
    return sum(adapter_flops(layer, job) for layer in layers) / speed.adapter_flops


def layer_costs(
    layers: Sequence[BaseLayer], jobs: Sequence[JobOutline], rows: RowCounts, speed: Speed, state_bytes: int
) -> tuple[LayerCost, ...]:
    """What each layer takes of a microbatch with `rows`, nothing of it recomputed in the backward.

    `state_bytes` are those of one adapter parameter.
    """
    costs = []
    for layer in layers:
        line = base_line([layer], speed)(rows.tokens)
        square = square_seconds([layer], speed) * rows.squares
        flops = [adapter_flops(layer, job) for job in jobs]
        added = sum(
            one / speed.adapter_flops * rows.by_job.get(job.name, 0)
            for one, job in zip(flops, jobs, strict=True)
        )
        parameters = sum(adapter_parameters(layer, job) for job in jobs)
        costs.append(
            LayerCost(
                kind=layer.kind,
                forward=line + square + added,
                backward=line + ATTENTION_BACKWARD * square + ADAPTER_BACKWARD * added,
                weight_bytes=layer.weight_bytes,
                activation_bytes=layer.handed_bytes * rows.tokens,
                gradient_bytes=layer.handed_bytes * rows.tokens,
                state_bytes=parameters * state_bytes,
                kept_bytes=layer.kept_bytes * rows.tokens,
            )
        )
    return tuple(costs)
