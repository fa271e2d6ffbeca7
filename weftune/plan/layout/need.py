"""Memory that a cut of a streamed base needs on each device and on the host, and the time of a round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import ge

from weftune.core.shapes import JobShape, ModelShape
from weftune.plan.cost.estimate import GPU_LAUNCH, dequantised_bytes, layer_flops
from weftune.plan.cost.memory import FUSED_SLACK_BYTES
from weftune.plan.cost.ring import TRAVEL_ROUNDS, back_bytes, step_bytes
from weftune.plan.cost.streamed_memory import StreamedMemory
from weftune.plan.layout.recurrence import StageRound, compute_seconds, round_seconds, slotted_seconds
from weftune.plan.program.layout import Layout, StageLayers
from weftune.plan.program.program import Recompute

STREAM_SLACK_BYTES = 2 << 30
"""Slack bytes on a GPU: logits of one chunk and their gradient, temporaries, the allocator's rounding."""
ASKING_SECONDS = 4e-3
"""Seconds that Python takes on a GPU to launch the dozens of kernels of one pass over one layer. Estimated
from rounds with microbatches of 4096 and of 8192 tokens (docs/benchmarks.md), whose passes were not captured
as CUDA graphs. The time for captured passes has not been measured."""
GPU_BACKWARD = 1.35
"""Time of a layer's backward relative to its forward on a GPU: 1.39 for the 8B shape, 1.33 for 32B, on an
H200 with 16 jobs of rank 16 (docs/benchmarks.md)."""
STAGING_BYTES = 128 << 20
"""Bytes of page-locked memory, on a host with a GPU, that weights pass through if they stay in files."""
EMULATED_BANDWIDTH, EMULATED_FLOPS = 1e10, 1e11
"""Bytes per second and FLOP/s of an emulated device, which shares host memory: nothing waits for copies."""


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
    """Bytes per second from the host while the other direction is busy too. None uses `bandwidth`."""
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
    """Seconds that the host takes to launch one pass over one layer: a lower bound of its time."""


def gpu_device(
    budget: int,
    host_budget: int,
    bandwidth: float,
    flops: float,
    memory_bandwidth: float,
    both_ways: float | None = None,
) -> StreamDevice:
    return StreamDevice(
        budget=budget,
        host_budget=host_budget,
        bandwidth=bandwidth,
        both_ways=both_ways,
        flops=flops,
        memory_bandwidth=memory_bandwidth,
        backward=GPU_BACKWARD,
        slack=STREAM_SLACK_BYTES,
        whole_slack=FUSED_SLACK_BYTES,
        asking=ASKING_SECONDS,
    )


def emulated_device(budget: int, host_budget: int) -> StreamDevice:
    """Return a device that emulates a GPU with a part of the host's memory."""
    return StreamDevice(
        budget=budget,
        host_budget=host_budget,
        bandwidth=EMULATED_BANDWIDTH,
        flops=EMULATED_FLOPS,
        slack=0,
        fused=False,
    )


def in_files(device: StreamDevice) -> StreamDevice:
    """Return the device for a base whose weights stay in their files. An emulated device needs no staging."""
    return replace(device, staging=STAGING_BYTES if device.fused else 0)


@dataclass(frozen=True, slots=True)
class Draft:
    """A candidate cut of the base into stages."""

    sizes: tuple[int, ...]
    """Number of layers in each stage."""
    resident: tuple[bool, ...]
    slots: tuple[int, ...]
    """Number of slots of each worker. Memory is not counted for more slots than the worker streams stages."""

    @property
    def streamed_layers(self) -> int:
        return sum(size for size, stays in zip(self.sizes, self.resident, strict=True) if not stays)

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
    """A base with its jobs on identical devices, one per worker, and one microbatch capacity. On one device,
    adapters may be streamed with their stage (`travels`) and inputs of stages offloaded (`offloads`)."""

    shape: ModelShape
    jobs: tuple[JobShape, ...]
    device: StreamDevice
    round_tokens: int
    """Tokens of one round of all jobs. Each stage keeps its input of all these tokens for the backward."""
    capacity: int
    travels: bool
    offloads: bool = False
    workers: int = 1
    alone: tuple[StreamCase, ...] = ()
    """Cases with a single job that is admitted later. Each of them must fit with the same cut."""

    def __post_init__(self) -> None:
        assert self.workers == 1 or not (self.travels or self.offloads), (
            "adapters and inputs of a worker's stages stay on its device"
        )

    # -- bytes -------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> StreamedMemory:
        return StreamedMemory(
            self.shape,
            self.jobs,
            self.device.fused,
            self.round_tokens,
            self.capacity,
            self.travels,
            self.offloads,
            self.workers,
        )

    def device_bytes(self, draft: Draft) -> int:
        """Return the peak bytes on the fullest device."""
        if self.workers == 1:
            return self.worker_bytes(draft, 0)
        return max(self.worker_bytes(draft, worker) for worker in range(self.workers))

    def worker_bytes(self, draft: Draft, worker: int) -> int:
        """Return the peak bytes on that worker's device."""
        sizes, resident = draft.sizes[worker :: self.workers], draft.resident[worker :: self.workers]
        parts = self.memory.parts(sizes, resident, draft.slots[worker], worker, len(draft.sizes))
        return self.device.taken + self.device.slack + sum(parts)

    def host_bytes(self, draft: Draft) -> int:
        return self.memory.host_bytes(draft.streamed_layers, len(draft.sizes), self.device.staging)

    def fits(self, draft: Draft) -> bool:
        return not self.excess(draft)

    def excess(self, draft: Draft) -> int:
        """Return the bytes lacking on the fullest device plus the bytes lacking on the host."""
        host = max([case.host_bytes(draft) for case in (self, *self.alone)])
        lacking = self.most_bytes(draft) - self.device.budget, host - self.device.host_budget
        return sum([count for count in lacking if count > 0])

    def most_bytes(self, draft: Draft) -> int:
        """Return the peak bytes on the fullest device, with these jobs or with any job of `alone`."""
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
        """Return the times and bytes of each stage in a round. The last stage runs the backward of every
        microbatch right after its forward, so it recomputes nothing."""
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
        hop = self.memory.input_bytes / self._passes / self.device.bandwidth
        cut = draft.cut(travels=False)
        return round_seconds(self.rounds(draft.sizes), cut, self._passes, hop, bandwidth)

    def arithmetic_seconds(self, sizes: Sequence[int]) -> float:
        """Return the seconds of a round in stages of these sizes if nothing had to be transferred."""
        return compute_seconds(self.rounds(sizes))

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second from the host, while adapters and inputs may be copied back to the host."""
        goes_back = self.travels or self.offloads
        return (self.device.both_ways if goes_back else None) or self.device.bandwidth

    @cached_property
    def bare_seconds(self) -> float:
        """Seconds of the optimizer steps at the end of a window, which overlap with no pass."""
        if not self.travels:
            return 0.0
        return (
            sum(job.trainable for job in self.jobs) * step_bytes(self.shape.bytes_per_value) / self.bandwidth
        )

    def unhidden(self, draft: Draft) -> float:
        """Return the share of a round in which the device waits for transfers or kernel launches. With
        several workers, return the share that transfers of weights add."""
        seconds, at_once = self.seconds(draft), replace(self, device=replace(self.device, asking=0.0))
        if self.workers > 1:
            return max(0.0, seconds - self._round_seconds(draft, math.inf)) / seconds
        return max(0.0, seconds - at_once.arithmetic_seconds(draft.sizes)) / seconds

    @cached_property
    def _first(self) -> list[StageRound]:
        """Times and bytes of the first stage in a round, indexed by its number of layers."""
        once = self.layer_seconds
        again = 1.0 + self.device.backward
        return [self._stage(size, size * once, again * size * once) for size in range(self.shape.layers + 1)]

    @cached_property
    def _inner(self) -> list[StageRound]:
        waiting = self.memory.input_bytes if self.offloads else 0
        return [replace(one, input_bytes=waiting) for one in self._first]

    @cached_property
    def _last(self) -> list[StageRound]:
        times = [size * self.layer_seconds for size in range(self.shape.layers + 1)]
        head, back = self.head_seconds, self.device.backward
        return [self._stage(size, once + head, back * once + head) for size, once in enumerate(times)]

    def _stage(self, size: int, forward: float, backward: float) -> StageRound:
        loaded = StageRound(forward, backward, load_bytes=size * self.memory.layer_bytes)
        if not self.travels:
            return loaded
        parameters = size * self.memory.layer_parameters
        return replace(
            loaded,
            gone_bytes=size * self.memory.gradient_bytes,
            copy_bytes=size * self.memory.copy_bytes,
            step_bytes=parameters * step_bytes(self.shape.bytes_per_value),
            back_bytes=parameters * back_bytes(self.shape.bytes_per_value),
        )


def resident_round_seconds(
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
    """Return the case with the condition that each waiting job fits by itself later."""
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
    """Return the jobs that no other job dominates. If each of them fits alone, all jobs do."""
    wants = {(job.trainable, job.longest, job.batch_tokens, job.means): job for job in jobs}

    def outdone(want: tuple[int, ...]) -> bool:
        others = (other for other in wants if other != want)
        return any(all(map(ge, other, want)) for other in others)

    return [job for want, job in wants.items() if not outdone(want)]
