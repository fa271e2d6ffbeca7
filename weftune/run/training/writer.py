"""Writes what jobs leave on disk while training goes on: a checkpoint from a snapshot, a finished adapter.

What one job is to leave is written in the order in which it was asked for. Threads hash and write different
jobs' files side by side, so that checksums keep up with the disk. What is said to be on disk is on disk: a
future is done when everything is synced and has its name.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch

from weftune.run.training import checkpoint
from weftune.run.training.snapshot import Snapshot, Snapshots

T = TypeVar("T")
MOST_THREADS = 4
CORES_PER_THREAD = 4
"""A hash takes a core, and training needs some too."""


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A checkpoint that could not be written."""

    job: str
    step: int
    reason: str


class Writer:
    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        """`device` is the one that trains; snapshots take at most `max_bytes`."""
        self.snapshots = Snapshots(device, max_bytes)
        threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // CORES_PER_THREAD))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="writer")
        self._last: dict[str, Future[Any]] = {}
        """Job → what was asked for last, unless it is done."""
        self._lock = Lock()
        self._failed: deque[tuple[Snapshot, Exception]] = deque()
        """Checkpoints that could not be written since somebody asked. The trainer asks after every step, when
        thousands may be under way: so they are not gone through."""

    def run(self, job: str, work: Callable[[], T]) -> Future[T]:
        """Call `work` when all that was asked for this job before is done."""
        before = self._last.get(job)

        def in_turn() -> T:
            if before is not None:
                # It has begun: threads take what was asked for first.
                wait([before])
            return work()

        future = self._threads.submit(in_turn)
        with self._lock:
            self._last[job] = future
        future.add_done_callback(partial(self._forget_done, job))
        return future

    def _forget_done(self, job: str, future: Future[Any]) -> None:
        with self._lock:
            if self._last.get(job) is future:
                del self._last[job]

    def write(self, snapshot: Snapshot, work: Callable[[Snapshot], T]) -> Future[T]:
        """Call `work` with a snapshot, and give its memory back."""
        future = self.run(snapshot.job, partial(work, snapshot))
        future.add_done_callback(lambda _: self.snapshots.give_back(snapshot))
        return future

    def save(self, folder: Path, snapshot: Snapshot) -> None:
        """Write a checkpoint under `folder`."""
        self.write(snapshot, partial(self._write_checkpoint, folder))

    def _write_checkpoint(self, folder: Path, snapshot: Snapshot) -> None:
        try:
            checkpoint.write(folder, snapshot)
        except Exception as error:
            self._failed.append((snapshot, error))
            raise

    def unsaved(self) -> list[Unsaved]:
        """Checkpoints that could not be written, of those that are done since the last call. An error that is
        not the disk's is raised here."""
        found = []
        while self._failed:
            snapshot, error = self._failed.popleft()
            found.append(Unsaved(snapshot.job, snapshot.progress.step, _of_the_disk(error)))
        return found

    def wait(self, job: str) -> None:
        """Wait until all that was asked for this job is done."""
        if (last := self._last.get(job)) is not None:
            wait([last])

    def forget(self, job: str) -> None:
        """What was asked for last is not needed any more. If it has not begun, it is left out."""
        if (last := self._last.get(job)) is not None:
            last.cancel()

    def close(self, at_once: bool = False) -> None:
        """Wait until everything is written; `at_once`, only what has begun."""
        self._threads.shutdown(wait=True, cancel_futures=at_once)


def disk_error(done: Future[Any]) -> str | None:
    """Why the disk did not take what was to be written, if so. An error of another kind is raised."""
    error = None if done.cancelled() else done.exception()
    return None if error is None else _of_the_disk(error)


def _of_the_disk(error: BaseException) -> str:
    if not isinstance(error, OSError):
        raise error
    return error.strerror or str(error)
