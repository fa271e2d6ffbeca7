"""Costs of layers and stages. The time of a pass is its FLOPs divided by the throughput of the device: a
fixed fraction of the peak in its data sheet or, if the device has been profiled, the measured throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weftune.core.shapes import JobShape, LayerRange, ModelShape, SiteShape, layer_number
from weftune.plan.cost.cluster import Device
from weftune.plan.cost.time import Line

GPU_EFFICIENCY, CPU_EFFICIENCY = 0.6, 0.45
"""Fraction of the peak FLOP/s that matrix products of the base reach. The values were measured in one
training step on an H200 and in one on a CPU with two cores; for other devices, these values are guesses."""
ADAPTER_EFFICIENCY = 0.1
"""Fraction of the peak FLOP/s that matrix products of adapters reach. The fraction is low, since these
products are narrow and read all inputs again."""
GPU_LAUNCH, CPU_LAUNCH = 60e-6, 30e-6
"""Fixed seconds of one pass (forward or backward) over one layer on a GPU and on a CPU, in addition to the
time of the pass's rows (tokens)."""
CODED_SPEED = 1.7
"""Speed of fp8 matrix products relative to bfloat16. On an H200, a step of an 8B model takes 440 ms, 330 ms
of them in the layers' products, and fp8 shortens the step by 138 ms."""
ATTENTION_BACKWARD = 2.5
"""Time of attention's backward relative to its forward."""
ADAPTER_BACKWARD = 2.0
"""Time of an adapter's backward relative to its forward. Adapters, unlike the base, have weight gradients."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Throughput that a device reaches in practice."""

    flops: float
    adapter_flops: float
    bandwidth: float
    launch_seconds: float
    source: str
    """Source of the throughput numbers, as a string for the user."""
    attention_flops: float = 0.0
    """FLOP/s that attention reaches. 0 means that attention is as fast as the matrix products of the base."""


@dataclass(frozen=True, slots=True)
class JobOutline:
    """The properties of a job that a forecast of its time and memory needs."""

    shape: JobShape
    ranks: Mapping[str, int]
    """Maps each site (adapted linear) that the job targets to the adapter's rank at the site."""
    batches: tuple[tuple[int, ...], ...]
    """Sample lengths, in tokens, of each of the job's next global batches."""

    @property
    def name(self) -> str:
        return self.shape.name


@dataclass(frozen=True, slots=True)
class BaseLayer:
    """FLOPs and bytes of a decoder layer of the base, or of the embedding or the head."""

    kind: Literal["embedding", "layer", "head"]
    flops: int
    """FLOPs per token of a forward. A backward has equally many FLOPs, since the layer is frozen. Quantised
    weights count as fewer FLOPs if their products are faster."""
    square_flops: int
    """FLOPs of attention in the forward of one sample, divided by the square of the sample's length in
    tokens."""
    weight_bytes: int
    kept_bytes: int
    """Bytes per token of the activations that are kept from the forward to the backward."""
    output_bytes: int
    """Bytes per token of the output for the next layer, and of the gradient for the previous one."""
    sites: tuple[SiteShape, ...]
    matrix_bytes: int = 0
    """Bytes of the dequantised weights, which every pass writes and reads. 0 if weights are not
    dequantised."""


def data_sheet_speed(device: Device) -> Speed:
    part = GPU_EFFICIENCY if device.is_gpu else CPU_EFFICIENCY
    return Speed(
        flops=part * device.peak_flops,
        adapter_flops=ADAPTER_EFFICIENCY * device.peak_flops,
        bandwidth=device.bandwidth,
        launch_seconds=GPU_LAUNCH if device.is_gpu else CPU_LAUNCH,
        source=f"estimated from the data sheet at {part:.0%} of its peak, not measured",
    )


def base_layers(shape: ModelShape, kept_bytes: int, has_separate_ends: bool) -> tuple[BaseLayer, ...]:
    """Return the parts of the base in order: embedding, layers and head. Each layer keeps `kept_bytes` bytes
    per token for its backward.

    With `has_separate_ends`, embedding and head are on different devices, so tied weights are stored twice.
    """
    by_layer: dict[int, list[SiteShape]] = {number: [] for number in range(shape.layers)}
    outside: list[SiteShape] = []
    for site in shape.sites:
        number = layer_number(site.name)
        (outside if number is None else by_layer[number]).append(site)
    matrix = shape.vocabulary * shape.hidden
    inside = sum(site.weight_count for sites in by_layer.values() for site in sites)
    tied = shape.parameters < inside + 2 * matrix
    # The shape does not list norms, biases and positions separately; they are small and counted here.
    first = shape.parameters - inside - (0 if tied else matrix)
    handed = shape.hidden * shape.bytes_per_value
    layers = [_inner_layer(shape, tuple(sites), kept_bytes, handed) for sites in by_layer.values()]
    head = 0 if tied and not has_separate_ends else matrix
    return (
        BaseLayer("embedding", 0, 0, first * shape.bytes_per_value, 0, handed, tuple(outside)),
        *layers,
        BaseLayer("head", 2 * matrix, 0, head * shape.bytes_per_value, 0, handed, ()),
    )


def layer_bytes(shape: ModelShape) -> int:
    """Return the weight bytes of the largest layer."""
    return max(layer.weight_bytes for layer in _inner_layers(shape))


def dequantised_bytes(shape: ModelShape) -> int:
    """Return the maximum bytes per layer that a pass moves in order to read quantised weights and to write
    and read dequantised ones. Return 0 if weights are not dequantised."""
    return max(_moved_bytes(layer) if layer.matrix_bytes else 0 for layer in _inner_layers(shape))


def layer_flops(shape: ModelShape) -> int:
    """Return the FLOPs per token of a pass over the most expensive layer."""
    return max(layer.flops for layer in _inner_layers(shape))


def _inner_layers(shape: ModelShape) -> tuple[BaseLayer, ...]:
    return base_layers(shape, 0, has_separate_ends=False)[1:-1]


def _moved_bytes(layer: BaseLayer) -> int:
    """Return the bytes that a pass over the layer reads and writes for its weights. Dequantised weights are
    written once and read once."""
    return layer.weight_bytes + 2 * layer.matrix_bytes


def _inner_layer(
    shape: ModelShape, sites: tuple[SiteShape, ...], kept_bytes: int, output_bytes: int
) -> BaseLayer:
    flops = 2 * sum(site.active_weights for site in sites)
    flops = round(flops / CODED_SPEED) if shape.multiplies_stored_format else flops
    weight_bytes = round(sum(site.weight_count for site in sites) * shape.weight_bytes_per_value)
    # Attention makes two products as wide as all heads, half of each masked; that width is close to the
    # hidden size.
    matrices = sum(site.weight_count for site in sites) * shape.bytes_per_value if shape.matrix_bytes else 0
    return BaseLayer(
        "layer", flops, 2 * shape.hidden, weight_bytes, kept_bytes, output_bytes, sites, matrices
    )


def adapter_flops(layer: BaseLayer, job: JobOutline) -> int:
    """Return the FLOPs per token that the job's adapter adds to a forward of this layer."""
    return sum(2 * job.ranks.get(site.name, 0) * site.values_per_token for site in layer.sites)


def adapter_parameters(layer: BaseLayer, job: JobOutline) -> int:
    return sum(
        max(1, site.experts) * job.ranks.get(site.name, 0) * (site.in_features + site.out_features)
        for site in layer.sites
    )


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer: seconds of its forward and backward, and bytes. Times, activations and gradients are
    those of one microbatch."""

    kind: str
    forward: float
    backward: float
    weight_bytes: int
    activation_bytes: int = 0
    """Bytes of the layer's output, which the next layer receives."""
    gradient_bytes: int = 0
    """Bytes of the gradient at the layer's input, which the previous layer receives."""
    state_bytes: int = 0
    """Device bytes of the adapters at this layer: parameters, gradients and optimizer moments."""
    kept_bytes: int = 0
    """Device bytes of the activations that a microbatch keeps from its forward to its backward."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Combined cost of a stage: the consecutive layers from `start` up to, but not including, `stop`."""

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
        """Return the device bytes of the stage while it holds activations of `in_flight` microbatches."""
        return self.weight_bytes + self.state_bytes + in_flight * self.kept_bytes


def stage_cost(layers: Sequence[LayerCost], start: int, stop: int) -> StageCost:
    assert 0 <= start < stop <= len(layers), "a stage holds at least one layer"
    stage_layers = layers[start:stop]
    return StageCost(
        start,
        stop,
        forward=sum(layer.forward for layer in stage_layers),
        backward=sum(layer.backward for layer in stage_layers),
        weight_bytes=sum(layer.weight_bytes for layer in stage_layers),
        activation_bytes=stage_layers[-1].activation_bytes,
        gradient_bytes=stage_layers[0].gradient_bytes,
        state_bytes=sum(layer.state_bytes for layer in stage_layers),
        kept_bytes=sum(layer.kept_bytes for layer in stage_layers),
    )


def stage_shape(shape: ModelShape, layer_range: LayerRange) -> ModelShape:
    """Return the shape of one stage of the base, given its range of layers. Every stage includes the sites
    (adaptable linears) outside the layers."""
    sites = tuple(site for site in shape.sites if _is_in_stage(site.name, layer_range))
    inside = sum(site.weight_count for site in sites)
    ends = shape.hidden * shape.vocabulary * (layer_range.is_first + layer_range.is_last)
    return replace(shape, layers=layer_range.stop - layer_range.start, parameters=inside + ends, sites=sites)


def _is_in_stage(site: str, layer_range: LayerRange) -> bool:
    layer = layer_number(site)
    return layer is None or layer_range.start <= layer < layer_range.stop


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Token counts of a microbatch, from which its time is predicted."""

    tokens: int
    squared_lengths: int
    """Sum of squared sample lengths."""
    tokens_by_job: Mapping[str, int]
    """Maps each job to its number of tokens."""


def base_pass_time(layers: Sequence[BaseLayer], speed: Speed) -> Line:
    """Return the seconds of a forward or a backward over the given layers as a linear function of the tokens,
    without attention and adapters."""
    worked = [layer for layer in layers if layer.flops]
    moved = sum(map(_moved_bytes, worked))
    fixed = len(worked) * speed.launch_seconds + moved / speed.bandwidth
    return Line(fixed, sum(layer.flops for layer in worked) / speed.flops)


def square_seconds(layers: Sequence[BaseLayer], speed: Speed) -> float:
    """Return the seconds of attention in the forward of one sample, divided by the square of the sample's
    length in tokens."""
    return sum(layer.square_flops for layer in layers) / (speed.attention_flops or speed.flops)


def adapter_seconds(layers: Sequence[BaseLayer], job: JobOutline, speed: Speed) -> float:
    """Return the seconds per token that the job's adapters at these layers add to a forward."""
    return sum(adapter_flops(layer, job) for layer in layers) / speed.adapter_flops


def layer_costs(
    layers: Sequence[BaseLayer], jobs: Sequence[JobOutline], rows: RowCounts, speed: Speed, state_bytes: int
) -> tuple[LayerCost, ...]:
    """Return the cost of each layer (time and bytes) for a microbatch with the given token counts, without
    recomputation of activations.

    `state_bytes` is the number of bytes per adapter parameter, including its gradient and optimizer state.
    """
    costs = []
    for layer in layers:
        line = base_pass_time([layer], speed)(rows.tokens)
        square = square_seconds([layer], speed) * rows.squared_lengths
        flops = [adapter_flops(layer, job) for job in jobs]
        added = sum(
            one / speed.adapter_flops * rows.tokens_by_job.get(job.name, 0)
            for one, job in zip(flops, jobs, strict=True)
        )
        parameters = sum(adapter_parameters(layer, job) for job in jobs)
        costs.append(
            LayerCost(
                kind=layer.kind,
                forward=line + square + added,
                backward=line + ATTENTION_BACKWARD * square + ADAPTER_BACKWARD * added,
                weight_bytes=layer.weight_bytes,
                activation_bytes=layer.output_bytes * rows.tokens,
                gradient_bytes=layer.output_bytes * rows.tokens,
                state_bytes=parameters * state_bytes,
                kept_bytes=layer.kept_bytes * rows.tokens,
            )
        )
    return tuple(costs)
