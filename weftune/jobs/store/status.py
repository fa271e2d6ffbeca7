"""The status of a run and its jobs: states, status.json, the names of the output's files, and the command
that resumes a run."""

from __future__ import annotations

import json
import os
import shlex
import time
import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from weftune.core.files import (
    FORMAT,
    UnknownFormat,
    json_text,
    refuse_unknown_format,
    replace_file,
    temporary_path,
)
from weftune.errors import OutputError


class State(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    """State of a job that was stopped before its end and can be resumed: by a request, by Ctrl-C, or because
    a file could not be written."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended. An ended job continues only at the user's request (--restart or
        --retry)."""
        return not MOVES[self]


MOVES: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.PAUSED, State.FAILED, State.CANCELLED}),
    # Back to queued is preemption: the job leaves its slot and keeps its cursor.
    State.RUNNING: frozenset({State.QUEUED, State.PAUSED, State.SUCCEEDED, State.FAILED, State.CANCELLED}),
    # Back to queued is a resumption.
    State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}


def check_transition(old_state: State, new_state: State) -> State:
    """Return `new_state` if a job may change to it from `old_state`, and raise ValueError otherwise."""
    if new_state not in MOVES[old_state]:
        raise ValueError(f"a job cannot go from {old_state} to {new_state}")
    return new_state


CHECKSUM = "checksum"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    state: State = State.QUEUED
    reason: str = ""
    """Reason why the job waits, is paused, failed or was cancelled; empty otherwise."""
    step: int = 0
    """Number of completed optimizer steps."""
    steps: int = 0
    """Total number of optimizer steps; 0 until the samples are counted."""
    trained_tokens: int = 0
    eval_loss: float | None = None
    """Validation loss of the adapter in the job's folder: at `best_step` with `keep: best`, otherwise at the
    last evaluation."""
    best_step: int | None = None
    best_loss: float | None = None
    """Validation loss of the best evaluation, which is at `best_step`."""
    score: float | None = None
    """Value of the job's `eval.metric` for the adapter in the job's folder."""
    base_loss: float | None = None
    """Validation loss of the base without any adapter."""
    base_score: float | None = None
    """Value of the job's `eval.metric` for the base without any adapter."""
    warning: str = ""
    """Problem with the adapter of a job that trained all its steps. Empty if there is none."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run. Times are seconds since 1970; `seconds` is training time over all resumptions."""

    base: str = ""
    device: str = ""
    dtype: str = ""
    started: float = 0.0
    updated: float = 0.0
    seconds: float = 0.0
    solo_seconds: float | None = None
    """Predicted seconds that the run's jobs would take if they were trained one after another."""
    peak_bytes: int | None = None
    command: str | None = None
    """Shell command that resumes the run. Empty if the jobs were created in Python; None if unknown."""
    notes: tuple[str, ...] = ()
    jobs: Mapping[str, JobStatus] = field(default_factory=dict)


def to_json(status: RunStatus) -> dict[str, Any]:
    whole = {item.name: getattr(status, item.name) for item in fields(RunStatus)}
    whole["jobs"] = {
        name: {item.name: getattr(job, item.name) for item in fields(JobStatus)}
        for name, job in status.jobs.items()
    }
    whole = {"format": FORMAT, **whole}
    return {**whole, CHECKSUM: status_checksum(whole)}


def status_text(status: RunStatus) -> str:
    """Return the content of status.json as a string. Only jobs that have changed since the last call are
    serialised again, since serialising thousands of jobs is slow."""
    whole = {item.name: getattr(status, item.name) for item in fields(RunStatus) if item.name != "jobs"}
    whole = {"format": FORMAT, **whole}
    names = [json_text(name) for name in status.jobs]
    texts = [_job_json(job) for job in status.jobs.values()]
    compact = ", ".join(f"{name}: {text}" for name, (text, _) in zip(names, texts, strict=True))
    checksum = _text_checksum(f'{json_text(whole)[:-1]}, "jobs": {{{compact}}}}}')
    indented = ",\n".join(f"    {name}: {text}" for name, (_, text) in zip(names, texts, strict=True))
    jobs = f"{{\n{indented}\n  }}" if names else "{}"
    head = json_text(whole, indent=2).removesuffix("\n}")
    return f'{head},\n  "jobs": {jobs},\n  "{CHECKSUM}": {json_text(checksum)}\n}}\n'


_JOB_FIELDS = tuple(item.name for item in fields(JobStatus))


@lru_cache(maxsize=1 << 15)
def _job_json(job: JobStatus) -> tuple[str, str]:
    """Return a job's status as two JSON strings: a compact string, from which the checksum is computed, and
    the string that is written."""
    values = {name: getattr(job, name) for name in _JOB_FIELDS}
    if job.notes:
        return json_text(values), json_text(values, indent=2).replace("\n", "\n    ")
    # Same text as in the line above, which takes ten times as long: a thousand jobs change in a second.
    lines = [f'"{name}": {json_text(value)}' for name, value in values.items()]
    return f"{{{', '.join(lines)}}}", "{\n      " + ",\n      ".join(lines) + "\n    }"


def from_json(value: Any, path: Path) -> RunStatus:
    """Parse the status of a run from JSON values. Raise ValueError for content that Weftune did not write,
    and UnknownFormat for content of a later version."""
    if not isinstance(value, dict):
        raise ValueError("it is no status")
    # Checked before the format: a flipped bit there is damage, not a newer Weftune.
    if CHECKSUM in value and value[CHECKSUM] != status_checksum(value):
        raise ValueError("it does not match its checksum")
    refuse_unknown_format(value.get("format"), path)
    if not isinstance(value.get("jobs"), dict):
        raise ValueError("it is no status")
    jobs = {name: job_from_json(job) for name, job in value["jobs"].items()}
    return validate_record(RunStatus, {**value, "jobs": jobs})


def status_checksum(values: Mapping[str, Any]) -> str:
    """Return the checksum of a status, computed without the key `checksum`. The checksum detects flipped bits
    that leave valid JSON."""
    return _text_checksum(json_text({key: value for key, value in values.items() if key != CHECKSUM}))


def _text_checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def job_from_json(value: Any) -> JobStatus:
    if not isinstance(value, dict):
        raise ValueError("a job in it is no mapping")
    return validate_record(JobStatus, {**value, "state": State(str(value.get("state")))})


def validate_record(record: type, value: Mapping[str, Any]) -> Any:
    """Create an instance of the dataclass `record` from a mapping, ignoring keys that are no fields of the
    dataclass. Pydantic checks the types, so that a hand-edited file fails here and not in the middle of a
    run."""
    names = {item.name for item in fields(record)}
    return _type_adapter(record).validate_python({key: below for key, below in value.items() if key in names})


@cache
def _type_adapter(record: type) -> TypeAdapter[Any]:
    return TypeAdapter(record)


STATUS, METRICS, WINDOWS, LOCK = "status.json", "metrics.jsonl", "windows.jsonl", ".lock"
RUNG_LOSS = "rung_loss"
"""Key, in the lines of metrics, of the loss by which a sweep compares its trials at a rung, a step at which
only the best trials continue."""
BASE_LOSS = "base_loss"
"""Key, in the lines of metrics, of the loss on a job's held-out samples of the base model without any
adapter."""
FITTED_MODELS = "learned.json"
"""Name of the file with the fitted time and memory models, which the planner uses for later windows (a few
global batches of every job)."""
PREDICTION = "promise.json"
"""Name of the file with the predictions for a run's first window (its first few global batches of every job):
layout, attached jobs, seconds, bytes. The file is written before the window runs."""
WORKER_LOGS = "ranks"
"""Name of the folder for the logs of all worker processes except the first one."""


LOCK_TRIES = 3


def lock_folder(folder: Path, displayed_folder: Path) -> int:
    """Lock a folder until the process ends. The lock file is not deleted. Error messages call the folder
    `displayed_folder`."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        import fcntl
    except ImportError:
        return handle
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            # It may be `weftune jobs`, which holds the lock for an instant to see whether a run does.
            time.sleep(0.02)
    os.close(handle)
    raise OutputError(
        f"another weftune train is writing to {displayed_folder}; wait for it, or choose another --output"
    )


class DamagedStatus(OutputError):
    """An error raised if neither status.json nor its unfinished next version can be read."""

    def __init__(self, path: Path, damage_text: str) -> None:
        self.damage_text = damage_text
        super().__init__(
            f"{path} cannot be used ({damage_text}); put back a copy of it, or choose another --output"
        )


def read_status(folder: Path) -> RunStatus:
    """Read status.json or, if it is damaged, its next version that was written but not renamed yet."""
    damage_text = ""
    for path in (folder / STATUS, temporary_path(folder / STATUS)):
        try:
            return from_json(json.loads(path.read_bytes()), path)
        except UnknownFormat:
            raise
        except (OSError, ValueError, TypeError) as error:
            damage_text = damage_text or str(error).splitlines()[0]
    raise DamagedStatus(folder / STATUS, damage_text)


def write_status(folder: Path, status: RunStatus) -> None:
    replace_file(folder / STATUS, status_text(status).encode())


def requeue_jobs(status: RunStatus, states: Container[State] = (State.RUNNING, State.PAUSED)) -> RunStatus:
    """Return the status with all jobs in one of the `states` queued again. A job that is still marked as
    running belonged to a process that was killed."""
    jobs = {
        name: replace(job, state=check_transition(job.state, State.QUEUED), reason="")
        if job.state in states
        else job
        for name, job in status.jobs.items()
    }
    return replace(status, jobs=jobs)


ON_REQUEST = "paused on request"
"""Prefix of the recorded reason of a job that was paused on a user's request."""


def requested_pauses(status: RunStatus) -> frozenset[str]:
    return frozenset(
        name
        for name, job in status.jobs.items()
        if job.state is State.PAUSED and job.reason.startswith(ON_REQUEST)
    )


UNKNOWN_COMMAND = "weftune train jobs.yaml --resume"
"""Command to resume a run that is shown for outputs of old versions, which did not record the command. The
user inserts the name of the jobs file."""
PYTHON_COMMAND = ""
"""Value that is recorded instead of a command if a run was started from Python with jobs that are in no file,
so that no command can resume it."""


def train_command(
    jobs: str | Path,
    output: str | Path | None,
    max_steps: int | None = None,
    processes: Mapping[str, object] | None = None,
) -> str:
    """Return the shell command that resumes a run that was started in Python by `weftune.train` with these
    arguments. `processes` maps options such as `gpus` to their values."""
    named = {"output": output, "max-steps": max_steps, **(processes or {})}
    given = [f"--{key} {shlex.quote(str(value))}" for key, value in named.items() if value is not None]
    return " ".join(["weftune", "train", shlex.quote(str(jobs)), *given, "--resume"])


def resume_line(
    command: str | None,
    *,
    restart: Sequence[str] = (),
    retry: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> str:
    """Return the command line that resumes a run. `command` is the command that is recorded in its status.

    Jobs of `restart` are trained from the beginning. Jobs of `retry` continue although they failed, with the
    dotted keys of `changes` set to new values.
    """
    if command == PYTHON_COMMAND:
        named = {"restart": tuple(restart), "retry": tuple(retry), "changes": dict(changes or {})}
        words = ["resume=True", *(f"{key}={value!r}" for key, value in named.items() if value)]
        return f"options=weftune.Options({', '.join(words)})"
    words = [word for name in restart for word in ("--restart", name)]
    words += [word for name in retry for word in ("--retry", name)]
    for key, value in (changes or {}).items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json_text(value)}"]
    return " ".join([command or UNKNOWN_COMMAND, *map(shlex.quote, words)])
