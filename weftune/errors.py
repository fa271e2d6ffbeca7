"""Every error a user can meet, as sentences.

A user's mistake is a `UserError`: the command line prints its sentences and exits with code 2.
Bugs are asserts; they are allowed to look like bugs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


class WeftuneError(Exception):
    """Anything Weftune raises on purpose."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake of the user's: where it is, and a sentence that says what it is and how to correct it."""

    location: str
    sentence: str
    line: int = field(default=0, compare=False, repr=False)
    """Line of the file, to sort mistakes by; 0 if there is none."""

    def __str__(self) -> str:
        return f"{self.location}: {self.sentence}" if self.location else self.sentence

    def of_job(self, name: str) -> Mistake:
        """Return the mistake with the name of its job."""
        return Mistake(f"job {name}: {self.location}" if self.location else f"job {name}", self.sentence)


class UserError(WeftuneError):
    """One or more mistakes in what the user gave us."""

    def __init__(self, mistakes: str | Mistake | Iterable[Mistake]) -> None:
        if isinstance(mistakes, str):
            mistakes = Mistake("", mistakes)
        if isinstance(mistakes, Mistake):
            mistakes = (mistakes,)
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))


class SpecError(UserError):
    """The jobs file, or a spec made in Python, cannot be used as it stands."""


class DataError(UserError):
    """A dataset, or a row of it, cannot be used."""


class BaseModelError(UserError):
    """The base model cannot be found, loaded or trusted to compute the right thing."""


class WeightsLost(BaseModelError):
    """A file from which weights are read in every step has changed or disappeared; the run can be resumed."""


class OutputError(UserError):
    """The output folder cannot be written to, or holds something else."""


class AdapterError(UserError):
    """An adapter folder cannot be read, or does not fit the base."""


class PlanError(UserError):
    """No plan can serve these jobs on these devices; the sentence names the job and the number."""


class HostTooSmall(PlanError):
    """The device would do, but the memory of its host does not hold what a plan keeps there."""


class MissingPackage(UserError):
    """An optional package is needed; the sentence carries the command that installs it."""
