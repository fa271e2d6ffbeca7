"""The training loop: it admits jobs, plans and executes windows (a few global batches of every job), and
stores results until no job is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from weftune.adapters.folder import CONFIG
from weftune.adapters.kind import JobAdapter
from weftune.adapters.target import source_job
from weftune.core.clock import Phase, phase
from weftune.core.files import cache_folder
from weftune.core.shapes import JobShape
from weftune.errors import OutputError, SpecError, UserError
from weftune.jobs.courses import MIN_SAVE_SECONDS, save_interval
from weftune.jobs.spec.spec import JobSpec
from weftune.jobs.store.policy import Ranking
from weftune.jobs.store.scheduler import admit_jobs
from weftune.jobs.store.status import ON_REQUEST, State
from weftune.jobs.store.store import JobStore
from weftune.plan.cost.fitted import FittedModels, Outcome
from weftune.plan.cost.memory import max_sample_tokens
from weftune.plan.cost.time import PassTime, StateTime
from weftune.plan.layout.split import cpu_data_sheet_cost
from weftune.plan.outlook.first_window import prediction_numbers
from weftune.plan.program.program import Program
from weftune.report.words import count_noun
from weftune.run.events import Evaluated, Event, Failed, OutOfMemory, Passed, SaveDue, Scored, Stepped
from weftune.run.measure.memory import peak_bytes, release_cached_memory, reset_peak
from weftune.run.training import checkpoint
from weftune.run.training.snapshot import snapshot_bytes
from weftune.run.training.state import Training, new_training
from weftune.run.training.writer import Unsaved
from weftune.trainer.answers import JobAnswers
from weftune.trainer.engine import Engine
from weftune.trainer.inbox import JobInbox, handle_requests
from weftune.trainer.job import PreparedJob, collate_plan
from weftune.trainer.journal import Journal
from weftune.trainer.references import References
from weftune.trainer.results import Ending, ResultWriter
from weftune.trainer.sweeps import Sweeps
from weftune.trainer.warnings import SlowRun, base_warning, collapse_warning
from weftune.trainer.windows import Windows

Callback = Callable[[Stepped | Evaluated], None]
Rank = Callable[[Sequence[JobShape], Sequence[JobShape]], Ranking]
"""Function that decides which of the waiting and attached (training) jobs may train now, and sets their
priorities and their order of admission."""


@dataclass(slots=True)
class TimedWindow:
    """Measurements of the window (a few global batches of every job) that is being executed."""

    pass_times: list[PassTime] = field(default_factory=list)
    steps: list[StateTime] = field(default_factory=list)
    save_times: list[StateTime] = field(default_factory=list)
    other_seconds: float = 0.0
    """Seconds spent in the user's callback and in passes of a decoder during the current window (a few global
    batches of every job). These seconds are excluded from the window's measured time."""


def lost_checkpoint_reason(store: JobStore, name: str, survey: checkpoint.CheckpointSurvey) -> str:
    """Return why a job that has begun cannot resume from its checkpoints, and how the user can continue the
    job."""
    what = "none of its checkpoints is whole" if survey.damaged_paths else "its checkpoints are gone"
    names = f" ({', '.join(path.name for path in survey.damaged_paths)})" if survey.damaged_paths else ""
    return f"{what}{names}; put back a copy of one, or restart it with {store.resume_line(restart=[name])}"


def lost_references_reason(store: JobStore, name: str) -> str:
    """Return the reason, for the user, why a job that has begun cannot resume: its reference
    log-probabilities are lost and cannot be recomputed."""
    restarted = store.resume_line(restart=[name])
    what = "the log-probabilities of its reference policy, the adapter that it started from, are gone"
    return f"{what}; put back a copy of its checkpoints, or restart it with {restarted}"


def source_stopped_reason(store: JobStore, source: str, state: State) -> str:
    """Return the reason, for the user, why a job is paused: the job whose adapter it starts from has
    stopped."""
    if state is State.PAUSED:
        return f"it starts from {source}, which is paused; resume both: {store.resume_line()}"
    happened = "has failed" if state is State.FAILED else "was cancelled"
    retried, restarted = store.resume_line(retry=[source]), store.resume_line(restart=[source])
    return f"it starts from {source}, which {happened}; resume both: {retried} or {restarted}"


def _clear_source(job: PreparedJob) -> PreparedJob:
    return replace(job, shape=replace(job.shape, source_job="")) if job.shape.source_job else job


class Loop:
    def __init__(self, engine: Engine, tokenizer: Any, store: JobStore, journal: Journal) -> None:
        self.engine = engine
        self.executor, self.choice, self.base = engine.executor, engine.choice, engine.base
        self.writer = engine.executor.writer
        self.store = store
        self.journal = journal
        self.fitted_models = FittedModels(
            initial_cost=engine.initial_cost_model,
            memory=replace(engine.choice.memory, uses_fused_ops=self.executor.is_fused),
            first_seconds=engine.choice.first_pass_seconds,
        )
        self.seconds = 0.0
        """Total seconds of training so far in this process."""
        if not engine.deterministic:
            with suppress(ValueError):
                self.fitted_models.restore(journal.read_fitted_models())
        self.jobs: dict[str, PreparedJob] = {}
        self.waiting_jobs: dict[str, PreparedJob] = {}
        self.programs_run: list[Program] | None = None
        """Executed Programs (each is the plan of a few global batches of every job). None unless a test or a
        benchmark requests them by setting a list."""
        self._endings: dict[str, Ending] = {}
        self.result_writer = ResultWriter(engine, tokenizer, store, journal)
        self.windows = Windows(engine, self.fitted_models, self.jobs)
        self.answers = JobAnswers(engine, tokenizer, journal, self.jobs)
        self.references = References(engine.base, cache_folder() / "tokens", journal.note)
        self._slow_run = (
            SlowRun(has_profile=engine.choice.cost_model is not None)
            if engine.base.device.type == "cpu"
            else None
        )
        self._planned_cost = (
            engine.initial_cost_model
            if engine.initial_cost_model.is_measured
            else cpu_data_sheet_cost(engine.choice.shape)
        )
        """Time model with which `weftune plan` predicts this run: from a profile of this machine or, without
        a profile, from its data sheet."""
        self._timed = TimedWindow()
        self._saved_at_every_step: set[str] = set()
        self._last_saved: dict[str, float] = {}
        """Maps each attached job to the monotonic time, in seconds, at which the job was admitted or its last
        checkpoint was begun."""
        self.sweeps = Sweeps()
        """Sweeps of this run. Their trials are jobs of the run."""
        self.add_proposed_job: Callable[[JobSpec], Any] | None = None
        """Function that adds a job proposed by a sweep during the run. None if all trials are known."""
        self.inbox: JobInbox | None = None
        """Source of requests, such as to pause a job, which are read after every few global batches. None if
        the run takes no requests."""
        self.rank_jobs: Rank = lambda waiting, attached: Ranking(tuple(waiting), tuple(attached))
        """Policy that ranks the jobs for admission. By default, jobs are admitted by their own priority and
        their order in the file."""
        self.watch_pass: Callable[[Passed], None] | None = None
        """Function that is called after every forward and backward pass with the pass's time. None if nobody
        watches passes."""
        self.paused_jobs: set[str] = set()
        """Jobs that were paused on request and have not been resumed."""
        self._stop: Callable[[], bool] = lambda: False
        """Function that returns whether the run has been asked to end."""
        self._callback: Callback | None = None
        self._evaluated_trials: frozenset[str] = frozenset()
        """Trials (jobs of a sweep) that make no step in the current window (a few global batches of every
        job): only the mean of their last weights is evaluated."""
        self._max_jobs: float = math.inf
        """Maximum number of attached jobs. It is lowered after a shortage of memory, and unlimited again when
        one of these jobs has ended."""
        self._max_jobs_reason = ""
        self._overtake_counts: Mapping[str, int] = {}
        """Maps each waiting job to the number of jobs behind it in the queue that were admitted before it."""
        self._preempted_by: dict[str, str] = {}
        """Maps each preempted job that still waits to the job that replaced it."""

    # -- admission ---------------------------------------------------------------------------------------

    def add_job(self, job: PreparedJob) -> None:
        """Queue a job, which will be attached (loaded for training) as soon as there is enough memory for
        it."""
        checkpoints = self.result_writer.checkpoints(job.name)
        if job.shape.source_job and checkpoint.newest_progress(checkpoints) is not None:
            # It has begun and no longer needs the adapter of another job.
            job = _clear_source(job)
        job = self.jobs[job.name] = self.sweeps.add_trial(job)
        if not self.sweeps.is_resting(job.name):
            self.waiting_jobs[job.name] = job
        if save_interval(job.spec, job.recipe.steps) == 1:
            self._saved_at_every_step.add(job.name)
        self.store.add_job(job.name)
        for note in job.data.notes:
            self.store.add_note(job.name, note)
        status = self.store.job(job.name)
        step, steps, tokens = status.step, job.recipe.steps, status.trained_tokens
        self.store.advance_job(job.name, step, steps, tokens)
        self.journal.show_job(job.name, state=State.QUEUED, step=step, steps=steps, trained_tokens=tokens)

    def cancel(self, name: str) -> None:
        """Cancel a job. A waiting job is cancelled immediately, and an attached (training) one before its
        next microbatch."""
        is_paused = self.store.job(name).state is State.PAUSED
        if name in self.waiting_jobs or is_paused or self.sweeps.is_resting(name):
            self.paused_jobs.discard(name)
            self._remove_from_queue(name, State.CANCELLED)
            self.journal.flush()
        elif name in self.executor.attached and name not in self._endings:
            self._set_ending(name, Ending(State.CANCELLED))

    def fail(self, name: str, reason: str) -> None:
        """Mark an attached (training) job as failed for the given reason. The job stops before its next
        microbatch."""
        if name in self.executor.attached and name not in self._endings:
            self._set_ending(name, Ending(State.FAILED, reason))

    def pause(self, name: str, with_sweep: bool = False) -> None:
        """Save and detach a job, which does not train until `resume` is called. This is allowed between two
        runs of a Program only. A trial is paused only together with its whole sweep."""
        if self.sweeps.is_trial(name) and not with_sweep:
            raise SpecError(f"{name} is a trial of a sweep, which decides when its trials train")
        if self.store.job(name).state is State.PAUSED:
            raise SpecError(f"{name} is paused already: {self.store.job(name).reason}")
        if name in self.waiting_jobs or self.sweeps.is_resting(name):
            self._remove_from_queue(name, State.PAUSED, self._pause_reason(name))
        else:
            self._save_and_detach([name])
            if name in self._endings:
                # It could not be saved, and is paused for that reason.
                return
            self.journal.set_state(name, State.PAUSED, self._pause_reason(name))
        self.paused_jobs.add(name)

    def _pause_reason(self, name: str) -> str:
        return f"{ON_REQUEST} at step {self.store.job(name).step}; resume with {self.store.resume_line()}"

    def resume(self, name: str) -> None:
        """Queue a paused job again. This is allowed between two runs of a Program only."""
        if self.store.job(name).state is not State.PAUSED:
            raise SpecError(f"{name} is not paused: it is {self.store.job(name).state}")
        self.paused_jobs.discard(name)
        self.journal.set_state(name, State.QUEUED)
        self.add_job(self.jobs[name])

    def set_priority(self, name: str, priority: int) -> None:
        """Change the priority with which a job is admitted and preempted from now on."""
        job = self.jobs[name]
        self.jobs[name] = replace(job, shape=replace(job.shape, priority=priority))
        if name in self.waiting_jobs:
            self.waiting_jobs[name] = self.jobs[name]

    def finish_requests(self) -> None:
        """Detach the jobs that requests have ended, and write the effects of all requests to disk."""
        self._detach_ended()
        self.journal.flush()

    def _remove_from_queue(self, name: str, state: State, reason: str = "") -> None:
        """Record the new state of a job that waits in the queue, or for a comparison with other trials of its
        sweep, and remove it from there."""
        self.waiting_jobs.pop(name, None)
        self.sweeps.remove_resting_trial(name)
        self.journal.set_state(name, state, reason)

    def _admit_jobs(self) -> None:
        """Admit waiting jobs and preempt attached ones, by priority and memory, between two windows (runs of
        a few global batches of every job)."""
        self._check_source_jobs()
        attached = self._job_shapes(self.executor.attached)
        waiting = [job.shape for job in self.waiting_jobs.values()]
        ranking = self.rank_jobs(waiting, attached)
        decision = admit_jobs(
            ranking.waiting_jobs, ranking.attached_jobs, self._misfit_reason, self._overtake_counts
        )
        held_names = [name for name in self.executor.attached if name in ranking.hold_reasons]
        if self.executor.unfinished.batches and (
            decision.admitted_names or decision.preempted_by or held_names
        ):
            self._drain()
            self._detach_ended()
            self._admit_jobs()
            return
        self._overtake_counts = decision.overtake_counts
        self._requeue_jobs({name: ranking.hold_reasons[name] for name in held_names})
        for name, reason in decision.misfit_reasons.items():
            advice = self.fitted_models.memory.advice(self.waiting_jobs.pop(name).shape)
            self.journal.set_state(name, State.FAILED, f"it cannot run even alone: {reason}; {advice}")
        self._preempted_by |= decision.preempted_by
        priorities = {name: self.jobs[name].shape.priority for name in decision.preempted_by.values()}
        self._requeue_jobs(
            {
                name: f"preempted by {other}, priority {priorities[other]}"
                for name, other in decision.preempted_by.items()
            }
        )
        if self._endings:
            # A job that cannot be saved is detached all the same.
            self._detach_ended()
        waiting_reasons = {one: why for one, why in ranking.hold_reasons.items() if one in self.waiting_jobs}
        for name, reason in {**decision.wait_reasons, **waiting_reasons}.items():
            # A preempted job keeps its reason as long as the job that replaced it is attached.
            is_replaced = self._preempted_by.get(name) in self.executor.attached
            if not is_replaced and self.store.job(name).reason != reason:
                self.store.explain_job(name, reason)
                self.journal.show_job(name, reason=reason)
        written = {
            name: self.result_writer.write_job_file_ahead(self.waiting_jobs[name])
            for name in decision.admitted_names
        }
        for name in decision.admitted_names:
            self._preempted_by.pop(name, None)
            self.journal.set_state(name, State.RUNNING)
        if decision.admitted_names:
            # If the process dies while it attaches them, the next one knows which jobs these were.
            self.journal.flush()
        for name in decision.admitted_names:
            self._attach_job(self.waiting_jobs.pop(name), written[name])
        if decision.admitted_names or decision.misfit_reasons:
            # Once for all of them, however many are admitted.
            self.journal.flush()

    def _check_source_jobs(self) -> None:
        """Queue jobs that start from another job's adapter once that job has succeeded, and pause them if it
        can no longer succeed."""
        for name, job in list(self.waiting_jobs.items()):
            if not (source := job.shape.source_job):
                continue
            while source in self.result_writer:
                # The job then starts at the same boundary, however fast the disk is.
                self._wait_for_delivery()
            if source in self.store:
                state = self.store.job(source).state
            else:
                # With shares, a source that was trained before is known by its folder only.
                has_adapter = (self.store.output / source / CONFIG).exists()
                state = State.SUCCEEDED if has_adapter else State.PAUSED
            if state is State.SUCCEEDED:
                self.jobs[name] = self.waiting_jobs[name] = _clear_source(job)
            elif state not in (State.QUEUED, State.RUNNING):
                del self.waiting_jobs[name]
                self.journal.set_state(name, State.PAUSED, source_stopped_reason(self.store, source, state))

    def _misfit_reason(self, jobs: Sequence[JobShape]) -> str | None:
        return self._max_jobs_reason if len(jobs) > self._max_jobs else self.fitted_models.misfit_reason(jobs)

    def _attach_job(self, job: PreparedJob, pending_write: Future[None] | None) -> None:
        """Attach a job to the executor, which then trains it. `pending_write` is the unfinished write of its
        job file, if there is one."""
        spec = job.spec
        found = checkpoint.survey(self.result_writer.checkpoints(spec.name))
        has_begun = found.progress is not None
        adapter_spec = spec.adapter
        if source := source_job(adapter_spec):
            # A job that has begun resumes from its checkpoint instead.
            folder = None if has_begun else str(self.store.output.absolute() / source)
            adapter_spec = replace(adapter_spec, init_from=folder)
        adapter = JobAdapter(spec.name, adapter_spec, spec.seed, job.recipe.steps, job.start_tokens)
        try:
            training = self._new_training(job, adapter, is_restored=has_begun)
            restored = checkpoint.restore(self.result_writer.checkpoints(spec.name), training)
            if has_begun and not restored:
                training = self._new_training(job, adapter)
        except UserError as error:
            self.journal.set_state(spec.name, State.FAILED, str(error))
            return
        if not restored and (found.damaged_paths or (has_begun and source)):
            self.journal.set_state(
                spec.name, State.PAUSED, lost_checkpoint_reason(self.store, spec.name, found)
            )
            return
        progress = training.progress
        self.store.advance_job(spec.name, progress.step, job.recipe.steps, progress.trained_tokens)
        self.journal.record_kept_loss(job, progress)
        try:
            if pending_write is None:
                self.result_writer.write_job_file(job)
            else:
                pending_write.result()
            checkpoint.rename_damaged(found.damaged_paths)
        except (OSError, OutputError) as error:
            remedy = f"correct that, and resume with {self.store.resume_line()}"
            self.journal.set_state(spec.name, State.PAUSED, f"{error}; {remedy}")
            return
        start = adapter_spec.init_from
        scored = self.references.add_job(
            job,
            self.result_writer.checkpoints(spec.name),
            Path(start) if isinstance(start, str) and not has_begun else None,
            has_begun=progress.step > 0,
        )
        if scored is None:
            reason = lost_references_reason(self.store, spec.name)
            self.journal.set_state(spec.name, State.PAUSED, reason)
            return
        self.jobs[spec.name] = scored
        self.executor.attach(training)
        # A job that starts from another adapter, which may be gone later, is saved at once.
        is_safe = progress.step > 0 or spec.adapter.init_from is None
        self._last_saved[spec.name] = time.monotonic() if is_safe else -math.inf
        self.result_writer.prepare(job, snapshot_bytes(training, keeps_best=spec.keep == "best"))

    def _new_training(self, job: PreparedJob, adapter: JobAdapter, is_restored: bool = False) -> Training:
        return new_training(
            adapter,
            job.recipe,
            self.base.trained_sites,
            self.base.dtype,
            self.executor.home,
            self.base.whole_sites,
            draw_device=self.base.device,
            frozen=self.base.weight_reader(),
            is_restored=is_restored,
        )

    # -- windows -----------------------------------------------------------------------------------------

    @phase(Phase.TRAINING)
    def run(self, stop: Callable[[], bool], callback: Callback | None = None) -> None:
        """Train until every job has ended, or until `stop` returns True. In the latter case, save and pause
        the jobs that have not ended."""
        self._stop, self._callback = stop, callback
        try:
            self._run(stop, callback)
        except KeyboardInterrupt:
            self.writer.close(cancels_waiting=True)
            raise
        finally:
            self.windows.close()
            if self.engine.timeline is not None:
                self.engine.timeline.close(self.store.output)
            for sentence in self.engine.final_notes(self.seconds):
                self.journal.note(sentence)

    def _run(self, stop: Callable[[], bool], callback: Callback | None) -> None:
        while not stop():
            self._apply_sweep_decisions()
            if self.inbox is not None:
                handle_requests(self, self.inbox)
            before = len(self.waiting_jobs)
            self._admit_jobs()
            if not self.executor.attached:
                if (
                    len(self.waiting_jobs) < before
                    or self._apply_sweep_decisions()
                    or self._wait_for_requests(stop)
                ):
                    # A job could not be attached, and others may have waited for it.
                    continue
                break
            unscored_samples = self.references.pending_scores()
            if self._score_base(stop, unscored_samples.keys()):
                continue
            attached = [name for name in self.executor.attached if name not in unscored_samples]
            starting_jobs = frozenset(name for name in attached if self._needs_first_evaluation(name))
            awaited = {name for name in attached if self.sweeps.is_awaited(name, self._current_step(name))}
            self._evaluated_trials = (
                frozenset(name for name in awaited if self.sweeps.evaluates_mean_weights(name))
                - starting_jobs
            )
            program = self.windows.next_window(starting_jobs | self._evaluated_trials, unscored_samples)
            # Only now: a window that was planned ahead may refer to jobs that have ended.
            self._release_ended()
            self.windows.plan_ahead(program)
            # A trial that is being evaluated has already been saved at its last step, if it was to be saved.
            program = program.without_saves(self._recently_saved() | self._evaluated_trials)
            with self._use_mean_weights():
                self._execute_program(program, stop, callback)
            for name, numbers in self.references.finish_window().items():
                self.jobs[name] = self.jobs[name].with_references(numbers)
            self._detach_ended()
        if stop():
            self._suspend_jobs()
        for name, reason in self.sweeps.stranded_trials():
            self.journal.set_state(name, State.PAUSED, reason)
        with phase(Phase.EXPORT):
            while self.result_writer:
                self._wait_for_delivery()
            self.writer.close()
            self._handle_writes()

    def _wait_for_requests(self, stop: Callable[[], bool]) -> bool:
        """Wait for requests while no job is attached. Return False if the loop is to end."""
        if self.inbox is None:
            return False
        while self.result_writer:
            self._wait_for_delivery()
        self._release_ended()
        return self.inbox.wait(stop)

    def _release_ended(self) -> None:
        """Release the data of ended jobs, which keep files open as long as they are referenced."""
        for name in [name for name in self.jobs if self.store.job(name).state.has_ended]:
            del self.jobs[name]
            self.journal.forget_job(name)
            self._last_saved.pop(name, None)
            self._saved_at_every_step.discard(name)

    def _current_step(self, name: str) -> int:
        """Return the last completed step of an attached job."""
        return self.executor.attached[name].progress.step

    def _score_base(self, stop: Callable[[], bool], waiting_jobs: Container[str]) -> bool:
        """Evaluate the base without adapters, once per set of held-out samples and objective, for jobs whose
        first evaluation does not measure the loss of the base. Jobs in `waiting_jobs` cannot be evaluated
        yet. Return False if the loss is known for all other attached jobs."""
        unscored_samples: dict[Hashable, list[str]] = {}
        for name in self.executor.attached:
            prepared = self.jobs[name]
            samples, is_known = prepared.base_samples, self.store.job(name).base_loss is not None
            if samples is not None and not is_known and name not in waiting_jobs:
                # The loss also depends on the job's reference policy or on its scalar head.
                objective = prepared.spec.objective
                own = name if objective.needs_reference or objective.scalar_head else ""
                unscored_samples.setdefault((samples.fingerprint, prepared.spec.objective, own), []).append(
                    name
                )
        if not unscored_samples:
            return False
        same_samples = {names[0]: names for names in unscored_samples.values()}
        self._drain()
        program = self.windows.base_evaluation(same_samples)
        fetch = partial(collate_plan, jobs=self.jobs, without_adapter=True)
        try:
            for event in self.executor.run(program, fetch, stop):
                match event:
                    case Evaluated(job):
                        for name in same_samples[job]:
                            self.journal.record_base_evaluation(event, name)
                    case Failed(job, reason):
                        self._endings[job] = Ending(State.FAILED, reason)
        except OutOfMemory:
            self._reduce_memory(program.capacity)
        self.journal.flush()
        self._detach_ended()
        return True

    def take_turn(self, action: Callable[[], object]) -> None:
        """Call `action`, which runs a decoder between two passes of training. The seconds of the call are
        excluded from the measured time of training."""
        began = time.monotonic()
        action()
        self._timed.other_seconds += time.monotonic() - began

    def _needs_first_evaluation(self, name: str) -> bool:
        """Return whether the job must be evaluated before its next step: at its start, or if a planned
        evaluation of its current step was interrupted."""
        job, progress = self.jobs[name], self.executor.attached[name].progress
        if name in self.executor.unfinished.steps:
            return False
        if job.data.evaluation is None:
            return progress.step == 0
        if self.sweeps.is_awaited(name, progress.step) and not self.sweeps.evaluates_mean_weights(name):
            return True
        return progress.step in job.evaluate_at and progress.evaluated < progress.step

    @contextmanager
    def _use_mean_weights(self) -> Iterator[None]:
        """Return a context manager within which passes read the mean weights of the trials that are being
        evaluated."""
        for name in self._evaluated_trials:
            self.executor.use_mean_weights(name)
        yield
        for name in self._evaluated_trials:
            # An ended trial keeps reading zeros; a detached one has its own weights when attached again.
            if name in self.executor.attached and name not in self._endings:
                self.executor.use_latest_weights(name)
        self._evaluated_trials = frozenset()

    def _recently_saved(self) -> frozenset[str]:
        """Return the jobs that choose their own checkpoint interval (they have no `save_every`) and wrote a
        checkpoint so recently that another one would be too early."""
        now = time.monotonic()
        return frozenset(
            name
            for name in self.executor.attached
            if self.jobs[name].spec.save_every is None and now - self._last_saved[name] < MIN_SAVE_SECONDS
        )

    def _peak_bytes(self) -> list[int]:
        """Return the peak memory use of each worker process in bytes."""
        return [peak_bytes(self.base.device), *self.engine.other_peak_bytes()]

    def _job_shapes(self, names: Iterable[str]) -> list[JobShape]:
        return [self.jobs[name].shape for name in names]

    def _drain(self) -> None:
        """Finish the global batches that the last window left unfinished in the pipeline, since jobs can join
        and leave only when no microbatch is in flight."""
        if self.executor.unfinished.batches:
            self._execute_program(self.windows.drain_window(), self._stop, self._callback)

    def _execute_program(self, program: Program, stop: Callable[[], bool], callback: Callback | None) -> None:
        attached = {name: self.jobs[name].shape for name in self.executor.attached}
        prediction = self.fitted_models.predict_window(program, attached, self.engine.price(attached))
        taken = self.fitted_models.memory.process_bytes
        self.journal.record_prediction(
            prediction_numbers(self.choice.layout, program, attached, prediction, taken)
        )
        self._timed = TimedWindow()
        own_peak, peak_before = reset_peak(self.base.device), max(self._peak_bytes())
        if not own_peak:
            # The measured value will be the highest peak so far, so that is what is predicted.
            prediction = replace(prediction, peak_bytes=max(peak_before, prediction.peak_bytes))
        if self.engine.timeline is not None:
            self.engine.timeline.begin(program)
        fitted, began = True, time.monotonic()
        try:
            events = self.executor.run(program, partial(collate_plan, jobs=self.jobs), stop)
            for event in self.answers.with_answers(events, program, self._evaluated_trials):
                self._handle_event(event, callback)
        except OutOfMemory:
            # Handled below, when the traceback no longer holds tensors.
            fitted = False
        self.seconds += time.monotonic() - began
        if self.engine.timeline is not None:
            self.engine.timeline.end(program)
        if not fitted:
            self._reduce_memory(program.capacity)
            return
        if self.programs_run is not None:
            self.programs_run.append(program)
        timed = self._timed
        seconds = time.monotonic() - began - timed.other_seconds - self.answers.window_seconds
        peaks = self._peak_bytes()
        outcome = Outcome(seconds, max(peaks), own_peak, timed.pass_times, timed.steps, timed.save_times)
        self.fitted_models.record_outcome(program, attached, outcome)
        if not self.engine.deterministic and self.fitted_models.adopt_fitted_models():
            self.journal.save_fitted_models(self.fitted_models.state_record())
        self.journal.record_window(program, attached, prediction, outcome, self.fitted_models.cost, peaks)
        if self._slow_run is not None and len(program.devices) == 1:
            planned = self._planned_cost.program_seconds(program, attached)
            if sentence := self._slow_run.add(planned, seconds):
                self.journal.note(sentence)
        if timed.save_times:
            # A run that finds no checkpoint then knows that there was one.
            self.journal.flush()

    def _reduce_memory(self, capacity: int) -> None:
        """Reduce memory use after a shortage: halve the capacity (maximum tokens per microbatch) or, if that
        is not possible, preempt a job, or fail the only job."""
        release_cached_memory(self.base.device)
        shapes = self._job_shapes(name for name in self.executor.attached if name not in self._endings)
        if not shapes:
            return
        least = max_sample_tokens(shapes)
        if capacity > least:
            self.windows.max_tokens = max(capacity // 2, least)
            self.journal.note(
                f"Out of memory with {capacity} tokens per microbatch: continuing with "
                f"{self.windows.max_tokens}.{self._changed_results_warning()}"
            )
            return
        if self.fitted_models.recompute_more(shapes, self.windows.max_tokens):
            self.journal.note(
                f"Out of memory with {capacity} tokens per microbatch: more is recomputed from here "
                f"on.{self._changed_results_warning()}"
            )
            return
        last = max(shapes, key=lambda shape: (-shape.priority, shape.file_position)).name
        attached = count_noun(len(shapes), "attached job")
        reason = f"out of memory with {attached} and {capacity} tokens per microbatch"
        if len(shapes) == 1:
            self._set_ending(
                last, Ending(State.FAILED, f"{reason}; {self.fitted_models.memory.advice(shapes[0])}")
            )
            return
        self._max_jobs = len(shapes) - 1
        self._max_jobs_reason = f"{reason}; it resumes when another job has ended"
        if changed_results := self._changed_results_warning():
            self.journal.note(f"{last}: {reason}.{changed_results}")
        self._requeue_jobs({last: self._max_jobs_reason})

    def _changed_results_warning(self) -> str:
        """Return the warning that a shortage of memory changes the results of a deterministic run. Return an
        empty string for other runs."""
        if not self.engine.deterministic:
            return ""
        return " Deterministic: the bits differ from here on from those of a run without this shortage."

    # -- events ------------------------------------------------------------------------------------------

    def _handle_event(self, event: Event, callback: Callback | None) -> None:
        match event:
            case Passed():
                self._timed.pass_times.append(event.time)
                if self.watch_pass is not None:
                    self.watch_pass(event)
            case StateTime():
                self._timed.steps.append(event)
            case Stepped(job):
                if job in self._saved_at_every_step:
                    # There is no half of an interval in which the last checkpoint could be written.
                    self.executor.finish_saves(job)
                self.journal.record_step(event, self.jobs[job], self.executor.attached[job].progress)
                if self.jobs[job].spec.objective.kind == "sft":
                    self.journal.record_warning(
                        job, collapse_warning(event.outcome, self.base.shape.vocabulary)
                    )
                if (reason := self.sweeps.record_step(event)) is not None and job not in self._endings:
                    self._set_ending(job, Ending(State.CANCELLED, reason, leaves_sweep=True))
            case Evaluated(job) if job in self._evaluated_trials:
                self.journal.record_rung(event)
                self.sweeps.record_mean_evaluation(event)
            case Evaluated():
                self._record_evaluation(event)
            case Scored():
                self.references.record_scores(event)
            case SaveDue(job):
                self._save_checkpoint(job, self.executor.save)
            case Failed(job, reason):
                self._endings[job] = Ending(State.FAILED, reason)
        if (
            callback is not None
            and isinstance(event, Stepped | Evaluated)
            and event.job not in self._evaluated_trials
        ):
            began = time.monotonic()
            with phase(Phase.OTHER):
                callback(event)
            self._timed.other_seconds += time.monotonic() - began
        self._handle_writes()

    def _record_evaluation(self, event: Evaluated) -> None:
        spec, training = self.jobs[event.job].spec, self.executor.attached[event.job]
        min_delta = spec.early_stop.min_delta if spec.early_stop else 0.0
        counts = self.jobs[event.job].is_requested_evaluation(event.step)
        metric = self.jobs[event.job].metric_name
        score = None if metric is None else event.metrics[metric]
        self.executor.record_evaluation(event.job, event.loss, spec.keep == "best", min_delta, counts, score)
        progress = training.progress
        self.journal.record_evaluation(event, self.jobs[event.job], progress)
        self.sweeps.record_evaluation(event)
        if counts and spec.early_stop and progress.stale >= spec.early_stop.patience:
            evaluations = count_noun(progress.stale, "evaluation")
            what = metric or "validation loss"
            reason = f"stopped early at step {event.step}: no better {what} in {evaluations}"
            self._set_ending(event.job, Ending(State.SUCCEEDED, reason))

    @phase(Phase.SAVING)
    def _save_checkpoint(self, name: str, save: Callable[[str, Path], None]) -> None:
        """Begin to write a checkpoint, after waiting until the job's previous checkpoint is complete. However
        slow the disk is, a killed run thus loses at most the steps of one interval `save_every`."""
        began = time.monotonic()
        self.executor.finish_saves(name)
        self._handle_writes()
        training = self.executor.attached[name]
        if name not in self._endings:
            self._last_saved[name] = began
            try:
                save(name, self.result_writer.checkpoints(name))
            except OSError as error:
                self._pause_unsaved(Unsaved(name, training.progress.step, error.strerror or str(error)))
        self._timed.save_times.append(StateTime(1, training.layout.size, time.monotonic() - began))

    def _handle_writes(self) -> None:
        """Process the outcomes of checkpoints and other files whose background writes have completed or
        failed since the last call."""
        for one in self.executor.take_unsaved():
            self._pause_unsaved(one)
        self.result_writer.record_finished_writes()

    def _wait_for_delivery(self) -> None:
        self.result_writer.wait_for_next_write()
        self._handle_writes()

    def _pause_unsaved(self, unsaved: Unsaved) -> None:
        """Pause a job whose checkpoint could not be written, so that no further steps can be lost. A job that
        has made its last step is not paused, since only the adapter must still be written."""
        name, training = unsaved.job, self.executor.attached.get(unsaved.job)
        if training is None or name in self._endings:
            return
        if training.progress.step >= self.jobs[name].recipe.steps:
            return
        what = f"its checkpoint of step {unsaved.step} cannot be written: {unsaved.reason}"
        self._set_ending(name, Ending(State.PAUSED, f"{what}; {self.result_writer.resume_advice(name)}"))

    # -- endings -----------------------------------------------------------------------------------------

    def _set_ending(self, name: str, ending: Ending) -> None:
        """Record in which state and for which reason a job ends. The job is detached when the current window
        (a few global batches of every job) has been run."""
        self._endings[name] = ending
        self.executor.kill(name)

    def _detach_ended(self) -> None:
        self._end_complete_jobs()
        # Captured passes in flight read tables of all attached jobs.
        if self._endings and (self.executor.captures is not None or self._is_unfinished(self._endings)):
            self._drain()
            self._end_complete_jobs()
        for name, ending in self._endings.items():
            self._max_jobs = math.inf
            training = self._detach_job(name)
            if ending.state is State.SUCCEEDED:
                status = self.store.job(name)
                self.journal.record_warning(name, status.warning or base_warning(status))
                self.result_writer.deliver(self.jobs[name], training, ending)
            else:
                self.journal.set_state(name, ending.state, ending.reason)
            if ending.leaves_sweep:
                self.result_writer.drop_job_checkpoints(name)
        if self._endings:
            self.journal.flush()
        if self._endings and self.base.device.type == "cpu":
            # Otherwise the heap keeps what they held, and later windows do not appear to take less.
            release_cached_memory(self.base.device)
        self._endings.clear()

    def _is_unfinished(self, names: Iterable[str]) -> bool:
        """Return whether the last window left a global batch of one of these jobs unfinished in the
        pipeline."""
        return not self.executor.unfinished.steps.keys().isdisjoint(names)

    def _end_complete_jobs(self) -> None:
        """Mark jobs that have made their last step and have been evaluated as succeeded, unless another
        ending has been recorded. The jobs are detached when the current window (a few global batches of every
        job) has been run."""
        for name, training in list(self.executor.attached.items()):
            if training.progress.step >= self.jobs[name].recipe.steps and not self._needs_first_evaluation(
                name
            ):
                self._endings.setdefault(name, Ending(State.SUCCEEDED))

    def _requeue_jobs(self, reasons: Mapping[str, str], are_resting_trials: bool = False) -> None:
        """Save and detach jobs, and queue them again. `reasons` maps each job to the reason that the user
        sees; with `are_resting_trials`, the jobs are trials that wait for a comparison with other trials of
        their sweep."""
        if not reasons:
            return
        for training in self._save_and_detach(list(reasons)):
            name = training.job
            if are_resting_trials:
                self.sweeps.mark_resting(name)
            else:
                self.waiting_jobs[name] = self.jobs[name]
            self.journal.set_state(name, State.QUEUED, reasons[name])
        self.journal.flush()

    def _save_and_detach(self, names: Sequence[str]) -> list[Training]:
        """Save and detach the given jobs, and return those that were saved. A job that cannot be saved is
        paused instead."""
        self._drain()
        for name in names:
            self._save_checkpoint(name, self.executor.save_now)
        for name in names:
            self.executor.finish_saves(name)
        self._handle_writes()
        return [self._detach_job(name) for name in names if name not in self._endings]

    def _detach_job(self, name: str) -> Training:
        self.references.remove_job(name)
        return self.executor.detach(name)

    def _suspend_jobs(self) -> None:
        for training in self._save_and_detach(list(self.executor.attached)):
            reason = self._interruption_reason(training.progress.step)
            self.journal.set_state(training.job, State.PAUSED, reason)
        self._detach_ended()
        for name in [*self.waiting_jobs, *self.sweeps.resting_trials()]:
            self._remove_from_queue(name, State.PAUSED, self._interruption_reason(self.store.job(name).step))

    def _interruption_reason(self, step: int) -> str:
        return f"interrupted at step {step}; resume with {self.store.resume_line()}"

    # -- sweeps ------------------------------------------------------------------------------------------

    def _apply_sweep_decisions(self) -> bool:
        """Apply the decisions of sweeps, between two runs of a Program: trials that are compared at their
        current step continue, are detached to wait for other trials, or leave. Return whether a new job waits
        for admission."""
        if not self.sweeps.sweeps:
            return False
        attached = {name: training.progress.step for name, training in self.executor.attached.items()}
        orders = self.sweeps.trial_orders(attached, self.result_writer)
        before = frozenset(self.waiting_jobs)
        for name, limit in orders.step_limits.items():
            if self.jobs[name].step_limit != limit:
                self.jobs[name] = replace(self.jobs[name], step_limit=limit)
        self.waiting_jobs = {name: self.jobs[name] for name in (*self.waiting_jobs, *orders.promoted_trials)}
        for name, reason in orders.leave_reasons.items():
            self._leave_sweep(name, reason)
        self._requeue_jobs(orders.rest_reasons, are_resting_trials=True)
        self._detach_ended()
        if self.add_proposed_job is not None:
            self.sweeps.propose_trials(self.add_proposed_job, self.journal.note)
        self._handle_writes()
        return not before.issuperset(self.waiting_jobs)

    def _leave_sweep(self, name: str, reason: str) -> None:
        if name in self.executor.attached:
            self._set_ending(name, Ending(State.CANCELLED, reason, leaves_sweep=True))
            return
        self._remove_from_queue(name, State.CANCELLED, reason)
        self.result_writer.drop_job_checkpoints(name)
