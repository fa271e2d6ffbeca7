"""The private store of `weftune train`: the output folder, or one share of it, with one writer at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weftune.errors import OutputError
from weftune.jobs.files import LineFile, temporary
from weftune.jobs.folder import (
    LOCK,
    METRICS,
    RANKS,
    STATUS,
    WINDOWS,
    lock_folder,
    read_status,
    waiting_again,
    write_status,
)
from weftune.jobs.shares import SHARES, dissolve, gather, share_folder
from weftune.jobs.states import State, move
from weftune.jobs.status import JobStatus, RunStatus


def open_store(output: Path, resume: bool) -> Store:
    """Take the output folder. A folder in use, or one that holds something and is not resumed, is refused."""
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output} is a file; choose another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(output, output)
    except OSError as error:
        raise OutputError(f"cannot write to {output}: {error.strerror}; choose another --output") from error
    try:
        status = _status_of(output, resume)
        store = Store(output, output, status, lock)
        if (output / SHARES).exists():
            store.gather()
    except BaseException:
        os.close(lock)
        raise
    return store


def refuse_output(output: Path, resume: bool) -> None:
    """What `open_store` would refuse, found without writing anything."""
    nearest = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise OutputError(f"{nearest} is a file; choose another --output")
    if not os.access(nearest, os.W_OK):
        raise OutputError(f"cannot write to {nearest}; choose another --output")
    if nearest != output:
        return
    if (output / LOCK).exists():
        os.close(lock_folder(output, output))
    _status_of(output, resume)


def open_share(output: Path, number: int) -> Store:
    """Take the store of one share of the jobs, as it was dealt or as a process before this one left it."""
    records = share_folder(output, number)
    lock = lock_folder(records, output)
    try:
        return Store(output, records, _status_of(records, resume=True), lock)
    except BaseException:
        os.close(lock)
        raise


def _status_of(output: Path, resume: bool) -> RunStatus:
    left_over = {LOCK, RANKS, *(temporary(output / name).name for name in (STATUS, METRICS, WINDOWS))}
    is_empty = all(entry.name in left_over for entry in output.iterdir())
    if is_empty:
        return RunStatus(started=time.time())
    if not resume:
        raise OutputError(f"{output} is not empty; continue it with --resume, or choose another --output")
    if not (output / STATUS).exists():
        raise OutputError(
            f"{output} holds no {STATUS}, so there is nothing to resume; choose another --output"
        )
    return waiting_again(read_status(output))


class Store:
    """The status in memory and on disk, and the two files of lines. Made by `open_store`."""

    def __init__(self, output: Path, records: Path, status: RunStatus, lock: int) -> None:
        self.output = output
        """Where the jobs' folders are."""
        self.records = records
        """Where this store's own files are: the output, unless it is the store of a share."""
        self.status = status
        self._lock = lock
        self._metrics = LineFile(records / METRICS)
        self._windows = LineFile(records / WINDOWS)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self, base: str, device: str, dtype: str) -> None:
        self.status = replace(self.status, base=base, device=device, dtype=dtype)

    def measure(self, seconds: float, solo_seconds: float | None, peak_bytes: int | None) -> None:
        """The run's totals so far; what came before a resumption is the caller's to add."""
        self.status = replace(self.status, seconds=seconds, solo_seconds=solo_seconds, peak_bytes=peak_bytes)

    def note(self, sentence: str) -> None:
        if sentence not in self.status.notes:
            self.status = replace(self.status, notes=(*self.status.notes, sentence))

    def add_job(self, name: str) -> None:
        """Enter a job as queued; one that is already known keeps its status."""
        if name not in self.status.jobs:
            self._put(name, JobStatus())

    def restart_job(self, name: str) -> None:
        """Forget all that a job did, its metrics too; its folder is the caller's."""
        self._put(name, JobStatus())
        self._metrics.keep(lambda line: line.get("job") != name)

    def move_job(self, name: str, state: State, reason: str = "") -> None:
        self._put(name, replace(self.job(name), state=move(self.job(name).state, state), reason=reason))

    def explain_job(self, name: str, reason: str) -> None:
        """Why a queued job still waits."""
        assert self.job(name).state is State.QUEUED
        self._put(name, replace(self.job(name), reason=reason))

    def advance_job(self, name: str, step: int, steps: int, trained_tokens: int) -> None:
        self._put(name, replace(self.job(name), step=step, steps=steps, trained_tokens=trained_tokens))

    def best_job(self, name: str, step: int | None, eval_loss: float | None) -> None:
        """The best evaluation of a job so far."""
        self._put(name, replace(self.job(name), best_step=step, eval_loss=eval_loss))

    def note_job(self, name: str, sentence: str) -> None:
        if sentence not in self.job(name).notes:
            self._put(name, replace(self.job(name), notes=(*self.job(name).notes, sentence)))

    def job(self, name: str) -> JobStatus:
        return self.status.jobs[name]

    def _put(self, name: str, job: JobStatus) -> None:
        self.status = replace(self.status, jobs={**self.status.jobs, name: job})

    def rewind(self, cursors: Mapping[str, int], evaluated: Mapping[str, int] | None = None) -> None:
        """Drop the metrics that each job wrote beyond its cursor: it will write them again.

        A cursor of -1 drops the evaluation at step 0 too. Jobs that are not named keep all their lines.
        `evaluated` is the last step that a job has evaluated, where that may be less than its cursor.
        """
        looks = cursors if evaluated is None else evaluated

        def is_done(line: Mapping[str, Any]) -> bool:
            job, step = line.get("job"), line.get("step")
            if not (isinstance(job, str) and job in cursors and isinstance(step, int)):
                return True
            return step <= (looks if "eval_loss" in line else cursors)[job]

        self._metrics.keep(is_done)
        self._windows.keep(lambda line: True)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        self._metrics.append(line)

    def append_window(self, line: Mapping[str, Any]) -> None:
        self._windows.append(line)

    def write_status(self) -> None:
        """Bring everything to the disk: the lines first, so that no status speaks of lines not there."""
        self._metrics.sync()
        self._windows.sync()
        self.status = replace(self.status, updated=time.time())
        write_status(self.records, self.status)

    def gather(self) -> None:
        """Take in what the shares of the jobs have recorded; their stores end with it."""
        # Their files are about to be replaced.
        self._metrics.close()
        self._windows.close()
        self.status = gather(self.output, self.status)
        self.write_status()
        dissolve(self.output)

    def close(self) -> None:
        self._metrics.close()
        self._windows.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
