"""Allowed ranges of numbers in job files, as annotations of their fields, and the error messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_COUNT = 10**12
"""Maximum number of steps or tokens in a spec. It is larger than any real number of steps or tokens, but
still exact as a float."""
MAX_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The allowed range of a number in a jobs file, with which the type of a field is annotated, as in
    `rank: Annotated[int, Bound(at_least=1)]`. The annotated type determines whether the number must be an
    integer and whether None is allowed."""

    at_least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf
    allows_fraction: bool = False
    """Whether a value below 1 means a fraction of the job's steps and any other value a number of steps."""
    meaning: str = ""
    """Meaning of the number, for error messages. Empty if the number's key in the file says enough."""
    is_integer: bool = False
    allows_none: bool = False

    def fault(self, value: Any) -> str | None:
        """Return the error message for `value`, or None if it is allowed."""
        if value is None and self.allows_none:
            return None
        got = format_value(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"must be a {'whole ' if self.is_integer else ''}number, got {got}"
        if not _is_finite(value):
            return f"must be a finite number, got {got}"
        if self.is_integer and not isinstance(value, int):
            return f"must be a whole number, got {got}"
        if value < self.at_least:
            return f"must be at least {self.at_least:g}, got {got}"
        if value <= self.above:
            return f"must be above {self.above:g}, got {got}"
        if value >= self.below:
            meaning = f" ({self.meaning})" if self.meaning else ""
            return f"must be below {self.below:g}{meaning}, got {got}"
        if value > self.at_most:
            return f"must be at most {self.at_most:.12g}, got {got}"
        if self.allows_fraction and value > 1 and value != int(value):
            return f"must be below 1 (a share of the run) or a whole number of steps, got {got}"
        return None


SIZE = Bound(at_least=1, at_most=65536)
"""Allowed range of adapter ranks, adapter widths and numbers of virtual tokens."""
SEED = Bound(at_least=0, at_most=2**63 - 1)
RUN_SHARE = Bound(above=0, at_most=MAX_COUNT, allows_fraction=True)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def format_value(value: Any) -> str:
    """Return a value for an error message: shortened, and written as in YAML."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{_shorten(value)}"'
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:
        return "a number of many digits"
    if isinstance(value, int | float):
        return f"{value}"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return _shorten(str(value))


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 1]}…"
