"""Memory of activations, of adapter state, and of a base whose stages are streamed from host memory.

A stage is consecutive layers. Streamed stages are loaded one after another into slots of device memory. All
layers are assumed equal; norms and biases, which the shape does not list separately, are counted with
embedding and head. If several workers stream a base, each holds only the layers, adapter state and inputs of
its own stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from weftune.core.shapes import JobShape, ModelShape
from weftune.plan.cost.estimate import layer_bytes
from weftune.plan.cost.ring import ring_bytes, stage_parts
from weftune.plan.program.layout import (
    BUFFERED,
    OFFLOADED_MICROBATCHES,
    OFFLOADED_ROUNDS,
    offloaded_inputs,
    padded_rows,
)
from weftune.plan.program.program import NOTHING, Recompute

ACTIVATION_FACTOR = 1.5
"""Number of activation values that a pass keeps per token, divided by the summed widths of all linears.
Measured values are 1.1 to 1.4."""
FUSED_FACTOR = 0.87
"""Number of activation values that fused layers keep per token, divided by the summed widths of all linears.
The measured value is 0.86."""
OUTPUTS_FACTOR = 0.64
"""Number of activation values per token that fused layers keep if outputs of norms and activation functions
are recomputed, divided by the summed widths of all linears. Measured values are 0.55 to 0.57; the rest is a
margin for temporaries of the backward."""
RECOMPUTED_FACTOR = 1.4
"""Number of values per token, activations and gradients, that a recomputed layer holds during its backward,
divided by the summed widths of its linears."""
TILED_HIDDEN, TILED_ATTENTION = 2.0, 9.2
"""Values per token that a layer holds for all rows during the backward of its attention, in addition to its
input, if the rest of the layer is computed in tiles of rows. The two numbers are multiples of the hidden
width and of the attention width, and include gradients, queries, keys, values, outputs and buffers of
kernels. The values were measured on an H200 with 8,192 to 131,072 tokens (docs/benchmarks.md)."""
TILED_KEPT = 3.0
"""Number of values per token in the gradients and buffers of a layer that is computed in tiles of rows and
keeps all other values from its forward, as a multiple of the attention width."""
TILED_REST = 5.2
"""Number of values per token that only the backward of attention needs, not the computation of tiles before
or after it, as a multiple of the attention width."""
TILE_FACTOR = 1.06
"""Number of values per row of a tile during its backward, divided by the summed widths of the layer's
linears."""
UNDIVIDED, OUTPUTS_UNDIVIDED = 4, 2
"""Number of tensors of the hidden width that a layer keeps and that shards do not divide: its input, the
residual after attention, and the outputs of both norms. The second number is for passes that recompute the
outputs of norms."""
LOG_SUMS = 1 / 64
"""Bytes of the softmax statistics (log-sum-exp) that attention keeps, relative to the bytes of attention's
output."""
ON_THE_WAY = 4
"""Maximum number of full microbatches whose activations or gradients are being sent to or from a stage's
device at a time."""


def token_bytes(
    part: ModelShape, layers: int, uses_fused_ops: bool, recompute: Recompute, jobs: Sequence[JobShape]
) -> int:
    """Return the activation bytes per token that the layers of `part` keep. `part` is the whole base or a
    part of it, `layers` the number of layers of the whole base."""
    factor, extra = ACTIVATION_FACTOR, 0.0
    if uses_fused_ops and not part.routes_to_experts:
        factor, extra = OUTPUTS_FACTOR if recompute.recomputes_outputs else FUSED_FACTOR, part.extra_values
        extra += _values_of_kinds(jobs) / layers
    recomputed_count = min(recompute.recomputed_layers, part.layers)
    unsharded_values = OUTPUTS_UNDIVIDED if recompute.recomputes_outputs else UNDIVIDED
    values = (part.layers - recomputed_count) * (_layer_values(part, factor, unsharded_values) + extra)
    if recompute.tile_rows:
        values = _tiled_values(part, recompute, recomputed_count, values)
    elif recomputed_count:
        # Each recomputed layer keeps its input, and one layer at a time is held completely.
        values += recomputed_count * part.hidden + _layer_values(part, RECOMPUTED_FACTOR, UNDIVIDED) + extra
    return int(values * part.bytes_per_value) + part.code_bytes


def _values_of_kinds(jobs: Sequence[JobShape]) -> int:
    """Return the number of additional values per token that fused layers keep because of the adapter kinds of
    these jobs, in all layers together."""
    # Jobs that scale outputs mostly scale the same ones, which are kept once for all jobs. Copies are those
    # of a job's own rows, which are a part of the microbatch.
    scaled = max((job.scaled_outputs for job in jobs), default=0)
    return scaled + max((job.copied_values for job in jobs), default=0)


def _layer_values(part: ModelShape, factor: float, unsharded_values: int) -> float:
    """Return the number of values per token of a layer: `factor` times the summed widths of its linears.
    Shards divide these values, except for those of `unsharded_values` tensors of the hidden width."""
    values = factor * part.whole_values_per_token / part.layers
    whole = min(values, unsharded_values * part.hidden)
    return whole + (values - whole) / part.shards


def _tiled_values(part: ModelShape, recompute: Recompute, recomputed_count: int, kept_values: float) -> float:
    """Return the number of values per token that layers computed in tiles of rows hold on the device.
    `recomputed_count` layers are recomputed; the others keep `kept_values` values altogether, and their
    backward runs first."""
    width, keeps = part.attention_width, recompute.keeps_attention
    offloaded = min(recompute.offloaded_layers, recomputed_count)
    waiting = (recomputed_count - offloaded) * (
        part.hidden + keeps * width
    ) + keeps * recomputed_count * LOG_SUMS * width
    recomputing = TILED_HIDDEN * part.hidden + (TILED_ATTENTION - keeps) * width
    if offloaded:
        # The tensors of the layer, and the input of the layer before it.
        recomputing += 2 * part.hidden + keeps * width
    kept_values += (TILED_HIDDEN * part.hidden + TILED_KEPT * width) if kept_values else 0
    return waiting + max(kept_values, recomputing if recomputed_count else 0.0)


def tile_bytes(part: ModelShape, recompute: Recompute, jobs: Sequence[JobShape]) -> int:
    """Return the activation bytes of one tile (some rows of a microbatch) in one layer during its forward and
    backward."""
    one = _layer_values(part, TILE_FACTOR, UNDIVIDED) + part.extra_values
    one += _values_of_kinds(jobs) / part.layers
    return int(recompute.tile_rows * one * part.bytes_per_value)


def attention_backward_bytes(part: ModelShape) -> int:
    """Return the bytes per token that only the backward of attention needs. Tiles are computed before or
    after it and can use this memory."""
    return int(TILED_REST * part.attention_width * part.bytes_per_value)


def offloaded_token_bytes(part: ModelShape, recompute: Recompute) -> int:
    """Return the host bytes per token of activations that are offloaded to host memory."""
    kept = part.hidden + recompute.keeps_attention * part.attention_width
    return min(recompute.offloaded_layers, part.layers) * kept * part.bytes_per_value


def state_bytes(jobs: Iterable[JobShape], bytes_per_value: int) -> int:
    """Return the bytes of adapter state of these jobs: compute copies, master weights, gradients, two moments
    and averaged weights."""
    master = max(4, bytes_per_value)
    return sum(
        job.trainable_parameters * (bytes_per_value + (4 + job.mean_weight_count) * master) for job in jobs
    )


def shard_copy_bytes(shape: ModelShape) -> int:
    """Return the bytes per adapter parameter of the compute copy and the gradient that a shard has of its
    part of the parameters, in addition to the state of whole adapters. Return 0 if layers are not divided."""
    if shape.shards == 1:
        return 0
    part = shape.values_per_token / shape.whole_values_per_token
    return math.ceil(part * (shape.bytes_per_value + max(4, shape.bytes_per_value)))


def matrix_bytes(shape: ModelShape, uses_fused_ops: bool) -> int:
    """Return the bytes of the largest dequantised weight matrix, of which only one exists at a time. Fused
    layers join the matrices of two linears that share their input."""
    return shape.matrix_bytes * (2 if uses_fused_ops else 1)


@dataclass(frozen=True)
class StreamedMemory:
    """Memory of a base that is streamed from host memory, on one device or over several workers. If `shape`
    is that of a shard, device bytes are those of one shard, and host bytes those of all shards.

    On one device, adapters may be streamed together with their stage (`adapters_travel`), and the inputs of
    stages may be offloaded to host memory until their backward (`offloads_inputs`).
    """

    shape: ModelShape
    jobs: tuple[JobShape, ...]
    uses_fused_ops: bool
    round_tokens: int
    """Number of tokens of one round (one global batch of every job). Each stage keeps its input for all of
    these tokens until the backward."""
    max_tokens: int
    """Tokens of a full microbatch."""
    adapters_travel: bool
    offloads_inputs: bool
    workers: int

    @cached_property
    def layer_bytes(self) -> int:
        return layer_bytes(self.shape)

    @cached_property
    def embedding_head_bytes(self) -> int:
        """Bytes of embedding, final norm and head."""
        return max(0, self.shape.base_bytes - self.shape.layers * self.layer_bytes)

    @cached_property
    def layer_parameters(self) -> int:
        """Number of adapter parameters per layer."""
        return math.ceil(sum(job.trainable_parameters for job in self.jobs) / self.shape.layers)

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes per layer of the compute copy of the adapters, the weights that forward and backward read."""
        return self.layer_parameters * self.shape.bytes_per_value

    @cached_property
    def gradient_bytes(self) -> int:
        return self.layer_parameters * max(4, self.shape.bytes_per_value)

    @cached_property
    def loaded_layer_bytes(self) -> int:
        """Bytes of one layer on the device, including the adapter weights and gradients if they are streamed
        with the layer."""
        return self.layer_bytes + (self.copy_bytes + self.gradient_bytes if self.adapters_travel else 0)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all adapter state, in device and host memory together."""
        copied = shard_copy_bytes(self.shape) * sum(job.trainable_parameters for job in self.jobs)
        return state_bytes(self.jobs, self.shape.bytes_per_value) + copied

    @cached_property
    def round_rows(self) -> int:
        """Maximum number of rows of a round (one global batch of every job), including padding."""
        return padded_rows(self.round_tokens, self.uses_fused_ops)

    @cached_property
    def _row_bytes(self) -> int:
        return self.shape.hidden * self.shape.bytes_per_value

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of one stage's inputs for a whole round (one global batch of every job)."""
        return self.round_rows * self._row_bytes

    @cached_property
    def stage_input_bytes(self) -> int:
        """Device bytes that each additional stage needs for its inputs of a whole round (one global batch of
        every job)."""
        return 0 if self.offloads_inputs else self.input_bytes

    @cached_property
    def kept_bytes(self) -> int:
        """Activation bytes per layer of one full microbatch, from the recomputed forward to the backward."""
        each = token_bytes(self.shape, self.shape.layers, self.uses_fused_ops, NOTHING, self.jobs)
        return math.ceil(self.max_tokens * each / self.shape.layers)

    @cached_property
    def transfer_bytes(self) -> int:
        """Device bytes that do not depend on the number of stages: activations in transfer, buffers of CUDA
        graphs, and the inputs of stages that are on the device while the others are offloaded."""
        if self.workers > 1:
            # In addition to what its stages keep, the output of one of them may still be in transit.
            return self.input_bytes + ON_THE_WAY * self.max_tokens * self._row_bytes
        rows = BUFFERED * self.max_tokens if self.uses_fused_ops else 0
        if self.offloads_inputs:
            rows += OFFLOADED_ROUNDS * self.round_rows + OFFLOADED_MICROBATCHES * self.max_tokens
        return rows * self._row_bytes

    def weight_bytes(self, layers: int, worker: int, stages: int) -> int:
        """Return the bytes of weights on a worker's device: `layers` layers, and embedding and head if the
        worker has them. All norms and biases are counted on every worker, since the shape does not say where
        they are. `stages` is the number of stages of all workers."""
        weight_bytes = layers * self.layer_bytes + matrix_bytes(self.shape, self.uses_fused_ops)
        if self.workers == 1:
            return weight_bytes + self.embedding_head_bytes
        matrix = self.shape.hidden * self.shape.vocabulary * self.shape.bytes_per_value
        tied = self.embedding_head_bytes < 2 * matrix
        beside = max(0, self.embedding_head_bytes - (matrix if tied else 2 * matrix))
        first, last = worker == 0, (stages - 1) % self.workers == worker
        return weight_bytes + beside + matrix * (1 if first and last and tied else first + last)

    def ring_bytes(self, largest_stage: int) -> int:
        """Return the device bytes of the buffers for optimizer steps of streamed adapters, or 0 if adapters
        are not streamed. `largest_stage` is the number of layers of the largest stage."""
        if not self.adapters_travel:
            return 0
        return ring_bytes(
            stage_parts(self.jobs, largest_stage, self.shape.layers), self.shape.bytes_per_value
        )

    def bytes_by_use(
        self, sizes: Sequence[int], resident_stages: Sequence[bool], slots: int, worker: int, stages: int
    ) -> tuple[int, int, int]:
        """Return the bytes of weights, of adapter state and of activations on a worker's device.

        `sizes` and `resident_stages` contain, for each stage of the worker, the number of layers and whether
        the stage stays on the device. `slots` is the number of slots (places in device memory) for streamed
        stages, and `stages` the number of stages of all workers.
        """
        passing = [size for size, stays in zip(sizes, resident_stages, strict=True) if not stays]
        own, largest = sum(sizes), max(sizes)
        # Resident layers have memory of their own, streamed ones share the slots.
        present = own - sum(passing) + min(slots, len(passing)) * max(passing, default=0)
        # If adapters travel, copy and gradient are with the layers present, and Steps use a ring of buffers.
        state = present * (self.copy_bytes + self.gradient_bytes) + self.ring_bytes(largest)
        if not self.adapters_travel:
            state = math.ceil(self.state_bytes * own / self.shape.layers)
        return (
            self.weight_bytes(present, worker, stages),
            state,
            self.transfer_bytes + len(sizes) * self.stage_input_bytes + largest * self.kept_bytes,
        )

    def host_bytes(self, streamed_layers: int, stages: int, staging: int | None) -> int:
        """Return the host bytes of streamed layers, streamed adapter state and offloaded inputs. `staging` is
        the size in bytes of the buffers for weights that are read from their files, or None if weights are
        held in host memory."""
        layers = streamed_layers * self.layer_bytes if staging is None else staging
        inputs = offloaded_inputs(stages) * self.input_bytes if self.offloads_inputs else 0
        shard = layers + (self.state_bytes if self.adapters_travel else 0) + inputs
        return self.shape.shards * shard
