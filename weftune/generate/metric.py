"""The user's own metric: a Python function that scores one answer, named as `FILE.py:FUNCTION`."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftune.core.evaluation import AnsweredRow
from weftune.data.spec import RESERVED_NAMES
from weftune.errors import Mistake, UserError


@dataclass(frozen=True, slots=True)
class UserMetric:
    """A user's function `f(completion, expected, row) -> float` that scores one answer. Higher is better."""

    name: str
    function: Callable[[str, str | None, dict[str, Any]], Any]

    def score(self, row: AnsweredRow, adapter: str) -> float:
        """Return the score of one adapter's answer. Raise UserError with the row's location if the function
        fails or returns no number."""
        try:
            result = self.function(row.answers[adapter], row.expected, dict(row.values))
        except Exception as error:
            sentence = f"the metric {self.name} failed: {_describe_error(error)}"
            raise UserError(Mistake(row.location, sentence)) from error
        try:
            number = float(result)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(result, str) or not math.isfinite(number):
            sentence = f"the metric {self.name} returned {repr(result)[:80]}, which is no number"
            raise UserError(Mistake(row.location, sentence))
        return number


def load_metric(file: Path, name: str, key: str = "--metric") -> UserMetric:
    """Import a function from a Python file. Raise UserError if the file or the function cannot be used. `key`
    is the option or key in which the user named the function, for the error message."""
    if name in RESERVED_NAMES:
        raise UserError(f"{key}: {name} is already the name of a column; give the function another name.")
    if not file.is_file():
        raise UserError(f"{key}: there is no file {file}.")
    try:
        function = runpy.run_path(str(file), run_name=file.stem).get(name)
    except Exception as error:
        raise UserError(f"{key}: {file} cannot be imported: {_describe_error(error)}.") from error
    if not callable(function):
        raise UserError(f"{key}: {file} holds no function {name}.")
    return UserMetric(name, function)


def _describe_error(error: Exception) -> str:
    """Return the type of an exception and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
