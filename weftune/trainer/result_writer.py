"""The files of jobs: job files when jobs are admitted, adapters when they are finished, and checkpoints that
are no longer needed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weftune.core.clock import Phase, phase
from weftune.jobs.store.status import State
from weftune.jobs.store.store import Store
from weftune.run.training import checkpoint
from weftune.run.training.snapshot import Snapshot
from weftune.run.training.state import Training
from weftune.run.training.writer import disk_error
from weftune.trainer.engine import Engine
from weftune.trainer.job import PreparedJob
from weftune.trainer.journal import Journal
from weftune.trainer.results import (
    CHECKPOINTS,
    TokenizerFiles,
    describe,
    prepare_result,
    with_retries,
    write_job_file,
    write_result,
)


@dataclass(frozen=True, slots=True)
class Ending:
    state: State
    reason: str = ""
    leaves_sweep: bool = False
    """Whether a trial leaves its sweep: its checkpoints are deleted, since nothing resumes from them."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A job that has been detached and whose adapter is being written; it has succeeded when that is done."""

    ending: Ending
    written: Future[None]


class ResultWriter:
    """Files that the writer's threads write while other jobs train."""

    def __init__(self, engine: Engine, tokenizer: Any, store: Store, journal: Journal) -> None:
        self._engine, self._base, self._writer = engine, engine.base, engine.executor.writer
        self._store, self._journal = store, journal
        self._tokenizer = TokenizerFiles(tokenizer)
        self._begun: dict[str, Delivery] = {}
        self._spent: list[str] = []
        """Jobs that no longer need their checkpoints, which are deleted when the status says how the jobs
        ended."""

    def __contains__(self, name: object) -> bool:
        """Whether the adapter of a detached job is still being written."""
        return name in self._begun

    def __iter__(self) -> Iterator[str]:
        return iter(self._begun)

    def __len__(self) -> int:
        return len(self._begun)

    def checkpoints(self, name: str) -> Path:
        return self._store.output / name / CHECKPOINTS

    # -- admission ---------------------------------------------------------------------------------------

    def write_job_file_ahead(self, job: PreparedJob) -> Future[None] | None:
        """Begin to write a job file while other jobs are prepared: with thousands of small files, most of the
        time is spent waiting for the disk. None for a job that has checkpoints, which are inspected first."""
        if self.checkpoints(job.name).exists():
            return None
        return self._writer.run(job.name, partial(self.write_job_file, job))

    def write_job_file(self, job: PreparedJob) -> None:
        folder = self._store.output / job.name
        described = describe(job, self._base.spec, self._engine.deterministic)
        write_job_file(folder, with_retries(described, folder))

    def prepare(self, job: PreparedJob, snapshot_bytes: int) -> None:
        """Prepare ahead of time what can be prepared of a job's adapter and checkpoints."""
        self._writer.run(job.name, partial(self._prepare, job, snapshot_bytes))

    def _prepare(self, job: PreparedJob, snapshot_bytes: int) -> None:
        """Prepare in the writer's thread. An error here occurs again where it matters."""
        with suppress(Exception):
            prepare_result(job, self._tokenizer)
            self._writer.snapshots.reserve(snapshot_bytes)

    # -- endings -----------------------------------------------------------------------------------------

    @phase(Phase.EXPORT)
    def deliver(self, job: PreparedJob, training: Training, ending: Ending) -> None:
        """Begin to write the adapter of a finished job. A checkpoint that is not begun is dropped: it would
        be deleted at once."""
        self._writer.forget(training.job)
        snapshot = self._writer.snapshots.take(training)
        written = self._writer.write(snapshot, partial(self._write_adapter, job))
        self._begun[training.job] = Delivery(ending, written)

    def _write_adapter(self, job: PreparedJob, snapshot: Snapshot) -> None:
        """Write the adapter in the writer's thread."""
        vectors = snapshot.tensors()
        keeps_best = job.spec.keep == "best" and "best" in vectors
        parameters = snapshot.layout.views(vectors["best" if keeps_best else "master"])
        folder, base = self._store.output / job.name, self._base
        try:
            write_result(folder, job, parameters, base.whole_sites, base.spec, self._tokenizer)
        except OSError:
            with suppress(OSError):
                # Its last step was not saved, since the adapter was to follow at once.
                checkpoint.write(self.checkpoints(job.name), snapshot)
            raise

    def drop_checkpoints_of(self, name: str) -> None:
        self._spent.append(name)

    def hear(self) -> None:
        """Record the ends of jobs whose adapters have been written since the last call, or could not be."""
        # Only the first is checked, since they mostly end in the order of writing: thousands may wait.
        while self._begun and next(iter(self._begun.values())).written.done():
            name = next(iter(self._begun))
            self._record(name, self._begun.pop(name))
        if self._spent and (self._store.is_due() or not self._begun):
            self._drop_checkpoints()

    def wait_for_one(self) -> None:
        wait([next(iter(self._begun.values())).written])

    def _record(self, name: str, delivery: Delivery) -> None:
        ending = delivery.ending
        if (trouble := disk_error(delivery.written)) is not None:
            ending = Ending(State.PAUSED, f"its adapter cannot be written: {trouble}; {self.remedy(name)}")
        self._journal.move(name, ending.state, ending.reason)
        if ending.state is State.SUCCEEDED:
            self.drop_checkpoints_of(name)

    def remedy(self, name: str) -> str:
        progress = checkpoint.newest_progress(self.checkpoints(name))
        step = progress.step if progress else 0
        return f"mend that, and go on from step {step} with {self._store.resume_line()}"

    def _drop_checkpoints(self) -> None:
        """Delete the checkpoints of jobs that have ended, once their states are on disk: one write for all of
        them."""
        if self._journal.settle():
            for name in self._spent:
                self._writer.run(name, partial(shutil.rmtree, self.checkpoints(name), ignore_errors=True))
        self._spent.clear()
