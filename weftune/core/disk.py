"""Corrections for libraries that write files: I/O errors that are not raised as OSError, and private file
modes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""End of the text of an I/O error from safetensors and tokenizers, which write from Rust."""


@contextmanager
def disk_errors() -> Iterator[None]:
    """Convert an I/O error that a library raises as another exception into an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        found = OS_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error


def ordinary_modes(folder: Path) -> None:
    """Give all files below `folder` the mode of the user's umask: some libraries create private files."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
