"""The choice of how a base is streamed, with the reason as a sentence. On one device it is not streamed if it
fits; otherwise, and over several workers, the fastest way is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftune.core.shapes import JobShape, ModelShape
from weftune.errors import PlanError
from weftune.plan.cost.memory import MemoryModel, gib, longest
from weftune.plan.layout.need import StreamCase, StreamDevice, leaving_room, whole_seconds
from weftune.plan.layout.refuse import fits_devices, refuse_jobs, why_not, why_not_on_workers
from weftune.plan.layout.search import Found, fits_any, search
from weftune.plan.program.layout import Layout, one_device

SMALLEST = 256
"""Smallest number of tokens per pass that is tried, unless every sample is shorter."""
WORTH = 0.01
"""Share by which a step must get shorter for inputs to be offloaded or adapters to travel: the prediction
assumes that the link always reaches its best speed."""


@dataclass(frozen=True, slots=True)
class StreamWay:
    """State, other than layers, that is held in host memory."""

    travels: bool
    """Whether adapters are held there and travel with their stage."""
    offloads: bool
    """Whether inputs of stages are held there between their forward and their backward."""


WAYS = (StreamWay(False, False), StreamWay(False, True), StreamWay(True, False), StreamWay(True, True))
"""Ways to stream, the simplest first. Inputs are offloaded before adapters: no Step waits for inputs."""


@dataclass(frozen=True, slots=True)
class StreamChoice:
    cut: Layout
    capacity: int
    """Maximum tokens per microbatch."""
    device_bytes: int
    """Predicted peak bytes on the fullest device."""
    host_bytes: int
    """Host bytes of all workers."""
    step_seconds: float
    """Predicted seconds per round (one global batch of every job)."""
    unhidden: float
    """Share of a round in which devices wait for the host."""
    why: str
    """Reason, as a clause for the user."""
    mapped: bool = False
    """Whether streamed weights stay in their files and are read from there in every round."""
    whole: bool = False
    """Whether the base fits without streaming; `cut` is then one resident stage."""


def choose_stream(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    most: int,
    round_tokens: int,
    ways: Sequence[StreamWay] = WAYS,
    waiting: Sequence[JobShape] = (),
) -> StreamChoice:
    """Choose how to stream on one device. Microbatches have at most `most` tokens, a round of all jobs
    `round_tokens`. The `waiting` jobs are admitted later, and each must fit by itself.

    The base stays whole if it fits. Otherwise the result is the fastest cut and capacity of the first way,
    unless another way is clearly faster or is the first that fits. PlanError says what does not fit.
    """
    assert jobs, "there is nothing to train"
    round_tokens = max(round_tokens, longest(jobs))
    if choice := _whole(shape, jobs, device, most, round_tokens, waiting):
        return choice
    refuse_jobs(shape, jobs, device, round_tokens)
    by_way = [
        [
            _on_one(shape, jobs, device, round_tokens, capacity, way, waiting)
            for capacity in capacities(longest(jobs), most, round_tokens)
        ]
        for way in ways
    ]
    found = _plainest([best for cases in by_way if (best := search(cases))])
    if found is None and waiting:
        raise PlanError(
            "no way of streaming serves these jobs together and each of the waiting ones by itself"
        )
    if found is None:
        raise why_not([case for cases in by_way for case in cases])
    return _chosen(found, _why(found))


def _on_one(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    round_tokens: int,
    capacity: int,
    way: StreamWay,
    waiting: Sequence[JobShape],
) -> StreamCase:
    case = StreamCase(shape, tuple(jobs), device, round_tokens, capacity, way.travels, way.offloads)
    return leaving_room(case, waiting)


def _chosen(found: Found, why: str) -> StreamChoice:
    case, draft = found.case, found.draft
    return StreamChoice(
        cut=draft.cut(case.travels, case.round_rows if case.offloads else 0),
        capacity=case.capacity,
        device_bytes=case.device_bytes(draft),
        host_bytes=case.host_bytes(draft),
        step_seconds=found.seconds,
        unhidden=case.unhidden(draft),
        why=why,
        mapped=case.device.staging is not None,
    )


def fits_streamed(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    most: int,
    round_tokens: int,
    waiting: Sequence[JobShape] = (),
) -> bool:
    """Return whether `choose_stream` finds a way, without searching: the smallest microbatches need least."""
    round_tokens = max(round_tokens, longest(jobs))
    if _whole(shape, jobs, device, most, round_tokens, waiting):
        return True
    try:
        refuse_jobs(shape, jobs, device, round_tokens)
    except PlanError:
        return False
    least = capacities(longest(jobs), most, round_tokens)[-1]
    cases = (_on_one(shape, jobs, device, round_tokens, least, way, waiting) for way in reversed(WAYS))
    return any(map(fits_any, cases))


def _plainest(by_way: Sequence[Found]) -> Found | None:
    """Return the first draft for which no other is clearly faster."""
    least = min((found.seconds for found in by_way), default=0.0)
    return next((found for found in by_way if (1 - WORTH) * found.seconds <= least), None)


def capacities(least: int, most: int, round_tokens: int) -> list[int]:
    """Return the capacities worth trying, largest first: halves of `most` down to the longest sample, and its
    length."""
    halves = (most >> power for power in range(most.bit_length()))
    fit = [one for one in halves if one >= max(least, min(SMALLEST, round_tokens))]
    # A capacity beyond the tokens of a round is useless, whatever memory it takes.
    useful = [one for one in fit if one // 2 < round_tokens]
    return useful if least in useful else [*useful, least]


def _whole(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    most: int,
    round_tokens: int,
    waiting: Sequence[JobShape],
) -> StreamChoice | None:
    memory = _resident(shape, device)
    if any(memory.least_bytes(together) > device.budget for together in (jobs, *([job] for job in waiting))):
        return None
    recompute = memory.recompute(jobs, most)
    capacity = memory.capacity(jobs, most, recompute)
    need = memory.peak_bytes(jobs, capacity, recompute)
    seconds = whole_seconds(shape, jobs, device, round_tokens, capacity, recompute)
    why = (
        f"nothing is streamed, since the base, the adapters and their passes need {gib(need)} and the GPU "
        f"has {gib(device.budget)} for a run"
    )
    return StreamChoice(one_device(shape.layers), capacity, need, 0, seconds, 0.0, why, whole=True)


def _resident(shape: ModelShape, device: StreamDevice) -> MemoryModel:
    """Return the memory model of a run with the whole base on the device."""
    slack = device.slack if device.whole_slack is None else device.whole_slack
    return MemoryModel(shape, device.budget, device.taken, device.fused, slack=slack)


def _why(found: Found) -> str:
    case, draft = found.case, found.draft
    sizes, stays = draft.sizes, sum(draft.resident)
    whole = _resident(case.shape, case.device).least_bytes(case.jobs)
    adapters = "travel with their stage" if case.travels else "stay on the GPU"
    inputs = ", inputs of stages wait in host memory for the way back" if case.offloads else ""
    slots = min(draft.slots[0], len(sizes) - stays)
    return (
        f"streamed in {len(sizes)} stages of {_range(sizes, 'layer')}, {stays} of them resident, the others "
        f"in {_range([slots], 'slot')}, since the base, its adapters and their passes need "
        f"{gib(whole)} and the GPU has {gib(case.device.budget)} for a run; adapters {adapters}{inputs}, a "
        f"microbatch has up to {case.capacity:,} tokens, and the GPU waits for the host in "
        f"{case.unhidden(draft):.0%} of a step{_files(found)}"
    )


def _files(found: Found) -> str:
    case, device = found.case, found.case.device
    if device.staging is None:
        return ""
    return (
        "; weights are read from their files in every step, since the host has "
        f"{gib(device.host_budget)} for a run and they would take {gib(case.streamed_bytes(found.draft))}"
    )


def _range(counts: Sequence[int], noun: str) -> str:
    least, most = min(counts), max(counts)
    return f"{least} to {most} {noun}s" if least < most else f"{most} {noun}{'' if most == 1 else 's'}"


# -- several workers -------------------------------------------------------------------------------------


def choose_for_workers(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    later: Sequence[JobShape],
    device: StreamDevice,
    workers: int,
    most: int,
    parted: int,
) -> StreamChoice:
    """Return the fastest cut and capacity found for these jobs together; the `later` jobs fit too, one by
    one. `device` is that of every worker, with the host that all of them share. Microbatches have at most
    `most` tokens. `parted` is the number of bytes that each device would need if nothing were streamed, for
    the sentence that says why.

    PlanError says what does not fit.
    """
    assert jobs, "there is nothing to train"

    def made(together: Sequence[JobShape], capacity: int) -> StreamCase:
        tokens = max(sum(job.batch_tokens for job in together), longest(together))
        return StreamCase(shape, tuple(together), device, tokens, capacity, travels=False, workers=workers)

    tokens = max(sum(job.batch_tokens for job in jobs), longest(jobs))
    cases = [made(jobs, capacity) for capacity in capacities(longest(jobs), most, tokens)]
    found = search(leaving_room(case, later) for case in cases)
    if found is None:
        least = cases[-1]
        tried = (least, *(made([job], job.longest) for job in later))
        too_large = (one for one in tried if not fits_devices(one))
        raise why_not_on_workers(next(too_large, leaving_room(least, later)))
    return _chosen(found, _why_on_workers(found, parted))


def _why_on_workers(found: Found, parted: int) -> str:
    case, cut = found.case, found.draft.cut(travels=False)
    sizes, stay = found.draft.sizes, sum(found.draft.resident)
    slots = _range([count for count in cut.slots if count], "slot") if stay < len(sizes) else ""
    places = (
        f"{stay} of them resident, the others in {slots} of their worker" if slots else "all of them resident"
    )
    return (
        f"streamed over {case.workers} workers in {len(sizes)} stages of {_range(sizes, 'layer')}, {places}, "
        f"since a worker's part of the base, an adapter and the passes of a pipeline would need "
        f"{gib(parted)} of a device that has {gib(case.device.budget)} for a run; adapters and inputs of "
        f"stages stay on their worker's device, a microbatch has up to {case.capacity:,} tokens, and "
        f"Loads take {case.unhidden(found.draft):.0%} of a step"
    )
