"""The journal of a run. It writes metrics and job states to the store, rows of a table to the progress view
on the terminal, and metrics to experiment trackers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from weftune.core.evaluation import AnsweredRow
from weftune.core.files import json_text, replace_file, replace_json
from weftune.errors import OutputError
from weftune.jobs.store.status import BASE_LOSS, FITTED_MODELS, PREDICTION, RUNG_LOSS, State
from weftune.jobs.store.store import JobStore
from weftune.jobs.sweeps.record import SweepRecord
from weftune.plan.cost.fitted import Outcome, WindowPrediction
from weftune.plan.cost.time import CostModel, JobShapes
from weftune.plan.program.handover import closed_batches
from weftune.plan.program.program import Program
from weftune.report.evaluation import ANSWERS, answers_record
from weftune.report.read import JobRecord
from weftune.run.events import Evaluated, Stepped
from weftune.run.training.state import Progress
from weftune.trainer.job import PreparedJob

Log = Callable[[Mapping[str, Any]], None]


class View(Protocol):
    def update(self, row: JobRecord) -> None: ...

    def sweep(self, record: SweepRecord) -> None: ...

    def note(self, text: str) -> None: ...


class Journal:
    def __init__(self, store: JobStore, view: View, log: Log) -> None:
        self.store = store
        self.view = view
        self._log = log
        self._rows: dict[str, JobRecord] = {}
        self._windows = 0
        self._seconds_before = store.status.seconds
        self._saved = (store.status.solo_seconds or store.status.seconds) - store.status.seconds
        self._peak = store.status.peak_bytes or 0
        self._began = time.monotonic()
        self._reported_errors: set[str] = set()

    def record_step(self, event: Stepped, job: PreparedJob, progress: Progress) -> None:
        outcome = event.outcome
        self._write_metrics(
            {
                "job": event.job,
                "step": event.step,
                "epoch": round(job.sample_order.epoch(event.step), 6),
                "loss": outcome.loss,
                "tokens": outcome.tokens,
                "learning_rate": outcome.learning_rate,
                "grad_norm": outcome.grad_norm,
                **_accuracy_values("token_accuracy", outcome.token_accuracy),
                **outcome.metrics,
                "time": time.time(),
            }
        )
        self.store.advance_job(event.job, event.step, job.recipe.steps, progress.trained_tokens)
        self._try_write(self.store.write_status_soon)
        self.show_job(event.job, step=event.step, loss=outcome.loss, trained_tokens=progress.trained_tokens)

    def record_evaluation(self, event: Evaluated, job: PreparedJob, progress: Progress) -> None:
        self._write_evaluation(event, event.job, "eval_loss", "eval")
        if event.step == 0 and job.base_samples is None:
            self.store.score_base(event.job, event.loss)
        self.record_kept_loss(job, progress)
        self._try_write(self.store.write_status_soon)
        self.show_job(event.job, eval_loss=event.loss)

    def record_base_evaluation(self, event: Evaluated, job: str) -> None:
        """Record an evaluation of the base without adapters on the held-out samples of `job`."""
        self._write_evaluation(event, job, BASE_LOSS, "base")
        self.store.score_base(job, event.loss)
        self._try_write(self.store.write_status_soon)

    def has_base_score(self, job: str) -> bool:
        return self.store.job(job).base_score is not None

    def record_base_score(self, job: str, score: float) -> None:
        """Record the value of a job's `eval.metric` for the base without adapters."""
        self.store.measure_base(job, score)
        self._try_write(self.store.write_status_soon)

    def record_rung(self, event: Evaluated) -> None:
        """Record the evaluation of a trial at a rung, a step at which its sweep compares the trials."""
        self._write_evaluation(event, event.job, RUNG_LOSS, "rung")

    def _write_evaluation(self, event: Evaluated, job: str, loss: str, prefix: str) -> None:
        """Write a line of metrics for an evaluation: its loss under the key `loss`, the other values under
        keys with `prefix`."""
        self._write_metrics(
            {
                "job": job,
                "step": event.step,
                loss: event.loss,
                f"{prefix}_tokens": event.tokens,
                **_accuracy_values(f"{prefix}_token_accuracy", event.token_accuracy),
                **{f"{prefix}_{name}": value for name, value in event.metrics.items()},
                "time": time.time(),
            }
        )

    def record_kept_loss(self, job: PreparedJob, progress: Progress) -> None:
        """Record the validation loss of the adapter that a job would keep if it ended now, and the job's best
        loss so far."""
        keeps_best = job.spec.keep == "best"
        kept = progress.best_loss if keeps_best else progress.evaluated_loss
        score = progress.best_score if keeps_best else progress.evaluated_score
        self.store.evaluate_job(job.name, kept, progress.best_step, progress.best_loss, score)

    def record_answers(self, job: str, step: int, rows: Sequence[AnsweredRow]) -> None:
        """Write the answers of a job's adapter at a step, and the answers of the base, to the job's
        folder."""
        content = answers_record(job, step, rows)
        self._try_write(lambda: replace_json(self.store.output / job / ANSWERS, content))

    def record_warning(self, name: str, sentence: str) -> None:
        """Record a warning about a job's adapter. If its text is empty, the job's earlier warning is
        removed."""
        if self.store.job(name).warning != sentence:
            self.store.warn_job(name, sentence)
            self._try_write(self.store.write_status_soon)
            self.show_job(name, reason=self._warning_text(name))

    def _warning_text(self, name: str) -> str:
        warning = self.store.job(name).warning
        return f"warning: {warning}" if warning else ""

    def record_window(
        self,
        program: Program,
        shapes: JobShapes,
        prediction: WindowPrediction,
        outcome: Outcome,
        cost: CostModel,
        worker_peaks: Sequence[int],
    ) -> None:
        """Record an executed window (a few global batches of every job) with predicted and measured values.
        `cost`, the time model fitted with the window's passes, predicts how long the jobs would have taken
        one after another. `worker_peaks` are the peak memory uses of the workers in bytes."""
        trained = [one for one in outcome.passes if one.training]
        closed = closed_batches(program)
        batches = [batch for batch in program.batches if (batch.job, batch.step) in closed]
        alone = cost.solo_seconds(batches, program.capacity, shapes)
        if alone is not None:
            self._saved += alone - sum(one.seconds for one in trained)
        line = {
            "window": self._windows,
            "capacity": program.capacity,
            "tokens": sum(one.tokens for one in trained),
            "microbatches": len(outcome.passes),
            "shared": program.shared_count(),
            "jobs": len(program.jobs),
            "changed": prediction.changed,
            "unsettled": sum(not one.settled for one in outcome.passes),
            "seconds": outcome.seconds,
            "predicted_seconds": prediction.seconds,
            "peak_bytes": outcome.peak_bytes,
            **({"worker_peak_bytes": list(worker_peaks)} if len(worker_peaks) > 1 else {}),
            "predicted_peak_bytes": prediction.peak_bytes,
            "peak_error_bytes": prediction.error_bytes,
            "profile": prediction.version,
            "source": prediction.source,
            "time": time.time(),
        }
        self._try_write(lambda: self.store.append_window(line))
        self._windows += 1
        seconds = self._seconds_before + time.monotonic() - self._began
        self._peak = max(self._peak, outcome.peak_bytes)
        self.store.record_totals(seconds, seconds + self._saved, self._peak)
        self._try_write(self.store.write_status_soon)

    def record_prediction(self, numbers: Mapping[str, Any]) -> None:
        """Write the predictions for the first window (a few global batches of every job) of this process to
        disk before the window runs."""
        if self._windows == 0:
            self._write_json(PREDICTION, numbers)

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        content = json_text(values, indent=1).encode()
        self._try_write(lambda: replace_file(self.store.records / name, content))

    def read_fitted_models(self) -> Any:
        """Return the fitted time and memory models that earlier runs have left in the output folder. None if
        they cannot be read."""
        try:
            return json.loads((self.store.records / FITTED_MODELS).read_bytes())
        except (OSError, ValueError):
            return None

    def save_fitted_models(self, record: Mapping[str, Any]) -> None:
        self._write_json(FITTED_MODELS, record)

    def set_state(self, name: str, state: State, reason: str = "") -> None:
        """Record a job's new state. The state is written to disk soon, or immediately by `flush`."""
        self.store.move_job(name, state, reason)
        self._try_write(self.store.write_status_soon)
        self.show_job(name, state=state, reason=reason or self._warning_text(name))

    def note(self, sentence: str) -> None:
        self.store.note(sentence)
        self.view.note(sentence)

    def show_job(self, name: str, **changes: Any) -> None:
        self._rows[name] = replace(self._rows.get(name, JobRecord(name=name)), **changes)
        self.view.update(self._rows[name])

    def forget_job(self, name: str) -> None:
        """Remove an ended job from the journal's table of progress in memory."""
        self._rows.pop(name, None)

    def flush(self) -> bool:
        """Write the recorded states and metrics to disk. Return whether that succeeded."""
        return self._try_write(self.store.write_status)

    def _write_metrics(self, line: Mapping[str, Any]) -> None:
        self._try_write(lambda: self.store.append_metrics(line))
        self._log(line)

    def _try_write(self, write: Callable[[], None]) -> bool:
        """Attempt a write that training does not depend on, and return whether it succeeded. A repeated
        failure is reported only once. The next write includes the content that could not be written."""
        try:
            write()
        except OutputError as error:
            if str(error) not in self._reported_errors:
                self._reported_errors.add(str(error))
                self.note(f"warning: {error}; training continues, and the write is tried again.")
            return False
        return True


def _accuracy_values(key: str, value: float | None) -> dict[str, float]:
    """Return a dict that maps `key` to the token accuracy. The dict is empty for jobs without supervised
    tokens."""
    return {} if value is None else {key: value}
