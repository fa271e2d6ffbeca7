"""The sweeps of a run (sets of jobs that differ in some values and are compared), with the operations that
the training loop needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from weftune.errors import UserError
from weftune.jobs.spec.spec import JobSpec
from weftune.jobs.store.job_file import CHECKPOINTS
from weftune.jobs.store.status import State
from weftune.jobs.store.store import Store
from weftune.jobs.sweeps.halving import mean_weight_spans
from weftune.jobs.sweeps.read import trial_job
from weftune.jobs.sweeps.running import RunningSweep, ShowNote, TrialOrders
from weftune.run.events import Evaluated, Stepped
from weftune.run.training import checkpoint
from weftune.trainer.job import PreparedJob


class Sweeps:
    """All sweeps of a run, and the operations on them that the training loop needs. A run may have no
    sweeps."""

    def __init__(self, sweeps: Iterable[RunningSweep] = ()) -> None:
        self.sweeps: tuple[RunningSweep, ...] = ()
        self._sweep_of_trial: dict[str, RunningSweep] = {}
        for sweep in sweeps:
            self.add_sweep(sweep)

    def add_sweep(self, sweep: RunningSweep) -> None:
        """Add a sweep, whose trials may enter the loop afterwards."""
        self.sweeps = (*self.sweeps, sweep)
        self._sweep_of_trial |= dict.fromkeys(sweep.trials, sweep)

    def remove_sweep(self, sweep: RunningSweep) -> None:
        """Remove a sweep whose trials have all ended."""
        self.sweeps = tuple(one for one in self.sweeps if one is not sweep)
        for name in sweep.trials:
            self._sweep_of_trial.pop(name, None)

    def add_trial(self, job: PreparedJob) -> PreparedJob:
        """Return a trial with the limits that its sweep sets: it trains only up to the next step at which
        trials are compared (a rung), and is evaluated there if rungs use the latest weights."""
        sweep = self._sweep_of_trial.get(job.name)
        if sweep is None:
            return job
        job = self.with_weight_means(job)
        sweep.add_trial(job.name, job.recipe.steps)
        rungs = frozenset() if sweep.evaluates_mean_weights else frozenset(sweep.rungs.rungs(job.name))
        limit = sweep.rungs.step_limit(job.name)
        if sweep.rungs.is_waiting_at_rung(job.name):
            found = checkpoint.newest_progress(sweep.store.output / job.name / CHECKPOINTS)
            if found is not None and found.step >= limit:
                sweep.resting.add(job.name)
        # A trial that was paused has the rungs among its evaluations already.
        requested = job.evaluate_at if job.requested_evaluations is None else job.requested_evaluations
        return replace(
            job, evaluate_at=job.evaluate_at | rungs, requested_evaluations=requested, step_limit=limit
        )

    def with_weight_means(self, job: PreparedJob) -> PreparedJob:
        """Return the job with the spans of steps over which its weights are averaged, if its sweep compares
        trials by mean weights."""
        sweep = self._sweep_of_trial.get(job.name)
        if sweep is None or not sweep.evaluates_mean_weights:
            return job
        spans = mean_weight_spans(sweep.sweep.spec.halving, job.recipe.steps)
        recipe, shape = (
            replace(job.recipe, averaged_spans=spans),
            replace(job.shape, mean_weight_count=1 if spans else 0),
        )
        return replace(job, recipe=recipe, shape=shape)

    def is_trial(self, name: str) -> bool:
        return name in self._sweep_of_trial

    def is_resting(self, name: str) -> bool:
        sweep = self._sweep_of_trial.get(name)
        return sweep is not None and name in sweep.resting

    def mark_resting(self, name: str) -> None:
        """Record that a trial was saved and detached, and now waits for the other trials with which it is
        compared."""
        self._sweep_of_trial[name].resting.add(name)

    def is_awaited(self, name: str, step: int) -> bool:
        """Return whether the job is a trial that must still be evaluated at this step because its sweep
        compares trials here."""
        sweep = self._sweep_of_trial.get(name)
        return (
            sweep is not None and step == sweep.rungs.step_limit(name) and sweep.rungs.awaits_evaluation(name)
        )

    def evaluates_mean_weights(self, name: str) -> bool:
        """Return whether the trial is compared with others by the mean of its recent weights, and not by its
        latest ones."""
        sweep = self._sweep_of_trial.get(name)
        return sweep is not None and sweep.evaluates_mean_weights

    def record_step(self, event: Stepped) -> str | None:
        """Record the loss of a job's step. Return the reason if the job is a trial that leaves its sweep now,
        or else None."""
        sweep = self._sweep_of_trial.get(event.job)
        return None if sweep is None else sweep.record_step(event.job, event.step, event.outcome.loss)

    def record_evaluation(self, event: Evaluated) -> None:
        if (sweep := self._sweep_of_trial.get(event.job)) is not None:
            sweep.record_evaluation(event.job, event.step, event.loss, event.token_accuracy, event.metrics)

    def record_mean_evaluation(self, event: Evaluated) -> None:
        """Record an evaluation of the mean of a trial's last weights."""
        self._sweep_of_trial[event.job].record_rung_evaluation(
            event.job, event.step, event.loss, event.token_accuracy, event.metrics
        )

    def trial_orders(self, attached: Mapping[str, int], delivering_trials: Collection[str]) -> TrialOrders:
        found = [sweep.trial_orders(attached, delivering_trials) for sweep in self.sweeps]
        return TrialOrders(
            {name: limit for one in found for name, limit in one.step_limits.items()},
            [name for one in found for name in one.promoted_trials],
            {name: reason for one in found for name, reason in one.rest_reasons.items()},
            {name: reason for one in found for name, reason in one.leave_reasons.items()},
        )

    def propose_trials(self, add_job: Callable[[JobSpec], Any], show_note: ShowNote) -> None:
        """Ask each sweep for new trials as long as it can propose some, and add them as jobs of the run."""
        for sweep in self.sweeps:
            while new := sweep.propose_trials():
                self._sweep_of_trial |= dict.fromkeys((trial.name for trial in new), sweep)
                for trial in new:
                    try:
                        add_job(trial_job(sweep.sweep, trial))
                    except UserError as error:
                        sweep.record_refusal(trial.name, str(error))
                        show_note(f"warning: {trial.name} cannot be trained: {error}")

    def decide_rungs(self, store: Store) -> None:
        """Decide, from the metrics in the store, which trials continue at each step that all compared trials
        have reached. The method is called while no job trains. Trials that leave are cancelled in the
        store."""
        for sweep in self.sweeps:
            sweep.read_metrics()
        for name, reason in self.trial_orders({}, ()).leave_reasons.items():
            store.move_job(name, State.CANCELLED, reason)
            shutil.rmtree(store.output / name / CHECKPOINTS, ignore_errors=True)

    def is_waiting_at_rung(self, name: str) -> bool:
        """Return whether the trial has been evaluated at a step where trials are compared, and waits there
        for other trials."""
        sweep = self._sweep_of_trial.get(name)
        return sweep is not None and sweep.rungs.is_waiting_at_rung(name)

    def finish(self) -> None:
        for sweep in self.sweeps:
            sweep.finish()

    def stranded_trials(self) -> Iterator[tuple[str, str]]:
        """Yield the trials that wait for other trials although no job is attached, each with the reason, such
        as a paused trial. Yield nothing in a process that trains only a part of the jobs, since its launcher
        decides about the trials and trains them again."""
        for sweep in self.sweeps:
            for name in (
                sorted(sweep.resting - sweep.rungs.ended_trials.keys()) if sweep.decides_rungs else ()
            ):
                step, other = sweep.rungs.step_limit(name), sweep.awaited_trial()
                yield (
                    name,
                    f"waits at step {step} for {other}, which has not come as far; resume with "
                    f"{sweep.store.resume_line()}",
                )
            sweep.resting.clear()

    def remove_resting_trial(self, name: str) -> None:
        """Record that a trial that waited for other trials has been cancelled or paused."""
        if (sweep := self._sweep_of_trial.get(name)) is not None:
            sweep.resting.discard(name)

    def resting_trials(self) -> list[str]:
        return [name for sweep in self.sweeps for name in sorted(sweep.resting)]
