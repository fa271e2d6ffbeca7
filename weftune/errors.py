"""All exceptions that Weftune raises on purpose, with messages written as sentences.

An error in the user's input is a `UserError`: the command line prints its sentences and exits with code 2.
Bugs are found by asserts, which end in a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


class WeftuneError(Exception):
    """Base class of all exceptions that Weftune raises on purpose."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One error in the user's input: its location, and a sentence that says what is wrong and how to correct
    it."""

    location: str
    sentence: str
    line: int = field(default=0, compare=False, repr=False)
    """Line number in the file, by which errors are sorted. 0 if the error belongs to no line."""

    def __str__(self) -> str:
        return f"{self.location}: {self.sentence}" if self.location else self.sentence

    def with_job_name(self, name: str) -> Mistake:
        """Return the error with the job's name added to its location."""
        return Mistake(f"job {name}: {self.location}" if self.location else f"job {name}", self.sentence)


class UserError(WeftuneError):
    """An exception for one or more errors in the user's input."""

    def __init__(self, mistakes: str | Mistake | Iterable[Mistake]) -> None:
        if isinstance(mistakes, str):
            mistakes = Mistake("", mistakes)
        if isinstance(mistakes, Mistake):
            mistakes = (mistakes,)
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))


class SpecError(UserError):
    """An exception for an invalid jobs file, or for an invalid spec created in Python."""


class DataError(UserError):
    """An exception for a dataset, or a row of it, that cannot be used."""


class BaseModelError(UserError):
    """An exception for a base model that cannot be found or loaded, or would not compute correct results."""


class WeightsLost(BaseModelError):
    """An exception for a weight file, read in every optimizer step, that has changed or disappeared. The run
    can be resumed."""


class OutputError(UserError):
    """An exception for an output folder that cannot be written to, or contains files that do not belong to
    this run."""


class AdapterError(UserError):
    """An exception for an adapter folder that cannot be read, or does not fit the base model."""


class PlanError(UserError):
    """An exception for jobs for which no plan exists on these devices. The message names the number that
    rules a plan out, such as the bytes of memory."""


class HostTooSmall(PlanError):
    """An exception for a machine whose device has enough memory, but whose host does not have enough for the
    tensors that are kept in host memory."""


class MissingPackage(UserError):
    """An exception for an optional package that is missing. The message contains the command that installs
    it."""
