"""Numbers as people read them, the same on the page and in the terminal."""

from __future__ import annotations

NOTHING = "–"
"""Stands where there is no number."""


def loss_text(loss: float | None, digits: int = 4) -> str:
    if loss is None:
        return NOTHING
    return f"{loss:.{digits}f}" if abs(loss) < 1000 else f"{loss:.3g}"


def change_text(first: float | None, last: float | None) -> str:
    """How much smaller or larger `last` is, in percent of `first`."""
    if first is None or last is None or first == 0:
        return NOTHING
    return f"{100 * (last - first) / abs(first):+.1f} %".replace("-", "−")


def duration_text(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    whole = round(max(0.0, seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def minutes_text(seconds: float) -> str:
    """Minutes with the digits that matter: 0.42, 4.2, 42."""
    minutes = seconds / 60
    digits = 2 if abs(minutes) < 1 else 1 if abs(minutes) < 10 else 0
    return f"{minutes:,.{digits}f}"


def bytes_text(count: float | None) -> str:
    if count is None:
        return NOTHING
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def rate_text(tokens_per_second: float | None) -> str:
    return NOTHING if tokens_per_second is None else f"{tokens_per_second:,.0f}"


def printable(text: str) -> str:
    """One line without control characters: names and reasons come from outside."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
