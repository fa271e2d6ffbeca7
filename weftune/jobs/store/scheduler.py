"""The scheduler: which jobs are admitted next.

The order is strict: priority, then position in the file, and no job overtakes another. A small job behind a
large one waits although it would fit: otherwise a stream of small jobs could keep the large one out for ever.
The one exception is a job too large to run even alone: it is set aside and blocks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weftune.core.shapes import JobShape

Fits = Callable[[Sequence[JobShape]], str | None]
"""None where these jobs fit together, or the sentence that says why they do not."""


@dataclass(frozen=True, slots=True)
class Admission:
    admitted: tuple[str, ...]
    waiting: Mapping[str, str]
    """Name → why it must wait."""
    too_large: Mapping[str, str]
    """Name → why it cannot run even alone."""


def admit(waiting: Sequence[JobShape], aboard: Sequence[JobShape], fits: Fits) -> Admission:
    """Admit as many of `waiting` as fit beside those `aboard`, in strict order."""
    together = list(aboard)
    admitted: list[str] = []
    reasons: dict[str, str] = {}
    too_large: dict[str, str] = {}
    first_refused: str | None = None
    for job in sorted(waiting, key=lambda job: (-job.priority, job.order)):
        alone = fits([job])
        if alone is not None:
            too_large[job.name] = alone
        elif first_refused is not None:
            reasons[job.name] = f"it waits behind {first_refused}, which comes first"
        elif (reason := fits([*together, job])) is not None:
            reasons[job.name] = reason
            first_refused = job.name
        else:
            together.append(job)
            admitted.append(job.name)
    return Admission(tuple(admitted), reasons, too_large)
