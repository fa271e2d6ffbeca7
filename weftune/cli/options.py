"""Code shared by several commands: exit codes, and sizes as users write them."""

from __future__ import annotations

from weftune.errors import UserError

MISTAKE = 2
"""Exit code of a user's mistake, equal to typer's own for a wrong option."""
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def bytes_of(text: str, option: str = "--memory") -> int:
    """Return the number of bytes in a text such as `8GiB`."""
    number = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise UserError(f"{option} {text}: write a number and a unit, such as 8GiB") from None
