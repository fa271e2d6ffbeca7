"""The private store of `weft train`: the output folder, with one writer at a time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.errors import OutputError
from weft.jobs.files import LineFile, json_text, replace_file, temporary
from weft.jobs.states import State, move
from weft.jobs.status import JobStatus, RunStatus, from_json, to_json

STATUS, METRICS, WINDOWS, LOCK = "status.json", "metrics.jsonl", "windows.jsonl", ".lock"
RANKS = "ranks"
"""The folder of the logs of a pipeline's other ranks, which begin before the run does."""


def open_store(output: Path, resume: bool) -> Store:
    """Take the output folder. A folder in use, or one that holds something and is not resumed, is refused."""
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output} is a file; choose another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = _lock(output)
    except OSError as error:
        raise OutputError(f"cannot write to {output}: {error.strerror}; choose another --output") from error
    try:
        status = _status_of(output, resume)
    except BaseException:
        os.close(lock)
        raise
    return Store(output, status, lock)


def _lock(output: Path) -> int:
    """Held until the process ends, however it ends; the file itself stays."""
    handle = os.open(output / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        import fcntl
    except ImportError:
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise OutputError(
            f"another weft train is writing to {output}; wait for it, or choose another --output"
        ) from None
    return handle


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
    status = _read_status(output)
    # A job that was running when the trainer was killed waits for its turn again.
    jobs = {
        name: replace(job, state=move(job.state, State.QUEUED)) if job.state is State.RUNNING else job
        for name, job in status.jobs.items()
    }
    return replace(status, jobs=jobs)


def _read_status(output: Path) -> RunStatus:
    """status.json, or where a disk has damaged it, the next version of it that never took its name."""
    complaint = ""
    for path in (output / STATUS, temporary(output / STATUS)):
        try:
            return from_json(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            complaint = complaint or str(error).splitlines()[0]
    raise OutputError(
        f"{output / STATUS} cannot be used ({complaint}); put back a copy of it, or choose another --output"
    )


class Store:
    """The status in memory and on disk, and the two files of lines. Made by `open_store`."""

    def __init__(self, output: Path, status: RunStatus, lock: int) -> None:
        self.output = output
        self.status = status
        self._lock = lock
        self._metrics = LineFile(output / METRICS)
        self._windows = LineFile(output / WINDOWS)

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
        replace_file(self.output / STATUS, (json_text(to_json(self.status), indent=2) + "\n").encode())

    def close(self) -> None:
        self._metrics.close()
        self._windows.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
