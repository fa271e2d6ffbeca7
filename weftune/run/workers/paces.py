"""Measured speeds (paces) of the stages of a pipeline, for the planner. The time of a pass over a stage is
modelled as a linear function of its number of rows and, where samples run in chunks, of its attention."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from weftune.plan.cost.time import Line
from weftune.plan.program.program import (
    Backward,
    BackwardHalf,
    Evaluate,
    Forward,
    ForwardHalf,
    HalfPass,
    MicrobatchPlan,
    Program,
    Score,
    Step,
)
from weftune.plan.program.simulate import Timeline
from weftune.plan.window.pace import (
    LoadPace,
    MeasuredPass,
    StagePace,
    fit_line,
    fit_with_attention,
    predict_timeline,
    vary_timelines,
)
from weftune.run.workers.agreed import TimedAction, WorkerReport

MAX_MEASUREMENTS = 200
BACKWARD_GUESS = 1.5
"""Assumed ratio of the time of a backward to the time of a forward, until both have been measured."""


def _new_measurements() -> deque[MeasuredPass]:
    return deque(maxlen=MAX_MEASUREMENTS)


@dataclass(slots=True)
class _Measurements:
    """The latest measured passes over a stage in one direction. Passes of chunks of long samples are stored
    apart from passes of whole samples, so that they do not displace each other: passes of both sizes are
    needed to separate the fixed time of a pass from the time per row."""

    samples: deque[MeasuredPass] = field(default_factory=_new_measurements)
    chunks: deque[MeasuredPass] = field(default_factory=_new_measurements)

    def add(self, plan: MicrobatchPlan, measurement: MeasuredPass) -> None:
        (self.samples if plan.chunk is None else self.chunks).append(measurement)

    def all_passes(self) -> list[MeasuredPass]:
        return [*self.samples, *self.chunks]

    def fit(self) -> tuple[Line, float]:
        """Return the time of a pass as a function of its rows, and the additional seconds for each of its
        `squares`, the measure of its attention. If only whole samples have been measured, the second value is
        0, and the first includes attention."""
        return fit_with_attention(self.all_passes()) if self.chunks else (fit_line(self.samples), 0.0)


@dataclass(slots=True)
class _Stage:
    layers: int
    forwards: _Measurements = field(default_factory=_Measurements)
    backwards: _Measurements = field(default_factory=_Measurements)
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_MEASUREMENTS))

    def pace(self) -> StagePace:
        steps = sum(self.steps) / max(1, len(self.steps))
        kinds = [(passes.all_passes(), *passes.fit()) for passes in (self.forwards, self.backwards)]
        (_, forward, forward_per_square), (_, backward, backward_per_square) = kinds
        passes = sorted(
            (one.start, one.seconds, line(one.rows) + per_square * one.squares)
            for measured, line, per_square in kinds
            for one in measured
        )
        spread = tuple(seconds / predicted for _, seconds, predicted in passes if predicted > 0)
        return StagePace(forward, backward, steps, spread, forward_per_square, backward_per_square)

    def guess_pace(self) -> StagePace:
        return StagePace(Line(0.0, float(self.layers)), Line(0.0, BACKWARD_GUESS * self.layers))


class Paces:
    def __init__(self, layers: Sequence[int]) -> None:
        """Create the record of speeds, with no stage measured. `layers` is the number of layers of each
        stage, from which times are guessed until they are measured."""
        self._stages = [_Stage(count) for count in layers]
        self.loads: LoadPace | None = None
        """Predicted times of Loads (copies of stages to the device), which are not measured. None if stages
        are not streamed."""

    @property
    def has_measurements(self) -> bool:
        return all(stage.forwards.all_passes() and stage.backwards.all_passes() for stage in self._stages)

    def add_measurements(self, program: Program, reports: Sequence[WorkerReport]) -> None:
        """Add the times of actions in the reports of all workers. The time of an optimizer step counts for
        all stages of its worker."""
        for worker, report in enumerate(reports):
            homes = program.stage_devices(program.replica(worker))
            here = [stage for stage, home in zip(self._stages, homes, strict=True) if home == worker]
            halves: defaultdict[tuple[type[HalfPass], int], float] = defaultdict(float)
            for one in report.times:
                seconds = one.stop - one.start
                match one.action:
                    case ForwardHalf(number) | BackwardHalf(number) as half:
                        halves[type(half), number] += seconds
                        continue
                    case Forward(number):
                        seconds += halves[ForwardHalf, number]
                    case Backward(number):
                        seconds += halves[BackwardHalf, number]
                self._add_measurement(one, seconds, program, here)

    def _add_measurement(
        self, timed_action: TimedAction, seconds: float, program: Program, worker_stages: Sequence[_Stage]
    ) -> None:
        """Add the measured time of an action. For a pass that ran half a layer at a time, `seconds` includes
        all of its parts and their waits, so that it is the time that the pass adds to the Program."""
        match timed_action.action:
            case Forward(number, stage) | Evaluate(number, stage) | Score(number, stage):
                plan = program.microbatches[number]
                measured = MeasuredPass(plan.rows, seconds, timed_action.start, plan.squares)
                self._stages[stage].forwards.add(plan, measured)
            case Backward(number, stage):
                plan = program.microbatches[number]
                measured = MeasuredPass(plan.rows, seconds, timed_action.start, plan.squares)
                self._stages[stage].backwards.add(plan, measured)
            case Step():
                for stepped in worker_stages:
                    stepped.steps.append(seconds)

    def stages(self) -> tuple[StagePace, ...]:
        return (
            tuple(stage.pace() for stage in self._stages) if self.has_measurements else self.guessed_stages()
        )

    def guessed_stages(self) -> tuple[StagePace, ...]:
        """Return speeds (paces) of the stages, guessed from their numbers of layers alone."""
        return tuple(stage.guess_pace() for stage in self._stages)

    def predicted_seconds(self, program: Program) -> float | None:
        """Return the simulated time of a Program in seconds, or None if not all stages have been measured."""
        return mean(one.makespan for one in self.varied_timelines(program)) if self.has_measurements else None

    def timeline(self, program: Program) -> Timeline:
        """Return the simulated timeline of a Program in which every pass takes its predicted time."""
        return predict_timeline(program, self.stages(), self.loads)

    def varied_timelines(self, program: Program) -> list[Timeline]:
        """Return a few simulated timelines of the same Program, in which the times of passes vary as much as
        the measured times did."""
        return vary_timelines(program, self.stages(), self.loads)
