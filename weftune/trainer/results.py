"""The files of a job's folder: `job.yaml`, which is written when the job is admitted, and the adapter, which
is written when the job has succeeded."""

from __future__ import annotations

import copy
import importlib
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from weftune.adapters.folder import CONFIG
from weftune.adapters.kind import Parameters
from weftune.adapters.registry import get_kind
from weftune.base.spec import BASE_KEYS, BaseSpec
from weftune.core.clock import Phase, phase
from weftune.core.files import FORMAT, disk_errors, json_text, set_file_modes, sync_folder
from weftune.core.shapes import ModelShape, SiteShape
from weftune.data.template import template_source
from weftune.errors import OutputError
from weftune.jobs.spec.retry import CHANGEABLE, Retry, find_value
from weftune.jobs.spec.spec import JobSpec, changed_keys, resolve_job
from weftune.jobs.store.job_file import CHECKPOINTS, JOB_FILE, DamagedJobFile, read_job_file, write_job_file
from weftune.jobs.store.status import State, resume_line
from weftune.jobs.store.store import JobStore
from weftune.plan.cost.memory import format_bytes
from weftune.report.words import count_noun
from weftune.run.training import checkpoint
from weftune.run.training.checkpoint import KEPT_CHECKPOINTS
from weftune.run.training.snapshot import Snapshot
from weftune.run.training.state import Training
from weftune.run.training.writer import find_disk_error
from weftune.trainer.engine import Engine
from weftune.trainer.job import PreparedJob
from weftune.trainer.journal import Journal

PARTIAL_FOLDER = ".adapter.partial"
"""Name of the folder, inside a job's folder, for the files of an adapter that is being written."""
RECORDED_PACKAGES = ("weftune", "torch", "transformers", "peft", "safetensors", "datasets")


def job_file_values(job: PreparedJob, base: BaseSpec, deterministic: bool = False) -> dict[str, Any]:
    """Return the content of `job.yaml`: the resolved spec, the data, and the versions of libraries.
    `deterministic` is an option of the run, not a setting of the job, and may differ when the run is
    resumed."""
    data = job.data
    return {
        "format": FORMAT,
        "job": resolve_job(job.spec),
        "steps": job.recipe.steps,
        **({"deterministic": True} if deterministic else {}),
        "base": {**base.record(), "written": base.written},
        "data": {
            "fingerprint": data.train.fingerprint,
            "samples": len(data.train),
            "evaluation_fingerprint": None if data.evaluation is None else data.evaluation.fingerprint,
            "evaluation_samples": 0 if data.evaluation is None else len(data.evaluation),
            "notes": list(data.notes),
        },
        "versions": dict(_package_versions()),
    }


def read_retries(folder: Path) -> list[dict[str, Any]]:
    """Return the retries of a started job (requests to resume it with changed settings), the earliest
    first."""
    found = read_job_file(folder)
    return list(found.values.get("retries", [])) if found else []


def add_retries(description: dict[str, Any], folder: Path, *new_retries: Retry) -> dict[str, Any]:
    """Return the content of job.yaml with all retries (requests to resume the job with changed settings):
    those that the job's folder records, followed by the new ones."""
    retries = [*read_retries(folder), *(retry.record() for retry in new_retries)]
    return {**description, "retries": retries} if retries else description


def refuse_changes(
    folder: Path,
    description: dict[str, Any],
    allowed_changes: Collection[str] = (),
    command: str | None = None,
) -> str:
    """Raise an error, which names what changed, if a job is resumed with other keys, another base or another
    dataset.

    The keys in `allowed_changes` may differ, since the user requested that. `command` is the command that
    resumes the run. Return a sentence for the user if job.yaml is damaged, otherwise "".
    """
    name = description["job"]["name"]
    restart = f"restart it with {resume_line(command, restart=[name])}"
    try:
        found = read_job_file(folder)
    except DamagedJobFile as damaged:
        if not any((folder / CHECKPOINTS).glob("step-*")):
            # It starts at its first step, so any settings will do.
            return f"{damaged}; it is written again."
        raise OutputError(
            f"{damaged}, so it is not known whether job {name} would resume with the settings it began "
            f"with; put back a copy of it, or {restart}"
        ) from damaged
    if found is None:
        return ""
    before = found.values
    changed = [
        key
        for key in changed_keys(before["job"], description["job"])
        if not _overlaps_key(key, allowed_changes)
    ]
    remedy = f"put them back, or {restart}"
    if changed and all(_overlaps_key(key, CHANGEABLE) for key in changed):
        values = {key: find_value(description["job"], key) for key in changed}
        remedy = f"put them back, or resume with {resume_line(command, retry=[name], changes=values)}"
    changed += [f"base.{key}" for key in BASE_KEYS if before["base"].get(key) != description["base"][key]]
    if not changed and before["steps"] != description["steps"]:
        changed.append("--max-steps")
    if not changed and changed_keys(before["data"], description["data"]):
        changed.append("the rows of its data")
    if changed:
        raise OutputError(
            f"Job {name} has already started and cannot resume with other settings: {', '.join(changed)} "
            f"changed; {remedy}"
        )
    if found.is_copy:
        return f"{folder / JOB_FILE} was damaged; it is written again from its copy among the checkpoints."
    return ""


def changed_settings(folder: Path, job: JobSpec, base: BaseSpec, max_steps: int | None = None) -> list[str]:
    """Return a string `KEY OLD, now NEW` for every changed setting of a finished job. The rows of the job's
    data are not compared."""
    try:
        found = read_job_file(folder)
    except DamagedJobFile:
        return []
    if found is None:
        return []
    before, now, base_now = found.values, resolve_job(job), base.record()
    keys = changed_keys(before["job"], now)
    changed = {key: (find_value(before["job"], key), find_value(now, key)) for key in keys}
    changed |= {
        f"base.{key}": (before["base"].get(key), base_now[key])
        for key in BASE_KEYS
        if before["base"].get(key) != base_now[key]
    }
    if not changed and job.steps is not None:
        steps = job.steps if max_steps is None else min(job.steps, max_steps)
        changed |= {"steps with --max-steps": (before["steps"], steps)} if before["steps"] != steps else {}
    return [
        f"{key} {_changed_value_text(old)}, now {_changed_value_text(new)}"
        for key, (old, new) in changed.items()
    ]


def _changed_value_text(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)


def _overlaps_key(key: str, keys: Collection[str]) -> bool:
    """Return whether `keys` contains a dotted key, a section that contains it, or a key inside it."""
    return any(one == key or f"{one}.".startswith(f"{key}.") or key.startswith(f"{one}.") for one in keys)


def refuse_full_disk(output: Path, jobs: Sequence[PreparedJob], shape: ModelShape) -> None:
    """Raise OutputError if adapters and checkpoints of the jobs need more bytes than are free on the disk.

    Only jobs that train have checkpoints. All checkpoints together are therefore no larger than the memory of
    this machine, however many jobs wait.
    """
    value = max(4, shape.bytes_per_value)
    adapters = sum(value * job.shape.trainable_parameters for job in jobs)
    # A checkpoint has vectors as long as the adapter: its weights, their two moments, the best weights and a
    # mean of weights.
    vectors = [3 + (job.spec.keep == "best") + job.shape.mean_weight_count for job in jobs]
    states = sum(
        value * job.shape.trainable_parameters * count for job, count in zip(jobs, vectors, strict=True)
    )
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    memory = psutil.virtual_memory().total + sum(gpu.total_memory for gpu in gpus)
    # A resumed run replaces the files that are there.
    paths = (path for job in jobs for path in (output / job.name).rglob("*") if path.is_file())
    needed = adapters + KEPT_CHECKPOINTS * min(states, memory) - sum(path.stat().st_size for path in paths)
    free = shutil.disk_usage(output).free
    if needed > free:
        raise OutputError(
            f"{output} needs {format_bytes(needed)} for adapters and checkpoints of "
            f"{count_noun(len(jobs), 'job')}, but "
            f"only {format_bytes(free)} are free there; free {format_bytes(needed - free)}, or choose "
            "another --output"
        )


class TokenizerFiles:
    """The tokenizer's files that are written into the folder of every adapter, created once per chat
    template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._files_by_template: dict[str | None, dict[Path, bytes]] = {}
        """Maps each chat template to the paths and contents of the tokenizer's files with this template. The
        key None stands for the tokenizer's own template."""
        self._one_at_a_time = threading.Lock()

    def files_with_template(self, job: PreparedJob | None) -> Mapping[Path, bytes]:
        """Return the tokenizer's files with the job's chat template or, without a job, with the tokenizer's
        own template."""
        chosen = None if job is None else job.spec.data.chat_template
        template = None if chosen is None else template_source(self._tokenizer, chosen)
        with self._one_at_a_time:
            if template not in self._files_by_template:
                self._files_by_template[template] = self._create_files(template)
            return self._files_by_template[template]

    def _create_files(self, template: str | None) -> dict[Path, bytes]:
        own = copy.deepcopy(self._tokenizer)
        if template is not None:
            own.chat_template = template
        with TemporaryDirectory(prefix="weftune-") as folder:
            own.save_pretrained(folder)
            paths = [path for path in Path(folder).rglob("*") if path.is_file()]
            return {path.relative_to(folder): path.read_bytes() for path in paths}


def prepare_result(job: PreparedJob | None, tokenizer: TokenizerFiles) -> None:
    """Import PEFT and create the tokenizer's files ahead of time, since both are slow and needed to write an
    adapter."""
    with suppress(ImportError):
        importlib.import_module("peft")
    tokenizer.files_with_template(job)


def write_result(
    folder: Path,
    job: PreparedJob,
    parameters: Parameters,
    sites: tuple[SiteShape, ...],
    base: BaseSpec,
    tokenizer: TokenizerFiles,
) -> None:
    """Write the adapter in PEFT's format, and the tokenizer with the chat template the job was trained with.

    The files are written to a temporary folder, synced and then moved to their place. The adapter's config is
    moved last: if it exists, all files exist. Raises OSError if they cannot be written, and then leaves none
    of them.
    """
    kind = get_kind(job.spec.adapter.kind)
    draft = folder / PARTIAL_FOLDER
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with disk_errors():
            kind.save(draft, job.spec.adapter, parameters, sites, base.published_name)
            for path, content in tokenizer.files_with_template(job).items():
                (draft / path).parent.mkdir(exist_ok=True)
                (draft / path).write_bytes(content)
            set_file_modes(draft)
        _move_into_place(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _move_into_place(draft_folder: Path, folder: Path) -> None:
    """Sync the files of a result to disk and move them from `draft_folder` to `folder`. The caller reports
    success and deletes the job's checkpoints only afterwards."""
    paths = sorted(draft_folder.rglob("*"), key=lambda path: path.name == CONFIG)
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in paths:
        if path.is_file():
            target = folder / path.relative_to(draft_folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    sync_folder(folder)


@cache
def _package_versions() -> Mapping[str, str]:
    found = {}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Ending:
    state: State
    reason: str = ""
    leaves_sweep: bool = False
    """Whether the job is a trial that leaves its sweep. The trial's checkpoints are then deleted, since it
    never resumes."""


class ResultWriter:
    """A writer of the jobs' files in background threads, while other jobs train."""

    def __init__(self, engine: Engine, tokenizer: Any, store: JobStore, journal: Journal) -> None:
        self._engine, self._base, self._writer = engine, engine.base, engine.executor.writer
        self._store, self._journal = store, journal
        self._tokenizer = TokenizerFiles(tokenizer)
        self._endings: dict[str, Ending] = {}
        self._pending_adapters: dict[str, Future[None]] = {}
        """Maps each detached job to the pending write of its adapter. The job ends when the write is done."""
        self._checkpoints_to_delete: list[str] = []
        """Ended jobs whose checkpoints are deleted as soon as the final states of these jobs are on disk."""

    def __contains__(self, name: object) -> bool:
        """Return whether the writer is still writing the adapter of the detached job `name`."""
        return name in self._pending_adapters

    def __iter__(self) -> Iterator[str]:
        return iter(self._pending_adapters)

    def __len__(self) -> int:
        return len(self._pending_adapters)

    def checkpoints(self, name: str) -> Path:
        return self._store.output / name / CHECKPOINTS

    # -- admission ---------------------------------------------------------------------------------------

    def write_job_file_ahead(self, job: PreparedJob) -> Future[None] | None:
        """Begin to write the file job.yaml of a job while other jobs are prepared, since writing thousands of
        small files is slow. Return None if the job has checkpoints, since these are inspected first."""
        if self.checkpoints(job.name).exists():
            return None
        return self._writer.run(job.name, partial(self.write_job_file, job))

    def write_job_file(self, job: PreparedJob) -> None:
        folder = self._store.output / job.name
        described = job_file_values(job, self._base.spec, self._engine.deterministic)
        write_job_file(folder, add_retries(described, folder))

    def prepare(self, job: PreparedJob, snapshot_bytes: int) -> None:
        """Begin to prepare, in a background thread, what writing a job's adapter and checkpoints needs, such
        as host memory for `snapshot_bytes` bytes."""
        self._writer.run(job.name, partial(self._prepare, job, snapshot_bytes))

    def _prepare(self, job: PreparedJob, snapshot_bytes: int) -> None:
        """Prepare the files of a job in a background thread. Errors are ignored, since the same errors occur
        again when the files are written."""
        with suppress(Exception):
            prepare_result(job, self._tokenizer)
            self._writer.snapshots.reserve(snapshot_bytes)

    # -- endings -----------------------------------------------------------------------------------------

    @phase(Phase.EXPORT)
    def deliver(self, job: PreparedJob, training: Training, ending: Ending) -> None:
        """Begin to write the adapter of a finished job in a background thread. A checkpoint of the job that
        is still queued is cancelled."""
        self._writer.forget(training.job)
        snapshot = self._writer.snapshots.take_snapshot(training)
        self._endings[training.job] = ending
        self._pending_adapters[training.job] = self._writer.write(snapshot, partial(self._write_adapter, job))

    def _write_adapter(self, job: PreparedJob, snapshot: Snapshot) -> None:
        """Write the adapter of a job. The method is called in a background thread."""
        vectors = snapshot.tensors()
        keeps_best = job.spec.keep == "best" and "best" in vectors
        parameters = snapshot.layout.parameter_views(vectors["best" if keeps_best else "master"])
        folder, base = self._store.output / job.name, self._base
        try:
            write_result(folder, job, parameters, base.whole_sites, base.spec, self._tokenizer)
        except OSError:
            with suppress(OSError):
                # Its last step was not saved, since the adapter was to follow at once.
                checkpoint.write(self.checkpoints(job.name), snapshot)
            raise

    def write_snapshot(self, job: PreparedJob, snapshot: Snapshot, folder: Path) -> Future[None]:
        """Begin to write the current adapter of a job, which continues to train, to a folder of its own."""

        def write(snapshot: Snapshot) -> None:
            parameters = snapshot.layout.parameter_views(snapshot.tensors()["master"])
            folder.mkdir(parents=True, exist_ok=True)
            write_result(folder, job, parameters, self._base.whole_sites, self._base.spec, self._tokenizer)

        return self._writer.write(snapshot, write)

    def drop_job_checkpoints(self, name: str) -> None:
        self._checkpoints_to_delete.append(name)

    def record_finished_writes(self) -> None:
        """Record the final states of jobs whose adapters have been written, or could not be written, since
        the last call."""
        # Only the first is checked, since they mostly end in the order of writing: thousands may wait.
        while self._pending_adapters and next(iter(self._pending_adapters.values())).done():
            name = next(iter(self._pending_adapters))
            ending = self._endings.pop(name)
            if (trouble := find_disk_error(self._pending_adapters.pop(name))) is not None:
                reason = f"its adapter cannot be written: {trouble}; {self.resume_advice(name)}"
                ending = Ending(State.PAUSED, reason)
            self._journal.set_state(name, ending.state, ending.reason)
            if ending.state is State.SUCCEEDED:
                self.drop_job_checkpoints(name)
        if self._checkpoints_to_delete and (self._store.is_write_due() or not self._pending_adapters):
            # Deleted once the states are on disk: one write for all of them.
            if self._journal.flush():
                for name in self._checkpoints_to_delete:
                    self._writer.run(name, partial(shutil.rmtree, self.checkpoints(name), ignore_errors=True))
            self._checkpoints_to_delete.clear()

    def wait_for_next_write(self) -> None:
        wait([next(iter(self._pending_adapters.values()))])

    def resume_advice(self, name: str) -> str:
        progress = checkpoint.newest_progress(self.checkpoints(name))
        step = progress.step if progress else 0
        return f"correct that, and resume from step {step} with {self._store.resume_line()}"
