"""The `Agreement` of an executor whose single worker holds the whole base. An agreement decides which
optimizer steps are made and which events are reported."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor

from weftune.plan.cost.time import PassTime, StateTime, pass_work
from weftune.plan.program.program import (
    Action,
    Evaluate,
    ForwardOnly,
    MicrobatchPlan,
    Program,
    Recv,
    Reduce,
    Send,
    Step,
)
from weftune.run.events import (
    Event,
    Failed,
    OutOfMemory,
    Passed,
    SaveDue,
    Scored,
    Stepped,
    evaluation_event,
    score_event,
)
from weftune.run.measure.timers import DeviceSpan, WaitTime
from weftune.run.parts import NOTHING_TO_DO, AdapterState
from weftune.run.passes.rows import TimedPass
from weftune.run.training.state import EvaluationSums
from weftune.run.training.steps import StepRequest, StepsUnderway


class Alone:
    def __init__(self, adapters: AdapterState, is_asynchronous: bool) -> None:
        """Create the agreement of a single worker. `is_asynchronous` is True if the device runs behind the
        host, as a GPU does, so that the durations of passes are read later."""
        self._adapters, self._roster, self._runs_behind = adapters, adapters.roster, is_asynchronous
        self._program = NOTHING_TO_DO
        self._pending_evaluations: Counter[tuple[str, int]] = Counter()
        """Maps each evaluation (job, step) of the Program that is running to the number of its microbatches
        that have not run yet."""
        self._evaluation_sums: dict[tuple[str, int], EvaluationSums] = {}
        self._unreported_passes: list[TimedPass] = []
        """Passes that have run since the last optimizer step and have not been reported yet."""
        self._steps_underway: StepsUnderway | None = None
        """Optimizer steps whose outcomes have not been reported yet."""
        self._passes_before_steps: list[TimedPass] = []
        """Passes that ran before the optimizer steps in `_steps_underway` and have not been reported yet."""
        self._steps_settled = False
        """Whether the duration of the optimizer steps in `_steps_underway` is typical. False for the first
        steps of a run, which include setup such as compilation."""
        self._seen_kinds: set[str] = set()
        """Kinds of work ("pass", "evaluation" or "step") that have run at least once. The first run of each
        kind includes setup time, so its duration is not typical."""

    @property
    def shortage(self) -> str:
        return ""

    def begin_window(self, program: Program) -> None:
        self._program = program
        self._evaluation_sums = {}
        self._pending_evaluations = Counter(
            (segment.job, segment.step)
            for action, plan in program.forward_passes()
            if isinstance(action, Evaluate)
            for segment in plan.segments
        )

    def end_window(self, wait_time: WaitTime) -> None:
        pass

    def without_failed_jobs(self, plan: MicrobatchPlan) -> MicrobatchPlan:
        """Return the planned microbatch without the rows of failed jobs. They can be left out, because no
        other worker depends on them."""
        return plan.without(self._roster.failed_jobs)

    def receive(self, action: Recv) -> Tensor:
        raise AssertionError(f"there is no other worker for {action}")

    def send(self, action: Send, tensor_TD: Tensor | None) -> None:
        raise AssertionError(f"there is no other worker for {action}")

    def send_scores(self, job: str, step: int, sums: Sequence[float]) -> None:
        raise AssertionError(f"there is no replica for the scores of {job}")

    def add_scores(self, job: str, step: int) -> Sequence[float] | None:
        raise AssertionError(f"there is no replica with scores of {job}")

    def reduce(self, action: Reduce) -> None:
        raise AssertionError(f"there is no other worker for {action}")

    # -- passes ------------------------------------------------------------------------------------------

    def report_action(
        self, action: Action, span: DeviceSpan, timed_pass: TimedPass | None
    ) -> Iterator[Event]:
        if timed_pass is None:
            return
        timed_pass.is_typical &= self._is_repeated(
            "evaluation" if isinstance(action, ForwardOnly) else "pass"
        )
        self._unreported_passes.append(timed_pass)
        # A pass without a backward has waited for the device.
        if not self._runs_behind or isinstance(action, ForwardOnly):
            yield from self._report_passes(self._unreported_passes)
            self._unreported_passes = []

    def _is_repeated(self, kind: str) -> bool:
        """Return whether work of this kind ("pass", "evaluation" or "step") has run before, and record that
        it has run now."""
        before = kind in self._seen_kinds
        self._seen_kinds.add(kind)
        return before

    def _report_passes(self, passes: Sequence[TimedPass]) -> Iterator[Event]:
        """Yield one event per pass of a microbatch over the base, with its duration. Waits until the device
        has finished the passes."""
        for timed in passes:
            met = {job: self._roster.trainings[job].layout.active_size for job in timed.plan.jobs}
            time = PassTime(
                work=pass_work(timed.plan, met),
                forward=sum(span.seconds() for span in timed.forward),
                backward=sum(span.seconds() for span in timed.backward),
                training=timed.training,
                settled=timed.is_typical,
            )
            yield Passed(timed.plan, time)

    # -- evaluation and scores ---------------------------------------------------------------------------

    def handle_arrival(self, stage: int) -> Iterator[Event]:
        if self._adapters.needs_step_outcome(stage):
            yield from self.finish_steps()

    def report_evaluations(self, sums: Sequence[EvaluationSums]) -> Iterator[Event]:
        for more in sums:
            if more.job in self._roster.failed_jobs:
                continue
            key = more.job, more.step
            self._pending_evaluations[key] -= 1
            total = self._evaluation_sums[key] + more if key in self._evaluation_sums else more
            self._evaluation_sums[key] = total
            if not math.isfinite(total.loss):
                self._adapters.kill(more.job)
            elif self._pending_evaluations[key]:
                continue
            yield evaluation_event(total, self._roster.trainings[more.job].recipe.objective)

    def report_scores(self, scores: Sequence[Scored]) -> Iterator[Event]:
        for one in scores:
            if one.job in self._roster.failed_jobs:
                continue
            if isinstance(event := score_event(one), Failed):
                self._adapters.kill(one.job)
            yield event

    # -- Steps -------------------------------------------------------------------------------------------

    def step(self, steps: Sequence[Step]) -> Iterator[Event]:
        """Make the optimizer steps of several jobs together. The Program lists these steps directly one after
        another."""
        if self._adapters.needs_previous_outcome:
            yield from self.finish_steps()
        requests = [
            StepRequest(
                self._roster.trainings[step.job], self._program.batch(step.job, step.step).supervised_tokens
            )
            for step in steps
            if step.job not in self._roster.failed_jobs
        ]
        if not requests:
            return
        underway = self._adapters.step(requests)
        if self._steps_underway is None:
            self._steps_underway, self._steps_settled = underway, self._is_repeated("step")
        self._passes_before_steps += self._unreported_passes
        self._unreported_passes = []
        if underway.is_done:
            yield from self.finish_steps()

    def save(self, job: str, step: int) -> Iterator[Event]:
        yield from self.finish_steps()
        if job not in self._roster.failed_jobs:
            yield SaveDue(job, step)

    def finish_steps(self) -> Iterator[Event]:
        if (underway := self._steps_underway) is None:
            return
        # If this runs out of memory, the Steps are still pending.
        outcomes = underway.outcomes()
        self._steps_underway, passes, self._passes_before_steps = None, self._passes_before_steps, []
        yield from self._report_passes(passes)
        requests = underway.requests
        if self._steps_settled:
            parameters = sum(request.training.layout.size for request in requests)
            yield StateTime(len(requests), parameters, underway.seconds())
        for request, outcome in zip(requests, outcomes, strict=True):
            job = request.training.job
            if job in self._roster.failed_jobs:
                continue
            if isinstance(outcome, str):
                self._adapters.kill(job)
                yield Failed(job, outcome)
            else:
                yield Stepped(job, request.training.progress.step, outcome)

    def end_early(self) -> bool:
        """Drop unfinished global batches. Return True, which ends the window (the run of one Program) at
        once, since there is no other worker that waits for tensors."""
        self._unreported_passes = []
        self._adapters.abandon()
        return True

    def report_shortage(self, reason: str) -> None:
        self.end_early()
        raise OutOfMemory(reason)
