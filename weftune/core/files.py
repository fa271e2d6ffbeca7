"""Helpers for files: atomic replacement, JSON lines, YAML, format versions and the cache folder."""

from __future__ import annotations

import json
import math
import numbers
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weftune.errors import OutputError

MAX_PENDING_LINES = 50_000
"""Maximum number of lines that are kept in memory while a file cannot be written. If there are more, the
oldest are dropped."""
FORMAT = 1
"""Current format version of job.yaml, checkpoints and status.json. The version must be increased with every
change that older versions of Weftune would misread."""
BEFORE = 0
"""Format version of files without a format field, which early versions wrote and which can still be read."""
OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""Pattern that matches the error number at the end of I/O error messages of Rust libraries, such as
safetensors and tokenizers."""
MAX_YAML_CHARACTERS = 1 << 16
MAX_BRACKETS = 200
NESTED = re.compile(r"^[ \t?:-]{100}", re.MULTILINE)
"""Pattern that matches a line of YAML that starts with so much indentation that it may be nested too
deeply."""


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON. Numbers that are not finite become null."""
    return json.dumps(_json_value(value), ensure_ascii=False, indent=indent)


_PLAIN = (str, int, bool, type(None))


def _json_value(value: Any) -> Any:
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
        return {str(key): _json_value(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no place in a JSON file")


def temporary_path(path: Path) -> Path:
    """Return the path of the temporary file that is written and then renamed to `path`."""
    return path.with_name(f".{path.name}.new")


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically. Readers see either the old or the new content, even after a crash."""
    fresh = temporary_path(path)
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
    """Sync a folder, so that renames in it are durable. On Windows this does nothing."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class LineFile:
    """A file of JSON lines that is appended to. A line that cannot be written is kept and retried later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._size_bytes = 0
        """Size of the file in bytes while the file is open; no other object writes to it."""
        self._unwritten: deque[bytes] = deque(maxlen=MAX_PENDING_LINES)

    def append(self, line: Mapping[str, Any]) -> None:
        self._unwritten.append((json_text(line) + "\n").encode())
        self.flush()

    def flush(self) -> None:
        """Write all lines that are still in memory to the file, without syncing it."""
        content = b"".join(self._unwritten)
        if not content:
            return
        try:
            if self._handle is None:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                self._size_bytes = os.fstat(self._handle).st_size
            try:
                written = os.write(self._handle, content)
                if written < len(content):
                    os.write(self._handle, content[written:])
            except OSError:
                # Half a line would corrupt the next one.
                os.ftruncate(self._handle, self._size_bytes)
                raise
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}") from error
        self._size_bytes += len(content)
        self._unwritten.clear()

    def filter_lines(self, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
        """Remove lines that are incomplete or for which `is_kept` is false. The file is rewritten only if
        there are such lines."""
        self.close()
        if not self.path.exists():
            return
        kept = filtered_lines(self.path, is_kept)
        if kept != self.path.read_bytes():
            replace_file(self.path, kept)

    def sync(self) -> None:
        """Sync all flushed lines to the disk. Other threads may append lines in the meantime."""
        if self._handle is not None:
            try:
                os.fsync(self._handle)
            except OSError as error:
                raise OutputError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def filtered_lines(path: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> bytes:
    """Return the complete JSON lines of a file for which `is_kept` is true, or empty bytes if there is no
    file."""
    if not path.exists():
        return b""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(value, dict) and is_kept(value):
            kept.append(line)
    return b"".join(kept)


def refuse_full_folder(target: Path) -> None:
    """Raise OutputError unless `target` is a new or empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "is not empty" if target.is_dir() else "is a file"
        raise OutputError(f"{target} {what}; name a folder that is new or empty.")


def cache_folder() -> Path:
    """Return the folder that the environment variable `WEFTUNE_CACHE` names, or else `weftune` in the user's
    cache folder. The folder is not created."""
    chosen = os.environ.get("WEFTUNE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "weftune"


@contextmanager
def disk_errors() -> Iterator[None]:
    """Return a context manager that raises an OSError instead if a library raises another exception for an
    I/O error."""
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


def set_file_modes(folder: Path) -> None:
    """Set the modes of all files below `folder` by the umask, since some libraries create private files."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


class UnknownFormat(OutputError):
    """Raised for a file that was written by a later version of Weftune."""


def refuse_unknown_format(file_version: Any, path: Path) -> None:
    """Raise UnknownFormat if this version of Weftune cannot read files with the format version
    `file_version`."""
    version = BEFORE if file_version is None else file_version
    if isinstance(version, int) and not isinstance(version, bool) and BEFORE <= version <= FORMAT:
        return
    raise UnknownFormat(
        f"{path} has the format {version}, and this Weftune knows formats up to {FORMAT}: "
        "use the Weftune that wrote it, or a newer one"
    )


def load_yaml(text: str) -> Any:
    """Parse YAML that Weftune wrote, with libyaml if it is installed: with thousands of jobs, the Python
    parser takes longer than their training. Deeply nested YAML is parsed by the Python parser, which raises
    RecursionError early; libyaml would accept it and later code would fail."""
    import yaml

    brackets = text.count("[") + text.count("{")
    is_shallow = len(text) <= MAX_YAML_CHARACTERS and brackets <= MAX_BRACKETS and NESTED.search(text) is None
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader) if is_shallow else yaml.SafeLoader)


def dump_yaml(values: Any) -> bytes:
    """Return plain values as YAML, with keys in their given order. The text is written by libyaml if that is
    installed."""
    import yaml

    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True)
    return text.encode()
