"""The files of an output folder: their names, the lock, the status."""

from __future__ import annotations

import json
import os
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

from weftune.core.files import UnknownFormat, replace_file, temporary
from weftune.errors import OutputError
from weftune.jobs.store.states import State, move
from weftune.jobs.store.status import RunStatus, from_json, status_text

STATUS, METRICS, WINDOWS, LOCK = "status.json", "metrics.jsonl", "windows.jsonl", ".lock"
RUNG_LOSS = "rung_loss"
"""Key of metrics lines that hold the evaluation of a trial at a rung of its sweep."""
BASE_LOSS = "base_loss"
"""Key of metrics lines that hold the loss of the base without any adapter on a job's held-out samples."""
LEARNED = "learned.json"
"""File of the learned models that later windows are planned with."""
PROMISE = "promise.json"
"""File of the predictions for a run's first window, written before it: layout, attached jobs, seconds,
bytes."""
WORKER_LOGS = "ranks"
"""Folder of the other processes' logs, which begin before the run does."""


def lock_folder(folder: Path, named: Path) -> int:
    """Lock a folder until the process ends, however it ends; the lock file stays. Messages call the folder
    `named`."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        import fcntl
    except ImportError:
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise OutputError(
            f"another weftune train is writing to {named}; wait for it, or choose another --output"
        ) from None
    return handle


class DamagedStatus(OutputError):
    """An error raised if there is a status.json and neither it nor its successor can be read."""

    def __init__(self, path: Path, complaint: str) -> None:
        self.complaint = complaint
        super().__init__(
            f"{path} cannot be used ({complaint}); put back a copy of it, or choose another --output"
        )


def read_status(folder: Path) -> RunStatus:
    """Read status.json or, if a disk has damaged it, its next version that was never renamed."""
    complaint = ""
    for path in (folder / STATUS, temporary(folder / STATUS)):
        try:
            return from_json(json.loads(path.read_bytes()), path)
        except UnknownFormat:
            raise
        except (OSError, ValueError, TypeError) as error:
            complaint = complaint or str(error).splitlines()[0]
    raise DamagedStatus(folder / STATUS, complaint)


def write_status(folder: Path, status: RunStatus) -> None:
    replace_file(folder / STATUS, status_text(status).encode())


def waiting_again(status: RunStatus, states: Container[State] = (State.RUNNING, State.PAUSED)) -> RunStatus:
    """Return the status with jobs queued again that were paused, or running when their process was killed."""
    jobs = {
        name: replace(job, state=move(job.state, State.QUEUED), reason="") if job.state in states else job
        for name, job in status.jobs.items()
    }
    return replace(status, jobs=jobs)
