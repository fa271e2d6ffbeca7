"""Reasons why a base cannot be streamed, as sentences that are reported before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from weftune.core.shapes import JobShape, ModelShape
from weftune.errors import HostTooSmall, Mistake, PlanError
from weftune.plan.cost.memory import gib
from weftune.plan.layout.need import StreamCase, StreamDevice
from weftune.plan.layout.search import even_drafts, filled_drafts, frugal_drafts


def refuse_jobs(shape: ModelShape, jobs: Sequence[JobShape], device: StreamDevice, round_tokens: int) -> None:
    """Raise PlanError if not even one layer fits, or for every job that does not fit even alone."""
    nobody = StreamCase(shape, (), device, round_tokens=1, capacity=1, travels=False)
    if _least_bytes(nobody) > device.budget:
        raise PlanError(_one_layer(nobody))
    mistakes = []
    for job in jobs:
        # The job's part of a round is not known, but it is at least one sample.
        tokens = round_tokens if len(jobs) == 1 else job.longest
        alone = [
            StreamCase(shape, (job,), device, tokens, job.longest, travels, offloads)
            for travels, offloads in product((False, True), repeat=2)
        ]
        if need := _too_large(alone):
            mistakes.append(Mistake(f"job {job.name}", f"even alone, with the base streamed, it {need}"))
    if mistakes:
        raise PlanError(mistakes)


def why_not(cases: Sequence[StreamCase]) -> PlanError:
    """Return the error if no cut fits in any of these cases: the device or the host is too small for the
    jobs."""
    least = min(case.capacity for case in cases)
    smallest = [case for case in cases if case.capacity == least]
    if lacks := _too_large(smallest):
        return PlanError(f"the jobs do not fit together: the run {lacks}; train fewer at once")
    needs = [(host, case) for case in smallest if (host := _least_host_bytes(case)) is not None]
    need, case = min(needs, key=lambda pair: pair[0])
    layers = "the layers that find no room on the GPU"
    purpose = layers if case.device.staging is None else f"reading {layers} from their files"
    adapters = " and for the adapters" if case.travels else ""
    inputs = " and for inputs of stages" if case.offloads else ""
    return HostTooSmall(
        f"the host needs {gib(need)} for {purpose}{adapters}{inputs}, but {gib(case.device.host_budget)} of "
        "its memory are available; use a host with more memory, a larger GPU or a smaller base"
    )


def why_not_on_workers(case: StreamCase) -> PlanError:
    """Return the error for when no cut over several workers fits: a device is too small for the last of the
    jobs, or the host is too small."""
    device, need = case.device, _least_bytes(case)
    if need > device.budget:
        others = len(case.jobs) - 1
        beside = f"with {others} other job{'s' if others > 1 else ''} aboard, " if others else ""
        return PlanError(
            f"job {case.jobs[-1].name} does not fit: {beside}streamed over {case.workers} workers with "
            f"{case.capacity} tokens in a microbatch, a worker needs {gib(need)} of its device at the least, "
            f"where adapters and inputs of stages stay, but {gib(device.budget)} are available; use more "
            "or larger GPUs, or a smaller base"
        )
    host = _least_host_bytes(case)
    assert host is not None, "a cut fits the devices"
    return HostTooSmall(
        f"the host needs {gib(host)} for the layers that find no room on the {case.workers} devices, but "
        f"{gib(device.host_budget)} of its memory are available, and weights that stay in their files are "
        "streamed to one device only; use a host with more memory, larger GPUs or a smaller base"
    )


def fits_devices(case: StreamCase) -> bool:
    """Return whether some cut fits the devices, regardless of the host."""
    return _least_bytes(case) <= case.device.budget


def _one_layer(case: StreamCase) -> str:
    device = case.device
    beside = f"{gib(case.ends_bytes)} of embedding and head, {gib(device.slack)} of slack"
    if device.taken:
        beside += f" and {gib(device.taken)} that are taken"
    return (
        f"one layer of the base needs {gib(case.layer_bytes)} and beside it there must be {beside}, but the "
        f"GPU has {gib(device.budget)} for a run; use a larger GPU or a smaller base"
    )


def _too_large(cases: Sequence[StreamCase]) -> str | None:
    """Return what the most frugal case lacks on the device, as the rest of a sentence. None if it fits."""
    case = min(cases, key=_least_bytes)
    need = _least_bytes(case)
    if need <= case.device.budget:
        return None
    where = "in host memory" if case.travels else "on the GPU"
    inputs = ", inputs of stages in host memory" if case.offloads else ""
    return (
        f"needs {gib(need)} on the GPU with adapters {where}{inputs} and {case.capacity} tokens in a "
        f"microbatch, but {gib(case.device.budget)} are available"
    )


def _least_bytes(case: StreamCase) -> int:
    return min(map(case.most_bytes, frugal_drafts(case)))


def _least_host_bytes(case: StreamCase) -> int | None:
    """Return the host bytes with as many layers on the device as it holds. None if nothing fits there."""
    most = filled_drafts(case) if case.workers > 1 else even_drafts(case)
    drafts = (*most, *frugal_drafts(case))
    fitting = (draft for draft in drafts if case.most_bytes(draft) <= case.device.budget)
    return min(map(case.host_bytes, fitting), default=None)
