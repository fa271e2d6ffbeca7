"""The scheduler: who comes aboard at a window boundary, who gives way, and who waits for what.

`plan.layout.seats` has the rule: by priority, those aboard before those that wait, then by the order of the
file. A job aboard gives way (it is saved and queued again) only where that lets one of higher priority come
aboard at this boundary. A job that does not fit may be overtaken by smaller ones behind it, `MOST_OVERTAKEN`
times; then nobody behind it is admitted until it is aboard, so that no stream of small jobs keeps a large one
out. A job too large to run even alone is set aside and blocks nobody. A job that waits for the adapter of
another is not in the queue yet: nobody overtakes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weftune.core.shapes import JobShape
from weftune.plan.layout.seats import MOST_OVERTAKEN, Fits, Seats, in_order, seat, too_large


@dataclass(frozen=True, slots=True)
class Admission:
    admitted: tuple[str, ...]
    preempted: Mapping[str, str]
    """Name, of a job aboard → the admitted one of higher priority that it gives way to."""
    waiting: Mapping[str, str]
    """Name → why it must wait; of all that have not been aboard."""
    too_large: Mapping[str, str]
    """Name → why it cannot run even alone."""
    overtaken: Mapping[str, int]
    """Name of a waiting job → how many have come aboard before it that stood behind it; for the next
    boundary."""


def admit(
    waiting: Sequence[JobShape],
    aboard: Sequence[JobShape],
    fits: Fits,
    overtaken: Mapping[str, int] | None = None,
) -> Admission:
    """Who changes places at this boundary; `overtaken` is what the last one's Admission says. Whoever has a
    `starts_from` waits: once that adapter is there, the caller leaves it empty."""
    never = too_large(waiting, fits)
    early = {job.name: f"waits for {job.starts_from}" for job in waiting if job.starts_from}
    possible = [job for job in waiting if job.name not in never and job.name not in early]
    seats = seat(possible, aboard, fits, overtaken)
    present, seated = {job.name for job in aboard}, {job.name for job in seats.seated}
    admitted = [job for job in seats.seated if job.name not in present]
    order = in_order(possible, aboard)
    counts = _overtaken(order, seated, present, overtaken or {})
    return Admission(
        admitted=tuple(job.name for job in admitted),
        preempted={job.name: _first_before(job, admitted) for job in seats.unseated if job.name in present},
        waiting=_reasons(seats, present, counts, fits)
        | {name: reason for name, reason in early.items() if name not in never},
        too_large=never,
        overtaken=counts,
    )


def _first_before(job: JobShape, admitted: Sequence[JobShape]) -> str:
    """Of those that came aboard with a higher priority, the one nearest to the job's own."""
    return [other.name for other in admitted if other.priority > job.priority][-1]


def _overtaken(
    order: Sequence[JobShape], seated: set[str], present: set[str], before: Mapping[str, int]
) -> dict[str, int]:
    """Of everybody without a seat."""
    counts: dict[str, int] = {}
    came = 0
    for job in reversed(order):
        if job.name not in seated:
            counts[job.name] = before.get(job.name, 0) + came
        elif job.name not in present:
            came += 1
    return counts


def _reasons(seats: Seats, present: set[str], counts: Mapping[str, int], fits: Fits) -> dict[str, str]:
    queue = [job for job in seats.unseated if job.name not in present]
    reasons: dict[str, str] = {}
    behind = ""
    for job in queue:
        reasons[job.name] = behind or fits([*seats.seated, job]) or ""
        if counts[job.name] >= MOST_OVERTAKEN:
            behind = f"it waits behind {job.name}, which nobody may overtake any more"
        elif not behind:
            behind = f"it waits behind {job.name}, which comes first"
    return reasons
