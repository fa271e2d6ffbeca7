"""`job.yaml`, the settings that a job was started with, and the status of jobs rebuilt from their folders.

The file `job.yaml` ends with a checksum, and a copy of it is kept with the job's checkpoints."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from weftune.adapters.folder import CONFIG, JOB_FILE, WEIGHTS
from weftune.core.files import dump_yaml, filtered_lines, load_yaml, refuse_unknown_format, replace_file
from weftune.data.spec import DataSpec, Source
from weftune.errors import OutputError
from weftune.jobs.store.status import (
    BASE_LOSS,
    METRICS,
    STATUS,
    WINDOWS,
    JobStatus,
    RunStatus,
    State,
    job_from_json,
)

CHECKPOINTS = "checkpoints"
CHECKSUM_PREFIX = b"# crc32: "
__all__ = [
    "CHECKPOINTS",
    "JOB_FILE",
    "DamagedJobFile",
    "JobFile",
    "read_job_file",
    "recorded_data",
    "write_job_file",
]


class DamagedJobFile(OutputError):
    """An error raised if neither job.yaml nor its copy can be read."""


@dataclass(frozen=True, slots=True)
class JobFile:
    values: dict[str, Any]
    is_copy: bool
    """Whether the values come from the copy of job.yaml, because job.yaml itself is damaged or missing."""


def write_job_file(folder: Path, values: dict[str, Any]) -> None:
    text = dump_yaml(values)
    for path in (folder / JOB_FILE, folder / CHECKPOINTS / JOB_FILE):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text + CHECKSUM_PREFIX + _checksum(text) + b"\n")


def read_job_file(folder: Path) -> JobFile | None:
    """Return the settings that a job was started with, or None if it never started. Raises DamagedJobFile or
    UnknownFormat."""
    paths = folder / JOB_FILE, folder / CHECKPOINTS / JOB_FILE
    if not any(path.exists() for path in paths):
        return None
    damage_text = ""
    for path in paths:
        try:
            values = _parse_job_file(path.read_bytes())
        except (OSError, ValueError) as error:
            damage_text = damage_text or str(error)
            continue
        refuse_unknown_format(values.get("format"), path)
        return JobFile(values, is_copy=path != paths[0])
    raise DamagedJobFile(f"{paths[0]} cannot be used ({damage_text})")


def recorded_data(values: Mapping[str, Any]) -> DataSpec:
    """Return the spec of a job's data from the values of its job.yaml. Raises TypeError or AttributeError for
    unknown keys."""
    keys = values["job"].get("data") or {}
    path = keys.get("path") or ()
    sources = path if isinstance(path, str) else tuple(Source(**source) for source in path)
    return DataSpec(**{**keys, "path": sources})


def _parse_job_file(content: bytes) -> dict[str, Any]:
    """Parse a job file. Raises ValueError for content that Weftune has not written. A file from an older
    version, without a checksum, is accepted if it has the right keys."""
    text, mark, checksum = content.rpartition(CHECKSUM_PREFIX)
    if mark and checksum.strip() != _checksum(text):
        raise ValueError("it does not match its checksum")
    try:
        values = load_yaml(content.decode())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict) or not all(isinstance(values.get(key), dict) for key in ("job", "base")):
        raise ValueError("it is no job file")
    if "format" in values and not mark:
        raise ValueError("it has lost its checksum")
    return values


def _checksum(text: bytes) -> bytes:
    return f"{zlib.crc32(text):08x}".encode()


def rebuild_status(output: Path, damage_text: str) -> RunStatus:
    """Rebuild the status of a run from the jobs' folders and metrics, if status.json is damaged. Jobs that
    failed or were cancelled are recognised only if a part of a damaged status can still be read."""
    told = _ended_jobs(output / STATUS)
    folders = sorted(path.parent for path in output.glob(f"*/{JOB_FILE}") if not path.parent.is_symlink())
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for line in _read_lines(output / METRICS):
        lines.setdefault(str(line.get("job")), []).append(line)
    jobs = {
        folder.name: told.get(folder.name) or status_from_folder(folder, lines.get(folder.name, ()))
        for folder in folders
    }
    done = ", ".join(f"{name} {_state_phrase(job)}" for name, job in jobs.items()) or "no job had begun"
    note = f"{STATUS} was damaged ({damage_text}) and has been rebuilt from the folders of the jobs: {done}."
    return RunStatus(
        started=time.time(),
        seconds=sum(_finite_number(line.get("seconds")) for line in _read_lines(output / WINDOWS)),
        notes=(note,),
        jobs=jobs,
    )


def status_from_folder(folder: Path, lines: Sequence[Mapping[str, Any]] | None = None) -> JobStatus:
    """Derive the status of a job from its folder. The job is finished if its adapter exists, and otherwise
    queued. `lines` are the job's lines of metrics, if they have been read already."""
    if lines is None:
        lines = [line for line in _read_lines(folder.parent / METRICS) if line.get("job") == folder.name]
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if isinstance(line.get("eval_loss"), int | float)]
    last = max(evaluations, key=lambda line: _finite_number(line.get("step")), default={})
    base = next((line[BASE_LOSS] for line in lines if isinstance(line.get(BASE_LOSS), int | float)), None)
    values: Mapping[str, Any] = {}
    with suppress(DamagedJobFile):
        values = found.values if (found := read_job_file(folder)) else {}
    spec = values.get("job")
    keeps_best = isinstance(spec, Mapping) and spec.get("keep") == "best"
    metric = _metric_key(spec)
    ranked = sorted(
        evaluations, key=lambda line: (-_finite_number(line.get(metric)), float(line["eval_loss"]))
    )
    best = ranked[0] if ranked else {}
    kept = best if keeps_best else last
    step = max((int(_finite_number(line.get("step"))) for line in steps), default=0)
    is_finished = all((folder / name).is_file() for name in (CONFIG, WEIGHTS))
    return JobStatus(
        state=State.SUCCEEDED if is_finished and not (folder / CHECKPOINTS).exists() else State.QUEUED,
        step=step,
        steps=int(_finite_number(values.get("steps"))),
        trained_tokens=sum(int(_finite_number(line.get("tokens"))) for line in steps),
        eval_loss=kept.get("eval_loss"),
        score=kept.get(metric),
        best_step=best.get("step"),
        best_loss=best.get("eval_loss"),
        base_loss=base,
    )


def _metric_key(spec: Any) -> str:
    """Return the key under which lines of metrics contain the job's `eval.metric`, or an empty string if the
    job has no such metric."""
    held_out = spec.get("eval") if isinstance(spec, Mapping) else None
    metric = held_out.get("metric") if isinstance(held_out, Mapping) else None
    return f"eval_{metric.rpartition(':')[2]}" if isinstance(metric, str) else ""


def _ended_jobs(path: Path) -> dict[str, JobStatus]:
    """Map each job that failed or was cancelled, according to a damaged status file, to its status. Only
    these two states are trusted, since damage is unlikely to produce their names."""
    found = {}
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        for name, value in json.loads(path.read_bytes())["jobs"].items():
            with suppress(ValueError):
                job = job_from_json(value)
                if job.state in (State.FAILED, State.CANCELLED):
                    found[name] = job
    return found


def _state_phrase(job: JobStatus) -> str:
    if job.state.has_ended:
        return f"has {job.state}" if job.state is State.SUCCEEDED else f"is {job.state}"
    return "resumes from its last checkpoint" if job.step else "has not begun"


def _read_lines(path: Path) -> list[Mapping[str, Any]]:
    with suppress(OSError):
        return [json.loads(line) for line in filtered_lines(path, lambda _: True).splitlines()]
    return []


def _finite_number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
