"""Prediction of memory and time for a base that is cut into given stages and streamed from host memory: bytes
on each device and on the host, and seconds per round (one global batch of every job)."""

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
from weftune.plan.cost.ring import TRAVEL_ROUNDS, copied_back_bytes, step_bytes
from weftune.plan.cost.streamed_memory import StreamedMemory
from weftune.plan.layout.recurrence import StageRound, compute_seconds, round_seconds, slotted_seconds
from weftune.plan.program.layout import Layout, StageLayers
from weftune.plan.program.prices import Link
from weftune.plan.program.program import Recompute

STREAM_SLACK_BYTES = 2 << 30
"""Slack bytes on a GPU for a streamed base: for temporaries, rounding by the allocator, and the logits of one
chunk of rows with their gradient."""
ASKING_SECONDS = 4e-3
"""Seconds that Python takes to launch the dozens of GPU kernels of one pass over one layer. The value was
estimated from training with microbatches of 4096 and of 8192 tokens (docs/benchmarks.md), whose passes were
not captured as CUDA graphs. The time for captured passes has not been measured."""
GPU_BACKWARD = 1.35
"""Time of a layer's backward relative to its forward on a GPU: 1.39 for the 8B shape, 1.33 for 32B, on an
H200 with 16 jobs of rank 16 (docs/benchmarks.md)."""
STAGING_BYTES = 128 << 20
"""Bytes of page-locked host memory through which weights are copied to a GPU if they stay in their files."""
EMULATED_BANDWIDTH, EMULATED_FLOPS = 1e10, 1e11
"""Assumed bandwidth in bytes per second, and assumed FLOP/s, of an emulated device, whose memory is host
memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDevice:
    """The device to which a worker streams the base, and the host memory that all workers share."""

    budget_bytes: int
    """Bytes available to the run on the GPU."""
    process_bytes: int = 0
    """GPU bytes held by the process before anything is loaded."""
    host_budget_bytes: int
    """Bytes of host memory available to the run."""
    staging_bytes: int | None = None
    """Host bytes of the buffers for weights that stay in their files. None if weights are in host memory."""
    bandwidth: float
    """Bytes per second from the host to the device, or from the files if weights stay there."""
    duplex_bandwidth: float | None = None
    """Bytes per second from the host to the device while data is also copied back. None means that copies
    back do not slow the link down."""
    flops: float
    """FLOP/s that forwards reach."""
    memory_bandwidth: float = math.inf
    """Bytes per second of the device's own memory, for weights that are dequantised in every pass."""
    backward_ratio: float = 1.0
    """Time of a layer's backward relative to its forward."""
    slack_bytes: int
    """Device bytes for temporaries, rounding by the allocator, and the logits of one chunk of rows."""
    resident_slack_bytes: int | None = None
    """Device bytes for temporaries, rounding by the allocator, and logits if the whole base is on the device.
    None selects `slack_bytes`, the slack of a streamed base."""
    uses_fused_ops: bool = True
    device_launch_seconds: float = GPU_LAUNCH
    """Fixed seconds of one pass over one layer on the device, in addition to the time of its rows."""
    host_launch_seconds: float = 0.0
    """Seconds that the host takes to launch one pass over one layer. The pass cannot take less time."""
    worker_link: Link | None = None
    """Link between two workers that hold shards of the same layers. None if sums over shards take no time."""


def gpu_device(
    budget_bytes: int,
    host_budget_bytes: int,
    bandwidth: float,
    flops: float,
    memory_bandwidth: float,
    duplex_bandwidth: float | None = None,
) -> StreamDevice:
    return StreamDevice(
        budget_bytes=budget_bytes,
        host_budget_bytes=host_budget_bytes,
        bandwidth=bandwidth,
        duplex_bandwidth=duplex_bandwidth,
        flops=flops,
        memory_bandwidth=memory_bandwidth,
        backward_ratio=GPU_BACKWARD,
        slack_bytes=STREAM_SLACK_BYTES,
        resident_slack_bytes=FUSED_SLACK_BYTES,
        host_launch_seconds=ASKING_SECONDS,
    )


def emulated_device(budget_bytes: int, host_budget_bytes: int) -> StreamDevice:
    """Return a device that emulates a GPU, with a part of host memory as its memory."""
    return StreamDevice(
        budget_bytes=budget_bytes,
        host_budget_bytes=host_budget_bytes,
        bandwidth=EMULATED_BANDWIDTH,
        flops=EMULATED_FLOPS,
        slack_bytes=0,
        uses_fused_ops=False,
    )


def file_device(device: StreamDevice) -> StreamDevice:
    """Return the device for a base whose weights stay in their files. A GPU then needs staging buffers in
    host memory; an emulated device does not."""
    return replace(device, staging_bytes=STAGING_BYTES if device.uses_fused_ops else 0)


@dataclass(frozen=True, slots=True)
class LayoutDraft:
    """A candidate for the layout of a streamed base: its stages, which of them are resident, and the number
    of slots (places for streamed stages in device memory). The search compares many such candidates."""

    layer_counts: tuple[int, ...]
    """Number of layers in each stage."""
    resident_stages: tuple[bool, ...]
    slot_counts: tuple[int, ...]
    """Number of slots (places for a streamed stage) on each worker's device. Slots in excess of the worker's
    streamed stages take no memory."""

    @property
    def streamed_layers(self) -> int:
        return sum(
            size for size, stays in zip(self.layer_counts, self.resident_stages, strict=True) if not stays
        )

    def make_layout(self, adapters_travel: bool, offloaded_rows: int = 0, shards: int = 1) -> Layout:
        ends = pairwise(accumulate(self.layer_counts, initial=0))
        bounds = zip(ends, self.resident_stages, strict=True)
        stages = tuple(StageLayers(start, stop, stays) for (start, stop), stays in bounds)
        workers = len(self.slot_counts)
        moving = (self.resident_stages[worker::workers].count(False) for worker in range(workers))
        slots = tuple(map(min, self.slot_counts, moving))
        return Layout(stages, slots, adapters_travel, offloaded_rows, shards=shards)


def draft_from_layout(layout: Layout) -> LayoutDraft:
    stages = layout.stages
    return LayoutDraft(
        tuple(one.layer_count for one in stages), tuple(one.is_resident for one in stages), layout.slot_counts
    )


@dataclass(frozen=True)
class StreamCase:
    """The problem of streaming a base with its jobs to identical devices, one per worker, with a token
    capacity of microbatches. A search finds the stages with which training is fastest.

    On one device, adapters may be streamed together with their stage (`adapters_travel`), and inputs of
    stages may be offloaded to host memory until their backward (`offloads_inputs`).
    """

    shape: ModelShape
    """Shape of the base, or of one shard of it."""
    jobs: tuple[JobShape, ...]
    device: StreamDevice
    round_tokens: int
    """Number of tokens of one round (one global batch of every job). Each stage keeps its input for all of
    these tokens until the backward."""
    capacity: int
    adapters_travel: bool
    offloads_inputs: bool = False
    workers: int = 1
    later_cases: tuple[StreamCase, ...] = ()
    """Streaming problems of the jobs that are admitted later, each with one job alone. The chosen stages must
    fit in memory for all of these problems."""

    def __post_init__(self) -> None:
        assert self.workers == 1 or not (self.adapters_travel or self.offloads_inputs), (
            "adapters and inputs of a worker's stages stay on its device"
        )

    # -- bytes -------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> StreamedMemory:
        return StreamedMemory(
            self.shape,
            self.jobs,
            self.device.uses_fused_ops,
            self.round_tokens,
            self.capacity,
            self.adapters_travel,
            self.offloads_inputs,
            self.workers,
        )

    def device_bytes(self, draft: LayoutDraft) -> int:
        """Return the predicted peak bytes on the fullest device with a candidate layout."""
        if self.workers == 1:
            return self.worker_bytes(draft, 0)
        return max(self.worker_bytes(draft, worker) for worker in range(self.workers))

    def worker_bytes(self, draft: LayoutDraft, worker: int) -> int:
        """Return the predicted peak bytes on the device of one worker with a candidate layout."""
        sizes, resident = (
            draft.layer_counts[worker :: self.workers],
            draft.resident_stages[worker :: self.workers],
        )
        parts = self.memory.bytes_by_use(
            sizes, resident, draft.slot_counts[worker], worker, len(draft.layer_counts)
        )
        return self.device.process_bytes + self.device.slack_bytes + sum(parts)

    def host_bytes(self, draft: LayoutDraft) -> int:
        return self.memory.host_bytes(
            draft.streamed_layers, len(draft.layer_counts), self.device.staging_bytes
        )

    def fits(self, draft: LayoutDraft) -> bool:
        return not self.excess_bytes(draft)

    def excess_bytes(self, draft: LayoutDraft) -> int:
        """Return the bytes by which a candidate layout exceeds the memory of the fullest device, plus those
        by which it exceeds host memory. 0 means that the layout fits."""
        host = max([case.host_bytes(draft) for case in (self, *self.later_cases)])
        lacking = self.peak_bytes(draft) - self.device.budget_bytes, host - self.device.host_budget_bytes
        return sum([count for count in lacking if count > 0])

    def peak_bytes(self, draft: LayoutDraft) -> int:
        """Return the peak bytes on the fullest device, with the present jobs or with one of the later jobs
        alone."""
        return max([case.device_bytes(draft) for case in (self, *self.later_cases)])

    # -- seconds -----------------------------------------------------------------------------------------

    @cached_property
    def layer_seconds(self) -> float:
        """Forward time, in seconds, of one layer for all tokens of a round (one global batch of every
        job)."""
        arithmetic = layer_flops(self.shape) * self.round_tokens / self.device.flops
        each = (
            self.device.device_launch_seconds + dequantised_bytes(self.shape) / self.device.memory_bandwidth
        )
        return max(arithmetic + self._pass_count * each, self._pass_count * self.device.host_launch_seconds)

    @cached_property
    def sum_seconds(self) -> float:
        """Seconds of the all-reduces over shards in the forward of one layer, for all tokens of a round (one
        global batch of every job). The all-reduces of the backward take as long."""
        if self.device.worker_link is None:
            return 0.0
        shape, rows = self.shape, self.memory.round_rows / self._pass_count
        row_bytes = shape.hidden * shape.bytes_per_value
        return self._pass_count * self.device.worker_link.layer_sum_seconds(
            row_bytes, rows, shape.shards, shape.multiplies_stored_format
        )

    @cached_property
    def head_seconds(self) -> float:
        matrix = self.shape.hidden * self.shape.vocabulary
        return (
            2 * matrix * self.round_tokens / self.device.flops
            + self._pass_count * self.device.device_launch_seconds
        )

    @cached_property
    def _pass_count(self) -> int:
        return math.ceil(self.round_tokens / self.capacity)

    def stage_rounds(self, layer_counts: Sequence[int]) -> list[StageRound]:
        """Return the times and transferred bytes of each stage in a round (one global batch of every job).
        Only the last stage recomputes no forward, since it runs the backward of every microbatch right after
        its forward."""
        if len(layer_counts) == 1:
            return [self._last_stage_rounds[layer_counts[0]]]
        first, *inner, last = layer_counts
        return [
            self._first_stage_rounds[first],
            *(self._inner_stage_rounds[size] for size in inner),
            self._last_stage_rounds[last],
        ]

    def round_seconds(self, draft: LayoutDraft) -> float:
        """Return the predicted seconds of a round (one global batch of every job), or infinity if the
        candidate layout does not fit in memory."""
        return self.fitting_seconds(draft) if self.fits(draft) else math.inf

    def fitting_seconds(self, draft: LayoutDraft) -> float:
        """Return the predicted seconds of a round (one global batch of every job), without checking whether
        the candidate layout fits in memory."""
        if self.workers > 1:
            return self._pipeline_round_seconds(draft, self.device.bandwidth)
        rounds = self.stage_rounds(draft.layer_counts)
        hidden = slotted_seconds(rounds, draft.resident_stages, draft.slot_counts[0], self.link_bandwidth)
        return hidden + self.exposed_step_seconds / TRAVEL_ROUNDS

    def _pipeline_round_seconds(self, draft: LayoutDraft, bandwidth: float) -> float:
        """Return the predicted seconds of a round (one global batch of every job) over several workers, each
        with a link of this bandwidth to the host."""
        # Activations are priced as if sent through the host: between GPUs they are never slower.
        hop = self.memory.input_bytes / self._pass_count / self.device.bandwidth
        cut = draft.make_layout(adapters_travel=False)
        return round_seconds(self.stage_rounds(draft.layer_counts), cut, self._pass_count, hop, bandwidth)

    def compute_seconds(self, layer_counts: Sequence[int]) -> float:
        """Return the seconds of a round (one global batch of every job) with stages of these sizes, as if
        transfers took no time."""
        return compute_seconds(self.stage_rounds(layer_counts))

    @cached_property
    def link_bandwidth(self) -> float:
        """Bytes per second from the host to the device, reduced if adapters or inputs are copied back to the
        host at the same time."""
        goes_back = self.adapters_travel or self.offloads_inputs
        return (self.device.duplex_bandwidth if goes_back else None) or self.device.bandwidth

    @cached_property
    def exposed_step_seconds(self) -> float:
        """Seconds of the transfers for the last optimizer steps of a window (a few global batches of every
        job), which no forward or backward overlaps with."""
        if not self.adapters_travel:
            return 0.0
        return (
            sum(job.trainable_parameters for job in self.jobs)
            * step_bytes(self.shape.bytes_per_value)
            / self.link_bandwidth
        )

    def waiting_fraction(self, draft: LayoutDraft) -> float:
        """Return the fraction of a round (one global batch of every job) in which the device waits for
        transfers or kernel launches. With several workers, only waits for transfers of weights count."""
        seconds, at_once = (
            self.round_seconds(draft),
            replace(self, device=replace(self.device, host_launch_seconds=0.0)),
        )
        if self.workers > 1:
            return max(0.0, seconds - self._pipeline_round_seconds(draft, math.inf)) / seconds
        return max(0.0, seconds - at_once.compute_seconds(draft.layer_counts)) / seconds

    @cached_property
    def _first_stage_rounds(self) -> list[StageRound]:
        """Times and transferred bytes of the first stage in a round (one global batch of every job), indexed
        by the stage's number of layers."""
        once, sums = self.layer_seconds, self.sum_seconds
        again = (1.0 + self.device.backward_ratio) * once + 2 * sums
        return [
            self._stage_round(size, size * (once + sums), size * again)
            for size in range(self.shape.layers + 1)
        ]

    @cached_property
    def _inner_stage_rounds(self) -> list[StageRound]:
        waiting = self.memory.input_bytes if self.offloads_inputs else 0
        return [replace(one, input_bytes=waiting) for one in self._first_stage_rounds]

    @cached_property
    def _last_stage_rounds(self) -> list[StageRound]:
        once, sums = self.layer_seconds, self.sum_seconds
        head, back = self.head_seconds, self.device.backward_ratio
        return [
            self._stage_round(size, size * (once + sums) + head, size * (back * once + sums) + head)
            for size in range(self.shape.layers + 1)
        ]

    def _stage_round(self, layer_count: int, forward: float, backward: float) -> StageRound:
        loaded = StageRound(forward, backward, load_bytes=layer_count * self.memory.layer_bytes)
        if not self.adapters_travel:
            return loaded
        parameters = layer_count * self.memory.layer_parameters
        return replace(
            loaded,
            gradient_bytes=layer_count * self.memory.gradient_bytes,
            adapter_bytes=layer_count * self.memory.copy_bytes,
            step_bytes=parameters * step_bytes(self.shape.bytes_per_value),
            state_bytes=parameters * copied_back_bytes(self.shape.bytes_per_value),
        )


def resident_round_seconds(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    round_tokens: int,
    capacity: int,
    recompute: Recompute,
) -> float:
    """Return the predicted seconds of a round (one global batch of each of these jobs) if the whole base
    stays on the device."""
    # Passes over a resident base are captured as CUDA graphs, so Python does not launch their kernels.
    captured = replace(device, host_launch_seconds=0.0)
    case = StreamCase(shape, tuple(jobs), captured, round_tokens, capacity, adapters_travel=False)
    passed = (1.0 + device.backward_ratio) * shape.layers + recompute.recomputed_layers
    return passed * case.layer_seconds + 2 * case.head_seconds


def case_with_later_jobs(case: StreamCase, later_jobs: Iterable[JobShape]) -> StreamCase:
    """Return the streaming problem `case` with the additional condition that each of the later jobs fits in
    memory alone."""
    # One device keeps the chosen capacity; several workers may then have smaller microbatches.
    least = case.capacity if case.workers == 1 else 0
    alone = (
        replace(
            case,
            jobs=(job,),
            round_tokens=max(job.batch_tokens, job.max_sample_tokens),
            capacity=max(least, job.max_sample_tokens),
        )
        for job in undominated_jobs(later_jobs)
    )
    return replace(case, later_cases=tuple(alone))


def undominated_jobs(jobs: Iterable[JobShape]) -> list[JobShape]:
    """Return the jobs that no other job dominates: no other job needs at least as much of every resource. If
    each of them fits in memory alone, so does every other job."""
    wants = {
        (job.trainable_parameters, job.max_sample_tokens, job.batch_tokens, job.mean_weight_count): job
        for job in jobs
    }

    def is_dominated(job_needs: tuple[int, ...]) -> bool:
        others = (other for other in wants if other != job_needs)
        return any(all(map(ge, other, job_needs)) for other in others)

    return [job for want, job in wants.items() if not is_dominated(want)]
