"""How several workers stream a base that does not fit them even in parts, and why so, as a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape, ModelShape
from weftune.errors import HostTooSmall, PlanError
from weftune.plan.cost.memory import gib, longest
from weftune.plan.layout.need import StreamCase, StreamDevice
from weftune.plan.layout.stream_choice import capacities
from weftune.plan.layout.worker_need import WorkersCase
from weftune.plan.layout.worker_search import (
    FoundLayout,
    even_cuts,
    even_sizes,
    search,
    stage_counts,
    workers_cut,
)
from weftune.plan.program.layout import Layout


@dataclass(frozen=True, slots=True)
class WorkersChoice:
    cut: Layout
    capacity: int
    """Tokens of a microbatch."""
    device_bytes: int
    """On the fullest device at the peak, as predicted."""
    host_bytes: int
    """Of all workers."""
    step_seconds: float
    """Of a round: one global batch of every job."""
    unhidden: float
    """The share of it that Loads add."""
    why: str
    """A sentence for the user."""


def choose_for_workers(
    shape: ModelShape,
    jobs: Sequence[JobShape],
    later: Sequence[JobShape],
    device: StreamDevice,
    workers: int,
    most: int,
    parted: int,
) -> WorkersChoice:
    """The fastest cut and capacity that is found for these jobs together; those that come `later` fit, too,
    one by one. `device` is that of every worker, with the host that all of them share; microbatches have at
    most `most` tokens. `parted` bytes of each device would be needed if nothing were streamed, for the
    sentence that says why.

    PlanError says what does not fit.
    """
    assert jobs, "there is nothing to train"

    def made(together: Sequence[JobShape], capacity: int) -> StreamCase:
        tokens = max(sum(job.batch_tokens for job in together), longest(together))
        return StreamCase(shape, tuple(together), device, tokens, capacity, travels=False)

    tokens = max(sum(job.batch_tokens for job in jobs), longest(jobs))
    alone = made([_largest(later)], longest(later)) if later else None
    cases = [
        WorkersCase(made(jobs, capacity), workers, alone)
        for capacity in capacities(longest(jobs), most, tokens)
    ]
    best = search(cases)
    if best is None:
        singles = (WorkersCase(made([job], job.longest), workers) for job in later)
        tried = (replace(cases[-1], alone=None), *singles)
        raise _why_not(next((one for one in tried if _least_bytes(one) > device.budget), cases[-1]))
    return WorkersChoice(
        cut=best.cut,
        capacity=best.case.one.capacity,
        device_bytes=best.case.device_bytes(best.cut),
        host_bytes=best.case.host_bytes(best.cut),
        step_seconds=best.seconds,
        unhidden=best.case.unhidden(best.cut),
        why=_why(best, parted),
    )


def _largest(jobs: Sequence[JobShape]) -> JobShape:
    """One that needs no less than any of these."""
    return replace(
        jobs[0],
        trainable=max(job.trainable for job in jobs),
        longest=longest(jobs),
        batch_tokens=max(job.batch_tokens for job in jobs),
    )


def _why(found: FoundLayout, parted: int) -> str:
    case, cut = found.case, found.cut
    sizes = [stage.stop - stage.start for stage in cut.stages]
    stay = sum(stage.resident for stage in cut.stages)
    slots = _range([count for count in cut.slots if count], "slot") if stay < len(sizes) else ""
    places = (
        f"{stay} of them resident, the others in {slots} of their worker" if slots else "all of them resident"
    )
    return (
        f"streamed over {case.workers} workers in {len(sizes)} stages of {_range(sizes, 'layer')}, {places}, "
        f"since a worker's part of the base, an adapter and the passes of a pipeline would need "
        f"{gib(parted)} of a device that has {gib(case.one.device.budget)} for a run; adapters and inputs of "
        f"stages stay on their worker's device, a microbatch has up to {case.one.capacity:,} tokens, and "
        f"Loads take {case.unhidden(cut):.0%} of a step"
    )


def _range(counts: Sequence[int], noun: str) -> str:
    least, most = min(counts), max(counts)
    return f"{least} to {most} {noun}s" if least < most else f"{most} {noun}{'' if most == 1 else 's'}"


def _why_not(case: WorkersCase) -> PlanError:
    one, need = case.one, _least_bytes(case)
    if need > one.device.budget:
        others = len(one.jobs) - 1
        beside = f"with {others} other job{'s' if others > 1 else ''} aboard, " if others else ""
        return PlanError(
            f"job {one.jobs[-1].name} does not fit: {beside}streamed over {case.workers} workers with "
            f"{one.capacity} tokens in a microbatch, a worker needs {gib(need)} of its device at the least, "
            f"where adapters and inputs of stages stay, but {gib(one.device.budget)} are available; use more "
            "or larger GPUs, or a smaller base"
        )
    fitting = (cut for cut in even_cuts(case) if case.most_bytes(cut) <= one.device.budget)
    host = min(map(case.host_bytes, fitting))
    return HostTooSmall(
        f"the host needs {gib(host)} for the layers that find no room on the {case.workers} devices, but "
        f"{gib(one.device.host_budget)} of its memory are available, and weights that stay in their files "
        "are streamed to one device only; use a host with more memory, larger GPUs or a smaller base"
    )


def _least_bytes(case: WorkersCase) -> int:
    """All stages coming and going through one slot of each worker: nothing needs less of a device."""
    layers, counts = case.one.shape.layers, stage_counts(case)
    cuts = (workers_cut(even_sizes(layers, count), [False] * count, 1, case.workers) for count in counts)
    return min(map(case.most_bytes, cuts))
