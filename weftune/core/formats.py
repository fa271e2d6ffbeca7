"""The versions of the files that a run leaves behind: job.yaml, checkpoints and status.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weftune.errors import OutputError

FORMAT = 1
"""Current format version. Raise it whenever one of these files changes so that an older Weftune would misread
it."""
BEFORE = 0
"""Version of files without a format field: they were written before there was one, and are still read."""


class UnknownFormat(OutputError):
    """A file was written by a later version of Weftune."""


def refuse_unknown_format(found: Any, path: Path) -> None:
    """Raise UnknownFormat if this Weftune cannot read the format. `found` is the format field of the file at
    `path`; None if it has none."""
    version = BEFORE if found is None else found
    if isinstance(version, int) and not isinstance(version, bool) and BEFORE <= version <= FORMAT:
        return
    raise UnknownFormat(
        f"{path} has the format {version}, and this Weftune knows formats up to {FORMAT}: "
        "use the Weftune that wrote it, or a newer one"
    )
