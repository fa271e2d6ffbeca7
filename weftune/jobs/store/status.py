"""The records of status.json: a run, and each of its jobs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from weftune.core.files import FORMAT, json_text, refuse_unknown_format
from weftune.jobs.store.states import State

CHECKSUM = "checksum"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    state: State = State.QUEUED
    reason: str = ""
    """Reason why the job waits, is paused, failed or was cancelled; empty otherwise."""
    step: int = 0
    """Optimizer steps done."""
    steps: int = 0
    """Total number of optimizer steps; 0 until the data are counted."""
    trained_tokens: int = 0
    eval_loss: float | None = None
    """Validation loss of the adapter that is kept: at `best_step` with `keep: best`, else at the last
    evaluation."""
    best_step: int | None = None
    best_loss: float | None = None
    """Validation loss at `best_step`."""
    base_loss: float | None = None
    """Validation loss of the base without any adapter."""
    warning: str = ""
    """Problem with the adapter of a job that trained to its end; empty if there is none."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run. Times are seconds since 1970; `seconds` is the time spent training, over all
    resumptions."""

    base: str = ""
    device: str = ""
    dtype: str = ""
    started: float = 0.0
    updated: float = 0.0
    seconds: float = 0.0
    solo_seconds: float | None = None
    """Predicted seconds of the same jobs one after another."""
    peak_bytes: int | None = None
    command: str | None = None
    """Shell command that resumes the run. Empty if the jobs are held by a Python program; None if it is
    unknown."""
    notes: tuple[str, ...] = ()
    jobs: Mapping[str, JobStatus] = field(default_factory=dict)


def to_json(status: RunStatus) -> dict[str, Any]:
    whole = {item.name: getattr(status, item.name) for item in fields(RunStatus)}
    whole["jobs"] = {
        name: {item.name: getattr(job, item.name) for item in fields(JobStatus)}
        for name, job in status.jobs.items()
    }
    whole = {"format": FORMAT, **whole}
    return {**whole, CHECKSUM: _checksum(whole)}


def status_text(status: RunStatus) -> str:
    """Return `to_json` as the text of status.json. Jobs that have not changed since the last call are not
    serialised again: with thousands of jobs that takes most of the time."""
    whole = {item.name: getattr(status, item.name) for item in fields(RunStatus) if item.name != "jobs"}
    whole = {"format": FORMAT, **whole}
    names = [json_text(name) for name in status.jobs]
    texts = [_job_texts(job) for job in status.jobs.values()]
    compact = ", ".join(f"{name}: {text.compact}" for name, text in zip(names, texts, strict=True))
    checksum = _text_checksum(f'{json_text(whole)[:-1]}, "jobs": {{{compact}}}}}')
    indented = ",\n".join(f"    {name}: {text.indented}" for name, text in zip(names, texts, strict=True))
    jobs = f"{{\n{indented}\n  }}" if names else "{}"
    head = json_text(whole, indent=2).removesuffix("\n}")
    return f'{head},\n  "jobs": {jobs},\n  "{CHECKSUM}": {json_text(checksum)}\n}}\n'


@dataclass(frozen=True, slots=True)
class _JobTexts:
    compact: str
    """Text of which the checksum is computed."""
    indented: str
    """Text that is written to the file."""


_JOB_FIELDS = tuple(item.name for item in fields(JobStatus))


@lru_cache(maxsize=1 << 15)
def _job_texts(job: JobStatus) -> _JobTexts:
    values = {name: getattr(job, name) for name in _JOB_FIELDS}
    if job.notes:
        return _JobTexts(json_text(values), json_text(values, indent=2).replace("\n", "\n    "))
    # Same text as in the line above, which takes ten times as long: a thousand jobs change in a second.
    lines = [f'"{name}": {json_text(value)}' for name, value in values.items()]
    return _JobTexts(f"{{{', '.join(lines)}}}", "{\n      " + ",\n      ".join(lines) + "\n    }")


def from_json(value: Any, path: Path) -> RunStatus:
    """Parse a status. Raises ValueError for anything that `to_json` did not write, and UnknownFormat for a
    status of a later version."""
    if not isinstance(value, dict):
        raise ValueError("it is no status")
    # Checked before the format: a flipped bit there is damage, not a newer Weftune.
    if CHECKSUM in value and value[CHECKSUM] != _checksum(value):
        raise ValueError("it does not match its checksum")
    refuse_unknown_format(value.get("format"), path)
    if not isinstance(value.get("jobs"), dict):
        raise ValueError("it is no status")
    jobs = {name: job_from_json(job) for name, job in value["jobs"].items()}
    whole = _known(value, RunStatus) | {"jobs": jobs}
    return _typed(RunStatus, whole)


def _checksum(whole: Mapping[str, Any]) -> str:
    """Return the checksum of all other keys. A bit that a disk has flipped often leaves valid JSON with
    another number in it."""
    rest = {key: value for key, value in whole.items() if key != CHECKSUM}
    return _text_checksum(json_text(rest))


def _text_checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def job_from_json(value: Any) -> JobStatus:
    if not isinstance(value, dict):
        raise ValueError("a job in it is no mapping")
    return _typed(JobStatus, _known(value, JobStatus) | {"state": State(str(value.get("state")))})


def _known(value: Mapping[str, Any], record: type) -> dict[str, Any]:
    names = {item.name for item in fields(record)}
    return {key: below for key, below in value.items() if key in names}


def _typed(record: type, values: dict[str, Any]) -> Any:
    """Check the types with pydantic, so that a hand-edited file fails here and not in the middle of a run."""
    return _adapter_of(record).validate_python(values)


@cache
def _adapter_of(record: type) -> TypeAdapter[Any]:
    return TypeAdapter(record)
