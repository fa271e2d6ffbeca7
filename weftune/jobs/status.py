"""What status.json says of a run and of each of its jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from weftune.jobs.states import State

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    state: State = State.QUEUED
    reason: str = ""
    """Why it waits, failed or was cancelled; empty otherwise."""
    step: int = 0
    """Optimizer steps done."""
    steps: int = 0
    """Optimizer steps in all; 0 until its data are counted."""
    trained_tokens: int = 0
    best_step: int | None = None
    eval_loss: float | None = None
    """At `best_step`."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Times are seconds since 1970; `seconds` counts the time spent training, over all resumptions."""

    base: str = ""
    device: str = ""
    dtype: str = ""
    started: float = 0.0
    updated: float = 0.0
    seconds: float = 0.0
    solo_seconds: float | None = None
    """What the same jobs would have taken one after another."""
    peak_bytes: int | None = None
    notes: tuple[str, ...] = ()
    jobs: Mapping[str, JobStatus] = field(default_factory=dict)


def to_json(status: RunStatus) -> dict[str, Any]:
    whole = {item.name: getattr(status, item.name) for item in fields(RunStatus)}
    whole["jobs"] = {
        name: {item.name: getattr(job, item.name) for item in fields(JobStatus)}
        for name, job in status.jobs.items()
    }
    return {"version": VERSION, **whole}


def from_json(value: Any) -> RunStatus:
    """Raises ValueError for anything that `to_json` did not write."""
    if not isinstance(value, dict) or not isinstance(value.get("jobs"), dict):
        raise ValueError("it is no status")
    if value.get("version") != VERSION:
        raise ValueError(f"it is of version {value.get('version')}, and this Weftune reads version {VERSION}")
    jobs = {name: _job(job) for name, job in value["jobs"].items()}
    whole = _known(value, RunStatus) | {"jobs": jobs}
    return _typed(RunStatus, whole)


def _job(value: Any) -> JobStatus:
    if not isinstance(value, dict):
        raise ValueError("a job in it is no mapping")
    return _typed(JobStatus, _known(value, JobStatus) | {"state": State(str(value.get("state")))})


def _known(value: Mapping[str, Any], record: type) -> dict[str, Any]:
    names = {item.name for item in fields(record)}
    return {key: below for key, below in value.items() if key in names}


def _typed(record: type, values: dict[str, Any]) -> Any:
    """pydantic holds the types, so that a hand-edited file fails here and not in the middle of a run."""
    return _adapter_of(record).validate_python(values)


@cache
def _adapter_of(record: type) -> TypeAdapter[Any]:
    return TypeAdapter(record)
