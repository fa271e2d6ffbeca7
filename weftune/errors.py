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
    """One or more errors in the user's input."""

    def __init__(self, mistakes: str | Mistake | Iterable[Mistake]) -> None:
        if isinstance(mistakes, str):
            mistakes = Mistake("", mistakes)
        if isinstance(mistakes, Mistake):
            mistakes = (mistakes,)
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))


class SpecError(UserError):
    """Raised if the jobs file, or a spec created in Python, is invalid."""


class DataError(UserError):
    """A dataset, or a row of it, cannot be used."""


class BaseModelError(UserError):
    """The base model cannot be found or loaded, or would not compute correct results."""


class WeightsLost(BaseModelError):
    """A weight file that every optimizer step reads has changed or disappeared. The run can be resumed."""


class OutputError(UserError):
    """The output folder cannot be written to, or contains files that do not belong to this run."""


class AdapterError(UserError):
    """An adapter folder cannot be read, or does not fit the base."""


class PlanError(UserError):
    """No plan exists for these jobs on these devices. The message names the number that rules it out, such as
    the bytes of memory."""


class HostTooSmall(PlanError):
    """The device has enough memory, but the host does not have enough for the tensors that are kept in host
    memory."""


class MissingPackage(UserError):
    """Raised if an optional package is missing. The message contains the command that installs it."""
