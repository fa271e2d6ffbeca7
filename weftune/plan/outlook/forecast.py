"""What the first window of a run comes to, and what the same jobs would take otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape
from weftune.plan.cost.learned import sizes_of
from weftune.plan.layout.choose import Choice
from weftune.plan.layout.foresee import StageTimes
from weftune.plan.outlook.promise import FirstWindow, first_window
from weftune.plan.program.program import Program
from weftune.plan.program.timeline import Timeline
from weftune.plan.window.pipeline import PipelineOrder
from weftune.plan.window.rounds import Course

ALONE, PIPED = "one after another", "1F1B per job"
CourseOf = Callable[[str, int, bool], Course]
"""A job's part of the first window, of so many rounds, with the evaluation that it begins with or without."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a window comes to."""

    name: str
    seconds: float
    steps: int
    """Rounds: global batches of the job that has most."""
    tokens: int
    microbatches: int
    busy: float
    """Seconds in which devices compute, summed over them."""
    devices: int
    peaks: tuple[int, ...]
    """Bytes on each device, weights and adapters included, slack not."""
    fits: bool
    """Whether each device has room for its peak."""
    capacity: int

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bubbles(self) -> float:
        """The share of the devices' time in which they wait."""
        return 1.0 - self.busy / (self.seconds * self.devices)


@dataclass(frozen=True, slots=True)
class Ablation:
    mechanism: str
    instead: str
    forecast: Forecast
    cost: float
    """How much longer a window takes so, as a share; below 0 it would be shorter."""
    added: bool = False
    """Whether this is a mechanism that the default path leaves out."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A run's first window, and how the first goes on paper in which all jobs train."""

    window: FirstWindow
    program: Program
    timeline: Timeline
    forecast: Forecast
    alternatives: tuple[Forecast, ...]

    @property
    def choice(self) -> Choice:
        return self.window.choice


def foresee(choice: Choice, jobs: Sequence[JobShape], course: CourseOf, times: StageTimes) -> Foreseen:
    """`jobs` are those aboard; `times` those of a profile or of a data sheet."""
    first = first_window(choice, jobs, lambda name, rounds: course(name, rounds, True))
    found = _trained(choice, jobs, course, times)
    others = _alternatives(choice, jobs, course, times)
    return Foreseen(first, found.program, found.timeline, found.forecast, tuple(others))


@dataclass(frozen=True, slots=True)
class _Trained:
    program: Program
    timeline: Timeline
    forecast: Forecast


def _trained(
    choice: Choice,
    jobs: Sequence[JobShape],
    course: CourseOf,
    times: StageTimes,
    order: PipelineOrder | None = None,
) -> _Trained:
    window = first_window(choice, jobs, lambda name, rounds: course(name, rounds, False), order)
    program, promise = window.program, window.promise
    timeline = times.timeline(program, choice.layout, sizes_of(window.company), choice.loads)
    seconds = timeline.makespan if promise.seconds is None else promise.seconds
    forecast = Forecast(
        name="weftune",
        seconds=seconds,
        steps=max(sum(batch.job == job.name for batch in program.batches) for job in jobs),
        tokens=sum(batch.tokens for batch in program.batches),
        microbatches=len(program.microbatches),
        busy=sum(timeline.busy()) * seconds,
        devices=timeline.devices,
        peaks=(promise.peak_bytes,) * timeline.devices,
        fits=promise.peak_bytes <= choice.memory.budget,
        capacity=program.capacity,
    )
    return _Trained(program, timeline, forecast)


def _alternatives(
    choice: Choice, jobs: Sequence[JobShape], course: CourseOf, times: StageTimes
) -> list[Forecast]:
    """Each job by itself on the same layout: microbatch after microbatch, and in a pipeline by 1F1B."""
    each = [_trained(choice, [job], course, times, PipelineOrder.alternating).forecast for job in jobs]
    piped = replace(in_turn(each), name=PIPED)
    alone = replace(piped, name=ALONE, seconds=piped.busy)
    return [alone, piped] if choice.layout.pipelined and choice.layout.workers > 1 else [alone]


def in_turn(parts: Sequence[Forecast]) -> Forecast:
    """Runs that follow one another, each over an empty pipeline; the name is that of the first."""
    return Forecast(
        name=parts[0].name,
        seconds=sum(part.seconds for part in parts),
        steps=max(part.steps for part in parts),
        tokens=sum(part.tokens for part in parts),
        microbatches=sum(part.microbatches for part in parts),
        busy=sum(part.busy for part in parts),
        devices=parts[0].devices,
        peaks=tuple(map(max, zip(*(part.peaks for part in parts), strict=True))),
        fits=all(part.fits for part in parts),
        capacity=parts[0].capacity,
    )


def shared_groups(program: Program) -> tuple[tuple[str, ...], ...]:
    """Jobs that meet in microbatches, directly or by way of others."""
    groups: list[set[str]] = []
    for microbatch in program.microbatches:
        met = set(microbatch.jobs)
        apart = [group for group in groups if not group & met]
        joined = [group for group in groups if group & met]
        groups = [*apart, met.union(*joined)]
    order = {job: place for place, job in enumerate(program.jobs)}
    return tuple(tuple(sorted(group, key=order.__getitem__)) for group in groups)
