"""Runs a Program on one device, action by action, and reports what happened. It decides nothing.

Shapes: T rows of a microbatch, D hidden width, S supervised rows among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

from torch import Tensor

from weftune.base.model import Base
from weftune.core.batch import Microbatch, Segment
from weftune.errors import PlanError
from weftune.ops.lora.routes import Route
from weftune.ops.triton.at_hand import kernels_run
from weftune.plan.cost.time import PassTime, StateTime, work_of
from weftune.plan.program.program import (
    Action,
    Backward,
    Evaluate,
    Forward,
    MicrobatchPlan,
    Program,
    Save,
    Step,
)
from weftune.run.events import Evaluated, Event, Failed, OutOfMemory, Passed, SaveDue, Stepped, StepsMade
from weftune.run.measure.memory import is_out_of_memory
from weftune.run.measure.timers import Stopwatch
from weftune.run.passes.adapted import Woven
from weftune.run.passes.rows import LaidMicrobatch, lay
from weftune.run.passes.scorer import Scores
from weftune.run.training import checkpoint
from weftune.run.training.evaluation import Evaluations, EvaluationSums
from weftune.run.training.steps import Due, NoStep, Outcome, Underway, begin_steps, take_steps

Fetch = Callable[[MicrobatchPlan, bool], Microbatch]
"""Lays out the planned samples, of the training or (True) of the held-out rows, as tensors."""
_RUN = Forward | Backward | Evaluate | Step | Save
NOTHING_TO_DO = Program(capacity=0, microbatches=(), batches=(), devices=((),))


class Laps(Protocol):
    """Knows how long the parts of a pass took, once the device has done them."""

    def laps(self) -> list[float]: ...


class Watch(Laps, Protocol):
    def mark(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Flight:
    """A microbatch between its Forward and its Backward."""

    plan: MicrobatchPlan
    laid: LaidMicrobatch
    scores: Scores
    watch: Stopwatch
    settled: bool


@dataclass(frozen=True, slots=True)
class TimedPass:
    """A pass that the device has yet to finish: it holds no tensors of it."""

    plan: MicrobatchPlan
    watch: Laps
    settled: bool


@dataclass(frozen=True, slots=True)
class StepsAsked:
    """Steps that have yet to be made, and the passes before them."""

    begun: Underway
    watch: Laps
    settled: bool
    timed: list[TimedPass]


class Executor(Woven):
    def __init__(self, base: Base, route: Route | None = None, graphs: bool = True) -> None:
        super().__init__(base, route, graphs)
        self._flights: dict[int, _Flight] = {}
        self._next: tuple[MicrobatchPlan, LaidMicrobatch] | None = None
        self._timed: list[TimedPass] = []
        self._asked: StepsAsked | None = None
        self._made: set[str] = set()
        """The kinds of passes and Steps made so far: the first of each sets up what the next find ready."""
        self._looks = Evaluations(NOTHING_TO_DO)

    def note_evaluation(self, job: str, loss: float, keep_best: bool, min_delta: float) -> None:
        self.aboard[job].note_evaluation(loss, keep_best, min_delta)

    def save(self, job: str, folder: Path) -> None:
        """Write a checkpoint of where the job stands."""
        checkpoint.save(folder, self.aboard[job])

    def save_now(self, job: str, folder: Path) -> None:
        """The same between windows; where one process holds all, there is no difference."""
        self.save(job, folder)

    def run(self, program: Program, fetch: Fetch, stop: Callable[[], bool]) -> Iterator[Event]:
        """Run every action. Once `stop` says so, ends at the next point where no job is inside a step."""
        self._refuse(program)
        shortage = ""
        if self.layers is not None:
            self.layers.recompute = program.recompute
        try:
            with self._on_stream():
                yield from self._act(program, fetch, stop)
                yield from self._made_steps()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            shortage = str(error) or "out of memory"
        if shortage:
            # Out here, where no traceback holds the tensors of the pass that failed any longer.
            yield from self._made_steps()
            self._abandon()
            raise OutOfMemory(shortage)

    def _act(self, program: Program, fetch: Fetch, stop: Callable[[], bool]) -> Iterator[Event]:
        self._looks = Evaluations(program)
        for kind, run in groupby(program.actions, type):
            if kind is Step:
                yield from self._step(program, [action for action in run if isinstance(action, Step)])
                continue
            for action in run:
                if isinstance(action, Forward | Evaluate) and stop() and not self._inside_a_step():
                    return
                yield from self._do(action, program, fetch)

    def _do(self, action: Action, program: Program, fetch: Fetch) -> Iterator[Event]:
        match action:
            case Forward(number):
                self._start(number, program, fetch)
            case Backward(number):
                yield from self._finish(number, program, fetch)
            case Evaluate(number):
                yield from self._made_steps()
                yield from self._evaluate(program.microbatches[number], fetch)
            case Save(job, step):
                yield from self._made_steps()
                if job not in self.dead:
                    yield SaveDue(job, step)

    def _inside_a_step(self) -> bool:
        return any(training.open is not None for training in self.aboard.values())

    def _abandon(self) -> None:
        self._flights.clear()
        self._timed.clear()
        self._next = None
        self.passes.abandon()
        if self.passes.graphs is not None:
            self.passes.graphs.clear()
        for training in self.aboard.values():
            training.forget_open_batch()

    # -- training ----------------------------------------------------------------------------------------

    def _start(self, number: int, program: Program, fetch: Fetch) -> None:
        plan = program.microbatches[number].without(self.dead)
        if plan.segments:
            watch = Stopwatch(self.base.device)
            laid = self._laid(plan, fetch)
            self._flights[number] = self._forward(plan, laid, program, watch)

    def _laid(self, plan: MicrobatchPlan, fetch: Fetch) -> LaidMicrobatch:
        if self._next is not None and self._next[0] == plan:
            return self._next[1]
        return lay(fetch(plan, False), plan.rows, self.base.device)

    def _lay_ahead(self, number: int, program: Program, fetch: Fetch) -> None:
        """Lay the next microbatch out while the device computes: at a Step the host would wait for it."""
        self._next = None
        if self._stream is not None and number + 1 < len(program.microbatches):
            plan = program.microbatches[number + 1].without(self.dead)
            if plan.segments and Forward(number + 1) in program.actions:
                self._next = plan, lay(fetch(plan, False), plan.rows, self.base.device)

    def _forward(
        self, plan: MicrobatchPlan, laid: LaidMicrobatch, program: Program, watch: Stopwatch
    ) -> _Flight:
        captures = self.captures
        h_TD = self.passes.forward(laid, self.route)
        settled = self._again("pass") and (
            captures is None or (self.passes.replays and captures == self.captures)
        )
        scores = self.scorer.score(h_TD, laid, program.supervised)
        watch.mark()
        return _Flight(plan, laid, scores, watch, settled)

    def _again(self, kind: str) -> bool:
        """Whether something of this kind has been made before."""
        before = kind in self._made
        self._made.add(kind)
        return before

    def _finish(self, number: int, program: Program, fetch: Fetch) -> Iterator[Event]:
        flight = self._flights.pop(number, None)
        if flight is None:
            return
        self.passes.backward(flight.scores.gradient_TD(self.dead))
        self._collect(flight.scores)
        flight.watch.mark()
        self._timed.append(TimedPass(flight.plan, flight.watch, flight.settled))
        self._lay_ahead(number, program, fetch)
        if self._stream is None:
            yield from self._passed(self._timed)
            self._timed.clear()

    def _passed(self, passes: Sequence[TimedPass]) -> Iterator[Event]:
        """Report passes; the device must have done them."""
        for timed in passes:
            forward, backward = timed.watch.laps()
            time = PassTime(
                work=work_of(timed.plan, self._sizes()),
                forward=forward,
                backward=backward,
                training=True,
                settled=timed.settled,
            )
            yield Passed(timed.plan, time)

    def _sizes(self) -> dict[str, int]:
        """Job → adapter parameters."""
        return {job: training.layout.size for job, training in self.aboard.items()}

    def _collect(self, scores: Scores) -> None:
        """Add a microbatch's sums to those of each job's open global batch; those of the dead are dropped."""
        for segment, loss, hits in zip(scores.segments, scores.losses, scores.hits, strict=True):
            if segment.job not in self.dead:
                self.aboard[segment.job].collect(segment, loss, hits)

    def _step(self, program: Program, steps: Sequence[Step]) -> Iterator[Event]:
        """Consecutive Steps are made together. Where kernels make them, the device is only asked for them:
        while it is at them the host goes on to the next pass, and hears at the next Step what came of it."""
        yield from self._made_steps()
        due = self._due(program, steps)
        if not due:
            return
        settled, watch = self._again("step"), Stopwatch(self.base.device)
        master = due[0].training.master
        if kernels_run(master.device, master.dtype):
            begun = begin_steps(due)
            watch.mark()
            self._asked = StepsAsked(begun, watch, settled, self._timed)
            self._timed = []
            return
        outcomes = take_steps(due)
        watch.mark()
        yield from self._passed(self._timed)
        self._timed.clear()
        yield from self._stepped(due, outcomes, watch, settled)

    def _due(self, program: Program, steps: Sequence[Step]) -> list[Due]:
        alive = [step for step in steps if step.job not in self.dead]
        return [Due(self.aboard[step.job], program.batch(step.job, step.step).supervised) for step in alive]

    def _made_steps(self) -> Iterator[Event]:
        """Report the Steps that were asked for; waits for them."""
        if (asked := self._asked) is None:
            return
        self._asked = None
        outcomes = asked.begun.outcomes()
        yield from self._passed(asked.timed)
        yield from self._stepped(asked.begun.due, outcomes, asked.watch, asked.settled)

    def _stepped(
        self, due: Sequence[Due], outcomes: Sequence[Outcome], watch: Laps, settled: bool
    ) -> Iterator[Event]:
        if settled:
            parameters = sum(one.training.layout.size for one in due)
            yield StepsMade(StateTime(len(due), parameters, sum(watch.laps())))
        for one, outcome in zip(due, outcomes, strict=True):
            job = one.training.job
            if job in self.dead:
                continue
            if isinstance(outcome, NoStep):
                self.kill(job)
                yield Failed(job, outcome.reason)
            else:
                yield Stepped(job, one.training.progress.step, outcome)

    # -- evaluation --------------------------------------------------------------------------------------

    def _evaluate(self, plan: MicrobatchPlan, fetch: Fetch) -> Iterator[Event]:
        self._looks.begin(plan)
        alive = plan.without(self.dead)
        if not alive.segments:
            return
        watch = Stopwatch(self.base.device)
        microbatch = fetch(alive, True)
        laid = lay(microbatch, microbatch.rows, self.base.device)
        yield from self._evaluated(alive, laid, watch, self.passes.look(laid, self.route))

    def _evaluated(
        self, plan: MicrobatchPlan, laid: LaidMicrobatch, watch: Watch, h_TD: Tensor
    ) -> Iterator[Event]:
        """Add a microbatch, of which these are the last hidden states, to its jobs' evaluations."""
        sums = self.scorer.evaluate(h_TD, laid)
        watch.mark()
        time = PassTime(
            work=work_of(plan, self._sizes()),
            forward=sum(watch.laps()),
            backward=0.0,
            training=False,
            settled=self._again("evaluation"),
        )
        yield Passed(plan, time)
        for segment, more in zip(laid.microbatch.segments, sums, strict=True):
            yield from self._looked(segment, more)

    def _looked(self, segment: Segment, more: EvaluationSums) -> Iterator[Event]:
        if segment.job in self.dead:
            return
        key = (segment.job, segment.step)
        look = self._looks.add(key, more)
        if not math.isfinite(more.loss):
            self.kill(segment.job)
            yield Failed(segment.job, f"its evaluation loss at step {segment.step} is {more.loss}")
        elif self._looks.left[key] == 0:
            mean, accuracy = look.loss / look.tokens, look.hits / look.tokens
            yield Evaluated(segment.job, segment.step, mean, look.tokens, accuracy)

    def _refuse(self, program: Program) -> None:
        refuse_what_is_not_run(program)


def refuse_what_is_not_run(program: Program) -> None:
    """A plan may be priced for devices and streams that this executor does not have."""
    refuse_other_devices(program)
    kinds = {type(action).__name__ for action in program.actions if not isinstance(action, _RUN)}
    if kinds or len(program.stages) > 1:
        what = ", ".join(sorted(kinds)) or f"{len(program.stages)} stages"
        raise PlanError(f"this plan holds {what}, for a base that is streamed; here all of it is at hand")


def refuse_other_devices(program: Program) -> None:
    if len(program.devices) > 1:
        raise PlanError(f"this plan is for {len(program.devices)} devices, and only plans for one can be run")
    if program.chunk:
        raise PlanError(
            f"this plan cuts samples into chunks of {program.chunk} rows, which cannot yet be run"
        )
