"""The versions of the files that a run leaves behind: job.yaml, checkpoints and status.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weftune.errors import OutputError

FORMAT = 1
"""Raised whenever one of these files changes so that a Weftune from before would misread it."""
BEFORE = 0
"""What files are that carry no format: they were written before there was one, and are still read."""


class UnknownFormat(OutputError):
    """A file that a later Weftune has written."""


def refuse_unknown_format(found: Any, path: Path) -> None:
    """`found` is what the file at `path` says of its format; None where it says nothing."""
    version = BEFORE if found is None else found
    if isinstance(version, int) and not isinstance(version, bool) and BEFORE <= version <= FORMAT:
        return
    raise UnknownFormat(
        f"{path} has the format {version}, and this Weftune knows formats up to {FORMAT}: "
        "use the Weftune that wrote it, or a newer one"
    )
