"""The command-line options `--retry JOB --set KEY=VALUE`, by which a job resumes from its last checkpoint
with changed settings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from weftune.errors import Mistake, SpecError
from weftune.jobs.spec.build import build_job
from weftune.jobs.spec.keys import SECTIONS, unknown_key
from weftune.jobs.spec.layer import (
    expand_shorthands,
    keys_from_keywords,
    merge_over_defaults,
    source_locations,
)
from weftune.jobs.spec.lines import parse_yaml
from weftune.jobs.spec.spec import JobSpec, changed_keys, resolve_job
from weftune.jobs.store.status import resume_line

CHANGEABLE = (
    "learning_rate", "schedule", "warmup", "weight_decay", "betas", "eps", "clip", "adapter.dropout",
    "early_stop", "early_stop.patience", "early_stop.min_delta", "save_every", "priority",
)  # fmt: skip
"""Keys that a started job may change: they affect its optimizer steps, but not its rows, its number of steps
or the shape of its adapter."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A user's request to resume a stopped job with changed settings, as recorded in the job's job.yaml."""

    step: int
    """Step from which the job resumed."""
    reason: str
    """Reason why the job had stopped."""
    changed: Mapping[str, tuple[Any, Any]]
    """Maps each changed dotted key to the pair of its old and new values."""
    time: float
    """Time of the request in seconds since 1970."""

    def record(self) -> dict[str, Any]:
        changed = {key: {"from": before, "to": after} for key, (before, after) in self.changed.items()}
        return {"step": self.step, "reason": self.reason, "changed": changed, "time": self.time}

    def sentence(self) -> str:
        """Return a sentence about the retry for the job's notes."""
        keys = [f"{key} {after} (was {before})" for key, (before, after) in self.changed.items()]
        what = f" with {', '.join(keys)}" if keys else ""
        return f"retried from step {self.step}{what}" + (f", after: {self.reason}" if self.reason else "")


def read_changes(
    assignments: Sequence[str], command: str | None = None, jobs: Sequence[str] = ()
) -> dict[str, Any]:
    """Read the new values of keys from `--set KEY=VALUE`. Values are parsed as in the jobs file. `command` is
    the command that resumes the run, and `jobs` are the jobs to retry."""
    changes: dict[str, Any] = {}
    mistakes: list[Mistake] = []
    for word in assignments:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not key:
            mistakes.append(Mistake(f"--set {word}", "write KEY=VALUE, such as learning_rate=1e-5"))
        elif key not in CHANGEABLE:
            restart = resume_line(command, restart=jobs or ["JOB"])
            mistakes.append(Mistake(f"--set {key}", _refusal_message(key, restart)))
        else:
            changes[key] = parse_yaml(text, f"--set {key}").values
    if mistakes:
        raise SpecError(mistakes)
    return changes


def _refusal_message(key: str, restart: str) -> str:
    section, _, last = key.rpartition(".")
    known = SECTIONS.get(section or "job", ())
    if last not in known:
        return unknown_key(section if section in SECTIONS else "job", last)
    return (
        "a started job cannot change it: it decides the job's rows, its length or its adapter's shape; "
        f"train it anew with {restart}, or change one of {', '.join(CHANGEABLE)}"
    )


def apply_changes(job: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
    """Return the job with these dotted keys changed. The new values are checked like those of a jobs file."""
    if not changes:
        return job
    below = keys_from_keywords({item.name: getattr(job, item.name) for item in fields(JobSpec)})
    nested = _nest_keys(changes)
    made, found = build_job(
        JobSpec, merge_over_defaults(below, expand_shorthands(nested, source_locations(nested))), Path.cwd()
    )
    if made is None:
        raise SpecError([Mistake(f"--set {one.location}", one.sentence) for one in found])
    return made


def apply_retries(job: JobSpec, retries: Sequence[Mapping[str, Any]]) -> JobSpec:
    """Return a job that was read from the jobs file again, with the changes that the user requested in
    earlier retries. A change is not applied if the file contains neither the old nor the new value of the
    key: the file's value is then refused later as an edit."""
    known: dict[str, list[Any]] = {}
    for retry in retries:
        for key, change in retry["changed"].items():
            known.setdefault(key, []).extend((change["from"], change["to"]))
    plain = resolve_job(job)
    return apply_changes(
        job, {key: values[-1] for key, values in known.items() if find_value(plain, key) in values}
    )


def new_retry(old_values: Mapping[str, Any], new_values: Mapping[str, Any], step: int, reason: str) -> Retry:
    """Create the record of a retry (a user's request to resume a stopped job) from the job's keys before
    (`old_values`, as in job.yaml) and after the change (`new_values`)."""
    changed = {
        key: (find_value(old_values, key), find_value(new_values, key))
        for key in changed_keys(old_values, new_values)
    }
    return Retry(step, reason, changed, time.time())


def _nest_keys(changes: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in changes.items():
        section, _, last = key.rpartition(".")
        if section:
            section_values = values.get(section)
            values[section] = {**(section_values if isinstance(section_values, dict) else {}), last: value}
        else:
            values[key] = value
    return values


def find_value(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, such as `adapter.rank`, in a job's keys and values, or None if the
    job has no such key."""
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
