"""Forecast of the first window of a run (a few global batches of every job), and of alternative ways to run
the same jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weftune.core.shapes import JobShape
from weftune.plan.layout.choose import LayoutChoice
from weftune.plan.layout.division import WindowPrice
from weftune.plan.layout.foresee import StageTimes
from weftune.plan.layout.split import DeviceShare, share_jobs
from weftune.plan.outlook.first_window import FirstWindow, first_window
from weftune.plan.program.program import ForwardOnly, Program
from weftune.plan.program.simulate import Timeline
from weftune.plan.window.pipeline import PipelineOrder
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import Mechanisms

ALONE, PIPED = "one after another", "1F1B per job"
TRAINED_PASSES = 2.0
"""Time of a forward and its backward together, without recomputation, relative to the time of the forward
alone."""
FEW_ROUNDS = 2
"""Number of global batches per job in forecasts of alternative ways to run the jobs."""
JobWindowOf = Callable[[str, int, bool], JobWindow]
"""A function that returns a job's part of the first window (a few global batches of every job), given the
name of the job, its number of global batches, and whether the window begins with the job's evaluation."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted time and memory of a window (a few global batches of every job)."""

    name: str
    seconds: float
    steps: int
    """Number of rounds (one global batch of every job each), which is the largest number of global batches of
    any job."""
    tokens: int
    microbatches: int
    busy_seconds: float
    """Seconds in which devices compute, summed over the devices."""
    devices: int
    peaks: tuple[int, ...]
    """Predicted peak bytes in use on each device."""
    fits: bool
    """Whether the predicted peak fits in the memory of each device."""
    capacity: int
    sum_seconds: float = 0.0
    """Seconds in which devices wait for all-reduces over shards, summed over the devices."""

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bubbles(self) -> float:
        """Fraction of the devices' time in which they do not compute."""
        return 1.0 - self.busy_seconds / (self.seconds * self.devices)


@dataclass(frozen=True, slots=True)
class Ablation:
    """The predicted effect of leaving out one of the planner's optional mechanisms, such as packing."""

    mechanism: str
    alternative: str
    forecast: Forecast
    relative_cost: float
    """Relative increase in the time of the window (a few global batches of every job) without the mechanism.
    A negative value means that the window would be shorter."""
    is_added: bool = False
    """Whether the mechanism is off by default. The alternative then adds the mechanism to the plan instead of
    leaving it out."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Maps names of options of a run to the values that leave the mechanism out, so that its effect can be
    measured. Empty if there are no such options."""
    measured_step_seconds: float | None = None
    """Measured seconds per round (one global batch of every job) of a run without the mechanism. None if no
    such run was measured."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted first window of a run (a few global batches of every job): its plan, its simulation, its
    forecast, and the forecasts of other ways to run the jobs."""

    window: FirstWindow
    program: Program
    timeline: Timeline
    forecast: Forecast
    alternatives: tuple[Forecast, ...]

    @property
    def choice(self) -> LayoutChoice:
        return self.window.choice


def predict_window(
    choice: LayoutChoice, jobs: Sequence[JobShape], job_window: JobWindowOf, times: StageTimes
) -> Prediction:
    """Return the predicted time and memory of the first window of a run (a few global batches of every job),
    and of other ways to run its jobs. `jobs` are the jobs that run together from the start, and `times`
    predicts the times of stages."""
    times = replace(times, step=times.step.add(choice.step_wait))
    first = first_window(choice, jobs, lambda name, rounds: job_window(name, rounds, True))
    evaluating = any(isinstance(action, ForwardOnly) for action, _ in first.program.forward_passes())
    window = first
    if evaluating or first.program.hands_over:
        window = _training_window(choice, jobs, job_window)
    timeline = _simulate_window(window, times)
    forecast = _forecast_timeline(window, timeline)
    others = _forecast_alternatives(choice, jobs, job_window, times)
    alternatives = tuple(scale_to_window(one, forecast) for one in others)
    return Prediction(first, window.program, timeline, forecast, alternatives)


def price_window(choice: LayoutChoice, job_window: JobWindowOf, times: StageTimes) -> WindowPrice:
    """Return the predicted time and memory of the first window (a few global batches, without evaluations) of
    a share of the jobs."""
    window = _training_window(choice, choice.attached_jobs, job_window)
    forecast = forecast_window(window, times)
    at_once = forecast_window(window, replace(times, link=None))
    layers, recomputed_layers = times.layers, window.program.recompute.recomputed_layers
    again = min(1.0, recomputed_layers * len(choice.layout.stages) / layers)
    return WindowPrice(
        tokens=forecast.tokens,
        seconds=forecast.seconds,
        computing_fraction=1.0 - forecast.bubbles,
        seconds_without_link=at_once.seconds,
        recomputing_fraction=again / (again + TRAINED_PASSES),
        peak_bytes=max(forecast.peaks),
        capacity=forecast.capacity,
    )


def _training_window(choice: LayoutChoice, jobs: Sequence[JobShape], job_window: JobWindowOf) -> FirstWindow:
    """Return the first window of a run (a few global batches of every job), without evaluations and without
    batches that are left to the next window."""
    return first_window(choice, jobs, lambda name, rounds: job_window(name, rounds, False), hands_over=False)


def forecast_window(window: FirstWindow, times: StageTimes) -> Forecast:
    """Return the forecast of a window (a few global batches of every job), including waits for optimizer
    steps whose state is in host memory."""
    times = replace(times, step=times.step.add(window.choice.step_wait))
    return _forecast_timeline(window, _simulate_window(window, times))


def _simulate_window(window: FirstWindow, times: StageTimes) -> Timeline:
    choice = window.choice
    return times.timeline(window.program, choice.layout, window.shapes, choice.load_pace)


def _forecast_timeline(window: FirstWindow, timeline: Timeline) -> Forecast:
    program, prediction = window.program, window.prediction
    seconds = timeline.makespan if prediction.seconds is None else prediction.seconds
    counts = Counter(batch.job for batch in program.batches)
    # Each list of actions is run by all shards of its layers.
    shards = window.choice.layout.shards
    return Forecast(
        name="weftune",
        seconds=seconds,
        steps=max(counts.values()),
        tokens=sum(batch.tokens for batch in program.batches),
        microbatches=len(program.microbatches),
        busy_seconds=shards * sum(timeline.busy_fractions()) * seconds,
        sum_seconds=shards * timeline.sum_seconds,
        devices=shards * timeline.devices,
        peaks=(prediction.peak_bytes,) * shards * timeline.devices,
        fits=prediction.peak_bytes <= window.choice.memory.budget_bytes,
        capacity=program.capacity,
    )


def _forecast_alternatives(
    choice: LayoutChoice, jobs: Sequence[JobShape], job_window: JobWindowOf, times: StageTimes
) -> list[Forecast]:
    """Return forecasts of runs in which the jobs follow one another on the same layout: each job runs one
    microbatch after another and, in a second forecast for pipelines, with the 1F1B schedule. Only a few
    global batches of each job are simulated."""
    parts, plain = [], replace(choice, mechanisms=Mechanisms(order=PipelineOrder.alternating))
    for job in jobs:
        alone = first_window(
            plain,
            [job],
            lambda name, rounds: job_window(name, min(rounds, FEW_ROUNDS), False),
            hands_over=False,
        )
        parts.append(_forecast_timeline(alone, _simulate_window(alone, times)))
    piped = replace(sum_forecasts(parts), name=PIPED)
    alone_seconds = (piped.busy_seconds + piped.sum_seconds) / choice.layout.shards
    alone_way = replace(piped, name=ALONE, seconds=alone_seconds)
    several = choice.layout.is_pipeline and choice.layout.workers > 1
    return [alone_way, piped] if several else [alone_way]


def scale_to_window(forecast: Forecast, window_forecast: Forecast) -> Forecast:
    """Return `forecast` with times and counts scaled to the number of tokens in `window_forecast`, the
    forecast of a window (a few global batches of every job)."""
    factor = window_forecast.tokens / forecast.tokens
    return replace(
        forecast,
        seconds=factor * forecast.seconds,
        busy_seconds=factor * forecast.busy_seconds,
        sum_seconds=factor * forecast.sum_seconds,
        steps=window_forecast.steps,
        tokens=window_forecast.tokens,
        microbatches=round(factor * forecast.microbatches),
    )


def sum_forecasts(parts: Sequence[Forecast]) -> Forecast:
    """Return the total forecast of several runs that follow one another, with the name of the first
    forecast."""
    return Forecast(
        name=parts[0].name,
        seconds=sum(part.seconds for part in parts),
        steps=max(part.steps for part in parts),
        tokens=sum(part.tokens for part in parts),
        microbatches=sum(part.microbatches for part in parts),
        busy_seconds=sum(part.busy_seconds for part in parts),
        sum_seconds=sum(part.sum_seconds for part in parts),
        devices=parts[0].devices,
        peaks=tuple(map(max, zip(*(part.peaks for part in parts), strict=True))),
        fits=all(part.fits for part in parts),
        capacity=parts[0].capacity,
    )


def shared_groups(program: Program) -> tuple[tuple[str, ...], ...]:
    """Return the groups of jobs that are connected by shared microbatches, directly or through other jobs."""
    groups: list[set[str]] = []
    for microbatch in program.microbatches:
        met = set(microbatch.jobs)
        apart = [group for group in groups if not group & met]
        joined = [group for group in groups if group & met]
        groups = [*apart, met.union(*joined)]
    order = {job: index for index, job in enumerate(program.jobs)}
    return tuple(tuple(sorted(group, key=order.__getitem__)) for group in groups)


@dataclass(frozen=True, slots=True)
class ShareOutlook:
    """Forecast for a cluster in which every device holds the whole base and trains a part (share) of the
    jobs."""

    shares: tuple[DeviceShare, ...]
    parts: tuple[Prediction, ...]
    """Predicted first window (a few global batches of every job) of each share (part) of the jobs."""

    @property
    def tokens_per_second(self) -> float:
        """Predicted number of tokens per second while all devices are training."""
        return sum(part.forecast.tokens_per_second for part in self.parts)


def share_outlook(
    jobs: Sequence[JobShape],
    seconds: Mapping[str, float],
    devices: int,
    predict_share: Callable[[Sequence[JobShape]], Prediction],
) -> ShareOutlook:
    """Return the forecast for a cluster whose devices each train a share (part) of the jobs. All shares take
    about equally long; `seconds` maps each job to the predicted seconds of its training. `predict_share`
    predicts the first window of the jobs of one share."""
    sources = {job.name: job.source_job for job in jobs}
    shares = [share for share in share_jobs(seconds, devices, sources) if share.jobs]
    parts = [predict_share([job for job in jobs if job.name in share.jobs]) for share in shares]
    return ShareOutlook(tuple(shares), tuple(parts))
