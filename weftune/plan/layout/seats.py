"""Seats: which jobs are aboard together. The scheduler asks at every window boundary, `choose` before a run.

Jobs take their seats by priority; among equals those aboard go before those that wait, and then the earlier
in the jobs file. A job that does not fit beside those seated so far gets no seat, and smaller ones behind it
may. So a job gives way only to one of higher priority that comes aboard, and equals never send each other
away.

Who waits may be overtaken, but not for ever: once `MOST_OVERTAKEN` jobs that stood behind it have come aboard
before it, nobody behind it is admitted until it is aboard itself. Those aboard of the same or a higher
priority, which keep it out, then end one after another, and nobody takes their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weftune.core.shapes import JobShape

Fits = Callable[[Sequence[JobShape]], str | None]
"""None where these jobs fit together, or the sentence that says why they do not. Only their sizes matter;
jobs that do not fit do not fit with one more either, nor with a larger one in the place of a smaller."""

MOST_OVERTAKEN = 8
"""Jobs that may come aboard before one that stands in front of them and does not fit."""


@dataclass(frozen=True, slots=True)
class Seats:
    """Everybody, in the order in which seats are given."""

    seated: tuple[JobShape, ...]
    unseated: tuple[JobShape, ...]


def in_order(jobs: Sequence[JobShape], aboard: Sequence[JobShape] = ()) -> list[JobShape]:
    """As they take their seats."""
    present = {job.name for job in aboard}
    return sorted([*jobs, *aboard], key=lambda job: (-job.priority, job.name not in present, job.order))


def seat(
    waiting: Sequence[JobShape],
    aboard: Sequence[JobShape],
    fits: Fits,
    overtaken: Mapping[str, int] | None = None,
) -> Seats:
    """Seat as many as the rules allow; every job of `waiting` fits at least alone. `overtaken`: how many have
    come aboard before a waiting job so far."""
    seating = _Seating(aboard, fits, overtaken or {})
    rest = in_order(waiting, aboard)
    while rest:
        rest = seating.fill(rest)
    return Seats(tuple(seating.seated), tuple(seating.unseated))


def too_large(jobs: Sequence[JobShape], fits: Fits) -> dict[str, str]:
    """Name → why it cannot run even alone. Who is no larger than one that can is not looked at."""
    runnable: list[JobShape] = []
    found: dict[str, str] = {}
    for job in sorted(jobs, key=lambda job: -job.longest):
        if any(_is_as_large(other, job) for other in runnable):
            continue
        if (reason := fits([job])) is None:
            runnable.append(job)
        else:
            found[job.name] = reason
    return {job.name: found[job.name] for job in jobs if job.name in found}


class _Seating:
    """Seats given so far. Each look counts all jobs, so that looks are few: by halving, and nobody is looked
    at who is as large as one that did not fit."""

    def __init__(self, aboard: Sequence[JobShape], fits: Fits, overtaken: Mapping[str, int]) -> None:
        self.seated: list[JobShape] = []
        self.unseated: list[JobShape] = []
        self._present = {job.name for job in aboard}
        self._fits = fits
        self._overtaken = overtaken
        self._as_large: set[str] = set()
        """Those that were looked at and did not fit, and whoever is behind them and no smaller."""
        self._left: float = math.inf
        """How many may still overtake those that wait without a seat."""
        self._crowded = False
        """Whether somebody has come aboard: else those aboard stay, whatever memory they are said to need."""

    def fill(self, rest: Sequence[JobShape]) -> list[JobShape]:
        """Give seats up to the first job that is found not to fit; returns those behind it."""
        tried = self._possible(rest)
        run = [rest[at] for at, _ in tried]
        # Behind one that does not fit there is seldom room for many.
        first = 1 if self._as_large else len(run)
        count = most_that_fit(lambda count: self._fit(run[:count]), len(run), first) if run else 0
        end = len(rest)
        if count < len(run):
            end, self._left = tried[count]
            self._refuse(rest[end], rest[end + 1 :])
        taken = {job.name for job in run[:count]}
        self.seated += run[:count]
        self._crowded = self._crowded or not taken <= self._present
        self.unseated += [job for job in rest[: end + 1] if job.name not in taken]
        return list(rest[end + 1 :])

    def _possible(self, rest: Sequence[JobShape]) -> list[tuple[int, float]]:
        """Positions of those that may have a seat if all before them fit, and how many may overtake before
        each of them is looked at."""
        left, found = self._left, []
        for at, job in enumerate(rest):
            waits = job.name not in self._present
            if self._is_hopeless(job) or (waits and left <= 0):
                left = min(left, self._allowed(job))
                continue
            found.append((at, left))
            left -= waits
        return found

    def _is_hopeless(self, job: JobShape) -> bool:
        return job.name in self._as_large and (self._crowded or job.name not in self._present)

    def _allowed(self, job: JobShape) -> float:
        """How many may overtake a job without a seat. Who gives way stands in the queue from now on."""
        return MOST_OVERTAKEN - self._overtaken.get(job.name, 0)

    def _refuse(self, job: JobShape, behind: Sequence[JobShape]) -> None:
        known = self._as_large
        known |= {other.name for other in behind if other.name not in known and _is_as_large(other, job)}
        known.add(job.name)
        self._left = min(self._left, self._allowed(job))

    def _fit(self, more: Sequence[JobShape]) -> bool:
        together = [*self.seated, *more]
        return all(job.name in self._present for job in together) or self._fits(together) is None


def _is_as_large(job: JobShape, other: JobShape) -> bool:
    """Whether `job` takes no less than `other` of anything."""
    if job.longest < other.longest or job.batch_tokens < other.batch_tokens or job.means < other.means:
        return False
    if job.trainable < other.trainable or len(job.by_layer) != len(other.by_layer):
        return False
    if job.by_layer == other.by_layer:
        return True
    outside, others = (one.trainable - sum(one.by_layer) for one in (job, other))
    return outside >= others and all(a >= b for a, b in zip(job.by_layer, other.by_layer, strict=True))


def most_that_fit(fits: Callable[[int], bool], count: int, first: int | None = None) -> int:
    """So many of them as fit, by halving; 0 if not one does. The `first` guess is all of them, and is doubled
    while it is too low."""
    least, too_many = 0, count + 1
    tried = count if first is None else first
    while too_many - least > 1:
        least, too_many = (tried, too_many) if fits(tried) else (least, tried)
        tried = min(2 * least, count) if too_many > count else (least + too_many) // 2
    return least
