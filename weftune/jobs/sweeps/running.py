"""A sweep inside a run, which decides by successive halving which of its trials continue, wait or leave, and
tells the training loop between two windows.

A trial is a job like any other. The sweep sets the step up to which the trial may train, a rung, and has it
evaluated there. The trial then continues, is detached to wait until the other trials reach the same rung, or
leaves. Every decision is written to sweep.json before it takes effect, so a resumed run follows earlier
decisions.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weftune.adapters.folder import CONFIG
from weftune.core.files import json_text, sync_folder
from weftune.errors import OutputError, SpecError
from weftune.jobs.spec.spec import JobSpec
from weftune.jobs.store.job_file import CHECKPOINTS
from weftune.jobs.store.status import RUNG_LOSS, State
from weftune.jobs.store.store import JobStore
from weftune.jobs.sweeps.halving import LEFT, LossTrend, Rungs, TrialEnd, trial_count
from weftune.jobs.sweeps.record import (
    BEST,
    DamagedSweep,
    SampleCount,
    SweepRecord,
    TrialRecord,
    TrialState,
    read_record,
    write_record,
)
from weftune.jobs.sweeps.search import TrialSearch
from weftune.jobs.sweeps.spec import Judge, Sweep, Trial


def link_winners(folder: Path, winners: Sequence[Path], has_one_winner: bool) -> None:
    """Put the adapters of a sweep's winning trials into its folder `best`, atomically and with hard links if
    the file system supports them.

    With `has_one_winner`, `best` itself becomes the adapter folder. Otherwise it contains one folder per
    winner, with the trial's name."""
    partial, old = folder / f".{BEST}.partial", folder / f".{BEST}.old"
    for path in (partial, old):
        shutil.rmtree(path, ignore_errors=True)
    if not winners:
        return
    assert len(winners) == 1 or not has_one_winner, "one folder cannot be that of several"
    for winner in winners:
        shutil.copytree(
            winner,
            partial if has_one_winner else partial / winner.name,
            copy_function=_link_or_copy_file,
            ignore=shutil.ignore_patterns(".*", CHECKPOINTS),
        )
    if (folder / BEST).exists():
        (folder / BEST).rename(old)
    partial.rename(folder / BEST)
    sync_folder(folder)
    shutil.rmtree(old, ignore_errors=True)


def _link_or_copy_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


ShowNote = Callable[[str], None]
Metrics = Mapping[str, float | None]
"""Maps the name of each metric of a job's objective, such as `rewards/margins`, to its value."""
NO_METRICS: Metrics = {}


def _prefixed_metrics(line: Mapping[str, Any], prefix: str) -> Metrics:
    """Return the metrics in a line of metrics.jsonl whose names begin with `prefix`. The prefix is removed
    from the names."""
    return {name.removeprefix(prefix): value for name, value in line.items() if name.startswith(prefix)}


ENDS = {State.SUCCEEDED: TrialEnd.FINISHED, State.FAILED: TrialEnd.FAILED, State.CANCELLED: TrialEnd.LEFT}


@dataclass(frozen=True, slots=True)
class TrialOrders:
    """Instructions of a sweep to the training loop about its trials, given each time that the loop has run a
    few global batches of every job (a window)."""

    step_limits: Mapping[str, int] = field(default_factory=dict)
    """Maps each trial (job of a sweep) to the last step up to which it may train now."""
    promoted_trials: Sequence[str] = ()
    """Trials that waited at a rung (a step at which trials are compared) and now continue."""
    rest_reasons: Mapping[str, str] = field(default_factory=dict)
    """Maps each attached (training) trial that must now wait for other trials to the reason."""
    leave_reasons: Mapping[str, str] = field(default_factory=dict)


class RunningSweep:
    """A sweep of a run in progress. `jobs` maps names to all jobs of the run. `search` proposes later
    generations of trials, and is None if all trials are known."""

    def __init__(
        self,
        sweep: Sweep,
        store: JobStore,
        jobs: Mapping[str, JobSpec],
        show_note: ShowNote,
        search: TrialSearch | None = None,
    ) -> None:
        self.sweep, self.store, self.jobs = sweep, store, jobs
        self.folder = store.output / sweep.name
        self.rungs = Rungs(sweep.spec)
        self.trials: dict[str, Trial] = {}
        self.resting: set[str] = set()
        self.best: tuple[str, ...] = ()
        halving = sweep.spec.halving
        self._judge: Judge | None = None if halving is None else halving.judge
        """Weights with which trials are evaluated at rungs (the steps at which they are compared). None
        without successive halving, and for a sweep that was begun by an old version and is therefore
        evaluated with the last weights."""
        self._show_note = show_note
        self.show: Callable[[SweepRecord], None] = lambda _: None
        """Function that is called with the state of the sweep whenever that state is written to disk."""
        self._search = search
        self._values: dict[str, dict[int, float | None]] = {}
        """Maps each trial to its metric by step, measured at ordinary evaluations, with the weights that the
        trial had at that step."""
        self._trends: dict[str, LossTrend] = {}
        self._entered: set[str] = set()
        self._scores: dict[str, tuple[float | None, int | None]] = {}
        """Maps each trial that had ended when sweep.json was read to its metric and the step at which the
        metric was measured."""
        self._leaving: set[str] = set()
        """Trials that leave at the end of the current window (a few global batches of every job) because of
        their training loss."""
        self._written: SweepRecord | None = None
        self._finished = False
        self._exhausted = search is None
        """Whether no further generation of trials will be proposed."""
        self._reasons: dict[str, str] = {}
        """Maps each trial that was proposed during the run but cannot be trained to the reason."""

    @property
    def decides_rungs(self) -> bool:
        """Whether this process, and not its launcher, decides which trials of the sweep continue."""
        return True

    # -- before the jobs are made ready ------------------------------------------------------------------

    def restore(self, retried_trials: Collection[str] = ()) -> list[Trial]:
        """Continue the sweep from its recorded state, if there is one. Return the trials of later
        generations, for which the caller must create jobs. Trials that left in a run killed before it
        recorded their state are cancelled, except those in `retried_trials`, which continue at the user's
        request."""
        record = self._read_record()
        generations = [self.sweep.trials]
        if record is not None:
            if record.judge is None:
                # The record is from an old version, whose rungs could evaluate the last weights only.
                if self.evaluates_mean_weights and record.at and not record.best:
                    self._show_note(
                        f"{self.sweep.name} began with a Weftune whose rungs judge the last weights of "
                        "trials, and continues so (halving.judge: last)."
                    )
                self._judge = None
            self._refuse_changes(record)
            count = max((trial.generation for trial in record.trials), default=0)
            for number in range(1, count + 1):
                generations.append(
                    tuple(Trial(one.name, one.values) for one in record.trials if one.generation == number)
                )
        for generation in generations:
            self._begin_generation(generation)
        if record is not None:
            self._apply_record(record)
        for name, reason in self._unfinished_leaves():
            self.store.add_job(name)
            self.store.move_job(name, State.CANCELLED, reason)
        if record is not None and self.store.rebuild_note:
            self._copy_ended_trials(record, retried_trials)
        self._drop_checkpoints()
        self.read_metrics()
        self._record_ended_trials((), retried_trials)
        return [trial for generation in generations[1:] for trial in generation]

    def _drop_checkpoints(self) -> None:
        """Delete the checkpoints of trials that have left, in case a run was killed before it deleted them. A
        trial cancelled by the user keeps its checkpoints, as any job does."""
        for name in (name for name in self.trials if name in self.store):
            status = self.store.job(name)
            if status.state is State.CANCELLED and status.reason.startswith(LEFT):
                shutil.rmtree(self.store.output / name / CHECKPOINTS, ignore_errors=True)

    def _read_record(self) -> SweepRecord | None:
        try:
            return read_record(self.folder)
        except DamagedSweep as damaged:
            self._show_note(
                f"{self.folder.name}/sweep.json was damaged ({damaged.damage_text}) and has been rebuilt "
                "from the metrics."
            )
            return None

    def _refuse_changes(self, record: SweepRecord) -> None:
        mine = self._sweep_record(self.rungs)
        names = {"at": "halving.at", "share": "halving.keep", "judge": "halving.judge"}
        changed = [
            names.get(name, name)
            for name in ("search", "metric", "mode", "at", "share", "judge")
            if getattr(record, name) != getattr(mine, name)
        ]
        before = [(one.name, json_text(one.values)) for one in record.trials if one.generation == 0]
        if before != [(one.name, json_text(one.values)) for one in self.sweep.trials]:
            changed.append("its trials")
        if changed:
            raise OutputError(
                f"Sweep {self.sweep.name} has already begun and cannot continue with other settings: "
                f"{', '.join(changed)} changed; put them back, or choose another --output"
            )

    def _begin_generation(self, generation: Sequence[Trial]) -> None:
        assert not any(trial.name in self.trials for trial in generation), "a trial was proposed twice"
        self.trials |= {trial.name: trial for trial in generation}
        self.rungs.begin_first_rung([trial.name for trial in generation])

    def _apply_record(self, record: SweepRecord) -> None:
        for trial in record.trials:
            if trial.steps:
                self.rungs.add_trial(trial.name, trial.steps)
            for step, value in trial.at_rungs.items():
                self.rungs.record_metric(trial.name, int(step), value)
            if trial.state in ("left", "failed", "finished"):
                self._scores[trial.name] = trial.score, trial.score_step
        for decision in record.decisions:
            self.rungs.apply_decision(decision)
        self.best, self._written = record.best, record

    def _copy_ended_trials(self, record: SweepRecord, retried_trials: Collection[str]) -> None:
        """Copy the final states of trials from the sweep's file to the run's status, which may have been
        rebuilt without them."""
        states = {"left": State.CANCELLED, "failed": State.FAILED}
        for trial in record.trials:
            if trial.state not in states or trial.name not in self.store or trial.name in retried_trials:
                continue
            if not self.store.job(trial.name).state.has_ended:
                self.store.move_job(trial.name, states[trial.state], trial.reason)

    def _unfinished_leaves(self) -> Iterator[tuple[str, str]]:
        """Yield each trial that a recorded decision has dropped but that is not marked as ended in the run's
        status, with the reason."""
        for decision in self.rungs.decisions:
            for name in decision.left:
                if name not in self.store or not self.store.job(name).state.has_ended:
                    yield name, decision.reason(name, self.rungs.rungs(name)[decision.rung])

    def refuse_retries(self, option: str, names: Collection[str], changes: Collection[str]) -> None:
        """Raise an error if a trial is to be restarted or retried although the sweep has already made
        decisions without it."""
        for name in (name for name in names if name in self.trials):
            steps = [
                one.step
                for one in self.rungs.decisions
                if name in self.rungs.generations[one.generation] and name not in one.kept
            ]
            if steps:
                raise SpecError(
                    f"{option} {name}: the sweep {self.sweep.name} has decided at step {steps[0]} that "
                    "others continue, and its decisions stand; train it as a separate job, under another name"
                )
            if changes:
                raise SpecError(
                    f"--set {next(iter(changes))}: {name} is a trial of the sweep {self.sweep.name}, which "
                    "compares trials by their settings; leave --set out"
                )

    # -- admission ---------------------------------------------------------------------------------------

    def read_metrics(self) -> None:
        """Read the trials' evaluations and training losses of earlier runs from the run's recorded
        metrics."""
        self._values.clear()
        self._trends.clear()
        for name in self.trials:
            if name in self.store and self.store.job(name).steps:
                self.rungs.add_trial(name, self.store.job(name).steps)
        for line in self.store.metric_lines(self.trials):
            job, step = line["job"], line["step"]
            if RUNG_LOSS in line:
                found = line[RUNG_LOSS], line.get("rung_token_accuracy"), _prefixed_metrics(line, "rung_")
                self.record_rung_evaluation(job, step, *found)
            elif "eval_loss" in line:
                found = line["eval_loss"], line.get("eval_token_accuracy"), _prefixed_metrics(line, "eval_")
                self.record_evaluation(job, step, *found)
            elif line.get("loss") is not None:
                self._loss_trend(job).add_loss(step, line["loss"])

    def add_trial(self, name: str, steps: int) -> None:
        """Record the total number of steps of a trial when the trial is prepared for training."""
        self.rungs.add_trial(name, steps)
        self._entered.add(name)

    @property
    def evaluates_mean_weights(self) -> bool:
        """Whether trials are evaluated at rungs (the steps at which they are compared) with the mean of their
        recent weights."""
        return self._judge == "mean"

    # -- inside a window ---------------------------------------------------------------------------------

    def record_step(self, name: str, step: int, loss: float) -> str | None:
        """Record the training loss of a trial's step. Return the reason if the trial leaves the sweep now, or
        else None. The last trial never leaves, whatever its loss, so that a sweep ends with an adapter."""
        trend = self._loss_trend(name)
        trend.add_loss(step, loss)
        reason = trend.leave_reason()
        if reason is None or not self._has_other_trials(name):
            return None
        self._leaving.add(name)
        return reason

    def _has_other_trials(self, name: str) -> bool:
        """Return whether another trial of the sweep has finished or may still finish."""
        lost = {one for one, ended in self.rungs.ended_trials.items() if ended.kind is not TrialEnd.FINISHED}
        return bool(self.trials.keys() - lost - self._leaving - {name})

    def record_evaluation(
        self,
        name: str,
        step: int,
        loss: float | None,
        token_accuracy: float | None,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        """Record the results of an evaluation of a trial with its current weights."""
        self._values.setdefault(name, {})[step] = self._trial_metric(loss, token_accuracy, metrics)
        if not self.evaluates_mean_weights:
            self.record_rung_evaluation(name, step, loss, token_accuracy, metrics)

    def record_rung_evaluation(
        self,
        name: str,
        step: int,
        loss: float | None,
        token_accuracy: float | None,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        """Record an evaluation of a trial at a rung (a step at which trials are compared), with the weights
        by which trials are compared."""
        value = self._trial_metric(loss, token_accuracy, metrics)
        # At a rung a trial has a warning only if it has collapsed: then it is the worst by any metric.
        has_collapsed = name in self.store and bool(self.store.job(name).warning)
        self.rungs.record_metric(name, step, None if has_collapsed else value)

    def _trial_metric(
        self, loss: float | None, token_accuracy: float | None, metrics: Metrics
    ) -> float | None:
        """Return the metric by which trials are compared, from the results of an evaluation."""
        metric = self.sweep.spec.metric
        known = {"loss": loss, "mean_token_accuracy": token_accuracy, **metrics}
        return known.get(metric.removeprefix("eval_"))

    def _loss_trend(self, name: str) -> LossTrend:
        if name not in self._trends:
            self._trends[name] = LossTrend(self.rungs.steps(name))
        return self._trends[name]

    # -- between windows ---------------------------------------------------------------------------------

    def trial_orders(self, attached: Mapping[str, int], delivering_trials: Collection[str]) -> TrialOrders:
        """Record ended trials, and decide which trials continue wherever the metrics allow it. Return the
        resulting instructions to the training loop."""
        if self._finished:
            return TrialOrders()
        self._record_ended_trials(delivering_trials)
        if self.rungs.is_over() and self._exhausted:
            self.finish()
        self._decide_rungs(attached)
        living = [name for name in self.trials if name not in self.rungs.ended_trials]
        promoted = [
            name for name in living if name in self.resting and not self.rungs.is_waiting_at_rung(name)
        ]
        self.resting -= set(promoted)
        rest = {
            name: self.rungs.wait_reason(name)
            for name in living
            if name in attached
            and attached[name] >= self.rungs.step_limit(name)
            and self.rungs.is_waiting_at_rung(name)
        }
        return TrialOrders(
            {name: self.rungs.step_limit(name) for name in living if name in self._entered},
            promoted,
            rest,
            dict(self._unfinished_leaves()),
        )

    def _decide_rungs(self, attached: Mapping[str, int]) -> None:
        """Decide which trials continue wherever the metrics allow it, and record the decisions. A decision
        that cannot be recorded has no effect and is made again later."""
        decided = deepcopy(self.rungs) if self.rungs.pending_decisions() else self.rungs
        while pending := decided.pending_decisions():
            for decision in pending:
                decided.apply_decision(decision)
        if self._write_sweep_record(decided, attached):
            self.rungs = decided

    def _record_ended_trials(
        self, delivering_trials: Collection[str], excluded_trials: Collection[str] = ()
    ) -> None:
        for name in self.trials:
            if name not in self.store or name in self.rungs.ended_trials or name in excluded_trials:
                continue
            status = self.store.job(name)
            state = State.SUCCEEDED if name in delivering_trials else status.state
            if state in ENDS:
                self.rungs.end_trial(name, ENDS[state], status.step)

    def propose_trials(self) -> Sequence[Trial]:
        """Record and return the next generation of trials. Return an empty sequence unless all trials so far
        have ended."""
        if self._search is None or self._exhausted or not self.rungs.is_over():
            return ()
        ended = [(trial, self.score(trial.name)) for trial in self.trials.values()]
        if not (found := self._search.next_generation(ended)):
            self._exhausted = True
            return ()
        before = deepcopy(self.rungs)
        self._begin_generation(found)
        if self._write_sweep_record(self.rungs, {}):
            return found
        self.rungs = before
        for trial in found:
            del self.trials[trial.name]
        return ()

    def record_refusal(self, trial: str, reason: str) -> None:
        """Record that a trial that was proposed during the run has failed because it cannot be trained."""
        self._reasons[trial] = reason
        self.rungs.end_trial(trial, TrialEnd.FAILED, 0)

    # -- the record --------------------------------------------------------------------------------------

    def _write_sweep_record(self, rungs: Rungs, attached: Mapping[str, int]) -> bool:
        record = self._sweep_record(rungs, attached)
        if self._written is not None and replace(self._written, samples=record.samples) == record:
            return True
        try:
            self._store_record(record)
        except OutputError as error:
            self._show_note(f"warning: {error}; training continues, and it is tried again.")
            return False
        self._written = record
        self.show(record)
        return True

    def _store_record(self, record: SweepRecord) -> None:
        """Write the state of the sweep to disk. Raises OutputError if it cannot be written."""
        write_record(self.folder, record)

    def _sweep_record(self, rungs: Rungs, attached: Mapping[str, int] | None = None) -> SweepRecord:
        spec, halving = self.sweep.spec, self.sweep.spec.halving
        first = next(iter(self.trials), "")
        steps = rungs.steps(first)
        trials = tuple(
            self._trial_record(rungs, name, generation, attached or {})
            for generation, names in enumerate(rungs.generations)
            for name in names
        )
        return SweepRecord(
            name=self.sweep.name,
            search=spec.search,
            metric=spec.metric,
            mode=spec.mode,
            keep=spec.keep,
            at=() if halving is None else tuple(halving.at),
            share=None if halving is None else halving.keep,
            judge=self._judge,
            steps=steps,
            rungs=(*rungs.rungs(first), steps) if steps else (),
            trials=trials,
            expected=len(trials) if self._exhausted else trial_count(spec),
            decisions=tuple(rungs.decisions),
            best=self.best,
            samples=self._sample_count(rungs),
        )

    def _trial_record(
        self, rungs: Rungs, name: str, generation: int, attached: Mapping[str, int]
    ) -> TrialRecord:
        ended = rungs.ended_trials.get(name)
        score, score_step = self._score_and_step(rungs, name)
        return TrialRecord(
            name=name,
            values=json.loads(json_text(self.trials[name].values)),
            state=self._trial_state(rungs, name, attached),
            reason=self._trial_reason(rungs, name, attached),
            steps=rungs.steps(name),
            at_rungs={str(step): value for step, value in rungs.values.get(name, {}).items()},
            score=score,
            score_step=score_step,
            warning=self.store.job(name).warning if name in self.store else "",
            left_at=ended.step if ended is not None and ended.kind is not TrialEnd.FINISHED else None,
            generation=generation,
        )

    def _trial_state(self, rungs: Rungs, name: str, attached: Mapping[str, int]) -> TrialState:
        if name in rungs.ended_trials:
            return rungs.ended_trials[name].kind.value
        if rungs.is_waiting_at_rung(name) and (
            name in self.resting or attached.get(name, -1) >= rungs.step_limit(name)
        ):
            return "resting"
        return "running" if name in attached else "waiting"

    def _trial_reason(self, rungs: Rungs, name: str, attached: Mapping[str, int]) -> str:
        if name in self._reasons:
            return self._reasons[name]
        for decision in rungs.decisions:
            if name in decision.left:
                return decision.reason(name, rungs.rungs(name)[decision.rung])
        if self._trial_state(rungs, name, attached) == "resting":
            return rungs.wait_reason(name)
        return self.store.job(name).reason if name in self.store else ""

    def _sample_count(self, rungs: Rungs) -> SampleCount:
        trained = everything = 0
        for name in self.trials:
            size = self.jobs[name].batch_size if name in self.jobs else 0
            trained += size * (self.store.job(name).step if name in self.store else 0)
            everything += size * rungs.steps(name)
        return SampleCount(trained, everything)

    def score(self, name: str) -> float | None:
        """Return a trial's metric: that of its adapter if the trial has finished, the metric at the
        comparison (rung) where it was dropped, or otherwise the metric of its last evaluation."""
        return self._score_and_step(self.rungs, name)[0]

    def _score_and_step(self, rungs: Rungs, name: str) -> tuple[float | None, int | None]:
        """Return the metric of a trial and the step at which it was measured."""
        if name in self._scores and name not in self._entered:
            return self._scores[name]
        at_rungs = rungs.values.get(name, {})
        ended = rungs.ended_trials.get(name)
        if ended is not None and ended.kind is TrialEnd.LEFT and at_rungs.get(ended.step) is not None:
            return at_rungs[ended.step], ended.step
        # After a kill the lines of the metrics may end before a rung that is decided.
        values = {**at_rungs, **self._values.get(name, {})}
        if not values:
            return None, None
        best = self.store.job(name).best_step if name in self.store else None
        keeps_best = name in self.jobs and self.jobs[name].keep == "best"
        is_finished = ended is not None and ended.kind is TrialEnd.FINISHED
        step = best if is_finished and keeps_best and best in values else max(values)
        return values[step], step

    # -- after -------------------------------------------------------------------------------------------

    def awaited_trial(self) -> str:
        """Return the name of an unfinished trial that other trials wait for although no job is training any
        more, or an empty string."""
        living = (name for name in self.trials if name not in self.rungs.ended_trials)
        return next((name for name in living if name not in self.resting), "")

    def finish(self) -> None:
        """Record the state of the sweep. If every trial has ended, put the adapters of the winning trials
        into the folder `best`."""
        self._record_ended_trials(())
        self._decide_rungs({})
        trained = [name for name in self.trials if name not in self._reasons]
        has_ended = all(name in self.store and self.store.job(name).state.has_ended for name in trained)
        if self.rungs.is_over() and self._exhausted and has_ended:
            self._publish_winners()
        self._write_sweep_record(self.rungs, {})

    def _publish_winners(self) -> None:
        doubtful = {
            name: self.store.job(name).eval_loss
            for name in self.trials
            if name in self.store and self.store.job(name).warning
        }
        ranking = self.rungs.ranking({name: self.score(name) for name in self.trials}, doubtful)
        winners = tuple(ranking[: self.sweep.spec.keep])
        if winners and winners[0] in doubtful:
            self._show_note(
                f"warning: no trial of the sweep {self.sweep.name} improved on the base; {BEST} holds the "
                "lowest validation loss."
            )
        try:
            self._keep_winners(winners)
            self.best, self._finished = winners, True
        except OSError as error:
            self._show_note(
                f"warning: cannot write {self.folder / BEST}: {error.strerror}; try it again with "
                f"{self.store.resume_line()}"
            )

    def _keep_winners(self, winners: tuple[str, ...]) -> None:
        """Put the adapters of the sweep's winning trials into the folder `best`. Raises OSError if they
        cannot be written."""
        if not self._has_winners(winners):
            paths = [self.store.output / name for name in winners]
            link_winners(self.folder, paths, has_one_winner=self.sweep.spec.keep == 1)

    def _has_winners(self, winners: tuple[str, ...]) -> bool:
        """Return whether the given trials are already recorded as winners and the folder `best` contains
        their adapters."""
        folder = self.folder / BEST
        if self.sweep.spec.keep == 1:
            # Outputs of earlier versions have the one winner in a folder of its name there.
            return self.best == winners and (folder / CONFIG).is_file()
        there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        return self.best == winners and there == set(winners)


class SweepInShare(RunningSweep):
    """A sweep in one of several processes that each train a part of the jobs. Its trials train up to their
    next rung (a step at which trials are compared) and wait there.

    The launcher, which sees the trials of all processes, decides the rungs each time that all processes have
    ended their training, proposes trials and records the state of the sweep.
    """

    @property
    def decides_rungs(self) -> bool:
        return False

    def _has_other_trials(self, name: str) -> bool:
        """Return whether another trial of this process has finished or may still finish. Trials of other
        processes do not count, since all of them may leave the sweep."""
        own = {one for one in self.trials if one in self.store}
        lost = {one for one, ended in self.rungs.ended_trials.items() if ended.kind is not TrialEnd.FINISHED}
        return bool(own - lost - self._leaving - {name})

    def _unfinished_leaves(self) -> Iterator[tuple[str, str]]:
        return iter(())

    def _decide_rungs(self, attached: Mapping[str, int]) -> None:
        pass

    def propose_trials(self) -> Sequence[Trial]:
        return ()

    def finish(self) -> None:
        pass
