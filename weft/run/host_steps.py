"""Steps of adapters that live in host memory, made there by a thread of its own while the device computes.

What a stage needs of all of them is made before what the next stage needs: a round's forward can begin when
the first stage's part is done.

Shapes: J jobs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from weft.ops.adamw import State, Update
from weft.run.steps import (
    Due,
    NoStep,
    Outcome,
    Sums,
    counted,
    make_updates,
    open_tokens,
    sums_to_host,
    why_no_step,
    with_norms,
)
from weft.run.training import Training
from weft.run.travel import Pair, Part

ALIGNMENT = 64
"""Parameters. Torch's fused AdamW rounds the odd ones at a vector's end otherwise than all before them: cut
only at multiples of whatever a processor takes at a time, the parts get the bits of the whole."""

Make = Callable[[Sequence[Update]], list[str | None]]
"""Makes updates; for each, why its weights must not be used, or None."""


class Arrival(Protocol):
    """Something that the device does sooner or later."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Step:
    """One job's, on its way."""

    due: Due
    tokens: int
    parts: Mapping[int, Part]
    """Stage → what is updated for it."""
    sums: Sums | None = None
    made: Update | None = None
    reason: str | None = None

    @property
    def training(self) -> Training:
        return self.due.training

    @property
    def pairs(self) -> set[Pair]:
        return {(self.training.job, stage) for stage in self.parts}

    def outcome(self) -> Outcome:
        if self.reason is not None:
            return NoStep(self.reason)
        assert self.sums is not None
        assert self.made is not None
        return counted(self.due, self.sums, self.made.learning_rate, self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Steps that were asked for together, until their gradients have come and have a norm."""

    steps: tuple[_Step, ...]
    sums_J2: Tensor
    arrival: Arrival


@dataclass(frozen=True, slots=True, eq=False)
class _StagePart:
    """One stage's part of a Step."""

    stage: int
    step: _Step


@dataclass(slots=True)
class HostBegun:
    """Steps whose outcomes will be read together."""

    host: HostSteps
    steps: list[_Step] = field(default_factory=list)
    used: bool = False
    """Whether one of the jobs has been in a pass since."""

    @property
    def due(self) -> list[Due]:
        return [step.due for step in self.steps]

    @property
    def jobs(self) -> set[str]:
        return {step.training.job for step in self.steps}

    def outcomes(self) -> list[Outcome]:
        self.host.finish()
        return [step.outcome() for step in self.steps]


class HostSteps:
    """Between `begin` and the end of a job's last part only the thread touches the job's state."""

    def __init__(self, make: Make = make_updates) -> None:
        self._make = make
        # Of Python's threads one is enough: torch spreads an update over as many as it was told to use.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._changed = threading.Condition()
        self._runs: list[_Run] = []
        self._parts: list[_StagePart] = []
        self._left: set[Pair] = set()
        """What is being made, or waits for its turn."""
        self._tasks = 0
        """Runs and parts that are not done."""
        self._error: BaseException | None = None

    def begin(
        self,
        begun: HostBegun,
        due: Sequence[Due],
        parts: Sequence[Mapping[int, Part]],
        gone: Callable[[], Arrival],
    ) -> None:
        """Have Steps made once all has arrived that the device has been asked for until `gone` is called.

        `parts` are by stage, for each job. Open batches are closed.
        """
        steps = tuple(
            _Step(one, open_tokens(one.training), aligned(found, one.training.layout.size))
            for one, found in zip(due, parts, strict=True)
        )
        sums_J2 = sums_to_host([step.training for step in steps])
        for step in steps:
            step.training.open = None
        begun.steps += steps
        with self._changed:
            self._left |= {pair for step in steps for pair in step.pairs}
            self._runs.append(_Run(steps, sums_J2, gone()))
            self._submit(1)

    def unfinished(self, job: str, stage: int) -> bool:
        """Whether the job's weights of that stage are yet to be made."""
        with self._changed:
            return (job, stage) in self._left

    def wait(self, pairs: Iterable[Pair]) -> None:
        """Until these are made."""
        wanted = set(pairs)
        self._until(lambda: self._left.isdisjoint(wanted))

    def finish(self) -> None:
        """Until everything is made."""
        self._until(lambda: not self._tasks)

    def _until(self, done: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or done())
            if self._error is not None:
                raise self._error

    # -- in the thread -----------------------------------------------------------------------------------

    def _submit(self, tasks: int) -> None:
        self._tasks += tasks
        for _ in range(tasks):
            self._thread.submit(self._work)

    def _work(self) -> None:
        try:
            task = self._next()
            if self._error is None:
                self._measure(task) if isinstance(task, _Run) else self._update(task)
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._tasks -= 1
                self._changed.notify_all()

    def _next(self) -> _Run | _StagePart:
        """Norms come first, but while gradients are on their way there may be something else to do."""
        with self._changed:
            arrived = next((run for run in self._runs if run.arrival.query()), None)
            if arrived is None and self._parts:
                part = min(self._parts, key=lambda one: one.stage)
                self._parts.remove(part)
                return part
            run = arrived or self._runs[0]
            self._runs.remove(run)
            return run

    def _measure(self, run: _Run) -> None:
        run.arrival.synchronize()
        trainings = [step.training for step in run.steps]
        for step, sums in zip(run.steps, with_norms(trainings, run.sums_J2), strict=True):
            step.sums = sums
            step.reason = why_no_step(step.training, sums)
            step.made = step.training.update(sums.norm)
        with self._changed:
            fresh = [_StagePart(stage, step) for step in run.steps for stage in step.parts]
            self._parts += fresh
            self._submit(len(fresh))

    def _update(self, part: _StagePart) -> None:
        step, inside = part.step, part.step.parts[part.stage]
        assert step.made is not None
        if step.reason is None and inside.size:
            (step.reason,) = self._make([replace(step.made, state=_within(step.made.state, inside))])
        with self._changed:
            self._left.remove((step.training.job, part.stage))


def aligned(parts: Mapping[int, Part], size: int) -> dict[int, Part]:
    """Stage → what to update for it, where stages are updated in the order of their numbers.

    Of two neighbours the one that comes first takes what lies between their border and the next multiple, so
    that all of a stage is updated when its turn is over.
    """
    ordered = sorted(parts, key=lambda stage: parts[stage].start)
    starts = [0] if parts else []
    for before, after in pairwise(ordered):
        border = parts[after].start
        up = -(-border // ALIGNMENT) * ALIGNMENT
        start = min(up, size) if before < after else border // ALIGNMENT * ALIGNMENT
        starts = [*(min(start, other) for other in starts), start]
    ends = [*starts, size]
    return {stage: Part(ends[at], ends[at + 1]) for at, stage in enumerate(ordered)}


def _within(state: State, part: Part) -> State:
    return State(
        master=state.master[part.start : part.stop],
        exp_avg=state.exp_avg[part.start : part.stop],
        exp_avg_sq=state.exp_avg_sq[part.start : part.stop],
        gradient=state.gradient[part.start : part.stop],
        weights=state.weights[part.start : part.stop],
    )
