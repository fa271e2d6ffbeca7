"""Choice of how a base is streamed from host memory, with the reason as a sentence.

A base that fits on one device is not streamed. If it does not fit, or if several workers are to stream it,
the fastest cut into stages is chosen. If nothing fits, an error explains why before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from weftune.core.shapes import JobShape, ModelShape
from weftune.errors import HostTooSmall, Mistake, PlanError
from weftune.plan.cost.memory import MemoryModel, format_bytes, max_sample_tokens
from weftune.plan.layout.need import StreamCase, StreamDevice, case_with_later_jobs, resident_round_seconds
from weftune.plan.layout.search import (
    EvaluatedDraft,
    even_drafts,
    filled_drafts,
    fits_any,
    least_memory_drafts,
    search_layouts,
)
from weftune.plan.layout.seats import largest_fitting_count, order_for_seats
from weftune.plan.program.layout import Layout, one_device_layout

MIN_CAPACITY = 256
"""Smallest token capacity of microbatches that is tried, apart from the length of the longest sample."""
MIN_GAIN = 0.01
"""Relative gain in time that is required to offload inputs or to stream adapters. A smaller gain is not
relied on, since the prediction assumes that the link always reaches its best speed."""


@dataclass(frozen=True, slots=True)
class HostState:
    """Flags for the data that host memory holds in addition to the weights of layers."""

    adapters_travel: bool
    """Whether adapters are kept in host memory and loaded together with the stage (layers) that they belong
    to."""
    offloads_inputs: bool
    """Whether inputs of stages are kept in host memory between their forward and their backward."""


HOST_STATES = tuple(HostState(travels, offloads) for travels, offloads in product((False, True), repeat=2))
"""All combinations of data that host memory may hold, the preferred ones first. Offloading inputs is
preferred to streaming adapters, since no optimizer step waits for inputs."""


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """How a base is streamed: its layout, the predicted time and memory, and the reason for this choice."""

    layout: Layout
    capacity: int
    """Maximum tokens per microbatch."""
    attached_jobs: tuple[JobShape, ...]
    """Jobs for which the choice was made, which run together from the start."""
    device_bytes: int
    """Predicted peak bytes on the fullest device."""
    host_bytes: int
    """Bytes of host memory that all workers together need."""
    round_seconds: float
    """Predicted seconds per round (one global batch of every job)."""
    waiting_fraction: float
    """Fraction of a round (one global batch of every job) in which devices wait for the host."""
    reason: str
    """Reason for the choice, as a clause for the user."""
    reads_weight_files: bool = False
    """Whether streamed weights stay in their files and are read from there in every round (one global batch
    of every job)."""
    is_resident: bool = False
    """Whether the base fits on the device without streaming; `layout` then has one stage, which stays
    there."""


def fits_whole(shape: ModelShape, jobs: Sequence[JobShape], budget: int, decoder_bytes: int = 0) -> bool:
    """Return whether every job can train alone with the whole base on a GPU of `budget` bytes, so that
    nothing need be streamed."""
    memory = MemoryModel(shape, budget, uses_fused_ops=True, decoder_bytes=decoder_bytes)
    return all(memory.misfit_reason([job]) is None for job in jobs)


def choose_for_jobs(
    shape: ModelShape, jobs: Sequence[JobShape], device: StreamDevice, max_tokens: int
) -> StreamChoice:
    """Return how to stream the base to one device for as many jobs as fit together, in the order of
    admission. If possible, the choice also allows each remaining job to train alone later. Raise PlanError if
    nothing fits."""
    ordered = order_for_seats(jobs)

    def tokens(count: int) -> int:
        return sum(job.batch_tokens for job in ordered[:count])

    def fits_together(count: int, waiting_jobs: Sequence[JobShape]) -> bool:
        return fits_streamed(shape, ordered[:count], device, max_tokens, tokens(count), waiting_jobs)

    waiting: Sequence[JobShape] = ()
    if count := largest_fitting_count(lambda count: fits_together(count, ordered[count:]), len(ordered)):
        waiting = ordered[count:]
    else:
        # If not even one of them fits, the choice raises the error that says why.
        count = largest_fitting_count(lambda count: fits_together(count, ()), len(ordered)) or 1
    return choose_stream(shape, ordered[:count], device, max_tokens, tokens(count), waiting_jobs=waiting)


def choose_stream(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    max_tokens: int,
    round_tokens: int,
    states: Sequence[HostState] = HOST_STATES,
    waiting_jobs: Sequence[JobShape] = (),
) -> StreamChoice:
    """Return how to stream the base to one device. Microbatches have at most `max_tokens` tokens, and a round
    (one global batch of every job) has `round_tokens`. Each of the `waiting_jobs` jobs, which are admitted
    later, must fit alone.

    If the base fits, it is not streamed. Otherwise, return the fastest cut and capacity with the first of
    `states` (choices of what else host memory holds) that fits, unless another state is clearly faster. Raise
    PlanError if none fits.
    """
    assert jobs, "there is nothing to train"
    round_tokens = max(round_tokens, max_sample_tokens(jobs))
    if choice := _choose_resident(shape, jobs, device, max_tokens, round_tokens, waiting_jobs):
        return choice
    _check_jobs_fit(shape, jobs, device, round_tokens)
    tried = capacities(max_sample_tokens(jobs), max_tokens, round_tokens)
    by_state = [
        [
            _choose_on_one_device(shape, jobs, device, round_tokens, capacity, state, waiting_jobs)
            for capacity in tried
        ]
        for state in states
    ]
    # The first draft for which no other is clearly faster is the simplest.
    best = [found for cases in by_state if (found := search_layouts(cases))]
    least = min((found.seconds for found in best), default=0.0)
    chosen = next((found for found in best if (1 - MIN_GAIN) * found.seconds <= least), None)
    if chosen is None and waiting_jobs:
        raise PlanError(
            "no way of streaming serves these jobs together and each of the waiting ones by itself"
        )
    if chosen is None:
        raise _misfit_error([case for cases in by_state for case in cases])
    return _make_stream_choice(chosen, _streaming_reason(chosen))


def _choose_on_one_device(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    round_tokens: int,
    capacity: int,
    state: HostState,
    waiting_jobs: Sequence[JobShape],
) -> StreamCase:
    case = StreamCase(
        shape, tuple(jobs), device, round_tokens, capacity, state.adapters_travel, state.offloads_inputs
    )
    return case_with_later_jobs(case, waiting_jobs)


def _make_stream_choice(evaluated: EvaluatedDraft, reason: str) -> StreamChoice:
    case, draft = evaluated.case, evaluated.draft
    return StreamChoice(
        layout=draft.make_layout(
            case.adapters_travel, case.memory.round_rows if case.offloads_inputs else 0, case.shape.shards
        ),
        capacity=case.capacity,
        attached_jobs=case.jobs,
        device_bytes=case.device_bytes(draft),
        host_bytes=case.host_bytes(draft),
        round_seconds=evaluated.seconds,
        waiting_fraction=case.waiting_fraction(draft),
        reason=reason,
        reads_weight_files=case.device.staging_bytes is not None,
    )


def fits_streamed(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    max_tokens: int,
    round_tokens: int,
    waiting_jobs: Sequence[JobShape] = (),
) -> bool:
    """Return whether a layout for streaming the base exists that fits in memory with the smallest
    microbatches."""
    round_tokens = max(round_tokens, max_sample_tokens(jobs))
    if _choose_resident(shape, jobs, device, max_tokens, round_tokens, waiting_jobs):
        return True
    try:
        _check_jobs_fit(shape, jobs, device, round_tokens)
    except PlanError:
        return False
    least = capacities(max_sample_tokens(jobs), max_tokens, round_tokens)[-1]
    return any(
        fits_any(_choose_on_one_device(shape, jobs, device, round_tokens, least, state, waiting_jobs))
        for state in reversed(HOST_STATES)
    )


def capacities(min_tokens: int, max_tokens: int, round_tokens: int) -> list[int]:
    """Return the token capacities of microbatches to try: `max_tokens` and its repeated halves, and finally
    the length of the longest sample, `min_tokens`. Capacities far above `round_tokens` are left out."""
    halves = (max_tokens >> power for power in range(max_tokens.bit_length()))
    fits_together = [one for one in halves if one >= max(min_tokens, min(MIN_CAPACITY, round_tokens))]
    # A capacity beyond the tokens of a round is useless, whatever memory it takes.
    useful = [one for one in fits_together if one // 2 < round_tokens]
    return useful if min_tokens in useful else [*useful, min_tokens]


def _choose_resident(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    max_tokens: int,
    round_tokens: int,
    waiting_jobs: Sequence[JobShape],
) -> StreamChoice | None:
    memory = _resident_memory(shape, device)
    if any(
        memory.least_bytes(together) > device.budget_bytes
        for together in (jobs, *([job] for job in waiting_jobs))
    ):
        return None
    recompute = memory.choose_recompute(jobs, max_tokens)
    capacity = memory.choose_capacity(jobs, max_tokens, recompute)
    need = memory.peak_bytes(jobs, capacity, recompute)
    seconds = resident_round_seconds(shape, jobs, device, round_tokens, capacity, recompute)
    why = (
        f"nothing is streamed, since the base, the adapters and their passes need {format_bytes(need)} "
        "and the GPU "
        f"has {format_bytes(device.budget_bytes)} for a run"
    )
    cut = one_device_layout(shape.layers)
    return StreamChoice(cut, capacity, tuple(jobs), need, 0, seconds, 0.0, why, is_resident=True)


def _resident_memory(shape: ModelShape, device: StreamDevice) -> MemoryModel:
    """Return the memory model of a run in which the whole base stays on the device."""
    slack = device.slack_bytes if device.resident_slack_bytes is None else device.resident_slack_bytes
    return MemoryModel(
        shape, device.budget_bytes, device.process_bytes, device.uses_fused_ops, fixed_slack_bytes=slack
    )


def _streaming_reason(evaluated: EvaluatedDraft) -> str:
    case, draft, device = evaluated.case, evaluated.draft, evaluated.case.device
    sizes, stays = draft.layer_counts, sum(draft.resident_stages)
    whole = _resident_memory(case.shape, device).least_bytes(case.jobs)
    adapters = "travel with their stage" if case.adapters_travel else "stay on the GPU"
    inputs = ", inputs of stages wait in host memory for the way back" if case.offloads_inputs else ""
    slots = min(draft.slot_counts[0], len(sizes) - stays)
    files = ""
    if device.staging_bytes is not None:
        streamed = draft.streamed_layers * case.memory.layer_bytes
        files = (
            "; weights are read from their files in every step, since the host has "
            f"{format_bytes(device.host_budget_bytes)}"
            f" for a run and they would take {format_bytes(streamed)}"
        )
    return (
        f"streamed in {len(sizes)} stages of {_format_range(sizes, 'layer')}, {stays} of them resident, the "
        f"others in {_format_range([slots], 'slot')}, since the base, its adapters and their passes need "
        f"{format_bytes(whole)} and the GPU has {format_bytes(device.budget_bytes)} for a run; adapters "
        f"{adapters}{inputs}, a "
        f"microbatch has up to {case.capacity:,} tokens, and the GPU waits for the host in "
        f"{case.waiting_fraction(draft):.0%} of a step{files}"
    )


def _format_range(counts: Sequence[int], unit: str) -> str:
    least, largest = min(counts), max(counts)
    count_noun = f"{largest} {unit}{'' if largest == 1 else 's'}"
    return f"{least} to {largest} {unit}s" if least < largest else count_noun


# -- several workers -------------------------------------------------------------------------------------


def choose_for_workers(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    later_jobs: Sequence[JobShape],
    device: StreamDevice,
    workers: int,
    max_tokens: int,
    unstreamed_bytes: int,
) -> StreamChoice:
    """Return the fastest way found to stream the base to several workers for these jobs together, with stages
    with which each of `later_jobs` fits alone. If `shape` is that of a shard, each of the `workers` is a
    group of workers that hold the shards of its stages.

    `device` describes the device of every worker and the host memory that all workers share. Microbatches
    have at most `max_tokens` tokens. `unstreamed_bytes` is the number of bytes that each device would need if
    nothing were streamed; this number is only used in the reason. Raise PlanError if nothing fits.
    """
    assert jobs, "there is nothing to train"

    def case(attached_jobs: Sequence[JobShape], capacity: int) -> StreamCase:
        tokens = max(sum(job.batch_tokens for job in attached_jobs), max_sample_tokens(attached_jobs))
        return StreamCase(
            shape, tuple(attached_jobs), device, tokens, capacity, adapters_travel=False, workers=workers
        )

    tokens = max(sum(job.batch_tokens for job in jobs), max_sample_tokens(jobs))
    cases = [case(jobs, capacity) for capacity in capacities(max_sample_tokens(jobs), max_tokens, tokens)]
    found = search_layouts(case_with_later_jobs(one, later_jobs) for one in cases)
    if found is None:
        least = cases[-1]
        tried = (least, *(case([job], job.max_sample_tokens) for job in later_jobs))
        too_large = (one for one in tried if _least_bytes(one) > device.budget_bytes)
        raise _workers_misfit_error(next(too_large, case_with_later_jobs(least, later_jobs)))
    return _make_stream_choice(found, _workers_reason(found, unstreamed_bytes))


def _describe_workers(case: StreamCase) -> str:
    """Return a description of the workers for the user, such as `2 workers`, `2 shards` or `2 workers of 2
    shards`."""
    counts = ((case.workers, "workers"), (case.shape.shards, "shards"))
    return " of ".join(f"{count} {noun}" for count, noun in counts if count > 1)


def _workers_reason(evaluated: EvaluatedDraft, unstreamed_bytes: int) -> str:
    case, cut = evaluated.case, evaluated.draft.make_layout(adapters_travel=False)
    sizes, stay = evaluated.draft.layer_counts, sum(evaluated.draft.resident_stages)
    placement = "all of them resident"
    if stay < len(sizes):
        slots = _format_range([count for count in cut.slot_counts if count], "slot")
        placement = f"{stay} of them resident, the others in {slots} of their worker"
    return (
        f"streamed over {_describe_workers(case)} in {len(sizes)} stages of {_format_range(sizes, 'layer')}, "
        f"{placement}, since a worker's part of the base, an adapter and the passes of a pipeline would need "
        f"{format_bytes(unstreamed_bytes)} of a device that has {format_bytes(case.device.budget_bytes)} "
        "for a run; adapters and "
        f"inputs of stages stay on their worker's device, a microbatch has up to {case.capacity:,} tokens, "
        "and "
        f"Loads take {case.waiting_fraction(evaluated.draft):.0%} of a step"
    )


# -- errors ----------------------------------------------------------------------------------------------


def _check_jobs_fit(
    shape: ModelShape, jobs: Sequence[JobShape], device: StreamDevice, round_tokens: int
) -> None:
    """Raise PlanError if not even one layer fits on the device, or if some jobs do not fit even alone."""
    nobody = StreamCase(shape, (), device, round_tokens=1, capacity=1, adapters_travel=False)
    if _least_bytes(nobody) > device.budget_bytes:
        beside = (
            f"{format_bytes(nobody.memory.embedding_head_bytes)} of embedding and head, "
            f"{format_bytes(device.slack_bytes)} of slack"
        )
        if device.process_bytes:
            beside += f" and {format_bytes(device.process_bytes)} that are taken"
        raise PlanError(
            f"one layer of the base needs {format_bytes(nobody.memory.layer_bytes)} and beside it there "
            "must be "
            f"{beside}, but the GPU has {format_bytes(device.budget_bytes)} for a run; use a larger GPU "
            "or a smaller base"
        )
    mistakes = []
    for job in jobs:
        # The job's part of a round is not known, but it is at least one sample.
        tokens = round_tokens if len(jobs) == 1 else job.max_sample_tokens
        alone = [
            _choose_on_one_device(shape, [job], device, tokens, job.max_sample_tokens, state, ())
            for state in HOST_STATES
        ]
        if lack := _device_shortage(alone):
            mistakes.append(Mistake(f"job {job.name}", f"even alone, with the base streamed, it {lack}"))
    if mistakes:
        raise PlanError(mistakes)


def _misfit_error(cases: Sequence[StreamCase]) -> PlanError:
    """Return the error for a base that cannot be streamed with any token capacity. The message says whether
    device or host memory is too small."""
    least = min(case.capacity for case in cases)
    smallest = [case for case in cases if case.capacity == least]
    if lack := _device_shortage(smallest):
        return PlanError(f"the jobs do not fit together: the run {lack}; train fewer at once")
    needs = [(host, case) for case in smallest if (host := _least_host_bytes(case)) is not None]
    need, case = min(needs, key=lambda pair: pair[0])
    layers = "the layers that find no room on the GPU"
    purpose = layers if case.device.staging_bytes is None else f"reading {layers} from their files"
    adapters = " and for the adapters" if case.adapters_travel else ""
    inputs = " and for inputs of stages" if case.offloads_inputs else ""
    return HostTooSmall(
        f"the host needs {format_bytes(need)} for {purpose}{adapters}{inputs}, but "
        f"{format_bytes(case.device.host_budget_bytes)} of "
        "its memory are available; use a host with more memory, a larger GPU or a smaller base"
    )


def _workers_misfit_error(case: StreamCase) -> PlanError:
    """Return the error for a base that cannot be streamed to several workers. The message says whether device
    or host memory is too small."""
    device, need = case.device, _least_bytes(case)
    if need > device.budget_bytes:
        others = len(case.jobs) - 1
        beside = f"with {others} other job{'s' if others > 1 else ''} running, " if others else ""
        return PlanError(
            f"job {case.jobs[-1].name} does not fit: {beside}streamed over {_describe_workers(case)} with "
            f"{case.capacity} tokens in a microbatch, a worker needs {format_bytes(need)} of its device "
            "at the least, "
            f"where adapters and inputs of stages stay, but {format_bytes(device.budget_bytes)} are "
            "available; use more "
            "or larger GPUs, or a smaller base"
        )
    host = _least_host_bytes(case)
    assert host is not None, "a cut fits the devices"
    return HostTooSmall(
        f"the host needs {format_bytes(host)} for the layers that find no room on the "
        f"{case.workers * case.shape.shards} devices, but "
        f"{format_bytes(device.host_budget_bytes)} of its memory are available, and weights that stay in "
        "their files are "
        "streamed to one device only; use a host with more memory, larger GPUs or a smaller base"
    )


def _device_shortage(cases: Sequence[StreamCase]) -> str | None:
    """Return a clause for the user with the least device memory that streaming needs and the memory that is
    available. Return None if the device has enough memory."""
    case = min(cases, key=_least_bytes)
    need = _least_bytes(case)
    if need <= case.device.budget_bytes:
        return None
    where = "in host memory" if case.adapters_travel else "on the GPU"
    inputs = ", inputs of stages in host memory" if case.offloads_inputs else ""
    return (
        f"needs {format_bytes(need)} on the GPU with adapters {where}{inputs} and {case.capacity} tokens "
        "in a "
        f"microbatch, but {format_bytes(case.device.budget_bytes)} are available"
    )


def _least_bytes(case: StreamCase) -> int:
    return min(map(case.peak_bytes, least_memory_drafts(case)))


def _least_host_bytes(case: StreamCase) -> int | None:
    """Return the smallest number of host bytes with which the base can be streamed, or None if no layout fits
    on the devices."""
    full = filled_drafts(case) if case.workers > 1 else even_drafts(case)
    drafts = (*full, *least_memory_drafts(case))
    fitting = (draft for draft in drafts if case.peak_bytes(draft) <= case.device.budget_bytes)
    return min(map(case.host_bytes, fitting), default=None)
