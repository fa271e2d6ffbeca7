"""The files of an output folder: their names, the lock, the status."""

from __future__ import annotations

import json
import os
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

from weftune.core.files import replace_file, temporary
from weftune.core.formats import UnknownFormat
from weftune.errors import OutputError
from weftune.jobs.store.states import State, move
from weftune.jobs.store.status import RunStatus, from_json, status_text

STATUS, METRICS, WINDOWS, LOCK = "status.json", "metrics.jsonl", "windows.jsonl", ".lock"
RUNG_LOSS = "rung_loss"
"""In lines of the metrics that say what a sweep's rung has judged of a trial."""
BASE_LOSS = "base_loss"
"""In lines of the metrics with the loss of the base without any adapter on a job's held-out samples."""
LEARNED = "learned.json"
"""The learned models that later windows are planned with."""
PROMISE = "promise.json"
"""What a run promised of its first window before it began: layout, jobs aboard, seconds, bytes."""
WORKER_LOGS = "ranks"
"""The folder of the other processes' logs, which begin before the run does."""


def lock_folder(folder: Path, named: Path) -> int:
    """Held until the process ends, however it ends; the file itself stays. A user knows it as `named`."""
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
    """There is a status.json, and neither it nor its successor can be read."""

    def __init__(self, path: Path, complaint: str) -> None:
        self.complaint = complaint
        super().__init__(
            f"{path} cannot be used ({complaint}); put back a copy of it, or choose another --output"
        )


def read_status(folder: Path) -> RunStatus:
    """status.json, or where a disk has damaged it, the next version of it that never took its name."""
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
    """Jobs that were paused, or running when their process was killed, wait for their turn again."""
    jobs = {
        name: replace(job, state=move(job.state, State.QUEUED), reason="") if job.state in states else job
        for name, job in status.jobs.items()
    }
    return replace(status, jobs=jobs)
