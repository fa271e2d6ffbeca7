"""The files of a job's folder: `job.yaml` at its start, the adapter with its tokenizer at its success."""

from __future__ import annotations

import copy
import importlib
import os
import shutil
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weftune.adapters.folder import CONFIG
from weftune.adapters.kind import Parameters
from weftune.adapters.registry import kind_named
from weftune.base.spec import BaseSpec
from weftune.core.files import FORMAT, disk_errors, json_text, ordinary_modes, sync_folder
from weftune.core.shapes import SiteShape
from weftune.data.template import template_source
from weftune.errors import OutputError
from weftune.jobs.spec.retry import CHANGEABLE, Retry, value_at
from weftune.jobs.spec.spec import JobSpec, changed_keys, resolved
from weftune.jobs.store.job_file import CHECKPOINTS, JOB_FILE, DamagedJobFile, read_job_file, write_job_file
from weftune.jobs.store.status import resume_line
from weftune.trainer.job import PreparedJob

__all__ = [
    "CHECKPOINTS",
    "JOB_FILE",
    "TokenizerFiles",
    "describe",
    "finished_changes",
    "prepare_result",
    "refuse_changes",
    "write_job_file",
    "write_result",
]

PARTIAL = ".adapter.partial"
"""Folder inside a job's folder for an adapter that is being written."""
BASE_KEYS = ("model", "dtype", "revision", "quantize")
"""Keys that identify a base; the path as the user wrote it does not."""
NAMED_PACKAGES = ("weftune", "torch", "transformers", "peft", "safetensors", "datasets")


def describe(job: PreparedJob, base: BaseSpec, deterministic: bool = False) -> dict[str, Any]:
    """Return the content of `job.yaml`: the resolved spec, the data, and the versions of libraries.
    `deterministic` describes how the run was last resumed: it is no setting of the job and may differ next
    time."""
    data = job.data
    return {
        "format": FORMAT,
        "job": resolved(job.spec),
        "steps": job.recipe.steps,
        **({"deterministic": True} if deterministic else {}),
        "base": {name: getattr(base, name) for name in (*BASE_KEYS, "written")},
        "data": {
            "fingerprint": data.train.fingerprint,
            "samples": len(data.train),
            "evaluation_fingerprint": None if data.evaluation is None else data.evaluation.fingerprint,
            "evaluation_samples": 0 if data.evaluation is None else len(data.evaluation),
            "notes": list(data.notes),
        },
        "versions": dict(_versions()),
    }


def retries_of(folder: Path) -> list[dict[str, Any]]:
    """Return the retries of a started job, the earliest first."""
    found = read_job_file(folder)
    return list(found.values.get("retries", [])) if found else []


def with_retries(description: dict[str, Any], folder: Path, *more: Retry) -> dict[str, Any]:
    """Return a description with the retries that its job's folder records, and `more` of them."""
    retries = [*retries_of(folder), *(retry.record() for retry in more)]
    return {**description, "retries": retries} if retries else description


def refuse_changes(
    folder: Path, description: dict[str, Any], allowed: Collection[str] = (), command: str | None = None
) -> str:
    """Refuse to resume a job whose keys, base or dataset have changed, naming what changed.

    Keys that are `allowed` may differ: the user has named them. `command` is the command that resumes the
    run. Return a sentence about a damaged file, or "".
    """
    name = description["job"]["name"]
    anew = f"train it anew with {resume_line(command, restart=[name])}"
    try:
        found = read_job_file(folder)
    except DamagedJobFile as damaged:
        if not any((folder / CHECKPOINTS).glob("step-*")):
            # It starts at its first step, so any settings will do.
            return f"{damaged}; it is written anew."
        raise OutputError(
            f"{damaged}, so it cannot be known whether job {name} would go on with the settings it began "
            f"with; put back a copy of it, or {anew}"
        ) from damaged
    if found is None:
        return ""
    before = found.values
    changed = [key for key in changed_keys(before["job"], description["job"]) if not _is_in(key, allowed)]
    remedy = f"put them back, or {anew}"
    if changed and all(_is_in(key, CHANGEABLE) for key in changed):
        values = {key: value_at(description["job"], key) for key in changed}
        remedy = f"put them back, or go on with {resume_line(command, retry=[name], changes=values)}"
    changed += [f"base.{key}" for key in BASE_KEYS if before["base"].get(key) != description["base"][key]]
    if not changed and before["steps"] != description["steps"]:
        changed.append("--max-steps")
    if not changed and changed_keys(before["data"], description["data"]):
        changed.append("the rows of its data")
    if changed:
        raise OutputError(
            f"Job {name} has already started and cannot go on with other settings: {', '.join(changed)} "
            f"changed; {remedy}"
        )
    if found.is_copy:
        return f"{folder / JOB_FILE} was damaged; it is written again from its copy among the checkpoints."
    return ""


def finished_changes(folder: Path, job: JobSpec, base: BaseSpec, max_steps: int | None = None) -> list[str]:
    """Return `KEY OLD, now NEW` for every setting in which a finished job differs from what it was trained
    with.

    Its rows are not compared: they would have to be tokenised for that.
    """
    try:
        found = read_job_file(folder)
    except DamagedJobFile:
        return []
    if found is None:
        return []
    before, now = found.values, resolved(job)
    keys = changed_keys(before["job"], now)
    changed = {key: (value_at(before["job"], key), value_at(now, key)) for key in keys}
    changed |= {
        f"base.{key}": (before["base"].get(key), getattr(base, key))
        for key in BASE_KEYS
        if before["base"].get(key) != getattr(base, key)
    }
    if not changed and job.steps is not None:
        steps = job.steps if max_steps is None else min(job.steps, max_steps)
        changed |= {"steps with --max-steps": (before["steps"], steps)} if before["steps"] != steps else {}
    return [f"{key} {_value_text(old)}, now {_value_text(new)}" for key, (old, new) in changed.items()]


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)


def _is_in(key: str, named: Collection[str]) -> bool:
    """Whether a dotted key, a section that holds it or a key inside it is among `named`."""
    return any(one == key or f"{one}.".startswith(f"{key}.") or key.startswith(f"{one}.") for one in named)


class TokenizerFiles:
    """The files of the tokenizer that are written beside every adapter, created once per chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._made: dict[str | None, dict[Path, bytes]] = {}
        """Chat template (None for the tokenizer's own) → path in a job's folder → content."""
        self._one_at_a_time = threading.Lock()

    def of(self, job: PreparedJob | None) -> Mapping[Path, bytes]:
        """Return the files with the chat template that the job was trained with; without a job, with the
        tokenizer's own."""
        chosen = None if job is None else job.spec.data.chat_template
        template = None if chosen is None else template_source(self._tokenizer, chosen)
        with self._one_at_a_time:
            if template not in self._made:
                self._made[template] = self._make(template)
            return self._made[template]

    def _make(self, template: str | None) -> dict[Path, bytes]:
        own = copy.deepcopy(self._tokenizer)
        if template is not None:
            own.chat_template = template
        with TemporaryDirectory(prefix="weftune-") as folder:
            own.save_pretrained(folder)
            paths = [path for path in Path(folder).rglob("*") if path.is_file()]
            return {path.relative_to(folder): path.read_bytes() for path in paths}


def prepare_result(job: PreparedJob | None, tokenizer: TokenizerFiles) -> None:
    """Do ahead of time what takes long and does not depend on the weights."""
    with suppress(ImportError):
        importlib.import_module("peft")
    tokenizer.of(job)


def write_result(
    folder: Path,
    job: PreparedJob,
    parameters: Parameters,
    sites: tuple[SiteShape, ...],
    base: BaseSpec,
    tokenizer: TokenizerFiles,
) -> None:
    """Write the adapter in PEFT's format, and the tokenizer with the chat template the job was trained with.

    The files are written aside and synced before they are moved to their place, the config last: if that
    exists, all of them do. Raises OSError if the disk does not take them, and leaves none of them.
    """
    kind = kind_named(job.spec.adapter.kind)
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with disk_errors():
            kind.save(partial, job.spec.adapter, parameters, sites, base.published_name)
            for path, content in tokenizer.of(job).items():
                (partial / path).parent.mkdir(exist_ok=True)
                (partial / path).write_bytes(content)
            ordinary_modes(partial)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, folder: Path) -> None:
    """Sync the result to disk before the status reports it and its checkpoints are deleted."""
    paths = sorted(partial.rglob("*"), key=lambda path: path.name == CONFIG)
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in paths:
        if path.is_file():
            target = folder / path.relative_to(partial)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    sync_folder(folder)


@cache
def _versions() -> Mapping[str, str]:
    found = {}
    for package in NAMED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
