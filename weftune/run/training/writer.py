"""Writing of jobs' files while training continues: checkpoints from snapshots, and finished adapters.

The files of one job are written in the order in which they were requested. Several threads hash and write the
files of different jobs in parallel, so that hashing keeps up with the disk. The future of a request is done
only when everything is synced to disk and has its final name.
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
MIN_THREADS, MAX_THREADS = 2, 4
CORES_PER_THREAD = 4
"""Number of CPU cores for each writer thread. It is above 1 because a thread occupies its core only while it
hashes; with small files it mostly waits for the disk."""


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A checkpoint that could not be written."""

    job: str
    step: int
    reason: str


class Writer:
    def __init__(
        self, device: torch.device, max_bytes: int | None = None, threads: int | None = None
    ) -> None:
        """Start the writer's threads. `device` is the device on which jobs train, and `max_bytes` the maximum
        size in bytes of the host memory for snapshots."""
        self.snapshots = Snapshots(device, max_bytes)
        usual = max(MIN_THREADS, min(MAX_THREADS, (os.cpu_count() or 1) // CORES_PER_THREAD))
        self._threads = ThreadPoolExecutor(threads or usual, thread_name_prefix="writer")
        self._last_futures: dict[str, Future[Any]] = {}
        """Maps each job to the future of its last request to write a file, until that request is done."""
        self._lock = Lock()
        self._failed_writes: deque[tuple[Snapshot, Exception]] = deque()
        """Checkpoints that could not be written since the last call of `take_unsaved`, with their errors.
        They are collected separately, since a scan of all pending requests after every step would be slow."""

    def run(self, job: str, function: Callable[[], T]) -> Future[T]:
        """Call `function` in a writer thread once all earlier requests of this job are done. Return a future
        of its result."""
        before = self._last_futures.get(job)

        def run_in_turn() -> T:
            if before is not None:
                # It has begun: threads take requests in order.
                wait([before])
            return function()

        future = self._threads.submit(run_in_turn)
        with self._lock:
            self._last_futures[job] = future
        future.add_done_callback(partial(self._forget_done, job))
        return future

    def _forget_done(self, job: str, future: Future[Any]) -> None:
        with self._lock:
            if self._last_futures.get(job) is future:
                del self._last_futures[job]

    def write(self, snapshot: Snapshot, function: Callable[[Snapshot], T]) -> Future[T]:
        """Call `function` with a snapshot in a writer thread, then return the snapshot's memory to its
        pool."""
        future = self.run(snapshot.job, partial(function, snapshot))
        future.add_done_callback(lambda _: self.snapshots.release(snapshot))
        return future

    def save(self, folder: Path, snapshot: Snapshot) -> None:
        """Write a checkpoint under `folder` from the snapshot, in a writer thread."""
        self.write(snapshot, partial(self._write_checkpoint, folder))

    def _write_checkpoint(self, folder: Path, snapshot: Snapshot) -> None:
        try:
            checkpoint.write(folder, snapshot)
        except Exception as error:
            self._failed_writes.append((snapshot, error))
            raise

    def take_unsaved(self) -> list[Unsaved]:
        """Return the checkpoints that could not be written since the last call. Raise errors that are not
        disk errors."""
        found = []
        while self._failed_writes:
            snapshot, error = self._failed_writes.popleft()
            found.append(Unsaved(snapshot.job, snapshot.progress.step, _is_disk_error(error)))
        return found

    def wait(self, job: str) -> None:
        """Wait until all requested writes of this job are done."""
        if (last := self._last_futures.get(job)) is not None:
            wait([last])

    def forget(self, job: str) -> None:
        """Cancel the latest request to write a file of this job, unless a thread has already begun to write
        the file."""
        if (last := self._last_futures.get(job)) is not None:
            last.cancel()

    def close(self, cancels_waiting: bool = False) -> None:
        """Wait until everything is written. If `cancels_waiting`, wait only for writes that have begun, and
        cancel all others."""
        self._threads.shutdown(wait=True, cancel_futures=cancels_waiting)


def find_disk_error(future: Future[Any]) -> str | None:
    """Return the message of the disk error with which a write failed, or None. Raise any other error."""
    error = None if future.cancelled() else future.exception()
    return None if error is None else _is_disk_error(error)


def _is_disk_error(error: BaseException) -> str:
    if not isinstance(error, OSError):
        raise error
    return error.strerror or str(error)
