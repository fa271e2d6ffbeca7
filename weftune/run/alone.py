"""The agreement of a single worker that has the whole base: it decides every Step by itself and reports
everything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from weftune.core.batch import Segment
from weftune.plan.cost.time import PassTime, StateTime, work_of
from weftune.plan.program.program import Action, Evaluate, MicrobatchPlan, Program, Recv, Reduce, Send, Step
from weftune.run.events import Evaluated, Event, Failed, OutOfMemory, Passed, SaveDue, Stepped, StepsMade
from weftune.run.measure.timers import DeviceSpan
from weftune.run.measure.waited import Waited
from weftune.run.parts import AdapterState, TimedPass
from weftune.run.training.evaluation import Evaluations, EvaluationSums
from weftune.run.training.roster import Roster
from weftune.run.training.steps import Due, NoStep, StepsUnderway

NOTHING_TO_DO = Program(capacity=0, microbatches=(), batches=(), devices=((),))


@dataclass(slots=True)
class _Asked:
    """Steps whose outcomes have not been reported yet, and the passes before them."""

    underway: StepsUnderway
    settled: bool
    timed: list[TimedPass]


class Alone:
    def __init__(self, roster: Roster, adapters: AdapterState, runs_behind: bool) -> None:
        """`runs_behind` means that the device works asynchronously, so durations are read later, not right
        after a pass."""
        self._roster, self._adapters, self._runs_behind = roster, adapters, runs_behind
        self._program = NOTHING_TO_DO
        self._evaluations = Evaluations(NOTHING_TO_DO)
        self._timed: list[TimedPass] = []
        """Passes since the last Steps that have not been reported yet."""
        self._asked: _Asked | None = None
        self._made: set[str] = set()
        """Kinds of passes and Steps seen so far. The first of each kind includes setup time."""

    @property
    def shortage(self) -> str:
        return ""

    def begin_window(self, program: Program) -> None:
        self._program = program
        self._evaluations = Evaluations(program)

    def end_window(self, waited: Waited) -> None:
        pass

    def alive(self, plan: MicrobatchPlan) -> MicrobatchPlan:
        """Return the microbatch without dead jobs: no other worker depends on their rows."""
        return plan.without(self._roster.dead)

    def receive(self, action: Recv) -> Tensor:
        raise AssertionError(f"there is no other worker for {action}")

    def send(self, action: Send, tensor_TD: Tensor | None) -> None:
        raise AssertionError(f"there is no other worker for {action}")

    def reduce(self, action: Reduce) -> None:
        raise AssertionError(f"there is no other worker for {action}")

    # -- passes ------------------------------------------------------------------------------------------

    def ran(self, action: Action, span: DeviceSpan, passed: TimedPass | None) -> Iterator[Event]:
        if passed is None:
            return
        passed.settled &= self._again("evaluation" if isinstance(action, Evaluate) else "pass")
        self._timed.append(passed)
        # An evaluation has waited for the device.
        if not self._runs_behind or isinstance(action, Evaluate):
            yield from self._report_passes(self._timed)
            self._timed = []

    def _again(self, kind: str) -> bool:
        """Return whether this kind was seen before."""
        before = kind in self._made
        self._made.add(kind)
        return before

    def _report_passes(self, passes: Sequence[TimedPass]) -> Iterator[Event]:
        """Report passes whose end the device has reached."""
        for timed in passes:
            time = PassTime(
                work=work_of(timed.plan, self._roster.met(timed.plan.jobs)),
                forward=sum(span.seconds() for span in timed.forward),
                backward=sum(span.seconds() for span in timed.backward),
                training=timed.training,
                settled=timed.settled,
            )
            yield Passed(timed.plan, time)

    # -- evaluation --------------------------------------------------------------------------------------

    def evaluate(self, stage: int, plan: MicrobatchPlan) -> Iterator[Event]:
        if self._adapters.needs_outcome_before(stage):
            yield from self.settle()
        if stage + 1 == len(self._program.stages):
            self._evaluations.begin(plan)

    def evaluated(self, segments: Sequence[Segment], sums: Sequence[EvaluationSums]) -> Iterator[Event]:
        for segment, more in zip(segments, sums, strict=True):
            if segment.job not in self._roster.dead:
                yield from self._add(segment, more)

    def _add(self, segment: Segment, more: EvaluationSums) -> Iterator[Event]:
        key = (segment.job, segment.step)
        found = self._evaluations.add(key, more)
        if not math.isfinite(more.loss):
            self._adapters.kill(segment.job)
            yield Failed(segment.job, f"its evaluation loss at step {segment.step} is {more.loss}")
        elif self._evaluations.left[key] == 0:
            mean, accuracy = found.loss / found.tokens, found.correct / found.tokens
            yield Evaluated(segment.job, segment.step, mean, found.tokens, accuracy)

    # -- Steps -------------------------------------------------------------------------------------------

    def step(self, steps: Sequence[Step]) -> Iterator[Event]:
        """Make consecutive Steps together."""
        if self._adapters.needs_previous_outcome:
            yield from self.settle()
        alive = [step for step in steps if step.job not in self._roster.dead]
        due = [
            Due(self._roster.trainings[step.job], self._program.batch(step.job, step.step).supervised)
            for step in alive
        ]
        if not due:
            return
        underway = self._adapters.step(due)
        if self._asked is None:
            self._asked = _Asked(underway, self._again("step"), [])
        self._asked.timed += self._timed
        self._timed = []
        if underway.made:
            yield from self.settle()

    def save(self, job: str, step: int) -> Iterator[Event]:
        yield from self.settle()
        if job not in self._roster.dead:
            yield SaveDue(job, step)

    def settle(self) -> Iterator[Event]:
        if (asked := self._asked) is None:
            return
        # If this runs out of memory, the Steps are still pending.
        outcomes = asked.underway.outcomes()
        self._asked = None
        yield from self._report_passes(asked.timed)
        due = asked.underway.due
        if asked.settled:
            parameters = sum(one.training.layout.size for one in due)
            yield StepsMade(StateTime(len(due), parameters, asked.underway.seconds()))
        for one, outcome in zip(due, outcomes, strict=True):
            job = one.training.job
            if job in self._roster.dead:
                continue
            if isinstance(outcome, NoStep):
                self._adapters.kill(job)
                yield Failed(job, outcome.reason)
            else:
                yield Stepped(job, one.training.progress.step, outcome)

    def ends_early(self) -> bool:
        """Drop unfinished global batches and end the window here."""
        self._timed = []
        self._adapters.abandon()
        return True

    def fall_short(self, why: str) -> None:
        self.ends_early()
        raise OutOfMemory(why)
