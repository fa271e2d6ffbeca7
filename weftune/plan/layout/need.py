"""Memory that a cut for streaming needs on each device and on the host, and the time of a round.

All layers are alike; norms and biases, which the shape does not list separately, are counted with embedding
and head. If several workers stream a base, each holds what belongs to its own stages: layers, their adapters'
state and their inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import ge

from weftune.core.shapes import JobShape, ModelShape
from weftune.plan.cost.estimate import GPU_LAUNCH, dequantised_bytes, layer_bytes, layer_flops
from weftune.plan.cost.memory import ON_THE_WAY, MemoryModel, matrix_bytes
from weftune.plan.cost.ring import TRAVEL_ROUNDS, back_bytes, ring_bytes, stage_parts, step_bytes
from weftune.plan.layout.recurrence import Hops, StageRound, compute_seconds, round_seconds, slotted_seconds
from weftune.plan.program.layout import (
    BUFFERED,
    OFFLOADED_MICROBATCHES,
    OFFLOADED_ROUNDS,
    Layout,
    StageLayers,
    offloaded_inputs,
    padded_rows,
)
from weftune.plan.program.program import Recompute

STREAM_SLACK_BYTES = 2 << 30
"""Slack bytes on a GPU: logits of one chunk and their gradient, temporaries, the allocator's rounding."""
ASKING_SECONDS = 4e-3
"""Seconds that Python takes on a GPU to launch the dozens of kernels of one pass over one layer. Estimated
from rounds with microbatches of 4096 and of 8192 tokens, not measured by itself (docs/benchmarks.md). Those
passes were not captured; what remains of it for captured passes has not been measured."""
GPU_BACKWARD = 1.35
"""Time of a layer's backward relative to its forward on a GPU: 1.39 for the 8B shape, 1.33 for 32B, on an
H200 with 16 jobs of rank 16 (docs/benchmarks.md)."""
STAGING_BYTES = 128 << 20
"""Bytes of page-locked memory, on a host with a GPU, that weights pass through if they stay in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDevice:
    """One worker's GPU, and the host memory that all workers share."""

    budget: int
    """Bytes available to the run on the GPU."""
    taken: int = 0
    """GPU bytes held by the process before anything is loaded."""
    host_budget: int
    """Bytes of host memory available to the run."""
    staging: int | None = None
    """Host bytes that weights pass through if they stay in their files. None if host memory holds them."""
    bandwidth: float
    """Bytes per second from the host, or from the files if weights stay there."""
    both_ways: float | None = None
    """Bytes per second from the host while as many go back. None uses `bandwidth`."""
    flops: float
    """Floating-point operations per second that forward passes reach."""
    memory_bandwidth: float = math.inf
    """Bytes per second of the device's own memory, for weights that are dequantised in every pass."""
    backward: float = 1.0
    """Time of a layer's backward relative to its forward."""
    slack: int
    """Bytes for logits of one chunk, temporaries and the allocator's rounding."""
    whole_slack: int | None = None
    """Slack bytes of a run with the whole base on the device. None uses `slack`."""
    fused: bool = True
    launch: float = GPU_LAUNCH
    """Seconds that one pass over one layer takes, however few rows it has."""
    asking: float = 0.0
    """Seconds that the host takes to launch one pass over one layer: no pass is faster."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A cut during a search."""

    sizes: tuple[int, ...]
    """Number of layers in each stage."""
    resident: tuple[bool, ...]
    slots: tuple[int, ...]
    """Number of slots of each worker. Slots beyond its streamed stages are useless and are not counted."""

    def cut(self, travels: bool, offloaded_rows: int = 0) -> Layout:
        ends = pairwise(accumulate(self.sizes, initial=0))
        bounds = zip(ends, self.resident, strict=True)
        stages = tuple(StageLayers(start, stop, stays) for (start, stop), stays in bounds)
        workers = len(self.slots)
        moving = (self.resident[worker::workers].count(False) for worker in range(workers))
        return Layout(stages, tuple(map(min, self.slots, moving)), travels, offloaded_rows)


def draft_of(cut: Layout) -> Draft:
    stages = cut.stages
    return Draft(tuple(one.count for one in stages), tuple(one.resident for one in stages), cut.slots)


@dataclass(frozen=True)
class StreamCase:
    """A base, its jobs and identical devices, one per worker, with microbatches of one capacity. On one
    device, adapters stay or travel with their stage, and inputs of stages are kept or offloaded."""

    shape: ModelShape
    jobs: tuple[JobShape, ...]
    device: StreamDevice
    round_tokens: int
    """Tokens of one round of all jobs. Each stage needs its input for all of them again."""
    capacity: int
    travels: bool
    offloads: bool = False
    workers: int = 1
    alone: tuple[StreamCase, ...] = ()
    """Cases of jobs that are admitted after others have ended: each must fit by itself with the same cut."""

    def __post_init__(self) -> None:
        assert self.workers == 1 or not (self.travels or self.offloads), (
            "adapters and inputs of a worker's stages stay on its device"
        )

    # -- bytes -------------------------------------------------------------------------------------------

    @cached_property
    def layer_bytes(self) -> int:
        return layer_bytes(self.shape)

    @cached_property
    def ends_bytes(self) -> int:
        """Bytes of embedding, final norm and head."""
        return max(0, self.shape.base_bytes - self.shape.layers * self.layer_bytes)

    @cached_property
    def trainable(self) -> int:
        return sum(job.trainable for job in self.jobs)

    @cached_property
    def _layer_parameters(self) -> int:
        """Number of adapter parameters per layer."""
        return math.ceil(self.trainable / self.shape.layers)

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes per layer of the adapter weights that passes read."""
        return self._layer_parameters * self.shape.bytes_per_value

    @cached_property
    def gradient_bytes(self) -> int:
        return self._layer_parameters * max(4, self.shape.bytes_per_value)

    @cached_property
    def present_bytes(self) -> int:
        """Bytes of one layer while it is on the device."""
        return self.layer_bytes + (self.copy_bytes + self.gradient_bytes if self.travels else 0)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of everything that training the adapters needs, wherever it is held."""
        return self._memory.state_bytes(self.jobs)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the inputs of one stage in a round."""
        return self.round_rows * self._row_bytes

    @cached_property
    def round_rows(self) -> int:
        """Largest number of rows of a round, including the padding of microbatches."""
        return padded_rows(self.round_tokens, self.device.fused)

    @cached_property
    def stage_input_bytes(self) -> int:
        """Device bytes of inputs that each additional stage adds."""
        return 0 if self.offloads else self.input_bytes

    @cached_property
    def _row_bytes(self) -> int:
        return self.shape.hidden * self.shape.bytes_per_value

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes per layer that a microbatch keeps between the recomputed forward and its backward."""
        return math.ceil(self.capacity * self._memory.bytes_per_token() / self.shape.layers)

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes on the device of a single worker that do not depend on the cut."""
        state = 0 if self.travels else self.state_bytes
        rows = BUFFERED * self.capacity if self.device.fused else 0
        if self.offloads:
            rows += OFFLOADED_ROUNDS * self.round_rows + OFFLOADED_MICROBATCHES * self.capacity
        return self._device_bytes + self.ends_bytes + state + rows * self._row_bytes

    def _fixed_on(self, worker: int, stages: int, layers: int) -> int:
        """Return the fixed bytes of one of several workers that holds `layers` layers; `stages` counts those
        of all workers."""
        state = math.ceil(self.state_bytes * layers / self.shape.layers)
        # In addition to what its stages keep, the output of one of them may still be in transit.
        moving = self.input_bytes + ON_THE_WAY * self.capacity * self._row_bytes
        return self._device_bytes + self._ends_on(worker, stages) + state + moving

    @cached_property
    def _device_bytes(self) -> int:
        """Device bytes that are needed whatever is trained."""
        return self.device.taken + self.device.slack + matrix_bytes(self.shape, self.device.fused)

    def _ends_on(self, worker: int, stages: int) -> int:
        """Return the bytes of embedding and head on the workers that hold them, and of norms and biases,
        which may be on any worker."""
        matrix = self.shape.hidden * self.shape.vocabulary * self.shape.bytes_per_value
        tied = self.ends_bytes < 2 * matrix
        beside = max(0, self.ends_bytes - (matrix if tied else 2 * matrix))
        first, last = worker == 0, (stages - 1) % self.workers == worker
        return beside + matrix * (1 if first and last and tied else first + last)

    def ring_bytes(self, largest: int) -> int:
        """Return the bytes that Steps of adapters that travel pass through if the largest stage has `largest`
        layers."""
        if not self.travels:
            return 0
        return ring_bytes(stage_parts(self.jobs, largest, self.shape.layers), self.shape.bytes_per_value)

    @cached_property
    def _memory(self) -> MemoryModel:
        return MemoryModel(self.shape, self.device.budget, self.device.taken, self.device.fused)

    def device_bytes(self, draft: Draft) -> int:
        """Return the peak bytes on the fullest device."""
        if self.workers == 1:
            return self.worker_bytes(draft, 0)
        return max(self.worker_bytes(draft, worker) for worker in range(self.workers))

    def worker_bytes(self, draft: Draft, worker: int) -> int:
        """Return the peak bytes on that worker's device."""
        sizes, resident = draft.sizes[worker :: self.workers], draft.resident[worker :: self.workers]
        passing = [size for size, stays in zip(sizes, resident, strict=True) if not stays]
        slots, own = min(draft.slots[worker], len(passing)), sum(sizes)
        layers = own - sum(passing) + slots * max(passing, default=0)
        one = self.workers == 1
        return (
            (self.fixed_bytes if one else self._fixed_on(worker, len(draft.sizes), own))
            + self.ring_bytes(max(sizes))
            + layers * self.present_bytes
            + len(sizes) * self.stage_input_bytes
            + max(sizes) * self.kept_bytes
        )

    def streamed_bytes(self, draft: Draft) -> int:
        """Return the bytes of the streamed layers."""
        sizes = zip(draft.sizes, draft.resident, strict=True)
        return sum(size for size, stays in sizes if not stays) * self.layer_bytes

    def host_bytes(self, draft: Draft) -> int:
        """Return the host bytes of streamed layers or of their staging, of adapter state that is held there,
        and of offloaded inputs."""
        staging = self.device.staging
        layers = self.streamed_bytes(draft) if staging is None else staging
        inputs = offloaded_inputs(len(draft.sizes)) * self.input_bytes if self.offloads else 0
        return layers + (self.state_bytes if self.travels else 0) + inputs

    def fits(self, draft: Draft) -> bool:
        return not self.excess(draft)

    def excess(self, draft: Draft) -> int:
        """Return the bytes lacking on the fullest device plus the bytes lacking on the host."""
        host = max([case.host_bytes(draft) for case in (self, *self.alone)])
        lacking = self.most_bytes(draft) - self.device.budget, host - self.device.host_budget
        return sum([count for count in lacking if count > 0])

    def most_bytes(self, draft: Draft) -> int:
        """Return the peak bytes on the fullest device, with these jobs or with one that must fit alone."""
        return max([case.device_bytes(draft) for case in (self, *self.alone)])

    # -- seconds -----------------------------------------------------------------------------------------

    @cached_property
    def layer_seconds(self) -> float:
        """Seconds of the forward of a round through one layer."""
        arithmetic = layer_flops(self.shape) * self.round_tokens / self.device.flops
        each = self.device.launch + dequantised_bytes(self.shape) / self.device.memory_bandwidth
        return max(arithmetic + self._passes * each, self._passes * self.device.asking)

    @cached_property
    def head_seconds(self) -> float:
        matrix = self.shape.hidden * self.shape.vocabulary
        return 2 * matrix * self.round_tokens / self.device.flops + self._passes * self.device.launch

    @cached_property
    def _passes(self) -> int:
        return math.ceil(self.round_tokens / self.capacity)

    def rounds(self, sizes: Sequence[int]) -> list[StageRound]:
        """Return the round of each stage. The last stage runs the backward of every microbatch right after
        its forward, so nothing is recomputed there."""
        if len(sizes) == 1:
            return [self._last[sizes[0]]]
        first, *inner, last = sizes
        return [self._first[first], *(self._inner[size] for size in inner), self._last[last]]

    def seconds(self, draft: Draft) -> float:
        """Return the seconds of a round; infinite if the draft does not fit."""
        return self.fitting_seconds(draft) if self.fits(draft) else math.inf

    def fitting_seconds(self, draft: Draft) -> float:
        """Return the seconds of a round for a draft that is known to fit."""
        if self.workers > 1:
            return self._round_seconds(draft, self.device.bandwidth)
        rounds = self.rounds(draft.sizes)
        hidden = slotted_seconds(rounds, draft.resident, draft.slots[0], self.bandwidth)
        return hidden + self.bare_seconds / TRAVEL_ROUNDS

    def _round_seconds(self, draft: Draft, bandwidth: float) -> float:
        """Return the seconds of a round over several workers whose host links have this bandwidth."""
        # Activations are priced as if sent through the host: between GPUs they are never slower.
        hop = self.input_bytes / self._passes / self.device.bandwidth
        cut = draft.cut(travels=False)
        return round_seconds(self.rounds(draft.sizes), cut, self._passes, Hops(hop, bandwidth))

    def arithmetic_seconds(self, sizes: Sequence[int]) -> float:
        """Return the seconds of a round in stages of these sizes if nothing had to be transferred."""
        return compute_seconds(self.rounds(sizes))

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second from the host. Adapters that travel and offloaded inputs also go back at the same
        time."""
        goes_back = self.travels or self.offloads
        return (self.device.both_ways if goes_back else None) or self.device.bandwidth

    @cached_property
    def bare_seconds(self) -> float:
        """Seconds per window of the Steps at its end, which no pass hides."""
        if not self.travels:
            return 0.0
        return self.trainable * step_bytes(self.shape.bytes_per_value) / self.bandwidth

    def unhidden(self, draft: Draft) -> float:
        """Return the share of a round in which the device waits for the host, for bytes or for launches. With
        several workers it is the share that Loads add."""
        seconds, at_once = self.seconds(draft), replace(self, device=replace(self.device, asking=0.0))
        if self.workers > 1:
            return max(0.0, seconds - self._round_seconds(draft, math.inf)) / seconds
        return max(0.0, seconds - at_once.arithmetic_seconds(draft.sizes)) / seconds

    @cached_property
    def _first(self) -> list[StageRound]:
        """Rounds of the first stage, indexed by its number of layers."""
        once = self.layer_seconds
        again = 1.0 + self.device.backward
        return [self._stage(size, size * once, again * size * once) for size in range(self.shape.layers + 1)]

    @cached_property
    def _inner(self) -> list[StageRound]:
        waiting = self.input_bytes if self.offloads else 0
        return [replace(one, input_bytes=waiting) for one in self._first]

    @cached_property
    def _last(self) -> list[StageRound]:
        times = [size * self.layer_seconds for size in range(self.shape.layers + 1)]
        head, back = self.head_seconds, self.device.backward
        return [self._stage(size, once + head, back * once + head) for size, once in enumerate(times)]

    def _stage(self, size: int, forward: float, backward: float) -> StageRound:
        loaded = StageRound(forward, backward, load_bytes=size * self.layer_bytes)
        if not self.travels:
            return loaded
        parameters = size * self._layer_parameters
        return replace(
            loaded,
            gone_bytes=size * self.gradient_bytes,
            copy_bytes=size * self.copy_bytes,
            step_bytes=parameters * step_bytes(self.shape.bytes_per_value),
            back_bytes=parameters * back_bytes(self.shape.bytes_per_value),
        )


def whole_seconds(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    round_tokens: int,
    capacity: int,
    recompute: Recompute,
) -> float:
    """Return the seconds of a round of these jobs with the whole base on the device."""
    # Passes over a resident base are captured.
    captured = replace(device, asking=0.0)
    case = StreamCase(shape, tuple(jobs), captured, round_tokens, capacity, travels=False)
    passed = (1.0 + device.backward) * shape.layers + recompute.layers
    return passed * case.layer_seconds + 2 * case.head_seconds


def leaving_room(case: StreamCase, waiting: Iterable[JobShape]) -> StreamCase:
    """Return the case with the condition that each waiting job fits by itself later, its longest sample in a
    microbatch of its own."""
    # One device keeps the chosen capacity; several workers may then have smaller microbatches.
    least = case.capacity if case.workers == 1 else 0
    alone = (
        replace(
            case,
            jobs=(job,),
            round_tokens=max(job.batch_tokens, job.longest),
            capacity=max(least, job.longest),
        )
        for job in hungriest(waiting)
    )
    return replace(case, alone=tuple(alone))


def hungriest(jobs: Iterable[JobShape]) -> list[JobShape]:
    """Return the jobs that no other job dominates by needing at least as much of everything. If each of them
    fits alone, all jobs do."""
    wants = {(job.trainable, job.longest, job.batch_tokens, job.means): job for job in jobs}

    def outdone(want: tuple[int, ...]) -> bool:
        others = (other for other in wants if other != want)
        return any(all(map(ge, other, want)) for other in others)

    return [job for want, job in wants.items() if not outdone(want)]
