"""Distribution of jobs over devices that each hold the whole base, with predicted times as even as possible.

Nothing is exchanged between devices, so this beats any cut of the base wherever each device can hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weftune.core.shapes import JobShape, ModelShape
from weftune.plan.cost.cluster import detect_cpu
from weftune.plan.cost.estimate import Speed, data_sheet_speed
from weftune.plan.cost.prior import counted_terms
from weftune.plan.cost.time import CostModel, work_of
from weftune.plan.layout.balanced import assign_longest_first, improve_by_moves
from weftune.plan.pack.instance import pack
from weftune.plan.program.program import GlobalBatch, MicrobatchPlan, PlacedSample, SegmentPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWork:
    """The remaining work of a job that determines its remaining time."""

    shape: JobShape
    steps: int
    """Number of remaining steps."""
    batches: tuple[GlobalBatch, ...]
    """A sample of the job's global batches, representative of all."""
    evaluations: int = 0
    """Number of remaining evaluations."""
    held_out: tuple[PlacedSample, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The jobs that one device trains."""

    jobs: tuple[str, ...]
    """Names of the jobs, in the order in which they were given."""
    seconds: float
    """Predicted seconds."""


def job_seconds(job: JobWork, cost: CostModel, capacity: int) -> float:
    """Return the predicted seconds of a job if every microbatch holds only its samples.

    Passes shared with other jobs are cheaper, but by how much depends on which jobs share a device.
    """
    met = {job.shape.name: job.shape.active_parameters}
    room = max(capacity, job.shape.max_sample_tokens)

    def passes(step: int, samples: Sequence[PlacedSample]) -> list[MicrobatchPlan]:
        chosen = pack([placed.length for placed in samples], room)
        held = (tuple(samples[index] for index in some) for some in chosen)
        return [MicrobatchPlan((SegmentPlan(job.shape.name, step, some),)) for some in held]

    trained = [one for batch in job.batches for one in passes(batch.step, batch.samples)]
    step = sum(cost.pass_seconds(work_of(one, met)) for one in trained) / max(1, len(job.batches))
    evaluation = sum(cost.evaluation(work_of(one, met)) for one in passes(0, job.held_out))
    return job.steps * (step + cost.step(1, job.shape.trainable_parameters)) + job.evaluations * evaluation


def sheet_cost(shape: ModelShape, speed: Speed) -> CostModel:
    """Return the counted proportions of the base's terms, scaled to the speed in a device's data sheet."""
    return counted_terms(shape).base_cost(shape.layers, speed.source).times(1 / speed.flops)


def cpu_sheet_cost(shape: ModelShape) -> CostModel:
    """Return `sheet_cost` of this machine's CPU."""
    return sheet_cost(shape, data_sheet_speed(detect_cpu().devices[0]))


def share_jobs(
    seconds: Mapping[str, float], devices: int, sources: Mapping[str, str] | None = None
) -> tuple[DeviceShare, ...]:
    """Return a share for every device; one is empty only if there are fewer jobs than devices. A job is in
    the share of the job whose adapter it starts from, as given by `sources`.

    The longest jobs go first to the least loaded device, then jobs are moved and swapped while that evens the
    loads. This never increases the largest load, which is at most 4/3 of the smallest possible.
    """
    assert devices >= 1, "there is a device"
    groups: dict[str, list[str]] = {}
    for name in seconds:
        groups.setdefault(_chain_start(name, seconds, sources or {}), []).append(name)
    families = list(groups.values())
    each = [sum(seconds[name] for name in family) for family in families]
    buckets = assign_longest_first(each, devices)
    if len(each) > devices:
        buckets = improve_by_moves(buckets, each)
    held = [{name for index in bucket for name in families[index]} for bucket in buckets]
    return tuple(
        DeviceShare(tuple(name for name in seconds if name in names), sum(each[index] for index in bucket))
        for names, bucket in zip(held, buckets, strict=True)
    )


def _chain_start(name: str, seconds: Mapping[str, float], sources: Mapping[str, str]) -> str:
    """Return the first job of the chain in which each job starts from the adapter of the previous one."""
    while sources.get(name, "") in seconds:
        name = sources[name]
    return name
