"""What a cluster makes of jobs whose base fits each device: a share of them on each, and what each takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from weftune.plan.cost.cluster import make_cluster
from weftune.plan.cost.estimate import JobOutline
from weftune.plan.layout.split import DeviceShare, JobWork, job_seconds, share_jobs, sheet_cost
from weftune.plan.outlook.fit import Ground, make_ground, why_not
from weftune.plan.outlook.outlook import Outlook, outlook
from weftune.plan.program.program import GlobalBatch, PlacedSample


@dataclass(frozen=True, slots=True)
class ShareOutlook:
    shares: tuple[DeviceShare, ...]
    parts: tuple[Outlook, ...]
    """Of each share, what comes aboard its device first."""

    @property
    def tokens_per_second(self) -> float:
        """While all of them are at work."""
        return sum(part.forecast.tokens_per_second for part in self.parts)


def share_outlook(
    ground: Ground, jobs: Sequence[JobOutline], steps: Mapping[str, int]
) -> ShareOutlook | None:
    """None where the base with some job does not fit each device, where devices differ, or one suffices.

    `steps` are those of each job's whole run.
    """
    devices = ground.cluster.devices
    count = min(len(devices), len(jobs))
    if count < 2 or len(set(devices)) > 1:
        return None
    single = make_ground(ground.shape, make_cluster(devices[:1], None), ground.speeds[:1])
    if any(why_not(single, [job]) for job in jobs):
        return None
    cost = sheet_cost(ground.shape, ground.speeds[0])
    seconds = {job.name: job_seconds(_work(job, steps[job.name]), cost, single.most) for job in jobs}
    shares = share_jobs(seconds, count)
    by_name = {job.name: job for job in jobs}
    companies = [_aboard(single, [by_name[name] for name in share.jobs]) for share in shares]
    return ShareOutlook(shares, tuple(outlook(single, company, compared=False) for company in companies))


def _aboard(ground: Ground, jobs: Sequence[JobOutline]) -> list[JobOutline]:
    """Those that fit together, the first first."""
    company: list[JobOutline] = []
    for job in jobs:
        if why_not(ground, [*company, job]) is not None:
            break
        company.append(job)
    return company


def _work(job: JobOutline, steps: int) -> JobWork:
    batches = tuple(
        GlobalBatch(job.name, number, _placed(lengths), sum(lengths))
        for number, lengths in enumerate(job.batches, 1)
    )
    return JobWork(shape=job.shape, steps=steps, batches=batches)


def _placed(lengths: Sequence[int]) -> tuple[PlacedSample, ...]:
    """Every token supervised: which are is not known of an outline."""
    offsets = accumulate(lengths[:-1], initial=0)
    return tuple(
        PlacedSample(number, length, offset, length)
        for number, (length, offset) in enumerate(zip(lengths, offsets, strict=True))
    )
