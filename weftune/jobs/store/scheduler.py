"""The scheduler: which jobs are admitted between two windows (runs of a few global batches of every job),
which are preempted, and why the others wait.

The rule is implemented in `plan.layout.seats`. Jobs are ordered by priority, attached (training) jobs before
waiting ones, then by the order of the file. An attached job is preempted (it is saved and queued again) only
if a job of higher priority can thereby be admitted at once. A job that does not fit may be overtaken by
smaller ones behind it, `MAX_OVERTAKES` times; after that, no job behind it is admitted before it, so that no
stream of small jobs keeps a large one out. A job that is too large to run even alone is removed from the
queue. A job that waits for the adapter of another job is not in the queue yet, so it cannot be overtaken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weftune.core.shapes import JobShape
from weftune.plan.layout.seats import MAX_OVERTAKES, Fits, Seats, assign_seats, find_misfits, order_for_seats


@dataclass(frozen=True, slots=True)
class Admission:
    admitted_names: tuple[str, ...]
    preempted_by: Mapping[str, str]
    """Maps each preempted job to the job of higher priority that is admitted instead."""
    wait_reasons: Mapping[str, str]
    """Maps each waiting job to the reason why it must wait. Jobs that were attached and are preempted by this
    decision are left out."""
    misfit_reasons: Mapping[str, str]
    """Maps each job that does not fit into memory even alone to the reason."""
    overtake_counts: Mapping[str, int]
    """Maps each waiting job to the number of jobs behind it in the queue that have been admitted before it.
    The scheduler's next decision takes the number into account."""


def admit_jobs(
    waiting_jobs: Sequence[JobShape],
    attached_jobs: Sequence[JobShape],
    fits: Fits,
    overtake_counts: Mapping[str, int] | None = None,
) -> Admission:
    """Decide which jobs are admitted and preempted between two windows (runs of a few global batches of every
    job). `overtake_counts` comes from the Admission of the last decision. A job that starts from another
    job's adapter waits until the caller clears its `source_job`, once the adapter exists."""
    never = find_misfits(waiting_jobs, fits)
    early = {job.name: f"waits for {job.source_job}" for job in waiting_jobs if job.source_job}
    possible = [job for job in waiting_jobs if job.name not in never and job.name not in early]
    seats = assign_seats(possible, attached_jobs, fits, overtake_counts)
    present, seated = {job.name for job in attached_jobs}, {job.name for job in seats.seated_jobs}
    admitted = [job for job in seats.seated_jobs if job.name not in present]
    order = order_for_seats(possible, attached_jobs)
    counts = _count_overtakes(order, seated, present, overtake_counts or {})
    return Admission(
        admitted_names=tuple(job.name for job in admitted),
        preempted_by={
            job.name: _replacing_job(job, admitted) for job in seats.unseated_jobs if job.name in present
        },
        wait_reasons=_wait_reasons(seats, present, counts, fits)
        | {name: reason for name, reason in early.items() if name not in never},
        misfit_reasons=never,
        overtake_counts=counts,
    )


def _replacing_job(job: JobShape, admitted_jobs: Sequence[JobShape]) -> str:
    """Return the newly admitted job that replaces a preempted one: of those with higher priority than `job`,
    the one with the lowest priority."""
    return [other.name for other in admitted_jobs if other.priority > job.priority][-1]


def _count_overtakes(
    ranked_jobs: Sequence[JobShape],
    admitted_names: set[str],
    attached_names: set[str],
    previous_counts: Mapping[str, int],
) -> dict[str, int]:
    """Map each job that is not admitted to the number of jobs behind it in the queue that have been admitted
    before it, now or earlier."""
    counts: dict[str, int] = {}
    came = 0
    for job in reversed(ranked_jobs):
        if job.name not in admitted_names:
            counts[job.name] = previous_counts.get(job.name, 0) + came
        elif job.name not in attached_names:
            came += 1
    return counts


def _wait_reasons(
    seats: Seats, attached_names: set[str], counts: Mapping[str, int], fits: Fits
) -> dict[str, str]:
    queue = [job for job in seats.unseated_jobs if job.name not in attached_names]
    reasons: dict[str, str] = {}
    behind = ""
    for job in queue:
        reasons[job.name] = behind or fits([*seats.seated_jobs, job]) or ""
        if counts[job.name] >= MAX_OVERTAKES:
            behind = f"it waits behind {job.name}, which no job may overtake any more"
        elif not behind:
            behind = f"it waits behind {job.name}, which comes first"
    return reasons
