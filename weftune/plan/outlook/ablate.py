"""The effect of each mechanism of a plan: the predicted first window without it, compared with the plan's
own.

A window is a few global batches of every job. Both windows are planned and simulated in the same way, and
their times are scaled to the same number of tokens.
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
from weftune.plan.outlook.forecast import (
    Ablation,
    Forecast,
    Prediction,
    forecast_window,
    scale_to_window,
)
from weftune.plan.outlook.promise import FirstWindow, first_window
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.window.pipeline import PipelineOrder
from weftune.plan.window.rounds import JobWindow

TrainedWindow = Callable[[str, int], JobWindow]
"""A function that returns a job's part of the first window without evaluations, given the name of the job and
its number of global batches."""


def ablate(prediction: Prediction, job_window: TrainedWindow, times: StageTimes) -> list[Ablation]:
    """Return the predicted effect of leaving out each mechanism of the plan, one at a time."""
    jobs = list(prediction.window.shapes.values())
    rows = [("sharing", "no job shares a microbatch", prediction.alternatives[-1])] if len(jobs) > 1 else []
    for mechanism, alternative, window in _ablated_windows(prediction, jobs, job_window):
        rows.append((mechanism, alternative, forecast_window(window, times)))
    return [compare(prediction, *row) for row in rows]


def compare(prediction: Prediction, mechanism: str, alternative: str, other: Forecast) -> Ablation:
    """Return the comparison of the plan with another forecast, which differs from it in one mechanism."""
    shown = prediction.forecast
    other = scale_to_window(other, shown)
    return Ablation(mechanism, alternative, other, other.seconds / shown.seconds - 1.0)


def _ablated_windows(
    prediction: Prediction, jobs: Sequence[JobShape], job_window: TrainedWindow
) -> Iterator[tuple[str, str, FirstWindow]]:
    """Yield, for each mechanism, its name, a description of its replacement, and the window planned with the
    replacement."""
    choice, program = prediction.choice, prediction.program
    # The plan that is shown has whole batches, so that times can be compared.
    plan = partial(first_window, attached=jobs, job_window=job_window, hands_over=False)
    if program.capacity // 2 >= max_sample_tokens(jobs):
        half = replace(choice, capacity=program.capacity // 2)
        yield "capacity", f"microbatches of {half.capacity:,} tokens", plan(half)
    if len(choice.layout.stages) == 1:
        return
    if choice.layout.replicas == 1:
        # Several replicas always run in one order.
        for order in PipelineOrder:
            window = plan(choice, order=order)
            if window.program.devices != program.devices:
                yield "order", order.value, window
        window = plan(choice, searches_groups=False)
        if window.program.devices != program.devices:
            yield "groups", "divided by a formula", window
    if (even := _even_stages_choice(choice)).layout != choice.layout:
        yield "partition", "embedding and head not counted", plan(even)


def _even_stages_choice(choice: LayoutChoice) -> LayoutChoice:
    """Return the choice with stages whose numbers of layers differ by at most one."""
    layout, layers = choice.layout, choice.layout.layers
    cuts = [layers * number // len(layout.stages) for number in range(len(layout.stages) + 1)]
    ranges = [LayerRange(start, stop, layers) for start, stop in pairwise(cuts)]
    even = pipeline_layout(ranges, layout.replicas, layout.shards)
    return replace(choice, layout=even, memory=replace(choice.memory, layout=even))
