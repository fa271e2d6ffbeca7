"""The choice of how to run on one device that the base may not fit, for a run and for `weftune plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape, ModelShape
from weftune.plan.cost.memory import FUSED_SLACK_BYTES, MemoryModel
from weftune.plan.layout.need import (
    ASKING_SECONDS,
    GPU_BACKWARD,
    STAGING_BYTES,
    STREAM_SLACK_BYTES,
    StreamDevice,
)
from weftune.plan.layout.seats import in_order, most_that_fit
from weftune.plan.layout.stream_choice import StreamChoice, choose_stream, fits_streamed

PRETENDED_BANDWIDTH, PRETENDED_FLOPS = 1e10, 1e11
"""Bytes per second and FLOP/s of an emulated device, which shares host memory: nothing waits for copies."""


@dataclass(frozen=True, slots=True)
class ChoiceForJobs:
    choice: StreamChoice
    aboard: tuple[JobShape, ...]
    """Jobs that the choice was made for, which run from the start."""


def fits_whole(shape: ModelShape, jobs: Sequence[JobShape], budget: int) -> bool:
    """Return whether every job can train alone with the whole base on a GPU; then nothing is streamed."""
    memory = MemoryModel(shape, budget, fused=True)
    return all(memory.why_not([job]) is None for job in jobs)


def gpu_place(
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


def pretended_place(budget: int, host_budget: int) -> StreamDevice:
    """Return a device that emulates a GPU with a part of the host's memory."""
    return StreamDevice(
        budget=budget,
        host_budget=host_budget,
        bandwidth=PRETENDED_BANDWIDTH,
        flops=PRETENDED_FLOPS,
        slack=0,
        fused=False,
    )


def in_files(place: StreamDevice) -> StreamDevice:
    """Return the device for a base whose weights stay in their files. An emulated device needs no staging."""
    return replace(place, staging=STAGING_BYTES if place.fused else 0)


def choose_for_jobs(
    shape: ModelShape, jobs: Sequence[JobShape], place: StreamDevice, most: int
) -> ChoiceForJobs:
    """Choose for as many of the jobs as fit at once, in the order of admission, such that each of the others
    can train by itself later, if possible. PlanError says what does not fit."""
    ordered = in_order(jobs)

    def choose(count: int, waiting: Sequence[JobShape]) -> ChoiceForJobs:
        together = ordered[:count]
        choice = choose_stream(shape, together, place, most, _tokens(together), waiting=waiting)
        return ChoiceForJobs(choice, tuple(together))

    def fit(count: int, waiting: Sequence[JobShape]) -> bool:
        together = ordered[:count]
        return fits_streamed(shape, together, place, most, _tokens(together), waiting)

    if count := most_that_fit(lambda count: fit(count, ordered[count:]), len(ordered)):
        return choose(count, ordered[count:])
    # If not even one of them fits, this raises the error that says why.
    return choose(most_that_fit(lambda count: fit(count, ()), len(ordered)) or 1, ())


def _tokens(together: Sequence[JobShape]) -> int:
    return sum(job.batch_tokens for job in together)
