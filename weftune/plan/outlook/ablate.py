"""Ablation of a plan: the predicted time without each of the planner's optional mechanisms, compared with the
time of the plan.

Both plans are simulated in the same way, and their times are scaled to the same number of tokens. Most
mechanisms are compared in the first window (a few global batches of every job), which then leaves no batch
unfinished. The mechanisms of a pipeline's planner are compared in two consecutive windows, planned with the
speeds that a run would measure if its passes took the predicted times. The first window alone would not show
their effect: it is planned with guessed speeds and leaves no batch to the next window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from weftune.core.shapes import JobShape, LayerRange
from weftune.plan.cost.memory import max_sample_tokens
from weftune.plan.layout.choose import LayoutChoice
from weftune.plan.layout.foresee import StageTimes
from weftune.plan.outlook.first_window import FirstWindow, first_window, plan_predicted_window
from weftune.plan.outlook.forecast import (
    Ablation,
    Forecast,
    Prediction,
    forecast_window,
    scale_to_window,
    sum_forecasts,
)
from weftune.plan.program.handover import FINISHED, join_windows, unfinished_work
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.window.pace import shorten_windows, simulated_paces
from weftune.plan.window.pipeline import PipelineOrder
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import Mechanisms

TrainedWindow = Callable[[str, int], JobWindow]
"""A function that returns a job's part of the first window (a few global batches of every job) without
evaluations, given the name of the job and its number of global batches."""
NO_EXCHANGES = "packing", "best fit without exchanges", Mechanisms(exchanges_samples=False)
WITHOUT: Sequence[tuple[str, str, Mechanisms]] = (
    NO_EXCHANGES,
    *(("order", order.value, Mechanisms(order=order)) for order in PipelineOrder),
    ("groups", "divided by a formula", Mechanisms(searches_groups=False)),
    ("hand-over", "windows drain", Mechanisms(hands_over=False)),
    ("chunks", "samples stay whole", Mechanisms(cuts_samples=False)),
)
"""Ablations of a pipeline's planner: the name of the mechanism that is left out, a description of what
replaces this mechanism, and the mechanisms that remain."""


def ablate(prediction: Prediction, job_window: TrainedWindow, times: StageTimes) -> list[Ablation]:
    """Return the predicted effect of leaving out each optional mechanism of the planner, such as packing, one
    at a time."""
    jobs, choice = list(prediction.window.shapes.values()), prediction.choice
    # The plan that is shown has whole batches, so that times can be compared.
    plan = partial(first_window, attached_jobs=jobs, job_window=job_window, hands_over=False)
    rows = []
    if len(jobs) > 1:
        rows.append(
            compare_forecasts(
                prediction, "sharing", "no job shares a microbatch", prediction.alternatives[-1]
            )
        )
    if (half := prediction.program.capacity // 2) >= max_sample_tokens(jobs):
        forecast = forecast_window(plan(replace(choice, capacity=half)), times)
        row = compare_forecasts(prediction, "capacity", f"microbatches of {half:,} tokens", forecast)
        rows.append(replace(row, options={"capacity": half}))
    if len(choice.layout.stages) > 1:
        rows += _ablate_planner(prediction, jobs, job_window, times)
        if (even := _choice_with_even_stages(choice)).layout != choice.layout:
            forecast = forecast_window(plan(even), times)
            rows.append(
                compare_forecasts(prediction, "partition", "embedding and head not counted", forecast)
            )
        return rows
    mechanism, alternative, mechanisms = NO_EXCHANGES
    window = plan(replace(choice, mechanisms=mechanisms))
    if window.program.microbatches != prediction.program.microbatches:
        row = compare_forecasts(prediction, mechanism, alternative, forecast_window(window, times))
        rows.append(replace(row, options={"mechanisms": mechanisms}))
    return rows


def compare_forecasts(
    prediction: Prediction,
    mechanism: str,
    alternative: str,
    other: Forecast,
    reference: Forecast | None = None,
) -> Ablation:
    """Return the effect of leaving out a mechanism of the planner: `other`, the forecast without the
    mechanism, compared with `reference`, by default the forecast of the plan."""
    shown = prediction.forecast
    other, own = scale_to_window(other, shown), scale_to_window(reference or shown, shown)
    return Ablation(mechanism, alternative, other, other.seconds / own.seconds - 1.0)


def _ablate_planner(
    prediction: Prediction, jobs: Sequence[JobShape], job_window: TrainedWindow, times: StageTimes
) -> Iterator[Ablation]:
    """Yield the ablations of a pipeline's planner, one for each optional mechanism that changes how two
    consecutive windows run."""
    plan = partial(_plan_two_windows, prediction, jobs, job_window)
    windows = plan(Mechanisms())
    reference = _forecast_windows(windows, times)
    for mechanism, alternative, mechanisms in WITHOUT:
        if mechanism == "order" and prediction.choice.layout.replicas > 1:
            # Several replicas always run in one order.
            continue
        others = plan(mechanisms)
        if [one.program for one in others] != [one.program for one in windows]:
            other = _forecast_windows(others, times)
            row = compare_forecasts(prediction, mechanism, alternative, other, reference)
            yield replace(row, options={"mechanisms": mechanisms})


def _plan_two_windows(
    prediction: Prediction, jobs: Sequence[JobShape], job_window: TrainedWindow, mechanisms: Mechanisms
) -> list[FirstWindow]:
    """Return two consecutive windows (a few global batches of every job each) without evaluations, planned
    with these mechanisms. The last one leaves no batch unfinished. If the first window contains all batches
    of the jobs, return this window alone."""
    choice = replace(prediction.choice, mechanisms=mechanisms)
    rounds = undisturbed_rounds(choice, jobs, job_window)
    paces = simulated_paces(prediction.program, prediction.timeline)
    whole = [replace(job_window(job.name, 2 * rounds), evaluation=()) for job in jobs]
    windows: list[FirstWindow] = []
    left, last = FINISHED, any(one.batches[rounds:] for one in whole)
    for number in range(1 + last):
        begun = [one.batches[: number * rounds] for one in whole]
        parts = [
            replace(one, step=one.step + len(done), batches=one.batches[len(done) :][:rounds])
            for one, done in zip(whole, begun, strict=True)
        ]
        pacing = choice.pacing(paces, are_measured=True, hands_over=number < last)
        windows.append(plan_predicted_window(choice, jobs, parts, pacing, left))
        left = unfinished_work(windows[-1].program)
    return windows


def undisturbed_rounds(choice: LayoutChoice, jobs: Sequence[JobShape], job_window: TrainedWindow) -> int:
    """Return the number of rounds (one global batch of every job each) that the first window would have
    without evaluations. A pipeline's window ends at the first evaluation, which would hide the effect of
    mechanisms."""
    windows = [replace(job_window(job.name, choice.window_rounds), evaluation=()) for job in jobs]
    return max(len(one.batches) for one in shorten_windows(windows, choice.first_pace))


def _forecast_windows(windows: Sequence[FirstWindow], times: StageTimes) -> Forecast:
    """Return the predicted total time and the peak memory of several consecutive windows (a few global
    batches of every job each)."""
    if not windows[0].program.hands_over:
        return sum_forecasts([forecast_window(one, times) for one in windows])
    # The predicted seconds are those of one window; without them, the forecast has the simulated ones.
    peak = max(one.prediction.peak_bytes for one in windows)
    prediction = replace(windows[0].prediction, seconds=None, peak_bytes=peak)
    program = join_windows([one.program for one in windows])
    return forecast_window(replace(windows[0], program=program, prediction=prediction), times)


def _choice_with_even_stages(choice: LayoutChoice) -> LayoutChoice:
    """Return the layout choice with stages that have equal numbers of layers, up to a difference of one."""
    layout, layers = choice.layout, choice.layout.layers
    cuts = [layers * number // len(layout.stages) for number in range(len(layout.stages) + 1)]
    ranges = [LayerRange(start, stop, layers) for start, stop in pairwise(cuts)]
    even = pipeline_layout(ranges, layout.replicas, layout.shards)
    return replace(choice, layout=even, memory=replace(choice.memory, layout=even))
