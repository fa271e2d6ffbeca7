"""The scheduler: which jobs are admitted next.

The order is strict: priority, then position in the file, and no job overtakes another. A small job behind a
large one waits although it would fit: otherwise a stream of small jobs could keep the large one out for ever.
The one exception is a job too large to run even alone: it is set aside and blocks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape

Fits = Callable[[Sequence[JobShape]], str | None]
"""None where these jobs fit together, or the sentence that says why they do not. Only their sizes matter, and
jobs that do not fit do not fit with one more either."""


@dataclass(frozen=True, slots=True)
class Admission:
    admitted: tuple[str, ...]
    waiting: Mapping[str, str]
    """Name → why it must wait."""
    too_large: Mapping[str, str]
    """Name → why it cannot run even alone."""


def admit(waiting: Sequence[JobShape], aboard: Sequence[JobShape], fits: Fits) -> Admission:
    """Admit as many of `waiting` as fit beside those `aboard`, in strict order."""
    ordered = sorted(waiting, key=lambda job: (-job.priority, job.order))
    too_large = _too_large(ordered, fits)
    possible = [job for job in ordered if job.name not in too_large]
    count = _most_that_fit(possible, aboard, fits)
    admitted, refused = possible[:count], possible[count:]
    reasons: dict[str, str] = {}
    if refused:
        behind = f"it waits behind {refused[0].name}, which comes first"
        reasons = {job.name: behind for job in refused}
        reasons[refused[0].name] = fits([*aboard, *admitted, refused[0]]) or ""
    return Admission(tuple(job.name for job in admitted), reasons, too_large)


def _too_large(jobs: Sequence[JobShape], fits: Fits) -> dict[str, str]:
    """Jobs that cannot run even alone; many have the same sizes, and one of each is looked at."""
    answers: dict[JobShape, str | None] = {}
    found: dict[str, str] = {}
    for job in jobs:
        sizes = replace(job, name="", priority=0, order=0)
        if sizes not in answers:
            answers[sizes] = fits([job])
        if (reason := answers[sizes]) is not None:
            found[job.name] = reason
    return found


def _most_that_fit(jobs: Sequence[JobShape], aboard: Sequence[JobShape], fits: Fits) -> int:
    """How many of `jobs`, from the first on, fit beside those aboard; by halving, since each look counts all
    of them."""
    low, high = 0, len(jobs) + 1
    middle = len(jobs)
    while high - low > 1:
        if fits([*aboard, *jobs[:middle]]) is None:
            low = middle
        else:
            high = middle
        middle = (low + high) // 2
    return low
