"""Successive halving as a state machine, which decides how far each trial (a job of a sweep) may train, and
which trials wait or leave.

A rung is a step at which all trials of a generation are evaluated, and from which only the best continue. It
is decided when each of its trials has been evaluated there or has ended, so a decision depends only on the
recorded values, in whatever order they arrive. Trials leave a sweep

- at a rung, if they are not among the best `max(1, ceil(keep × n))` of the `n` trials that began it; among
  equals the first of the file continues;
- between rungs, when their training loss does not fall (`LossTrend`).

A trial that fails, is cancelled or leaves between rungs counts as the worst at the rungs that it has not
passed. A trial that was ended by its own `early_stop` counts as finished: it does not count among the trials
that continue after later rungs, but is ranked with the others at the end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from weftune.jobs.spec.spec import to_steps
from weftune.jobs.sweeps.search import count_combinations, generation_sizes
from weftune.jobs.sweeps.spec import Halving, Mode, SweepSpec

LEFT = "left the sweep at step"
"""Prefix of the recorded reason of every trial (a job of a sweep) that has left its sweep."""
TREND_STEPS = 10
"""Number of steps over which a trial's training losses are averaged, at its start and at its end so far,
before the two means are compared."""
FIRST_TREND = 20
"""Earliest step at which a trial can leave its sweep because its training loss does not fall."""
TREND_SHARE = 0.1
"""Initial fraction of a trial's steps during which a poor training loss cannot stop the trial."""


class TrialEnd(StrEnum):
    """The ways in which a trial of a sweep can end."""

    LEFT = "left"
    FAILED = "failed"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class EndedTrial:
    kind: TrialEnd
    step: int
    """Last step that the trial executed."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of a comparison of trials at a rung (a step at which only the best trials continue): the
    trials that continue and those that leave, each the best first. Trials that failed or left earlier are in
    neither list."""

    generation: int
    rung: int
    step: int
    """Step at which the first evaluated trial is compared with the others (its rung). The step differs
    between trials if the sweep searches over numbers of steps."""
    kept: tuple[str, ...]
    left: tuple[str, ...]
    began: int
    """Number of trials that took part in the rung, a comparison after which only the best continue."""

    def reason(self, trial: str, step: int) -> str:
        """Return the reason, as a sentence for the user, why a trial leaves the sweep by this decision at
        `step`."""
        place = ordinal_text(len(self.kept) + self.left.index(trial) + 1)
        survivors = "the best continues" if len(self.kept) == 1 else f"the best {len(self.kept)} continue"
        return f"{LEFT} {step}: {place} of {self.began}, {survivors}"


def ordinal_text(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def rung_steps(halving: Halving | None, steps: int) -> tuple[int, ...]:
    """Return the steps at which a trial is compared with other trials (its rungs). The trial's last step is
    not one of them."""
    shares = () if halving is None else sorted(halving.at)
    return tuple(min(to_steps(share, steps), steps - 1) for share in shares)


def mean_weight_spans(halving: Halving | None, steps: int) -> tuple[tuple[int, int], ...]:
    """Return, for each rung (a step at which trials are compared), the first and the last step of the span
    over which weights are averaged for its evaluation.

    A span is the last quarter of the steps so far, but begins after the previous rung. Return an empty tuple
    if rungs evaluate the latest weights.
    """
    if halving is None or halving.judge == "last":
        return ()
    rungs = rung_steps(halving, steps)
    firsts = [max(rung - max(1, rung // 4), before) + 1 for before, rung in pairwise((0, *rungs))]
    return tuple((first, rung) for first, rung in zip(firsts, rungs, strict=True) if first <= rung)


def kept_trial_count(kept_fraction: float, count: int) -> int:
    """Return how many of `count` trials continue after a comparison, where `kept_fraction` is the fraction
    that continues."""
    return count if kept_fraction >= 1 else max(1, to_steps(kept_fraction, count))


def sort_value(value: float | None, mode: Mode) -> float:
    """Return a sort key that is lower for better values of a metric. Missing and infinite values are the
    worst."""
    if value is None or not math.isfinite(value):
        return math.inf
    return value if mode == "min" else -value


@dataclass(slots=True)
class Rungs:
    """The state of successive halving in a sweep: the metrics of the trials at rungs (the steps at which they
    are compared), the decisions, and the trials that have ended."""

    spec: SweepSpec
    generations: list[tuple[str, ...]] = field(default_factory=list)
    """Groups of trials that are compared with one another. Only `tpe` has several groups, which are trained
    one after another."""
    decisions: list[Decision] = field(default_factory=list)
    values: dict[str, dict[int, float | None]] = field(default_factory=dict)
    """Maps each trial to a mapping from the step of each rung (a comparison of trials) to the trial's metric
    there. Only the first measurement at a step is kept."""
    ended_trials: dict[str, EndedTrial] = field(default_factory=dict)
    _steps_by_trial: dict[str, int] = field(default_factory=dict)
    _generation_by_trial: dict[str, int] = field(default_factory=dict)

    # -- events ------------------------------------------------------------------------------------------

    def begin_first_rung(self, trials: Sequence[str]) -> None:
        """Add a generation of trials (those that are compared with one another), in the order of the jobs
        file."""
        self._generation_by_trial |= dict.fromkeys(trials, len(self.generations))
        self.generations.append(tuple(trials))

    def add_trial(self, trial: str, steps: int) -> None:
        """Record the total number of optimizer steps of a trial when the trial is prepared."""
        self._steps_by_trial[trial] = steps

    def record_metric(self, trial: str, step: int, value: float | None) -> bool:
        """Record the metric of a trial at a step. Return False if the trial is not compared with others at
        this step (a rung) or already has a value there."""
        seen = self.values.setdefault(trial, {})
        if step not in self.rungs(trial) or step in seen:
            return False
        seen[step] = value
        return True

    def end_trial(self, trial: str, kind: TrialEnd, step: int) -> None:
        self.ended_trials.setdefault(trial, EndedTrial(kind, step))

    def apply_decision(self, decision: Decision) -> None:
        """Record a decision at a rung (a comparison of trials), and mark the trials that leave as ended."""
        self.decisions.append(decision)
        for trial in decision.left:
            self.end_trial(trial, TrialEnd.LEFT, self.rungs(trial)[decision.rung])

    # -- queries -----------------------------------------------------------------------------------------

    @property
    def trials(self) -> Iterator[str]:
        return (trial for generation in self.generations for trial in generation)

    def rungs(self, trial: str) -> tuple[int, ...]:
        return (
            rung_steps(self.spec.halving, self._steps_by_trial[trial])
            if trial in self._steps_by_trial
            else ()
        )

    def steps(self, trial: str) -> int:
        return self._steps_by_trial.get(trial, 0)

    def step_limit(self, trial: str) -> int:
        """Return the last step up to which the trial may train now: its next rung (comparison of trials) that
        is undecided or, if there is none, its last step."""
        generation = self._generation_by_trial[trial]
        rung = len(self._decided_rungs(generation))
        rungs = self.rungs(trial)
        if rung < len(rungs) and self._begins_rung(trial, rung):
            return rungs[rung]
        return self.steps(trial)

    def awaits_evaluation(self, trial: str) -> bool:
        """Return whether the trial still has to be evaluated at its next rung, a step at which trials are
        compared."""
        return self.step_limit(trial) < self.steps(trial) and self.step_limit(trial) not in self.values.get(
            trial, {}
        )

    def is_waiting_at_rung(self, trial: str) -> bool:
        """Return whether a trial that has trained up to its step limit must wait for other trials, with which
        it is compared there."""
        return self.step_limit(trial) < self.steps(trial) and not self.awaits_evaluation(trial)

    def wait_reason(self, trial: str) -> str:
        """Return a text for the user that says for what a trial waits."""
        return f"waits for the others at step {self.step_limit(trial)}"

    def pending_decisions(self) -> list[Decision]:
        """Return the decisions about which trials continue that the current metrics allow, at most one per
        generation of trials, without applying them."""
        found = (self._pending_decision(generation) for generation in range(len(self.generations)))
        return [decision for decision in found if decision is not None]

    def is_over(self) -> bool:
        """Whether every trial of the sweep has ended."""
        return all(trial in self.ended_trials for trial in self.trials)

    def ranking(
        self, scores: Mapping[str, float | None], collapsed_losses: Mapping[str, float | None] | None = None
    ) -> list[str]:
        """Return the finished trials, the best first. `collapsed_losses` maps each trial that has collapsed,
        or is no better than the base, to its validation loss. These trials are ranked after all others, the
        lowest loss first."""
        doubtful = collapsed_losses or {}

        def key(trial: str) -> tuple[bool, float]:
            if trial in doubtful:
                return True, sort_value(doubtful[trial], "min")
            return False, sort_value(scores.get(trial), self.spec.mode)

        finished = [
            trial
            for trial in self.trials
            if trial in self.ended_trials and self.ended_trials[trial].kind is TrialEnd.FINISHED
        ]
        return sorted(finished, key=key)

    # -- internals ---------------------------------------------------------------------------------------

    def _pending_decision(self, generation: int) -> Decision | None:
        halving, rung = self.spec.halving, len(self._decided_rungs(generation))
        if halving is None or rung >= len(halving.at):
            return None
        began = [trial for trial in self.generations[generation] if self._begins_rung(trial, rung)]
        values = {
            trial: self.values[trial][rungs[rung]]
            for trial in began
            if (rungs := self.rungs(trial)) and rungs[rung] in self.values.get(trial, {})
        }
        if any(trial not in values and trial not in self.ended_trials for trial in began):
            return None
        here = [trial for trial in values if self._was_evaluated(trial, self.rungs(trial)[rung])]
        if not here:
            return None
        ranked = sorted(here, key=lambda trial: sort_value(values[trial], self.spec.mode))
        count = kept_trial_count(halving.keep, len(began))
        step = self.rungs(here[0])[rung]
        return Decision(generation, rung, step, tuple(ranked[:count]), tuple(ranked[count:]), len(began))

    def _was_evaluated(self, trial: str, step: int) -> bool:
        """Return whether a trial was still training in its sweep at this step, so that its metric there
        counts."""
        ended = self.ended_trials.get(trial)
        return ended is None or ended.step > step or (ended.kind is TrialEnd.FINISHED and ended.step == step)

    def _decided_rungs(self, generation: int) -> list[Decision]:
        return [decision for decision in self.decisions if decision.generation == generation]

    def _begins_rung(self, trial: str, rung: int) -> bool:
        """Return whether a trial takes part in a rung, a comparison of trials. All trials take part in the
        first rung. In a later one take part those that continued after the rung before."""
        return rung == 0 or trial in self._decided_rungs(self._generation_by_trial[trial])[rung - 1].kept


class LossTrend:
    """A check that a trial's training loss decreases.

    From step 20 or a tenth of the steps on, whichever is later, the mean loss of the last ten steps must be
    below the mean loss of the first ten. The last step is not checked, since stopping there would save no
    work.
    """

    def __init__(self, steps: int) -> None:
        self._from = max(FIRST_TREND, to_steps(TREND_SHARE, steps))
        self._steps_by_trial = steps
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=TREND_STEPS)
        self._step = 0

    def add_loss(self, step: int, loss: float) -> None:
        self._step = step
        if step <= TREND_STEPS:
            self._first.append(loss)
        self._last.append(loss)

    def leave_reason(self) -> str | None:
        """Return the reason why the trial leaves the sweep at its current step, or None if it continues."""
        if not self._from <= self._step < self._steps_by_trial:
            return None
        if len(self._first) < TREND_STEPS:
            # Lines of the metrics were lost, so the trend is unknown.
            return None
        first, last = (math.fsum(losses) / len(losses) for losses in (self._first, self._last))
        if last < first:
            return None
        return (
            f"{LEFT} {self._step}: its training loss does not fall "
            f"(mean of the first {TREND_STEPS} steps {first:.4g}, of the last {last:.4g})"
        )


@dataclass(frozen=True, slots=True)
class TrialWork:
    """The amount of work to train one trial, in samples, tokens or seconds."""

    steps: int
    work_per_step: float


@dataclass(frozen=True, slots=True)
class Saving:
    rungs: tuple[int, ...]
    """Number of trials that train up to each rung (comparison of trials), in the order of the rungs."""
    full_work: float
    """Work of all trials together if none leaves the sweep."""
    expected_work: float
    """Expected work of all trials together with successive halving."""

    @property
    def expected_fraction(self) -> float:
        return self.expected_work / self.full_work


def trial_count(spec: SweepSpec) -> int:
    """Return the total number of trials of a sweep, including those of later generations."""
    return int(count_combinations(spec.over)) if spec.trials is None else spec.trials


def rung_counts(spec: SweepSpec) -> tuple[int, ...]:
    """Return the number of trials that train up to each rung, a comparison after which only the best
    continue. Every generation of `tpe` is halved separately."""
    count = trial_count(spec)
    groups = generation_sizes(count) if spec.search == "tpe" else [count]
    return tuple(map(sum, zip(*(_trials_at_rungs(group, spec.halving) for group in groups), strict=True)))


def _trials_at_rungs(trials: int, halving: Halving | None) -> list[int]:
    counts = [trials]
    for _ in halving.at if halving else ():
        counts.append(kept_trial_count(halving.keep if halving else 1.0, counts[-1]))
    return counts


def expected_saving(spec: SweepSpec, trial_work: Sequence[TrialWork]) -> Saving:
    """Return the expected saving of work by successive halving. Trials that leave the sweep early are assumed
    to have had the mean work of all trials; `trial_work` may cover only some of the trials."""
    counts = rung_counts(spec)
    scale = counts[0] / len(trial_work)
    parts = []
    for work in trial_work:
        ends = (0, *rung_steps(spec.halving, work.steps), work.steps)
        parts.append([(end - start) * work.work_per_step for start, end in pairwise(ends)])
    spans = [sum(part) * scale for part in zip(*parts, strict=True)]
    expected = sum(span * count / counts[0] for span, count in zip(spans, counts, strict=True))
    return Saving(counts, sum(spans), expected)
