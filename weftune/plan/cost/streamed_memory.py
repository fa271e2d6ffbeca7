"""Bytes of activations and of adapter state, and the memory of a base whose stages take turns on its devices.

All layers are alike; norms and biases, which the shape does not list separately, are counted with embedding
and head. If several workers stream a base, each holds what belongs to its own stages: layers, their adapters'
state and their inputs.
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
"""Values kept per token over the summed widths of the sites: measured 1.1 to 1.4 on the tested families."""
FUSED_FACTOR = 0.92
OUTPUTS_FACTOR = 0.64
"""Values kept per token by fused layers, relative to the widths: counted 0.83 to 0.85, and 0.55 to 0.57 if
outputs of norms and activations are recomputed. The rest covers temporaries of the backward."""
RECOMPUTED_FACTOR = 1.4
"""Values per token of a recomputed layer during its backward, relative to its widths: everything that it
keeps, and gradients."""
ON_THE_WAY = 4
"""Full microbatches whose activations or gradients a template stage may hold to be sent or used."""


def token_bytes(
    part: ModelShape, layers: int, fused: bool, recompute: Recompute, jobs: Iterable[JobShape]
) -> int:
    """Return the activation bytes per token in the layers of `part`; the whole base has `layers`."""
    widths = sum(site.widths for site in part.sites)
    factor, extra = ACTIVATION_FACTOR, 0.0
    if fused and not part.mixes:
        factor, extra = OUTPUTS_FACTOR if recompute.outputs else FUSED_FACTOR, part.extra_values
        # Jobs that scale outputs mostly scale the same ones, which are kept once for all jobs.
        extra += max((job.scaled for job in jobs), default=0) / layers
    again, one = min(recompute.layers, part.layers), widths / part.layers
    values = (part.layers - again) * (factor * one + extra)
    if again:
        # Each recomputed layer keeps its input, and one layer at a time is held completely.
        values += again * part.hidden + RECOMPUTED_FACTOR * one + extra
    return int(values * part.bytes_per_value) + part.code_bytes


def state_bytes(jobs: Iterable[JobShape], bytes_per_value: int) -> int:
    """Return the bytes of the jobs' adapter state: compute copy, master, gradient, two moments, and means."""
    master = max(4, bytes_per_value)
    return sum(job.trainable * (bytes_per_value + (4 + job.means) * master) for job in jobs)


def matrix_bytes(shape: ModelShape, fused: bool) -> int:
    """Return the bytes that quantised weights are dequantised into for one product at a time; fused layers
    use one product for two sites that share their input."""
    return shape.matrix_bytes * (2 if fused else 1)


@dataclass(frozen=True)
class StreamedMemory:
    """Memory of a base whose stages take turns, on one device or on those of several workers. On one device,
    adapters stay or travel with their stage, and inputs of stages are kept or offloaded."""

    shape: ModelShape
    jobs: tuple[JobShape, ...]
    fused: bool
    round_tokens: int
    """Tokens of one round of all jobs. Each stage needs its input for all of them again."""
    max_tokens: int
    """Tokens of a full microbatch."""
    travels: bool
    offloads: bool
    workers: int

    @cached_property
    def layer_bytes(self) -> int:
        return layer_bytes(self.shape)

    @cached_property
    def ends_bytes(self) -> int:
        """Bytes of embedding, final norm and head."""
        return max(0, self.shape.base_bytes - self.shape.layers * self.layer_bytes)

    @cached_property
    def layer_parameters(self) -> int:
        """Number of adapter parameters per layer."""
        return math.ceil(sum(job.trainable for job in self.jobs) / self.shape.layers)

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes per layer of the adapter weights that passes read."""
        return self.layer_parameters * self.shape.bytes_per_value

    @cached_property
    def gradient_bytes(self) -> int:
        return self.layer_parameters * max(4, self.shape.bytes_per_value)

    @cached_property
    def present_bytes(self) -> int:
        """Bytes of one layer while it is on the device."""
        return self.layer_bytes + (self.copy_bytes + self.gradient_bytes if self.travels else 0)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of everything that training the adapters needs, wherever it is held."""
        return state_bytes(self.jobs, self.shape.bytes_per_value)

    @cached_property
    def round_rows(self) -> int:
        """Largest number of rows of a round, including the padding of microbatches."""
        return padded_rows(self.round_tokens, self.fused)

    @cached_property
    def _row_bytes(self) -> int:
        return self.shape.hidden * self.shape.bytes_per_value

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the inputs of one stage in a round."""
        return self.round_rows * self._row_bytes

    @cached_property
    def stage_input_bytes(self) -> int:
        """Device bytes of inputs that each additional stage adds."""
        return 0 if self.offloads else self.input_bytes

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes per layer that a microbatch keeps between the recomputed forward and its backward."""
        each = token_bytes(self.shape, self.shape.layers, self.fused, NOTHING, self.jobs)
        return math.ceil(self.max_tokens * each / self.shape.layers)

    @cached_property
    def moving_bytes(self) -> int:
        """Bytes of rows that arrive, leave, or are buffered for captured passes, and of the inputs that do
        not depend on the number of stages."""
        if self.workers > 1:
            # In addition to what its stages keep, the output of one of them may still be in transit.
            return self.input_bytes + ON_THE_WAY * self.max_tokens * self._row_bytes
        rows = BUFFERED * self.max_tokens if self.fused else 0
        if self.offloads:
            rows += OFFLOADED_ROUNDS * self.round_rows + OFFLOADED_MICROBATCHES * self.max_tokens
        return rows * self._row_bytes

    def weight_bytes(self, layers: int, worker: int, stages: int) -> int:
        """Return the bytes of weights on a worker's device with so many layers present: of the layers, of
        embedding and head where they are held, and of norms and biases, which may be on any worker. `stages`
        counts those of all workers."""
        held = layers * self.layer_bytes + matrix_bytes(self.shape, self.fused)
        if self.workers == 1:
            return held + self.ends_bytes
        matrix = self.shape.hidden * self.shape.vocabulary * self.shape.bytes_per_value
        tied = self.ends_bytes < 2 * matrix
        beside = max(0, self.ends_bytes - (matrix if tied else 2 * matrix))
        first, last = worker == 0, (stages - 1) % self.workers == worker
        return held + beside + matrix * (1 if first and last and tied else first + last)

    def ring_bytes(self, largest: int) -> int:
        """Return the bytes of the buffers for Steps of adapters that travel, given the largest stage."""
        if not self.travels:
            return 0
        return ring_bytes(stage_parts(self.jobs, largest, self.shape.layers), self.shape.bytes_per_value)

    def parts(
        self, sizes: Sequence[int], resident: Sequence[bool], slots: int, worker: int, stages: int
    ) -> tuple[int, int, int]:
        """Return the bytes of weights, of adapter state and of activations on a worker's device, for its own
        stages of these `sizes`; `stages` counts those of all workers."""
        passing = [size for size, stays in zip(sizes, resident, strict=True) if not stays]
        own, largest = sum(sizes), max(sizes)
        # Resident layers have memory of their own, streamed ones share the slots.
        present = own - sum(passing) + min(slots, len(passing)) * max(passing, default=0)
        # If adapters travel, copy and gradient are with the layers present, and Steps use a ring of buffers.
        state = present * (self.copy_bytes + self.gradient_bytes) + self.ring_bytes(largest)
        if not self.travels:
            state = math.ceil(self.state_bytes * own / self.shape.layers)
        return (
            self.weight_bytes(present, worker, stages),
            state,
            self.moving_bytes + len(sizes) * self.stage_input_bytes + largest * self.kept_bytes,
        )

    def host_bytes(self, streamed_layers: int, stages: int, staging: int | None) -> int:
        """Return the host bytes of streamed layers or their staging, of adapter state, and of inputs."""
        layers = streamed_layers * self.layer_bytes if staging is None else staging
        inputs = offloaded_inputs(stages) * self.input_bytes if self.offloads else 0
        return layers + (self.state_bytes if self.travels else 0) + inputs
