"""Files that survive a kill: replaced whole or not at all, and lines that are complete or gone."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weftune.errors import OutputError

MOST_UNWRITTEN = 50_000
"""Maximum number of lines kept in memory while the disk accepts none; beyond it the oldest are dropped."""


def json_text(value: Any, indent: int | None = None) -> str:
    """Return valid JSON: a number that is not finite is written as null."""
    return json.dumps(_clean(value), ensure_ascii=False, indent=indent)


_PLAIN = (str, int, bool, type(None))


def _clean(value: Any) -> Any:
    # Handles nearly all values without the slow check of abstract number types: it runs at every step of
    # every job.
    if type(value) in _PLAIN or (type(value) is float and math.isfinite(value)):
        return value
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no place in a JSON file")


def temporary(path: Path) -> Path:
    """Return the path to which the next version of `path` is written before it is renamed."""
    return path.with_name(f".{path.name}.new")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a restart, sees the old content or the new and nothing between."""
    fresh = temporary(path)
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def replace_json(path: Path, value: Any) -> None:
    """Replace a file atomically with indented JSON."""
    replace_file(path, (json_text(value, indent=2) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Make a rename durable. Windows cannot sync folders, so there this does nothing."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class LineFile:
    """A file of JSON lines that is appended to. A line that cannot be written now waits for the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._size = 0
        """Size of the file in bytes while it is open; there is no other writer."""
        self._unwritten: deque[bytes] = deque(maxlen=MOST_UNWRITTEN)

    def append(self, line: Mapping[str, Any]) -> None:
        self._unwritten.append((json_text(line) + "\n").encode())
        self.flush()

    def flush(self) -> None:
        """Write the pending lines to the operating system."""
        content = b"".join(self._unwritten)
        if not content:
            return
        try:
            if self._handle is None:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                self._size = os.fstat(self._handle).st_size
            try:
                written = os.write(self._handle, content)
                if written < len(content):
                    os.write(self._handle, content[written:])
            except OSError:
                # Half a line would corrupt the next one.
                os.ftruncate(self._handle, self._size)
                raise
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}") from error
        self._size += len(content)
        self._unwritten.clear()

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Drop every line that is torn or not `wanted`, replacing the file only if that changes it."""
        self.close()
        if not self.path.exists():
            return
        kept = kept_lines(self.path, wanted)
        if kept != self.path.read_bytes():
            replace_file(self.path, kept)

    def sync(self) -> None:
        """Sync everything that was flushed to the disk. Lines may be appended meanwhile."""
        if self._handle is not None:
            try:
                os.fsync(self._handle)
            except OSError as error:
                raise OutputError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def kept_lines(path: Path, wanted: Callable[[Mapping[str, Any]], bool]) -> bytes:
    """Return the complete lines of a file that are `wanted`; empty if there is no file."""
    if not path.exists():
        return b""
    return b"".join(line for line in path.read_bytes().splitlines(keepends=True) if _is_kept(line, wanted))


def _is_kept(line: bytes, wanted: Callable[[Mapping[str, Any]], bool]) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and wanted(value)


def refuse_full_folder(target: Path) -> None:
    """Raise OutputError unless `target` is a new or empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "is not empty" if target.is_dir() else "is a file"
        raise OutputError(f"{target} {what}; name a folder that is new or empty.")
