"""A disk that fails, or a process that is killed, at a chosen write: real files below one folder, with every
call that changes them counted.

What Python writes goes through here. safetensors and tokenizers write from Rust: for those `largest_file`.
"""

from __future__ import annotations

import builtins
import io
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Inside `with disk.watched():` every call is in `calls` as (what, path below the folder)."""

    def __init__(self, folder: Path, fails: Callable[[int], bool] = lambda _: False, error: int | None = 0):
        self.folder = folder.absolute()
        self.fails = fails
        self.error = error
        """The error that a failing call raises; None: the process is killed there instead."""
        self.calls: list[tuple[str, str]] = []
        self._one_at_a_time = threading.RLock()
        """The trainer and its writer change files at the same time."""

    def count(self, what: str, path: Any, half: Callable[[], Any] = lambda: None) -> None:
        path = Path(os.fsdecode(path)).absolute()
        if not path.is_relative_to(self.folder):
            return
        with self._one_at_a_time:
            self.calls.append((what, str(path.relative_to(self.folder))))
            if not self.fails(len(self.calls)):
                return
        half()
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        assert self.error is not None
        raise OSError(self.error, os.strerror(self.error), str(path))

    @contextmanager
    def watched(self) -> Iterator[Disk]:
        real_open, real_write, real_fsync, real_io = os.open, os.write, os.fsync, io.open

        def named(handle: int) -> str:
            return os.readlink(f"/proc/self/fd/{handle}")

        def opened(path: Any, flags: int, *more: Any, **keys: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                self.count("open", path)
            return real_open(path, flags, *more, **keys)

        def write(handle: int, content: bytes) -> int:
            half = content[: len(content) // 2]
            self.count("write", named(handle), lambda: real_write(handle, half))
            return real_write(handle, content)

        def fsync(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            self.count("fsync", named(number))
            real_fsync(number)

        def file(path: Any, mode: str = "r", *more: Any, **keys: Any) -> Any:
            is_read = not set(mode) & set("wax+") or isinstance(path, int)
            if is_read:
                return real_io(path, mode, *more, **keys)
            self.count("open", path)
            return _Counted(self, real_io(path, mode, *more, **keys), path)

        def moved(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def move(old: Any, *more: Any, **keys: Any) -> Any:
                self.count(what, old)
                return real(old, *more, **keys)

            return move

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", opened)
            patch.setattr(os, "write", write)
            patch.setattr(os, "fsync", fsync)
            patch.setattr(io, "open", file)
            patch.setattr(builtins, "open", file)
            for what in ("rename", "replace", "mkdir"):
                patch.setattr(os, what, moved(what, getattr(os, what)))
            yield self


class _Counted:
    def __init__(self, disk: Disk, file: Any, path: Any) -> None:
        self._disk, self._file, self._path = disk, file, path

    def write(self, content: Any) -> int:
        def half() -> None:
            self._file.write(content[: len(content) // 2])
            self._file.flush()

        self._disk.count("write", self._path, half)
        return self._file.write(content)

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: a disk that is full, as whoever writes sees it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
