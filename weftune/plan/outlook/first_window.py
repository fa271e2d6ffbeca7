"""Prediction of a run's start: its layout, the jobs that run together, and the time and memory of the first
window (a few global batches of every job).

`weftune plan` prints this prediction, and `weftune train` records it before training begins. Both commands
use the same choice and the same planner, so that the two predictions can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weftune.core.shapes import JobShape
from weftune.plan.cost.fitted import FittedModels, WindowPrediction
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.cost.time import JobShapes
from weftune.plan.layout.choose import LayoutChoice
from weftune.plan.program.handover import FINISHED, Unfinished
from weftune.plan.program.layout import Layout
from weftune.plan.program.program import Program
from weftune.plan.window.pace import guess_pace, shorten_windows
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import Pacing, plan_window


def prediction_numbers(
    layout: Layout, program: Program, shapes: JobShapes, prediction: WindowPrediction, process_bytes: int
) -> dict[str, Any]:
    """Return the predicted time and memory of a window (a few global batches of every job), with its layout,
    as a JSON-compatible dict. `process_bytes` is the number of bytes that a process holds before anything is
    loaded."""
    return {
        "layout": {
            "stages": [
                {"layers": stage.layer_count, "worker": home, "resident": stage.is_resident}
                for stage, home in zip(layout.stages, layout.stage_workers, strict=True)
            ],
            "slots": list(layout.slot_counts),
            "replicas": layout.replicas,
            "adapters_travel": layout.adapters_travel,
            "inputs_offloaded": layout.offloads_inputs,
            "optimizer_offloaded": layout.offloads_optimizer,
        },
        "capacity": program.capacity,
        "recomputed_layers": program.recompute.recomputed_layers,
        "tile_rows": program.recompute.tile_rows,
        "offloaded_layers": program.recompute.offloaded_layers,
        "aboard": list(shapes),
        "global_batches": len(program.batches),
        "microbatches": len(program.microbatches),
        "seconds": prediction.seconds,
        "bytes": prediction.peak_bytes - process_bytes,
        "process_bytes": process_bytes,
        "source": prediction.source,
    }


@dataclass(frozen=True, slots=True)
class FirstWindow:
    """The first or a later window of a run (a few global batches of every job), with its predicted time and
    memory."""

    program: Program
    prediction: WindowPrediction
    shapes: JobShapes
    choice: LayoutChoice

    @property
    def numbers(self) -> dict[str, Any]:
        taken = self.choice.memory.process_bytes
        return prediction_numbers(self.choice.layout, self.program, self.shapes, self.prediction, taken)


def first_window(
    choice: LayoutChoice,
    attached_jobs: Sequence[JobShape],
    job_window: Callable[[str, int], JobWindow],
    *,
    hands_over: bool = True,
) -> FirstWindow:
    """Return the window (a few global batches of every job) with which a run begins.

    `job_window` returns a job's part of the window, given the name of the job and a number of global batches.
    With `hands_over`, the window may leave batches unfinished for the next window, as in a run; otherwise, it
    ends with whole batches, from which the time of a run can be predicted.
    """
    paces = tuple(guess_pace(stage.layer_count) for stage in choice.layout.stages)
    pacing = choice.pacing(paces, hands_over=hands_over)
    windows = [job_window(job.name, choice.window_rounds) for job in attached_jobs]
    cut = shorten_windows(windows, choice.first_pace)
    return plan_predicted_window(choice, attached_jobs, cut, pacing, uses_free_memory=hands_over)


def plan_predicted_window(
    choice: LayoutChoice,
    attached_jobs: Sequence[JobShape],
    windows: Sequence[JobWindow],
    pacing: Pacing | None,
    inherited: Unfinished = FINISHED,
    *,
    uses_free_memory: bool = True,
) -> FirstWindow:
    """Plan a window (a few global batches) of these jobs, and return the window with its predicted time and
    memory. With `uses_free_memory`, a pipeline has as many microbatches in flight as memory allows."""
    memory, shapes = choice.memory, {job.name: job for job in attached_jobs}
    recompute = memory.choose_recompute(attached_jobs, choice.capacity)
    capacity = memory.choose_capacity(attached_jobs, choice.capacity, recompute)
    if pacing is not None and uses_free_memory:
        pacing = replace(pacing, spare_microbatches=memory.choose_spare(attached_jobs, capacity, recompute))
    program = plan_window(
        windows,
        choice.layout,
        capacity,
        choice.captures_graphs and not recompute.tile_rows,
        recompute,
        pacing,
        inherited,
        choice.mechanisms.packing_limits,
    )
    known = choice.cost_model or uncalibrated_cost_model(choice.shape)
    fitted_models = FittedModels(initial_cost=known, memory=memory, first_seconds=choice.first_pass_seconds)
    return FirstWindow(
        program, fitted_models.predict_window(program, shapes, _price_program(choice, shapes)), shapes, choice
    )


def _price_program(
    choice: LayoutChoice, shapes: Mapping[str, JobShape]
) -> Callable[[Program], float | None] | None:
    """Return a function that simulates a program on several workers and returns its seconds. Return None for
    one worker, whose time model needs no simulation."""
    if choice.layout.workers * choice.layout.replicas * choice.layout.shards == 1:
        return None
    return partial(choice.predict_seconds, shapes=shapes)
