"""The status rebuilt from the jobs' folders, for a damaged status.json."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from weftune.adapters.folder import CONFIG, WEIGHTS
from weftune.core.files import kept_lines
from weftune.jobs.store.folder import BASE_LOSS, METRICS, STATUS, WINDOWS
from weftune.jobs.store.job_file import CHECKPOINTS, JOB_FILE, DamagedJobFile, read_job_file
from weftune.jobs.store.states import State
from weftune.jobs.store.status import JobStatus, RunStatus, job_from_json


def rebuilt_status(output: Path, complaint: str) -> RunStatus:
    """Rebuild the status from the folders and the lines; jobs that failed or were cancelled are known only if
    a damaged status can still be read in part."""
    told = _ended(output / STATUS)
    folders = sorted(path.parent for path in output.glob(f"*/{JOB_FILE}") if not path.parent.is_symlink())
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for line in _lines(output / METRICS):
        lines.setdefault(str(line.get("job")), []).append(line)
    jobs = {
        folder.name: told.get(folder.name) or found_job(folder, lines.get(folder.name, ()))
        for folder in folders
    }
    done = ", ".join(f"{name} {_standing(job)}" for name, job in jobs.items()) or "no job had begun"
    note = f"{STATUS} was damaged ({complaint}) and has been rebuilt from the folders of the jobs: {done}."
    return RunStatus(
        started=time.time(),
        seconds=sum(_number(line.get("seconds")) for line in _lines(output / WINDOWS)),
        notes=(note,),
        jobs=jobs,
    )


def found_job(folder: Path, lines: Sequence[Mapping[str, Any]] | None = None) -> JobStatus:
    """Return the status of a job by its folder: finished if its adapter is there, else queued to resume.
    `lines` are its metrics, if they were read already."""
    if lines is None:
        lines = [line for line in _lines(folder.parent / METRICS) if line.get("job") == folder.name]
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if isinstance(line.get("eval_loss"), int | float)]
    best = min(evaluations, key=lambda line: float(line["eval_loss"]), default={})
    last = max(evaluations, key=lambda line: _number(line.get("step")), default={})
    base = next((line[BASE_LOSS] for line in lines if isinstance(line.get(BASE_LOSS), int | float)), None)
    values = _job_values(folder)
    keeps_best = _mapping(values.get("job")).get("keep") == "best"
    made = max((int(_number(line.get("step"))) for line in steps), default=0)
    is_finished = all((folder / name).is_file() for name in (CONFIG, WEIGHTS))
    return JobStatus(
        state=State.SUCCEEDED if is_finished and not (folder / CHECKPOINTS).exists() else State.QUEUED,
        step=made,
        steps=int(_number(values.get("steps"))),
        trained_tokens=sum(int(_number(line.get("tokens"))) for line in steps),
        eval_loss=(best if keeps_best else last).get("eval_loss"),
        best_step=best.get("step"),
        best_loss=best.get("eval_loss"),
        base_loss=base,
    )


def _ended(path: Path) -> dict[str, JobStatus]:
    """Return the jobs that a damaged status still names as failed or cancelled: no flipped bit makes such a
    word."""
    found = {}
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        for name, value in json.loads(path.read_bytes())["jobs"].items():
            with suppress(ValueError):
                job = job_from_json(value)
                if job.state in (State.FAILED, State.CANCELLED):
                    found[name] = job
    return found


def _standing(job: JobStatus) -> str:
    if job.state.ended:
        return f"has {job.state}" if job.state is State.SUCCEEDED else f"is {job.state}"
    return "goes on from its last checkpoint" if job.step else "has not begun"


def _job_values(folder: Path) -> Mapping[str, Any]:
    """Return the content of the job's file; empty if it cannot be read."""
    try:
        found = read_job_file(folder)
    except DamagedJobFile:
        return {}
    return found.values if found else {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _lines(path: Path) -> list[Mapping[str, Any]]:
    with suppress(OSError):
        return [json.loads(line) for line in kept_lines(path, lambda _: True).splitlines()]
    return []


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
