"""Formatting of numbers and names as text, shared by the report's page and the terminal output."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from urllib.parse import quote

NO_VALUE = "–"
"""String that is shown in place of a missing number."""


def loss_text(loss: float | None, digits: int = 4) -> str:
    if loss is None:
        return NO_VALUE
    # Adding zero turns -0.0, which a tiny margin of rewards is rounded to, into 0.0.
    return f"{round(loss, digits) + 0.0:.{digits}f}" if abs(loss) < 1000 else f"{loss:.3g}"


def change_text(first_value: float | None, last_value: float | None) -> str:
    """Format the change from `first_value` to `last_value`, in percent of `first_value`."""
    if first_value is None or last_value is None or first_value == 0:
        return NO_VALUE
    return f"{100 * (last_value - first_value) / abs(first_value):+.1f} %".replace("-", "−")


def accuracy_text(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def points_text(old_fraction: float, new_fraction: float) -> str:
    """Format the change from one fraction to another in percentage points."""
    return f"{100 * (new_fraction - old_fraction):+.1f} points".replace("-", "−")


def duration_text(seconds: float | None) -> str:
    if seconds is None:
        return NO_VALUE
    whole = round(max(0.0, seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def minutes_text(seconds: float) -> str:
    """Format minutes with about two significant digits: 0.42, 4.2, 42."""
    minutes = seconds / 60
    digits = 2 if abs(minutes) < 1 else 1 if abs(minutes) < 10 else 0
    return f"{minutes:,.{digits}f}"


def bytes_text(count: float | None) -> str:
    if count is None:
        return NO_VALUE
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def rate_text(tokens_per_second: float | None) -> str:
    return NO_VALUE if tokens_per_second is None else f"{tokens_per_second:,.0f}"


def relative_link(*parts: str) -> str:
    """Return a relative link to a file or folder below the page's folder. Names are quoted, so that they
    cannot lead outside the folder."""
    return "/".join((".", *(quote(part, safe="") for part in parts)))


def printable_line(text: str) -> str:
    """Return a string as one line without control characters, since names and reasons are user input."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def trial_state_text(state: str) -> str:
    """Return the word with which a trial's state is shown. The state `left` is shown as `dropped`, since
    `left` could be read as remaining time."""
    return "dropped" if state == "left" else state


def count_noun(count: int, singular: str) -> str:
    return f"{count:,} {singular}" if count == 1 else f"{count:,} {singular}s"


def short_paths(paths: Sequence[str]) -> Mapping[str, str]:
    """Map each path to the shortest sequence of its last parts that distinguishes it from the other paths."""
    parts = {path: PurePath(path).parts for path in paths}
    for count in range(1, max(map(len, parts.values()), default=0) + 1):
        tails = {path: "/".join(some[-count:]) for path, some in parts.items()}
        if len(set(tails.values())) == len(tails):
            return tails
    return {path: path for path in paths}


def split_breakable(text: str) -> tuple[str, ...]:
    """Split a string into pieces between which a line may break. A path or name may break after slashes,
    underscores and hyphens, and a list of names at its spaces only."""
    return (text,) if " " in text else tuple(re.split(r"(?<=[/_-])(?=[^/_-])(?!\d)", text))
