"""Distribution of jobs over devices that each hold the whole base, with predicted times as even as possible.

Such devices exchange nothing, which is faster than dividing the base if each device has memory for the whole
base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weftune.core.shapes import JobShape, ModelShape
from weftune.plan.cost.cluster import detect_cpu
from weftune.plan.cost.estimate import Speed, data_sheet_speed
from weftune.plan.cost.prior import flop_terms
from weftune.plan.cost.time import CostModel, pass_work
from weftune.plan.layout.balanced import assign_longest_first, improve_by_moves
from weftune.plan.pack.instance import pack
from weftune.plan.program.program import GlobalBatch, MicrobatchPlan, PlacedSample, SegmentPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWork:
    """The remaining work of a job, from which its remaining time is predicted."""

    shape: JobShape
    steps: int
    """Number of remaining optimizer steps."""
    batches: tuple[GlobalBatch, ...]
    """A few of the job's global batches, from which the time of all of them is predicted."""
    evaluations: int = 0
    """Number of remaining evaluations on held-out samples."""
    held_out_samples: tuple[PlacedSample, ...] = ()
    """Held-out samples of each evaluation."""


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The jobs that one device trains."""

    jobs: tuple[str, ...]
    """Names of the jobs, in the order in which they were given."""
    seconds: float
    """Predicted seconds of training these jobs on the device."""


def job_seconds(job: JobWork, cost: CostModel, capacity: int) -> float:
    """Return the predicted seconds of a job's remaining work if it does not share microbatches with other
    jobs.

    The time with shared microbatches is shorter, but depends on the other jobs of the device. `capacity` is
    the maximum number of tokens per microbatch.
    """
    met = {job.shape.name: job.shape.active_parameters}
    room = max(capacity, job.shape.max_sample_tokens)

    def passes(step: int, samples: Sequence[PlacedSample]) -> list[MicrobatchPlan]:
        chosen = pack([placed.length for placed in samples], room)
        sample_lists = (tuple(samples[index] for index in some) for some in chosen)
        return [MicrobatchPlan((SegmentPlan(job.shape.name, step, some),)) for some in sample_lists]

    trained = [one for batch in job.batches for one in passes(batch.step, batch.samples)]
    step = sum(cost.pass_seconds(pass_work(one, met)) for one in trained) / max(1, len(job.batches))
    evaluation = sum(cost.evaluation(pass_work(one, met)) for one in passes(0, job.held_out_samples))
    return job.steps * (step + cost.step(1, job.shape.trainable_parameters)) + job.evaluations * evaluation


def data_sheet_cost(shape: ModelShape, speed: Speed) -> CostModel:
    """Return a time model of the base in seconds, computed from its FLOPs and the speed of a device."""
    return flop_terms(shape).base_cost(shape.layers, speed.source).multiply_by(1 / speed.flops)


def cpu_data_sheet_cost(shape: ModelShape) -> CostModel:
    """Return a time model of the base in seconds on this machine's CPU, from the CPU's nominal speed."""
    return data_sheet_cost(shape, data_sheet_speed(detect_cpu().devices[0]))


def share_jobs(
    seconds: Mapping[str, float], devices: int, sources: Mapping[str, str] | None = None
) -> tuple[DeviceShare, ...]:
    """Divide the jobs among `devices` devices and return each device's share (part) of the jobs. `seconds`
    maps each job to its predicted time. If a job starts from the adapter of another job, which `sources`
    names, both are in the same share. A share is empty only if there are fewer jobs than devices.

    The longest jobs are assigned first, each to the device with the least time so far. Then jobs are moved
    and swapped while that makes the times more even. The largest time is at most 4/3 of the smallest
    possible.
    """
    assert devices >= 1, "there is a device"
    groups: dict[str, list[str]] = {}
    for name in seconds:
        groups.setdefault(_first_in_chain(name, seconds, sources or {}), []).append(name)
    families = list(groups.values())
    each = [sum(seconds[name] for name in family) for family in families]
    buckets = assign_longest_first(each, devices)
    if len(each) > devices:
        buckets = improve_by_moves(buckets, each)
    job_names = [{name for index in bucket for name in families[index]} for bucket in buckets]
    return tuple(
        DeviceShare(tuple(name for name in seconds if name in names), sum(each[index] for index in bucket))
        for names, bucket in zip(job_names, buckets, strict=True)
    )


def _first_in_chain(name: str, seconds: Mapping[str, float], sources: Mapping[str, str]) -> str:
    """Return the first job of the chain that ends with this job. Each job of a chain starts from the adapter
    of the previous one."""
    while sources.get(name, "") in seconds:
        name = sources[name]
    return name
