"""The training loop's records of its jobs, in the database of a service. All changes are collected in memory
and written in one transaction per flush, so that the database is consistent after a crash."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from weftune.errors import OutputError
from weftune.jobs.store.status import BASE_LOSS, RUNG_LOSS, JobStatus, RunStatus, State, check_transition
from weftune.plan.program.program import MicrobatchPlan
from weftune.report.words import loss_text
from weftune.service.ids import AdapterName, new_id
from weftune.service.queue_order import DAY_SECONDS, QUEUE, decay_usage
from weftune.service.settings import EPOCHS, ServiceSettings, adapter_folder
from weftune.service.store.database import StoreUnavailable
from weftune.service.store.records import (
    Changes,
    CheckpointRow,
    EventRow,
    JobRow,
    LeaseLost,
    Measured,
    Receipt,
    TrainingStore,
    Transition,
    WindowRow,
)
from weftune.service.store.requests import Submission

log = logging.getLogger(__name__)

JOB_ID = re.compile(r"\bftjob-[0-9a-f]+\b")
FLUSH_SECONDS = 1.0
"""Minimum seconds between two flushes (writes of all changes to the database), unless an immediate flush is
requested."""
WINDOW_PASSES = 400
"""Maximum number of passes over the base model that are recorded per window (a few global batches of every
job). Later passes of the window are not recorded."""
RESUMPTION = "POST /v1/fine_tuning/jobs/ID/resume"
ANNOUNCED = "announced"
"""Key in the data of a job's events for a boolean that says whether vLLM has loaded the job's adapter."""
METRIC_NAMES = {
    "loss": "train_loss",
    "token_accuracy": "train_mean_token_accuracy",
    "eval_loss": "valid_loss",
    "eval_token_accuracy": "valid_mean_token_accuracy",
    BASE_LOSS: "base_valid_loss",
    "base_token_accuracy": "base_valid_mean_token_accuracy",
}
"""Maps keys in a job's lines of metrics to the names that OpenAI's API has for them. A key that is missing
here is used unchanged."""
MEASURED = {
    "train": ("training", "train_loss"),
    "eval": ("validation", "valid_loss"),
    "base": ("validation of the base,", "base_valid_loss"),
    "rung": ("evaluation at a rung,", RUNG_LOSS),
}
"""Maps each kind of loss, such as `eval`, to a pair: its name in messages and its key in metrics."""


class JobNotes:
    """Data about a job that the training process keeps in memory only, such as waiting times and the last
    metrics."""

    def __init__(self, submission: Submission, current_time: float) -> None:
        self.submission = submission
        self.receipt = Receipt(job=submission.id, tenant=submission.tenant)
        self.suffix = submission.suffix or ""
        self.earlier_wait_seconds = max(0.0, current_time - submission.created_at)
        """Total seconds for which the job waited for admission before its current wait began."""
        self.waits_since: float | None = current_time
        """Time, in seconds since 1970, at which the job began to wait for admission. None while it trains."""
        self.last_admission: tuple[float, int] = (current_time, 0)
        """Time, in seconds since 1970, and step of the job's last admission, from which its training speed is
        measured."""
        self.metrics: dict[str, Any] = {}
        """Maps each metric of the job to its last value."""

    def waited_seconds(self, current_time: float) -> float:
        return self.earlier_wait_seconds + (
            0.0 if self.waits_since is None else current_time - self.waits_since
        )


class ServiceJobStore:
    """The job store of a service's training process, which keeps its jobs in the database (`TrainingStore`).

    Jobs that have ended are removed from memory once they are written, and read from the database when
    needed. `end_process` is called if another process has taken the lease (the exclusive right to write), and
    must not return.
    """

    def __init__(
        self, settings: ServiceSettings, training: TrainingStore, end_process: Callable[[LeaseLost], None]
    ) -> None:
        self.settings, self._training, self._end_process = settings, training, end_process
        self.output = settings.jobs.absolute()
        self.records = settings.store.absolute()
        self.rebuild_note = ""
        self.is_stopping: Callable[[], bool] = lambda: False
        """Function that returns whether the service is being stopped. Jobs that end their training for this
        reason are queued again, not paused."""
        self.notes: dict[str, JobNotes] = {}
        """Maps each job that has not ended to data that are kept in memory only, such as waiting times."""
        self._jobs: dict[str, JobRow] = {}
        self._ended_trials: dict[str, JobRow] = {}
        """Maps ended trials of unfinished sweeps to their records. They are kept in memory because sweeps
        read them between any two windows (runs of a few global batches of every job)."""
        self._kept_trials: set[str] = set()
        """Trials (jobs of a sweep) whose records stay in memory after they have ended, because their sweep
        has not."""
        self._unrecorded_trials: set[str] = set()
        """Trials of unfinished sweeps that have no row in the database yet, so that it need not be queried
        for them."""
        self._changed_rows: dict[str, JobRow] = {}
        self._transitions: list[Transition] = []
        self._events: list[EventRow] = []
        self._checkpoints: list[CheckpointRow] = []
        self._receipts: dict[str, Receipt] = {}
        self._usage: dict[tuple[str, int], int] = {}
        self.describe_device: Callable[[], Mapping[str, Any]] = dict
        """Function that returns values to record with every window (a few global batches of every job): the
        device's name, its memory in bytes by purpose, and the inputs with which the queue was ranked."""
        self.announce: Callable[[JobRow], object] = lambda row: None
        """Function that announces the finished adapter of a job that has succeeded, such as to vLLM. By
        default, it does nothing."""
        self.withdraw: Callable[[str, str], object] = lambda name, model: None
        """Function that withdraws a deleted adapter, such as from vLLM, given the job and the adapter's name.
        By default, it does nothing."""
        self._windows: list[WindowRow] = []
        self._passes: list[dict[str, Any]] = []
        """Records of the passes over the base model in the current window (the few global batches of every
        job that are run together)."""
        self._cursors: dict[str, int] = {}
        self._recent_usage: dict[str, tuple[float, float]] = {}
        """Maps each tenant to a pair: an exponentially decayed count of trained tokens, and the time of that
        count in seconds since 1970."""
        self._lock = threading.RLock()
        self._written = float("-inf")

    # -- jobs --------------------------------------------------------------------------------------------

    def admit_submission(self, submission: Submission, row: JobRow | None = None) -> None:
        """Start recording a job. `row` is its record if an earlier process left the job unfinished, or None
        for a new job."""
        self.notes[submission.id] = JobNotes(submission, time.time())
        self._unrecorded_trials.discard(submission.id)
        if row is not None:
            self._jobs[submission.id] = row
            if (receipt := self._training.receipt(submission.id)) is not None:
                self.notes[submission.id].receipt = receipt
            return
        row = JobRow(id=submission.id, tenant=submission.tenant, created_at=submission.created_at)
        row = replace(row, priority=int(submission.job.get("priority", 0)))
        self._set_row(row)
        self._transitions.append(Transition(job=row.id, at=time.time(), old=None, new=State.QUEUED))
        self._add_event(row.id, f"Created fine-tuning job: {row.id}")

    def row(self, name: str) -> JobRow | None:
        """Return the record of a job, even if the job has ended. None if the training process has not
        recorded it."""
        if name in self._unrecorded_trials:
            return None
        return self._jobs.get(name) or self._ended_trials.get(name) or self._training.job(name)

    def keep_ended(self, trials: Collection[str]) -> None:
        """Keep the records of these trials of a sweep in memory after the trials have ended, until
        `forget_ended` is called."""
        others = {name for name in trials if name not in self._jobs}
        rows = self._training.jobs_by_id(others)
        self._kept_trials |= set(trials)
        self._ended_trials |= {name: row for name, row in rows.items() if row.state.has_ended}
        self._unrecorded_trials |= others - rows.keys()

    def forget_ended(self, trials: Collection[str]) -> None:
        self._kept_trials -= set(trials)
        self._unrecorded_trials -= set(trials)
        for name in trials:
            self._ended_trials.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return self.row(name) is not None

    def job(self, name: str) -> JobStatus:
        row = self.row(name)
        assert row is not None, f"{name} is no job of this service"
        return row.status

    def add_job(self, name: str) -> None:
        assert name in self._jobs, f"{name} has been submitted"

    def move_job(self, name: str, state: State, reason: str = "") -> None:
        row, now, reason = self._jobs[name], time.time(), self._hide_other_tenants(name, reason)
        if state is State.PAUSED and self.is_stopping():
            # It waits for the next training process, and nobody has to resume it.
            state, reason = State.QUEUED, ""
        if state is row.state:
            return
        check_transition(row.state, state)
        self._transitions.append(Transition(job=name, at=now, old=row.state, new=state, reason=reason))
        self._add_transition_event(row, state, reason)
        status = replace(row.status, state=state, reason=reason)
        changes: dict[str, Any] = {"status": status, "estimated_finish": None}
        notes = self.notes[name]
        if state is State.RUNNING:
            notes.earlier_wait_seconds, notes.waits_since = notes.waited_seconds(now), None
            notes.last_admission = now, status.step
            changes["started_at"] = row.started_at or now
        elif not state.has_ended:
            notes.waits_since = now
        if state.has_ended:
            changes["finished_at"] = now
        if state is State.SUCCEEDED:
            changes["model"] = self._model_name(name)
        if state is State.FAILED:
            changes["error"] = row.error or {"code": "training_failed", "message": reason, "param": None}
        self._set_row(replace(row, **changes))
        if state is State.SUCCEEDED:
            self.announce(self._jobs[name])

    def fail_job(self, name: str, error: Mapping[str, Any]) -> None:
        """Record that a queued job cannot be trained: `error` has code, message and param."""
        self._set_row(replace(self._jobs[name], error=error))
        self.move_job(name, State.FAILED, str(error["message"]))

    def set_priority(self, name: str, priority: int) -> None:
        self._set_row(replace(self._jobs[name], priority=priority))

    def delete_model(self, name: str) -> None:
        """Record that the adapter of a job that has ended was deleted."""
        if (row := self.row(name)) is not None and row.model is not None:
            with self._lock:
                self._changed_rows[name] = replace(row, model=None)
                if name in self._ended_trials:
                    self._ended_trials[name] = self._changed_rows[name]
            self.withdraw(name, row.model)

    def explain_job(self, name: str, reason: str) -> None:
        self._change_status(name, reason=self._hide_other_tenants(name, reason))

    def advance_job(self, name: str, step: int, steps: int, trained_tokens: int) -> None:
        self._change_status(name, step=step, steps=steps, trained_tokens=trained_tokens)
        row, notes, now = self._jobs[name], self.notes[name], time.time()
        # Steps that are trained again after a crash are not counted again.
        if (new := trained_tokens - notes.receipt.tokens) > 0:
            self._set_receipt(name, replace(notes.receipt, tokens=trained_tokens))
            day = row.tenant, int(now // DAY_SECONDS)
            with self._lock:
                self._usage[day] = self._usage.get(day, 0) + new
            self._recent_usage[row.tenant] = self.recent_tokens(row.tenant, now) + new, now
        began, first = notes.last_admission
        if row.state is State.RUNNING and step > first:
            remaining = (steps - step) * (now - began) / (step - first)
            self._set_row(replace(self._jobs[name], estimated_finish=now + remaining))

    def evaluate_job(
        self,
        name: str,
        eval_loss: float | None,
        best_step: int | None,
        best_loss: float | None,
        score: float | None = None,
    ) -> None:
        self._change_status(name, eval_loss=eval_loss, best_step=best_step, best_loss=best_loss)

    def score_base(self, name: str, loss: float) -> None:
        self._change_status(name, base_loss=loss)

    def measure_base(self, name: str, score: float) -> None:
        self._change_status(name, base_score=score)

    def warn_job(self, name: str, sentence: str) -> None:
        self._change_status(name, warning=sentence)
        if sentence:
            self._add_event(name, f"Warning: {sentence}", "warn")

    def add_note(self, name: str, sentence: str) -> None:
        if sentence not in (known := self.job(name).notes):
            self._change_status(name, notes=(*known, sentence))
            self._add_event(name, sentence)

    # -- the run -----------------------------------------------------------------------------------------

    @property
    def status(self) -> RunStatus:
        return RunStatus()

    def resume_line(self, *, restart: Sequence[str] = (), retry: Sequence[str] = ()) -> str:
        return "a new job through the API" if restart or retry else RESUMPTION

    def record_totals(self, seconds: float, solo_seconds: float | None, peak_bytes: int | None) -> None:
        pass

    def note(self, sentence: str) -> None:
        log.info("%s", sentence)

    def append_window(self, line: Mapping[str, Any]) -> None:
        values = {**line, **self.describe_device(), "passes": self._passes}
        self._passes = []
        with self._lock:
            self._windows.append(WindowRow(at=time.time(), values=values))

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        measured: Measured = "train"
        if RUNG_LOSS in line:
            measured = "rung"
        elif "eval_loss" in line or BASE_LOSS in line:
            measured = "eval" if "eval_loss" in line else "base"
        name, step = str(line["job"]), int(line["step"])
        data = {
            METRIC_NAMES.get(key, key): value for key, value in line.items() if key not in ("job", "time")
        }
        if measured != "rung":
            self.notes[name].metrics |= data
        what, key = MEASURED[measured]
        message = f"Step {step}/{self.job(name).steps}: {what} loss={loss_text(data[key])}"
        event = EventRow(
            id=new_id("ftevent"),
            job=name,
            at=float(line["time"]),
            type="metrics",
            message=message,
            data=data,
            measured=measured,
            step=step,
        )
        with self._lock:
            self._events.append(event)

    def metric_lines(self, jobs: Collection[str]) -> Iterator[Mapping[str, Any]]:
        """Yield the lines of metrics in the database. Lines of steps that a resumed job will repeat are left
        out."""
        names = {ours: name for name, ours in METRIC_NAMES.items()}
        for job in jobs:
            row = self.row(job)
            for event in () if row is None else self._training.metrics(job):
                if event.step is not None and event.step <= row.status.step:  # type: ignore[union-attr]
                    line = {names.get(key, key): value for key, value in event.data.items()}
                    yield {**line, "job": job, "step": event.step}

    def add_sweep_event(self, sweep: str, message: str, decision: int | None = None) -> None:
        """Record an event of a sweep's job. An event that reports a numbered decision of the sweep is stored
        only once."""
        log.info("%s: %s", sweep, message)
        event = EventRow(
            id=new_id("ftevent"),
            job=sweep,
            at=time.time(),
            level="warn" if message.startswith("warning") else "info",
            message=message,
            measured=None if decision is None else "rung",
            step=decision,
        )
        with self._lock:
            self._events.append(event)

    def record_pass(
        self, plan: MicrobatchPlan, seconds: float, predicted_seconds: float | None, is_training: bool
    ) -> None:
        """Add the time of a pass over the base model to the receipts (used resources) of its jobs, in
        proportion to their tokens, and record the pass for the overview of the device."""
        tokens: dict[str, int] = {}
        for segment in plan.segments:
            tokens[segment.job] = tokens.get(segment.job, 0) + segment.tokens
        if len(self._passes) < WINDOW_PASSES:
            self._passes.append(
                {
                    "jobs": tokens,
                    "tokens": plan.tokens,
                    "training": is_training,
                    "seconds": seconds,
                    "predicted_seconds": predicted_seconds,
                }
            )
        padding, total = plan.rows - plan.tokens, max(1, plan.tokens)
        for name, own in tokens.items():
            if name not in self.notes:
                continue
            before = self.notes[name].receipt
            self._set_receipt(
                name,
                replace(
                    before,
                    padding_tokens=before.padding_tokens + round(padding * own / total),
                    device_seconds=before.device_seconds + seconds * own / total,
                    passes=before.passes + 1,
                    shared_passes=before.shared_passes + (len(tokens) > 1),
                ),
            )

    def add_checkpoint(self, name: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Record that the checkpoint of a job at this step has been written and can answer prompts."""
        if name not in self.notes:
            return
        row = CheckpointRow(
            id=new_id("ftckpt"),
            job=name,
            at=time.time(),
            step=step,
            model=self._model_name(name, step),
            folder=f"{EPOCHS}/step-{step}",
            metrics=metrics,
        )
        with self._lock:
            self._checkpoints.append(row)
        self._add_event(name, f"Checkpoint created at step {step}")

    def epoch_folder(self, name: str, step: int) -> Path:
        return adapter_folder(self.output, name, step)

    def recent_tokens(self, tenant: str, current_time: float) -> float:
        tokens, at = self._recent_usage.get(tenant, (0.0, current_time))
        return decay_usage(tokens, current_time - at)

    def restore_recent_tokens(self, window: WindowRow) -> None:
        """Restore the tenants' counts of recently trained tokens from the record that the previous training
        process wrote last."""
        recorded = window.values.get(QUEUE, {}).get("recent_tokens", {})
        self._recent_usage = {tenant: (tokens, window.at) for tenant, tokens in recorded.items()}

    def tokens_today(self, tenant: str, current_time: float) -> int:
        day = int(current_time // DAY_SECONDS)
        pending = self._usage.get((tenant, day), 0)
        return self._training.usage(tenant, day).get(day, 0) + pending

    def set_cursors(self, cursors: Mapping[str, int]) -> None:
        """Record the number of the last applied row of each table of clients' requests. The number is written
        in the same transaction as the effects of the requests."""
        with self._lock:
            self._cursors |= cursors

    # -- writing -----------------------------------------------------------------------------------------

    def write_status(self) -> None:
        """Write all changes in one transaction. If the database cannot be used, the changes are kept for the
        next call, and OutputError is raised."""
        with self._lock:
            changes = Changes(
                jobs=list(self._changed_rows.values()),
                transitions=list(self._transitions),
                events=list(self._events),
                checkpoints=list(self._checkpoints),
                receipts=list(self._receipts.values()),
                usage=dict(self._usage),
                windows=list(self._windows),
                cursors=dict(self._cursors),
            )
            self._written = time.monotonic()
            try:
                self._training.write(changes)
            except StoreUnavailable as error:
                raise OutputError(str(error)) from error
            except LeaseLost as lost:
                self._end_process(lost)
                raise
            for pending in (self._changed_rows, self._receipts, self._usage, self._cursors):
                pending.clear()
            for rows in (self._transitions, self._events, self._checkpoints, self._windows):
                rows.clear()
            for name in [name for name, one in self._jobs.items() if one.state.has_ended]:
                row = self._jobs.pop(name)
                del self.notes[name]
                if name in self._kept_trials:
                    self._ended_trials[name] = row

    def flush(self, seconds: float = 0.0) -> None:
        """Write all changes. If the database is not available, retry for `seconds`; after that, the changes
        are left to the next flush."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.write_status()
                return
            except OutputError as error:
                log.warning("%s", error)
            if time.monotonic() >= deadline:
                return
            time.sleep(FLUSH_SECONDS)

    def schedule_flush(self) -> None:
        if self.is_write_due():
            self.flush()

    def write_status_soon(self) -> None:
        if self.is_write_due():
            self.write_status()

    def is_write_due(self) -> bool:
        return time.monotonic() - self._written >= FLUSH_SECONDS

    # -- pending changes ---------------------------------------------------------------------------------

    def _set_row(self, row: JobRow) -> None:
        with self._lock:
            self._jobs[row.id] = self._changed_rows[row.id] = row

    def _change_status(self, name: str, **status: Any) -> None:
        row = self._jobs[name]
        self._set_row(replace(row, status=replace(row.status, **status)))

    def _set_receipt(self, name: str, receipt: Receipt) -> None:
        self.notes[name].receipt = receipt
        with self._lock:
            self._receipts[name] = receipt

    def _hide_other_tenants(self, name: str, reason: str) -> str:
        """Return a reason in which ids of other tenants' jobs are hidden from the job's owner."""
        tenant = self._jobs[name].tenant

        def hide_other_job(match: re.Match[str]) -> str:
            other = self.row(match[0])
            return match[0] if other is not None and other.tenant == tenant else "another job"

        return JOB_ID.sub(hide_other_job, reason)

    def _model_name(self, name: str, step: int | None = None) -> str:
        row, notes = self._jobs[name], self.notes[name]
        return str(AdapterName(self.settings.base_name, row.tenant, notes.suffix, name, step))

    def _add_transition_event(self, row: JobRow, state: State, reason: str) -> None:
        name, step = row.id, row.status.step
        match state:
            case State.RUNNING if row.started_at is None:
                self._add_event(name, "Fine-tuning job started")
            case State.RUNNING:
                self._add_event(name, f"Fine-tuning job continues from step {step}")
            case State.QUEUED if row.state is State.PAUSED:
                self._add_event(name, "Fine-tuning job resumed; it is queued")
            case State.QUEUED:
                self._add_event(
                    name,
                    f"Fine-tuning job is queued again at step {step}: {reason or 'the service restarts'}",
                )
            case State.PAUSED:
                self._add_event(name, f"Fine-tuning job paused at step {step}: {reason}")
            case State.SUCCEEDED:
                self._add_event(name, f"New fine-tuned model created: {self._model_name(name)}")
                self._add_event(name, "The job has successfully completed")
            case State.CANCELLED:
                why = f": {reason}" if reason else ""
                self._add_event(name, f"Fine-tuning job cancelled at step {step}{why}")
            case State.FAILED:
                self._add_event(name, f"Fine-tuning job failed: {reason}", "error")

    def record_announcement(
        self, name: str, message: str, level: Literal["info", "warn"], is_loaded: bool
    ) -> None:
        """Record the outcome of announcing a finished adapter to vLLM. Any thread may call it."""
        self._add_event(name, message, level, {ANNOUNCED: is_loaded})

    def _add_event(
        self,
        name: str,
        message: str,
        level: Literal["info", "warn", "error"] = "info",
        data: Mapping[str, Any] | None = None,
    ) -> None:
        log.info("%s: %s", name, message)
        event = EventRow(
            id=new_id("ftevent"), job=name, at=time.time(), level=level, message=message, data=data or {}
        )
        with self._lock:
            self._events.append(event)
