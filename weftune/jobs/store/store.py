"""The store of a run, which writes the run's status, the lines of metrics, and the lines about windows (a few
global batches of every job each) to the output folder. If the jobs of a run are divided among several
processes, each process has a store."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from weftune.core.files import LineFile, filtered_lines, temporary_path
from weftune.errors import OutputError
from weftune.jobs.store.job_file import JOB_FILE, rebuild_status, status_from_folder
from weftune.jobs.store.shares import SHARES, delete_shares, merge_shares, share_folder
from weftune.jobs.store.status import (
    BASE_LOSS,
    LOCK,
    METRICS,
    RUNG_LOSS,
    STATUS,
    WINDOWS,
    WORKER_LOGS,
    DamagedStatus,
    JobStatus,
    RunStatus,
    State,
    check_transition,
    lock_folder,
    read_status,
    requested_pauses,
    requeue_jobs,
    resume_line,
    write_status,
)


class JobStore(Protocol):
    """The records of a running training loop: the status of its jobs, and the lines that it writes about
    them. `Store` keeps these in an output folder, and a service keeps them in its database."""

    @property
    def output(self) -> Path: ...

    @property
    def records(self) -> Path: ...

    @property
    def rebuild_note(self) -> str:
        """Sentence about the damage if the status of the run was damaged and had to be rebuilt. Empty
        otherwise."""
        ...

    @property
    def status(self) -> RunStatus: ...

    def __contains__(self, name: str) -> bool: ...

    def job(self, name: str) -> JobStatus: ...

    def resume_line(self, *, restart: Sequence[str] = (), retry: Sequence[str] = ()) -> str: ...

    def record_totals(self, seconds: float, solo_seconds: float | None, peak_bytes: int | None) -> None: ...

    def note(self, sentence: str) -> None: ...

    def add_job(self, name: str) -> None: ...

    def move_job(self, name: str, state: State, reason: str = "") -> None: ...

    def explain_job(self, name: str, reason: str) -> None: ...

    def advance_job(self, name: str, step: int, steps: int, trained_tokens: int) -> None: ...

    def evaluate_job(
        self,
        name: str,
        eval_loss: float | None,
        best_step: int | None,
        best_loss: float | None,
        score: float | None = None,
    ) -> None: ...

    def score_base(self, name: str, loss: float) -> None: ...

    def measure_base(self, name: str, score: float) -> None: ...

    def warn_job(self, name: str, sentence: str) -> None: ...

    def add_note(self, name: str, sentence: str) -> None: ...

    def append_metrics(self, line: Mapping[str, Any]) -> None: ...

    def append_window(self, line: Mapping[str, Any]) -> None: ...

    def metric_lines(self, jobs: Collection[str]) -> Iterable[Mapping[str, Any]]:
        """Return the recorded lines of metrics of these jobs. The lines of each job are in the order of its
        steps."""
        ...

    def write_status(self) -> None: ...

    def write_status_soon(self) -> None: ...

    def is_write_due(self) -> bool: ...


def open_store(output: Path, resume: bool, command: str | None = None) -> Store:
    """Open and lock the output folder. Refuse a folder that is in use. Without `resume`, also refuse one that
    is not empty and, with `resume`, one that does not exist. `command` is the shell command that resumes this
    run."""
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output} is a file; choose another --output")
    if resume and not output.exists():
        raise OutputError(
            f"there is no folder {output}, so there is nothing to resume; check the name of the output, or "
            "leave --resume out"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(output, output)
    except OSError as error:
        raise OutputError(f"cannot write to {output}: {error.strerror}; choose another --output") from error
    try:
        status, rebuilt = _read_or_rebuild_status(output, resume, command)
        status = status if command is None else replace(status, command=command)
        store = _create_store(output, output, status, lock)
        store.rebuild_note = rebuilt
        if (output / SHARES).exists():
            store.merge_shares()
            store.set_status(requeue_jobs(store.status))
    except BaseException:
        os.close(lock)
        raise
    return store


def refuse_output(output: Path, resume: bool, command: str | None = None) -> None:
    """Raise an error if the output folder cannot be used for a run. Nothing is written."""
    nearest = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise OutputError(f"{nearest} is a file; choose another --output")
    if not os.access(nearest, os.W_OK):
        raise OutputError(f"cannot write to {nearest}; choose another --output")
    if nearest != output:
        return
    if (output / LOCK).exists():
        os.close(lock_folder(output, output))
    _read_or_rebuild_status(output, resume, command)


def open_share(output: Path, number: int) -> Store:
    """Open and lock the store of a process that trains a part of the jobs. The store, which the launcher
    creates, must exist already."""
    records = share_folder(output, number)
    lock = lock_folder(records, output)
    try:
        return _create_store(output, records, _read_or_rebuild_status(records, resume=True)[0], lock)
    except BaseException:
        os.close(lock)
        raise


def _create_store(output: Path, records: Path, status: RunStatus, lock: int) -> Store:
    """Return the store of an output folder. Jobs that an earlier process left unfinished are queued."""
    store = Store(output, records, requeue_jobs(status), lock)
    store.requested_pauses = requested_pauses(status)
    return store


def _read_or_rebuild_status(output: Path, resume: bool, command: str | None = None) -> tuple[RunStatus, str]:
    """Return the status from which a run resumes, and a sentence about the damage if the status had to be
    rebuilt."""
    left_over = {
        LOCK,
        WORKER_LOGS,
        *(temporary_path(output / name).name for name in (STATUS, METRICS, WINDOWS)),
    }
    is_empty = all(entry.name in left_over for entry in output.iterdir())
    if is_empty:
        return RunStatus(started=time.time()), ""
    holds_a_run = (output / STATUS).exists() or any(output.glob(f"*/{JOB_FILE}"))
    if not resume:
        mend = f"continue it with {resume_line(command)}, or choose another --output"
        mend = mend if holds_a_run else "it holds other things than a run; choose another --output"
        raise OutputError(f"{output} is not empty; {mend}")
    if not holds_a_run:
        raise OutputError(
            f"{output} holds no {STATUS}, so there is nothing to resume; choose another --output"
        )
    try:
        return read_status(output), ""
    except DamagedStatus as damaged:
        if output.parent.name == SHARES:
            # The status cannot be rebuilt: the folders of the jobs are not in the folder of the share.
            raise
        rebuilt = rebuild_status(output, damaged.damage_text)
        return rebuilt, rebuilt.notes[0]


STATUS_SECONDS = 1.0
"""Seconds between two writes of the status, unless an immediate write is requested."""


class Store:
    """The store of a run: its status in memory and on disk, with its lines of metrics and of windows (a few
    global batches of every job each). A store is created by `open_store`."""

    def __init__(self, output: Path, records: Path, status: RunStatus, lock: int) -> None:
        self.output = output
        """Output folder of the run, which contains the folders of its jobs."""
        self.records = records
        """Folder of this store's own files: the output folder or, if several processes each train a part of
        the jobs, a folder inside it."""
        self._run = status
        """Status of the run. Its fields for jobs and for the time of the last write are not used, since
        separate attributes hold them."""
        self._jobs = dict(status.jobs)
        self._updated = status.updated
        self.requested_pauses: frozenset[str] = frozenset()
        """Jobs that an earlier process has paused on request. These jobs are queued when the store is
        opened."""
        self.rebuild_note = ""
        """Sentence that says that the status was damaged, and how it was replaced. Empty if the status was
        intact."""
        self._lock: int | None = lock
        self._metrics = LineFile(records / METRICS)
        self._windows = LineFile(records / WINDOWS)
        self._one_writer = threading.RLock()
        """Lock that is held while lines of metrics.jsonl or windows.jsonl are appended in memory, and while
        the content of a write to disk is collected."""
        self._disk = threading.RLock()
        """Lock that is held while files are written or closed. A thread that needs both locks acquires this
        one before `_one_writer`."""
        self._written = float("-inf")
        """Monotonic time, in seconds, of the last attempt to write the status."""
        self._late: threading.Timer | None = None
        """Timer that will write the status within a second. None if no write is scheduled."""
        self._trouble: OutputError | None = None
        """Error of the last write in another thread, if it has not been raised yet."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def status(self) -> RunStatus:
        """Current status of the run. For the status of a single job, the method `job` is cheaper, since it
        does not copy all jobs."""
        return replace(self._run, updated=self._updated, jobs=dict(self._jobs))

    def set_status(self, status: RunStatus) -> None:
        """Replace the current status of the run."""
        self._run, self._jobs, self._updated = status, dict(status.jobs), status.updated

    def resume_line(self, *, restart: Sequence[str] = (), retry: Sequence[str] = ()) -> str:
        """Return the command line that resumes this run, for messages."""
        return resume_line(self._run.command, restart=restart, retry=retry)

    def set_description(self, base: str, device: str, dtype: str) -> None:
        self._run = replace(self._run, base=base, device=device, dtype=dtype)

    def record_totals(self, seconds: float, solo_seconds: float | None, peak_bytes: int | None) -> None:
        """Record the run's total seconds and peak memory so far, including those from before it was
        resumed."""
        self._run = replace(self._run, seconds=seconds, solo_seconds=solo_seconds, peak_bytes=peak_bytes)

    def note(self, sentence: str) -> None:
        if sentence not in self._run.notes:
            self._run = replace(self._run, notes=(*self._run.notes, sentence))

    def add_job(self, name: str) -> None:
        """Add a queued job. A job that is already known, or has a folder, keeps its status."""
        if name not in self:
            folder = self.output / name
            self._replace_job(
                name, status_from_folder(folder) if (folder / JOB_FILE).exists() else JobStatus()
            )

    def restart_job(self, name: str) -> None:
        """Reset a job's status and discard its metrics. The caller deletes the job's folder."""
        self._replace_job(name, JobStatus())
        with self._disk, self._one_writer:
            self._metrics.filter_lines(lambda line: line.get("job") != name)

    def pause_job(self, name: str, reason: str) -> None:
        """Mark a job as paused, whatever its state was, so that the current run does not train it."""
        self.add_job(name)
        self._replace_job(name, replace(self.job(name), state=State.PAUSED, reason=reason))

    def retry_job(self, name: str, sentence: str) -> None:
        """Queue a stopped job again at the user's request. The job keeps its progress."""
        self._replace_job(name, replace(self.job(name), state=State.QUEUED, reason=""))
        self.add_note(name, sentence)

    def move_job(self, name: str, state: State, reason: str = "") -> None:
        self._replace_job(
            name, replace(self.job(name), state=check_transition(self.job(name).state, state), reason=reason)
        )

    def explain_job(self, name: str, reason: str) -> None:
        """Record the reason why a queued job waits."""
        assert self.job(name).state is State.QUEUED
        self._replace_job(name, replace(self.job(name), reason=reason))

    def advance_job(self, name: str, step: int, steps: int, trained_tokens: int) -> None:
        self._replace_job(
            name, replace(self.job(name), step=step, steps=steps, trained_tokens=trained_tokens)
        )

    def evaluate_job(
        self,
        name: str,
        eval_loss: float | None,
        best_step: int | None,
        best_loss: float | None,
        score: float | None = None,
    ) -> None:
        """Record a job's evaluation: the validation loss and the `score` of the adapter that the job would
        keep now, and the step and loss of the best evaluation so far."""
        job = replace(
            self.job(name), eval_loss=eval_loss, best_step=best_step, best_loss=best_loss, score=score
        )
        self._replace_job(name, job)

    def score_base(self, name: str, loss: float) -> None:
        """Record the validation loss of the base without the job's adapter."""
        self._replace_job(name, replace(self.job(name), base_loss=loss))

    def measure_base(self, name: str, score: float) -> None:
        """Record the value of the job's `eval.metric` for the base without the job's adapter."""
        self._replace_job(name, replace(self.job(name), base_score=score))

    def warn_job(self, name: str, sentence: str) -> None:
        """Record a warning about the job's adapter. An empty sentence removes the warning."""
        self._replace_job(name, replace(self.job(name), warning=sentence))

    def add_note(self, name: str, sentence: str) -> None:
        if sentence not in self.job(name).notes:
            self._replace_job(name, replace(self.job(name), notes=(*self.job(name).notes, sentence)))

    def __contains__(self, name: str) -> bool:
        return name in self._jobs

    def job(self, name: str) -> JobStatus:
        return self._jobs[name]

    def _replace_job(self, name: str, job: JobStatus) -> None:
        self._jobs[name] = job

    def drop_later_metrics(
        self, cursors: Mapping[str, int], evaluated_steps: Mapping[str, int] | None = None
    ) -> None:
        """Drop the lines of metrics that each job wrote after its step in `cursors`, from which it resumes.
        The job will write them again.

        A step of -1 drops the evaluation at step 0 too. Jobs that are not in `cursors` keep all their lines.
        `evaluated_steps` maps each job to the last step that it has evaluated, which may be less than its
        step in `cursors`. Evaluations at rungs (steps where a sweep compares its trials) are kept, since a
        trial is evaluated there only once. The loss of the base without adapters is kept if the status
        contains it.
        """
        eval_cursors = cursors if evaluated_steps is None else evaluated_steps

        def is_done(line: Mapping[str, Any]) -> bool:
            job, step = line.get("job"), line.get("step")
            if not (isinstance(job, str) and job in cursors and isinstance(step, int)):
                return True
            if BASE_LOSS in line:
                return self.job(job).base_loss is not None
            if RUNG_LOSS in line:
                return True
            return step <= (eval_cursors if "eval_loss" in line else cursors)[job]

        with self._disk, self._one_writer:
            self._metrics.filter_lines(is_done)
            self._windows.filter_lines(lambda line: True)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        with self._one_writer:
            self._metrics.append(line)

    def metric_lines(self, jobs: Collection[str]) -> Iterator[Mapping[str, Any]]:
        lines = filtered_lines(self.records / METRICS, lambda line: line.get("job") in jobs)
        yield from map(json.loads, lines.splitlines())

    def append_window(self, line: Mapping[str, Any]) -> None:
        with self._one_writer:
            self._windows.append(line)

    def write_status(self) -> None:
        """Write all lines and the status to disk. Lines are written first, so that no status refers to
        missing lines.

        If the lines cannot be written, the status is written nevertheless, since a job's state matters more
        than its curve, and OutputError is raised afterwards. Appending lines never waits for the disk.
        """
        files, troubles = (self._metrics, self._windows), []
        with self._disk:
            with self._one_writer:
                self._cancel_delayed_write()
                self._written = time.monotonic()
                troubles += _collect_errors(file.flush for file in files)
                self._updated = time.time()
                status = self.status
            troubles += _collect_errors(file.sync for file in files)
            write_status(self.records, status)
        if troubles:
            raise troubles[0]

    def is_write_due(self) -> bool:
        """Return whether the next change of the status should be written immediately, which is the case if
        the last write was at least `STATUS_SECONDS` ago."""
        return self._seconds_until_write() <= 0

    def _seconds_until_write(self) -> float:
        return self._written + STATUS_SECONDS - time.monotonic()

    def write_status_soon(self) -> None:
        """Write the status in another thread within a second. Raise the error of the last such write, if it
        failed."""
        with self._one_writer:
            if self._late is None:
                self._late = threading.Timer(
                    max(0.0, self._seconds_until_write()), self._write_delayed_status
                )
                self._late.daemon = True
                self._late.start()
            trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

    def _write_delayed_status(self) -> None:
        with self._disk:
            # Otherwise it has been written meanwhile, or the store is closed.
            if self._late is threading.current_thread():
                try:
                    self.write_status()
                except OutputError as error:
                    self._trouble = error

    def _cancel_delayed_write(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def merge_shares(self) -> None:
        """Merge the stores of all shares (parts of the jobs, each trained by one process) into this store,
        and delete them."""
        # The files of lines are about to be replaced.
        with self._disk:
            self._metrics.close()
            self._windows.close()
        self.set_status(merge_shares(self.output, self.status))
        self.write_status()
        delete_shares(self.output)

    def close(self) -> None:
        with self._disk, self._one_writer:
            self._cancel_delayed_write()
            self._metrics.close()
            self._windows.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _collect_errors(write_functions: Iterable[Callable[[], None]]) -> list[OutputError]:
    """Call all functions, even if one of them fails, and return the OutputErrors that they raise."""
    found = []
    for write in write_functions:
        try:
            write()
        except OutputError as error:
            found.append(error)
    return found
