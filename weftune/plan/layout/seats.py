"""Choice of the jobs that run together, as an assignment of seats. A job with a seat has room in memory and
runs.

Seats are assigned before a run and between windows (a few global batches of every job each), by priority;
among equals, running jobs come before waiting jobs, and then jobs that are earlier in the jobs file. A job
that does not fit in memory beside the jobs seated so far gets no seat, but smaller jobs behind it may. A
running job is therefore preempted only if a job of higher priority is admitted, and jobs of equal priority
never preempt each other.

A waiting job may be overtaken, but not forever: once `MAX_OVERTAKES` jobs that were behind it have been
admitted before it, no job behind it is admitted until it is running itself. The running jobs of the same or a
higher priority then end one after another without being replaced, until the waiting job fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weftune.core.shapes import JobShape

Fits = Callable[[Sequence[JobShape]], str | None]
"""A function that returns None if the given jobs fit in memory together, or else a sentence with the reason.
The result may depend on the sizes of the jobs only. Jobs that do not fit must not fit with an additional job
either, nor with a larger job in place of a smaller one."""

MAX_OVERTAKES = 8
"""Maximum number of jobs that may overtake a waiting job that is ahead of them in the queue but does not fit
in memory."""


@dataclass(frozen=True, slots=True)
class Seats:
    """The jobs that run together (seated) and all other jobs, each in the order of admission."""

    seated_jobs: tuple[JobShape, ...]
    unseated_jobs: tuple[JobShape, ...]


def order_for_seats(jobs: Sequence[JobShape], attached_jobs: Sequence[JobShape] = ()) -> list[JobShape]:
    """Return the jobs in the order in which they may run: by priority, and running jobs (`attached_jobs`)
    before waiting ones among equals."""
    present = {job.name for job in attached_jobs}
    return sorted(
        [*jobs, *attached_jobs], key=lambda job: (-job.priority, job.name not in present, job.file_position)
    )


def assign_seats(
    waiting_jobs: Sequence[JobShape],
    attached_jobs: Sequence[JobShape],
    fits: Fits,
    overtake_counts: Mapping[str, int] | None = None,
) -> Seats:
    """Return which of the waiting and running (`attached_jobs`) jobs run together. Every waiting job must fit
    in memory alone. `overtake_counts` maps a waiting job to the number of jobs that have been admitted before
    it."""
    seating = _Seating(attached_jobs, fits, overtake_counts or {})
    rest = order_for_seats(waiting_jobs, attached_jobs)
    while rest:
        rest = seating.admit_jobs(rest)
    return Seats(tuple(seating.seated_jobs), tuple(seating.unseated_jobs))


def find_misfits(jobs: Sequence[JobShape], fits: Fits) -> dict[str, str]:
    """Return a dict from the name of each job that does not fit even alone to the reason. Jobs that are no
    larger than a job that fits are not checked."""
    runnable: list[JobShape] = []
    found: dict[str, str] = {}
    for job in sorted(jobs, key=lambda job: -job.max_sample_tokens):
        if any(_is_as_large(other, job) for other in runnable):
            continue
        if (reason := fits([job])) is None:
            runnable.append(job)
        else:
            found[job.name] = reason
    return {job.name: found[job.name] for job in jobs if job.name in found}


class _Seating:
    """The state of a choice of jobs that run together. Since checking whether jobs fit in memory is slow, the
    largest number that fits is found by bisection, and jobs that are as large as a job that did not fit are
    not checked."""

    def __init__(
        self, attached_jobs: Sequence[JobShape], fits: Fits, overtake_counts: Mapping[str, int]
    ) -> None:
        self.seated_jobs: list[JobShape] = []
        self.unseated_jobs: list[JobShape] = []
        self._present = {job.name for job in attached_jobs}
        self._fits = fits
        self._overtaken = overtake_counts
        self._as_large: set[str] = set()
        """Names of jobs that were checked and did not fit, and of jobs behind them that are no smaller."""
        self._left: float = math.inf
        """Number of jobs that may still overtake the waiting jobs that are ahead of them in the queue but do
        not fit."""
        self._crowded = False
        """Whether a waiting job has been admitted. As long as this is False, running jobs keep running,
        whatever memory is predicted for them."""

    def admit_jobs(self, waiting_jobs: Sequence[JobShape]) -> list[JobShape]:
        """Admit the jobs of `waiting_jobs` up to the first one that does not fit in memory. Return the jobs
        after the one that does not fit, which are still to be considered."""
        tried = self._possible_positions(waiting_jobs)
        run = [waiting_jobs[at] for at, _ in tried]
        # After a job that does not fit there is seldom room for many.
        first = 1 if self._as_large else len(run)
        count = (
            largest_fitting_count(lambda count: self._can_seat_together(run[:count]), len(run), first)
            if run
            else 0
        )
        end = len(waiting_jobs)
        if count < len(run):
            end, self._left = tried[count]
            self._reject_job(waiting_jobs[end], waiting_jobs[end + 1 :])
        taken = {job.name for job in run[:count]}
        self.seated_jobs += run[:count]
        self._crowded = self._crowded or not taken <= self._present
        self.unseated_jobs += [job for job in waiting_jobs[: end + 1] if job.name not in taken]
        return list(waiting_jobs[end + 1 :])

    def _possible_positions(self, waiting_jobs: Sequence[JobShape]) -> list[tuple[int, float]]:
        """Return, for each job that can run if all jobs before it fit, its position in `waiting_jobs` and the
        number of jobs from this position on that may still overtake waiting jobs."""
        left, found = self._left, []
        for at, job in enumerate(waiting_jobs):
            waits = job.name not in self._present
            # A running job stays as long as no other has been admitted.
            hopeless = job.name in self._as_large and (self._crowded or waits)
            if hopeless or (waits and left <= 0):
                left = min(left, self._remaining_overtakes(job))
                continue
            found.append((at, left))
            left -= waits
        return found

    def _remaining_overtakes(self, job: JobShape) -> float:
        """Return how many more jobs may be admitted before this waiting job."""
        return MAX_OVERTAKES - self._overtaken.get(job.name, 0)

    def _reject_job(self, job: JobShape, later_jobs: Sequence[JobShape]) -> None:
        known = self._as_large
        known |= {other.name for other in later_jobs if other.name not in known and _is_as_large(other, job)}
        known.add(job.name)
        self._left = min(self._left, self._remaining_overtakes(job))

    def _can_seat_together(self, candidates: Sequence[JobShape]) -> bool:
        together = [*self.seated_jobs, *candidates]
        return all(job.name in self._present for job in together) or self._fits(together) is None


def _is_as_large(job: JobShape, other: JobShape) -> bool:
    """Return whether `job` needs at least as much of every resource as `other`."""
    if (
        job.max_sample_tokens < other.max_sample_tokens
        or job.batch_tokens < other.batch_tokens
        or job.mean_weight_count < other.mean_weight_count
    ):
        return False
    if job.trainable_parameters < other.trainable_parameters or len(job.parameters_by_layer) != len(
        other.parameters_by_layer
    ):
        return False
    if job.parameters_by_layer == other.parameters_by_layer:
        return True
    outside, others = (one.trainable_parameters - sum(one.parameters_by_layer) for one in (job, other))
    return outside >= others and all(
        a >= b for a, b in zip(job.parameters_by_layer, other.parameters_by_layer, strict=True)
    )


def largest_fitting_count(fits: Callable[[int], bool], count: int, first_guess: int | None = None) -> int:
    """Return the largest number from 0 to `count` for which `fits` is true, found by bisection. The first
    number tried is `first_guess` (by default, `count`), which is doubled as long as it fits."""
    least, too_many = 0, count + 1
    tried = count if first_guess is None else first_guess
    while too_many - least > 1:
        least, too_many = (tried, too_many) if fits(tried) else (least, tried)
        tried = min(2 * least, count) if too_many > count else (least + too_many) // 2
    return least
