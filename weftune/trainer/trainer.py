"""The class `Trainer`, with which Python code adds jobs and trains them together in one run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weftune.adapters.target import source_job
from weftune.base.host.read_ahead import base_read_ahead
from weftune.base.load import inspect, load_tokenizer, select_device
from weftune.base.model import Base
from weftune.base.quant.formats import refuse_without_fp8
from weftune.base.spec import BaseSpec
from weftune.core.clock import Phase, PhaseClock, current_clock, phase, use_clock
from weftune.core.deterministic import deterministic_kernels
from weftune.core.files import cache_folder
from weftune.core.interrupt import handle_interrupts
from weftune.core.shapes import ModelShape
from weftune.data.encode import Encoder
from weftune.data.prepare import SharedData
from weftune.data.workers import end_workers
from weftune.errors import BaseModelError, Mistake, OutputError, SpecError, UserError, WeightsLost
from weftune.jobs.spec.checks import (
    check_lengths,
    check_names,
    check_starts,
    check_targets,
    data_warnings,
    merge_repeated_sentences,
    rope_warnings,
    warnings,
)
from weftune.jobs.spec.read import parse_base, read_added_run
from weftune.jobs.spec.retry import apply_changes, apply_retries, new_retry
from weftune.jobs.spec.spec import JobSpec, RunSpec, locate_in_job, resolve_job
from weftune.jobs.store.inbox import FileRequest, added_runs
from weftune.jobs.store.job_file import DamagedJobFile, read_job_file
from weftune.jobs.store.status import State, resume_line
from weftune.jobs.store.store import Store, open_share, open_store
from weftune.jobs.sweeps.read import sweep_warnings, trial_job
from weftune.jobs.sweeps.record import SweepRecord, proposed_trials
from weftune.jobs.sweeps.running import RunningSweep, SweepInShare
from weftune.jobs.sweeps.search import TrialSearch, later_generation_search
from weftune.jobs.sweeps.spec import Sweep
from weftune.report.compare import first_loss, first_validation, kept_evaluation, kept_validation
from weftune.report.effort import wall_time_sentence
from weftune.report.loggers import check_trackers, open_loggers
from weftune.report.page import write_report
from weftune.report.read import JobRecord, Run, save_wall_time
from weftune.report.read import read_run as read_records
from weftune.run.training import checkpoint
from weftune.run.training.state import Progress
from weftune.run.workers.groups import restart_count
from weftune.trainer.engine import Engine, open_engine
from weftune.trainer.inbox import FolderInbox
from weftune.trainer.job import PreparedJob, prepare_job
from weftune.trainer.journal import Journal, View
from weftune.trainer.loop import Callback, Loop, lost_checkpoint_reason
from weftune.trainer.options import Options
from weftune.trainer.results import (
    CHECKPOINTS,
    JOB_FILE,
    add_retries,
    changed_settings,
    job_file_values,
    read_retries,
    refuse_changes,
    refuse_full_disk,
    write_job_file,
)
from weftune.trainer.sweeps import Sweeps


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a job: its state, its folder, and its metrics.

    Metrics whose keys begin with `eval_` belong to the adapter that is kept, and those with `base_eval_` to
    the base without an adapter. Metrics without a prefix, such as `rewards/chosen`, belong to the last step.
    """

    state: State
    path: Path
    metrics: dict[str, float]
    reason: str = ""
    warning: str = ""
    """Problem with the adapter of a job that has succeeded; empty if there is none."""


class Quiet:
    """A progress view that shows nothing."""

    def update(self, row: JobRecord) -> None:
        pass

    def sweep(self, record: SweepRecord) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class Trainer:
    """A trainer of adapters, which trains all added jobs together on one base model."""

    def __init__(
        self,
        base: str | Mapping[str, Any] | BaseSpec | Base,
        *,
        output: str | Path = "output",
        tokenizer: Any = None,
        max_steps: int | None = None,
        report_to: Sequence[str] = (),
        options: Options | None = None,
        view: View | None = None,
        place: Callable[..., str] = locate_in_job,
    ) -> None:
        if isinstance(base, str | Mapping):
            base = BaseSpec(model=base) if isinstance(base, str) else parse_base(base)
        self.base = base
        self.spec = base.spec if isinstance(base, Base) else base
        self.output = Path(output)
        self.tokenizer = tokenizer
        self.max_steps = max_steps
        self.report_to = tuple(report_to)
        self.options = options or Options()
        self.view: View = view or Quiet()
        self.jobs: dict[str, JobSpec] = {}
        self.sweeps: dict[str, tuple[Sweep, TrialSearch | None]] = {}
        self.interrupted = False
        self.loop: Loop | None = None
        """The training loop while the run lasts; None otherwise."""
        self._place = place
        self._encoder: Encoder | None = None
        """Encoder shared by all jobs, since computing its fingerprint takes much of a second."""

    def add(self, job: JobSpec) -> Trainer:
        """Add a job, before the run or from a callback during it."""
        if job.name in self.jobs:
            raise SpecError(Mistake(f"job {job.name}", "there is already a job of that name"))
        self.jobs[job.name] = job
        if self.loop is not None and not self._has_ended(self._store_in_folder(self.loop), job.name):
            try:
                (ready,) = self._prepare_joining_jobs([job], self._place)
            except UserError:
                del self.jobs[job.name]
                raise
            self._rewind_jobs(self._store_in_folder(self.loop), [ready])
            self.loop.add_job(ready)
        return self

    def _store_in_folder(self, loop: Loop) -> Store:
        assert isinstance(loop.store, Store), "a trainer keeps its jobs in a folder"
        return loop.store

    def _prepare_joining_jobs(self, jobs: Sequence[JobSpec], locate: Callable[..., str]) -> list[PreparedJob]:
        """Prepare, for training, jobs that join the run while it trains and have been added to `self.jobs`
        already. Raise one error for the invalid jobs among them."""
        assert self.loop is not None
        shape = self.loop.choice.shape
        self._check_prepared_jobs(jobs, shape, locate)
        try:
            ready = self.prepare_all(jobs, shape, self._store_in_folder(self.loop))
        finally:
            end_workers()
        for job in ready:
            self.loop.answers.check_memory(job)
        return ready

    def _prepare_added_jobs(self, request: FileRequest, record: Callable[[], None]) -> list[PreparedJob]:
        """Prepare the jobs of a file that `weftune jobs add` has sent to this run while it trains, and begin
        the file's sweeps. `record` keeps the file for `--resume`."""
        assert self.loop is not None
        if self.options.share is not None:
            raise SpecError(
                "jobs cannot join a run with --gpus, which has divided its jobs among the GPUs at its start; "
                "train them with another weftune train"
            )
        run = read_added_run(request.text, Path(request.file), list(self.jobs))
        self._check_added_jobs(run)
        self.jobs |= {job.name: job for job in run.jobs}
        store = self._store_in_folder(self.loop)
        for sweep in run.sweeps:
            self.add_sweep(sweep)
        try:
            ready = self._prepare_joining_jobs(run.jobs, run.locate)
            opened = [self._open_sweep(store, sweep) for sweep in run.sweeps]
            record()
        except UserError:
            for job in run.jobs:
                del self.jobs[job.name]
            for sweep in run.sweeps:
                del self.sweeps[sweep.name]
            raise
        for one in opened:
            self.loop.sweeps.add_sweep(one)
        self._show_job_warnings("warning", warnings(run.jobs, self.loop.choice.shape))
        self._show_data_notes(ready)
        self._rewind_jobs(store, ready)
        return ready

    def _check_added_jobs(self, run: RunSpec) -> None:
        """Raise an error if added jobs are for another base, or have the names of jobs of this run."""
        mistakes = [
            Mistake(run.locate(job.name, "name"), "the run has a job of that name already; choose another")
            for job in run.jobs
            if job.name in self.jobs or job.name in self.sweeps
        ]
        mistakes += [
            Mistake(
                run.locate(sweep.trials[0].name, "name"),
                "the run has a job or a sweep of that name already; choose another",
            )
            for sweep in run.sweeps
            if sweep.name in self.jobs or sweep.name in self.sweeps
        ]
        here, there = self.spec.record(), run.base.record()
        if changed := [
            f"base.{key}: the run has {here[key]}, not {there[key]}"
            for key in here
            if here[key] != there[key]
        ]:
            mistakes.append(Mistake("", f"{'; '.join(changed)}; jobs can only join a run on the same base"))
        if mistakes:
            raise SpecError(dict.fromkeys(mistakes))

    def restore_added_jobs(self) -> None:
        """Add the jobs and sweeps that `weftune jobs add` added to earlier runs into this output folder."""
        if not self.options.resume or self.options.share is not None:
            return
        for run in added_runs(self.output, self.jobs):
            # The user may have moved them to the jobs file of the run meanwhile.
            for job in run.jobs:
                self.jobs.setdefault(job.name, job)
            for sweep in run.sweeps:
                if sweep.name not in self.sweeps:
                    self.add_sweep(sweep)

    def add_sweep(self, sweep: Sweep, search: TrialSearch | None = None) -> Trainer:
        """Add a sweep whose trials have been added as jobs. `search` proposes later generations of trials;
        None means the search that the sweep's spec describes."""
        missing = [trial.name for trial in sweep.trials if trial.name not in self.jobs]
        assert not missing or self.options.share is not None, f"{missing} are no jobs"
        if sweep.name in self.jobs or sweep.name in self.sweeps:
            raise SpecError(Mistake(f"sweep {sweep.name}", "there is already a job or a sweep of that name"))
        own = {trial.name for trial in sweep.trials}
        others = (name for name in self.jobs if name not in own)
        self.sweeps[sweep.name] = sweep, search or later_generation_search(sweep, others)
        return self

    def cancel(self, name: str) -> None:
        """Cancel one job of the run. All other jobs continue."""
        if self.loop is None or name not in self.jobs:
            raise SpecError(f"There is no running job {name}.")
        self.loop.cancel(name)

    def run(self, callback: Callback | None = None) -> dict[str, Result]:
        """Train until every job has ended or the run is interrupted. `callback` is called with every step."""
        if current_clock() is not None or self.options.share is not None:
            return self._run(callback)
        with use_clock(PhaseClock()) as clock:
            results = self._run(callback)
            self.view.note(wall_time_sentence(clock.read()))
        return results

    def _run(self, callback: Callback | None) -> dict[str, Result]:
        if self.options.staff is None and self.options.starts_processes:
            raise UserError(
                "gpus, pipeline, replicas and shards start processes, which a Trainer cannot: give them to "
                "weftune.train or to the command line"
            )
        device = self.base.device if isinstance(self.base, Base) else select_device(self.options.device)
        if not isinstance(self.base, Base):
            refuse_without_fp8(self.spec, device)
        shape = self.base.shape if isinstance(self.base, Base) else inspect(self.spec, device)
        self.restore_added_jobs()
        self.check(shape)
        with ExitStack() as stack:
            stack.enter_context(deterministic_kernels(self.options.deterministic))
            if self.options.share is None:
                store = open_store(self.output, self.options.resume, self.options.command)
            else:
                store = open_share(self.output, self.options.share)
            stack.enter_context(store)
            sweeps = self.restore_sweeps(store)
            with nullcontext() if isinstance(self.base, Base) else base_read_ahead(self.spec):
                ready = self.prepare_unfinished_jobs(store, shape)
            shapes = [sweeps.with_weight_means(job).shape for job in ready]
            engine = None
            if ready:
                output = self.output.absolute()
                engine = open_engine(
                    self.options,
                    self.base,
                    device,
                    shape,
                    shapes,
                    lambda name: output / name / CHECKPOINTS,
                    self._note_recorder(store),
                )
            # Not earlier: while a base is loaded, which may take minutes, a signal has nothing to wait for.
            stopping = "Stopping: this step is finished and saved first. Press Ctrl-C again to stop at once."
            stop = stack.enter_context(handle_interrupts(partial(self.view.note, stopping)))
            if engine is not None:
                base = engine.base
                store.set_description(
                    self.spec.model, str(base.device), str(base.dtype).removeprefix("torch.")
                )
                self.prepare_output(store, ready)
                loggers = open_loggers(
                    self.report_to, self.output, {name: resolve_job(job) for name, job in self.jobs.items()}
                )
                stack.callback(loggers.close)
                self.loop = self._create_loop(engine, store, Journal(store, self.view, loggers.log))
                self.loop.sweeps, self.loop.add_proposed_job = sweeps, self.add
                inbox = FolderInbox(store.records, self._prepare_added_jobs, self._note_recorder(store))
                self.loop.inbox = inbox
                stack.callback(inbox.close)
                for sweep in sweeps.sweeps:
                    sweep.read_metrics()
                stack.callback(setattr, self, "loop", None)
                stack.callback(engine.executor.restore_base)
                for job in ready:
                    self.loop.add_job(job)
                if self.options.share is not None or restart_count() > 0:
                    # The run goes on after the loss of a process. The user resumes what the user has paused.
                    for name in store.requested_pauses & self.loop.waiting_jobs.keys():
                        self.loop.pause(name)
                # From here on the loop holds their data, as long as it needs them.
                ready.clear()
                try:
                    self.loop.run(stop, callback)
                except WeightsLost as error:
                    raise BaseModelError(f"{error}: {store.resume_line()}") from error
                for note in loggers.notes:
                    store.note(note)
            sweeps.finish()
            is_stopped = stop() or (self.loop is not None and bool(self.loop.paused_jobs))
            self.interrupted = is_stopped and not all(self._has_ended(store, name) for name in self.jobs)
            try:
                store.write_status()
            except OutputError as error:
                self.view.note(f"warning: {error}; --resume reads the folders of the jobs instead.")
            return self.results(store)

    # -- before ------------------------------------------------------------------------------------------

    def check(self, shape: ModelShape) -> None:
        """Validate the run before the output folder is modified. Raise one error with all mistakes that can
        be found by then."""
        if not self.jobs:
            raise SpecError("There is no job to train; add one.")
        jobs = list(self.jobs.values())
        self._check_prepared_jobs(jobs, shape, self._place)
        self._show_job_warnings("warning", [*warnings(jobs, shape), *rope_warnings(jobs, self.spec)])
        known = [*self.jobs, *proposed_trials(self.output, self.sweeps)]
        for option, names in (("--restart", self.options.restart), ("--retry", self.options.retry)):
            if unknown := [name for name in names if name not in known]:
                raise SpecError(f"{option} {unknown[0]}: there is no such job; known: {', '.join(known)}")
        if both := [name for name in self.options.retry if name in self.options.restart]:
            raise SpecError(
                f"--retry {both[0]} resumes from its last checkpoint, --restart starts again; choose one"
            )
        check_trackers(self.report_to)
        self.tokenizer = self.tokenizer or load_tokenizer(self.spec)

    def _check_prepared_jobs(
        self, jobs: Sequence[JobSpec], shape: ModelShape, locate: Callable[..., str]
    ) -> None:
        """Raise an error for targets that the base lacks, samples longer than its context, and jobs that
        cannot start from the job that they name. In a process that trains a part of the jobs, the last check
        is left out, since the launcher has made it."""
        known = list(self.jobs) if self.options.share is None else [source_job(job.adapter) for job in jobs]
        mistakes = check_names(jobs, known, locate)
        mistakes = mistakes or check_starts(list(self.jobs.values()), shape, locate)
        mistakes += check_targets(jobs, shape, locate)
        if mistakes := [*mistakes, *check_lengths(jobs, shape, self.spec, locate)]:
            raise SpecError(dict.fromkeys(mistakes))

    def restore_sweeps(self, store: Store) -> Sweeps:
        """Return the sweeps in their state after earlier runs, and add the trials that earlier runs proposed
        as jobs. A process that trains only a part of the jobs has all of its trials already."""
        sweeps = Sweeps([self._open_sweep(store, sweep) for sweep, _ in self.sweeps.values()])
        sweeps.propose_trials(self.add, self._note_recorder(store))
        return sweeps

    def _open_sweep(self, store: Store, sweep: Sweep) -> RunningSweep:
        again = {"--restart": self.options.restart, "--retry": self.options.retry}
        is_alone = self.options.share is None
        kind = RunningSweep if is_alone else SweepInShare
        found = kind(sweep, store, self.jobs, self._note_recorder(store), self.sweeps[sweep.name][1])
        found.show = self.view.sweep
        for trial in found.restore([name for names in again.values() for name in names]):
            if is_alone and trial.name not in self.jobs:
                self.add(trial_job(sweep, trial))
        for option, names in again.items():
            found.refuse_retries(option, names, self.options.changes)
        return found

    def prepare_unfinished_jobs(self, store: Store, shape: ModelShape) -> list[PreparedJob]:
        """Prepare the jobs that have not ended, and those that the user restarts, for training, and return
        them."""
        if store.rebuild_note:
            self.view.note(store.rebuild_note)
        self._check_finished_jobs(store)
        for name, status in store.status.jobs.items():
            if status.state is State.SUCCEEDED:
                # A kill may have come between a job's success and the deletion of its checkpoints.
                shutil.rmtree(self.output / name / CHECKPOINTS, ignore_errors=True)
        again = (*self.options.restart, *self.options.retry)
        jobs = [j for j in self.jobs.values() if j.name in again or not self._has_ended(store, j.name)]
        for name in self.options.retry:
            if name not in store or read_job_file(self.output / name) is None:
                raise SpecError(f"--retry {name}: it has not started yet; leave --retry out")
            if store.job(name).state is State.SUCCEEDED:
                restart = resume_line(self.options.command, restart=[name])
                raise SpecError(f"--retry {name}: it has succeeded; restart it with {restart}")
        try:
            ready = self.prepare_all(
                [job for job in jobs if not self._has_lost_checkpoints(store, job.name)], shape, store
            )
        finally:
            end_workers()
        self._show_data_notes(ready)
        refuse_full_disk(self.output, ready, shape)
        return ready

    def _check_finished_jobs(self, store: Store) -> None:
        """Raise an error if a job that has finished is resumed with other settings, which would have no
        effect."""
        mistakes, again = [], (*self.options.restart, *self.options.retry)
        for job in self.jobs.values():
            is_finished = self._has_ended(store, job.name) and store.job(job.name).state is State.SUCCEEDED
            if not is_finished or job.name in again:
                continue
            folder = self.output / job.name
            if changed := changed_settings(folder, self._apply_retries(job), self.spec, self.max_steps):
                restart = resume_line(self.options.command, restart=[job.name])
                what = f"Job {job.name} has already finished with other settings: {'; '.join(changed)}"
                mistakes.append(Mistake("", f"{what}; put them back, or restart it with {restart}"))
        if mistakes:
            raise OutputError(mistakes)

    def _show_data_notes(self, prepared_jobs: Sequence[PreparedJob]) -> None:
        """Show the notes about the jobs' data that `weftune preview` also prints."""
        found = [
            (job.name, sentence)
            for job in prepared_jobs
            for sentence in data_warnings(
                job.spec, job.data.train.rows, job.recipe.steps, job.data.evaluates_training_rows
            )
        ]
        steps = {job.name: job.recipe.steps for job in prepared_jobs}
        sweeps = [
            sweep for sweep, _ in self.sweeps.values() if any(trial.name in steps for trial in sweep.trials)
        ]
        found_of_sweeps = sweep_warnings(sweeps, self.jobs, steps)
        self._show_job_warnings("warning", [*merge_repeated_sentences(found), *found_of_sweeps])
        self._show_job_warnings(
            "note",
            merge_repeated_sentences((job.name, note) for job in prepared_jobs for note in job.data.notes),
        )

    def _show_job_warnings(self, kind: str, sentences: Sequence[str]) -> None:
        """Show warnings about the jobs to the user. If several processes each train a part of the jobs, only
        their launcher shows them."""
        for sentence in sentences if self.options.share is None else ():
            self.view.note(f"{kind}: {sentence}")

    def _has_lost_checkpoints(self, store: Store, name: str) -> bool:
        """Return whether a job that has begun has no checkpoint left. Such a job is paused, since only the
        user may decide to restart it."""
        if name in self.options.restart:
            return False
        folder = self.output / name / CHECKPOINTS
        found = checkpoint.survey(folder)
        has_begun = name in store and store.job(name).step > 0
        if found.progress is not None:
            if found.damaged_paths:
                names = ", ".join(path.name for path in found.damaged_paths)
                self._note_recorder(store)(
                    f"{name}: damaged checkpoints are left aside ({names}); it resumes from step "
                    f"{found.progress.step}."
                )
            return False
        if not found.damaged_paths and not (has_begun and not folder.exists()):
            return False
        store.pause_job(name, lost_checkpoint_reason(store, name, found))
        self.view.update(JobRecord(name=name, state=State.PAUSED, reason=store.job(name).reason))
        return True

    def _delete_job_folder(self, name: str) -> None:
        """Delete a job's folder. The folder is renamed first, since a partly deleted folder could look like a
        job to resume."""
        old = self.output / f".{name}.old"
        shutil.rmtree(old, ignore_errors=True)
        if (self.output / name).exists():
            (self.output / name).rename(old)
            shutil.rmtree(old, ignore_errors=True)

    def _has_ended(self, store: Store, name: str) -> bool:
        if name not in store and (self.output / name / JOB_FILE).exists():
            # The status has lost it, or it was added from a callback; its folder holds its state.
            store.add_job(name)
        return name in store and store.job(name).state.has_ended

    @phase(Phase.TOKENISING)
    def prepare_all(self, jobs: Sequence[JobSpec], shape: ModelShape, store: Store) -> list[PreparedJob]:
        """Prepare all jobs for training. Raise one error that lists everything that is wrong with them."""
        prepared_jobs: list[PreparedJob] = []
        mistakes: list[Mistake] = []
        if not jobs:
            return prepared_jobs
        # Not kept: the jobs hold their data themselves, as long as they need them.
        shared = self._shared_data(shape)
        order = {name: number for number, name in enumerate(self.jobs)}
        for job in jobs:
            try:
                prepared_jobs.append(self._prepare_job(job, order[job.name], shape, store, shared))
            except OutputError:
                raise
            except UserError as error:
                mistakes += error.mistakes
        if mistakes:
            raise SpecError(dict.fromkeys(mistakes))
        return prepared_jobs

    def _shared_data(self, shape: ModelShape) -> SharedData:
        if self._encoder is None:
            self._encoder = Encoder(self.tokenizer)
        return SharedData(self._encoder, cache_folder() / "tokens", shape.context)

    def _prepare_job(
        self, job: JobSpec, job_number: int, shape: ModelShape, store: Store, shared: SharedData
    ) -> PreparedJob:
        if job.name not in self.options.restart:
            job = self._apply_retries(job)
        cache = cache_folder() / "tokens"
        ready = prepare_job(job, job_number, self.tokenizer, shape, cache, self.max_steps, shared)
        if job.name not in self.options.restart:
            allowed = self.options.changes if job.name in self.options.retry else ()
            if mended := refuse_changes(
                self.output / job.name, job_file_values(ready, self.spec), allowed, self.options.command
            ):
                self._note_recorder(store)(mended)
        return ready

    def _apply_retries(self, job: JobSpec) -> JobSpec:
        """Return the job with the settings that were changed by its retries in earlier runs and in this
        run."""
        with suppress(DamagedJobFile):
            job = apply_retries(job, read_retries(self.output / job.name))
        return apply_changes(job, self.options.changes) if job.name in self.options.retry else job

    def prepare_output(self, store: Store, prepared_jobs: Sequence[PreparedJob]) -> None:
        """Record the jobs, retries and restarts of the run in the output folder, so that the run can be
        resumed if it is killed at any later moment."""
        for name in self.options.restart:
            store.restart_job(name)
        for job in prepared_jobs:
            # If there is no room for a later status, this one names them all.
            store.add_job(job.name)
        self._record_retries(store, prepared_jobs)
        self._rewind_jobs(store, prepared_jobs)
        store.write_status()
        for name in self.options.restart:
            self._delete_job_folder(name)

    def _record_retries(self, store: Store, prepared_jobs: Sequence[PreparedJob]) -> None:
        """Record retries (requests to resume jobs with changed settings) in the jobs' notes and in job.yaml,
        so that later runs know the changed keys."""
        for job in prepared_jobs:
            if job.name not in self.options.retry:
                continue
            folder = self.output / job.name
            after = job_file_values(job, self.spec, self.options.deterministic)
            before = read_job_file(folder)
            assert before is not None, "a job that has not started is refused"
            progress = checkpoint.newest_progress(folder / CHECKPOINTS) or Progress()
            retry = new_retry(before.values["job"], after["job"], progress.step, store.job(job.name).reason)
            write_job_file(folder, add_retries(after, folder, retry))
            store.retry_job(job.name, retry.sentence())

    def _create_loop(self, engine: Engine, store: Store, journal: Journal) -> Loop:
        return Loop(engine, self.tokenizer, store, journal)

    def _rewind_jobs(self, store: Store, prepared_jobs: Sequence[PreparedJob]) -> None:
        """Set the recorded progress of each job back to its newest checkpoint. Metrics of later steps are
        dropped, since the job will write them again."""
        found = {
            job.name: checkpoint.newest_progress(self.output / job.name / CHECKPOINTS)
            for job in prepared_jobs
        }
        progress = {name: one or Progress() for name, one in found.items()}
        store.drop_later_metrics(
            {name: one.step for name, one in progress.items()},
            {name: one.evaluated for name, one in progress.items()},
        )
        for job in prepared_jobs:
            one = progress[job.name]
            store.add_job(job.name)
            store.advance_job(job.name, one.step, job.recipe.steps, one.trained_tokens)

    # -- after -------------------------------------------------------------------------------------------

    def _note_recorder(self, store: Store) -> Callable[[str], None]:
        """Return a function that shows a sentence to the user and records it with the run."""

        def record_note(sentence: str) -> None:
            store.note(sentence)
            self.view.note(sentence)

        return record_note

    def results(self, store: Store) -> dict[str, Result]:
        """Return the results of all jobs. Write the report too, unless other processes still train a part of
        the jobs."""
        alone = self.options.share is None
        if alone:
            # For the report, and again after it, with the time that the report took.
            self._save_wall_time()
        run = read_records(self.output)
        if alone:
            self._write_report(run)
            self._save_wall_time()
        records = {record.name: record for record in run.jobs}
        return {name: self._job_result(store, name, records[name]) for name in self.jobs}

    @phase(Phase.REPORT)
    def _write_report(self, run: Run) -> None:
        try:
            write_report(self.output, run)
        except OutputError as error:
            self.view.note(f"warning: {error}; weftune report {self.output} draws it again.")

    def _save_wall_time(self) -> None:
        clock = current_clock()
        if clock is not None:
            with suppress(OutputError):
                save_wall_time(self.output, clock.read())

    def _job_result(self, store: Store, name: str, record: JobRecord) -> Result:
        status, kept = store.job(name), kept_evaluation(record)
        metrics: dict[str, float] = {"step": status.step, "trained_tokens": status.trained_tokens}
        found = {
            "first_loss": first_loss(record),
            "loss": record.loss,
            "base_eval_loss": status.base_loss,
            "first_eval_loss": first_validation(record),
            "eval_loss": kept_validation(record),
        }
        if record.losses:
            found |= record.losses[-1].metrics
        if kept is not None:
            found["eval_token_accuracy"] = kept.accuracy
            found |= {f"eval_{key}": value for key, value in kept.metrics.items()}
        if (evaluation := self.jobs[name].eval) is not None and evaluation.metric is not None:
            found[f"base_eval_{evaluation.metric_name}"] = status.base_score
            found[f"eval_{evaluation.metric_name}"] = status.score
        metrics |= {key: value for key, value in found.items() if value is not None}
        return Result(status.state, self.output / name, metrics, status.reason, status.warning)
