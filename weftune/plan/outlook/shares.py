"""Forecast for a cluster whose devices can each hold the base: each device runs a share of the jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weftune.core.shapes import JobShape
from weftune.plan.layout.split import DeviceShare, share_jobs
from weftune.plan.outlook.forecast import Prediction


@dataclass(frozen=True, slots=True)
class ShareOutlook:
    shares: tuple[DeviceShare, ...]
    parts: tuple[Prediction, ...]
    """Predicted first window of each share's device."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second while all devices are running."""
        return sum(part.forecast.tokens_per_second for part in self.parts)


def share_outlook(
    jobs: Sequence[JobShape],
    seconds: Mapping[str, float],
    devices: int,
    alone: Callable[[Sequence[JobShape]], Prediction],
) -> ShareOutlook:
    """Return the forecast of jobs divided by the `seconds` of their whole runs; `alone` predicts one device
    with a share."""
    sources = {job.name: job.starts_from for job in jobs}
    shares = [share for share in share_jobs(seconds, devices, sources) if share.jobs]
    parts = [alone([job for job in jobs if job.name in share.jobs]) for share in shares]
    return ShareOutlook(tuple(shares), tuple(parts))
