"""What disks do to libraries that write files: errors of other kinds than OSError, and modes of their own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How safetensors and tokenizers, which write from Rust, end the text of an I/O error."""


@contextmanager
def disk_errors() -> Iterator[None]:
    """An I/O error that a library raises as something else becomes the OSError that it is."""
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
    """Give all files below `folder` the mode of the user's umask: some libraries make them private."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
