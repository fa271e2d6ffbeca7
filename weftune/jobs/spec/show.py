"""Text of a value for error messages: short, and written as in YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LONGEST = 40


def show(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{_short(value)}"'
    if isinstance(value, int) and abs(value) >= 10**LONGEST:
        return "a number of many digits"
    if isinstance(value, int | float):
        return f"{value}"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return _short(str(value))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
