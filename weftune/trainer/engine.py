"""The engine of a run: the executor with the base model, loaded in the chosen layout (which layers each
worker holds), and the time model for planning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from weftune.base.host.streamed import load_streamed
from weftune.base.load import load_base
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.clock import Phase, phase
from weftune.core.shapes import JobShape, ModelShape
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.cost.time import CostModel, JobShapes
from weftune.plan.layout.choose import LayoutChoice, choose_layout
from weftune.plan.program.program import Program
from weftune.plan.window.window import Pacing
from weftune.report.gantt import DrawnTimeline, Timelines, prepare_timeline, write_timelines
from weftune.run.assemble import resident_executor, streamed_executor
from weftune.run.executor import Executor
from weftune.run.measure.memory import set_memory_limit
from weftune.run.workers.driver import Driver, open_pipeline
from weftune.run.workers.messages import WorkerControl
from weftune.run.workers.trace import Trace, make_timeline
from weftune.trainer.machine import describe_machine, memory_warning, workers_per_device
from weftune.trainer.options import Options

TRACE = "trace.json"
Price = Callable[[Program], float | None]
"""Function that maps the Program of a window (an executable plan for a few global batches of every job) to
its predicted seconds, or to None if these cannot be predicted."""


class TimelineWatcher:
    """An observer of windows (a few global batches of every job) that several workers run. It records a trace
    of all windows, and the predicted and measured timelines of the last window."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._trace = Trace()
        self._predicted_timeline: DrawnTimeline | None = None
        self._timelines: Timelines | None = None
        """Predicted and measured timelines of the last training window before which the workers' speeds were
        known from measurements. None before the first such window."""

    def begin(self, program: Program) -> None:
        # Computed before the window runs: afterwards the paces have learnt from it.
        paces = self._driver.paces
        known = program.batches and paces.has_measurements
        self._predicted_timeline = prepare_timeline(paces.timeline(program), program) if known else None

    def end(self, program: Program) -> None:
        reports = self._driver.reports
        self._trace.add(program, reports)
        if self._predicted_timeline is not None and not any(report.shortage for report in reports):
            self._timelines = Timelines(
                foreseen=self._predicted_timeline, measured=prepare_timeline(make_timeline(reports), program)
            )

    def close(self, output: Path) -> None:
        self._trace.write(output / TRACE)
        if self._timelines is not None:
            write_timelines(output, self._timelines)


@dataclass(frozen=True, slots=True)
class Engine:
    executor: Executor | Driver
    choice: LayoutChoice
    initial_cost_model: CostModel
    """Model that predicts the seconds of passes before any pass of this run has been measured."""
    timeline: TimelineWatcher | None = None
    """Object that records when each worker ran its actions (the timelines). None if a single worker
    trains."""
    final_notes: Callable[[float], Sequence[str]] = lambda seconds: ()
    """Function that maps the total seconds of training to sentences that the user sees at the end of the
    run."""
    pacing: Callable[[], Pacing | None] = lambda: None
    """Function that returns the measured speeds of a pipeline's stages, by which the planner orders passes.
    It returns None if there is no pipeline."""
    price: Callable[[JobShapes], Price | None] = lambda shapes: None
    """Function that maps the attached (training) jobs to a predictor of the seconds of a window's Program
    (the plan of a few global batches). It returns None if the learned time model predicts these seconds, as
    with a single worker."""
    other_peak_bytes: Callable[[], Sequence[int]] = tuple
    """Function that returns the peak memory use, in bytes, of each other worker."""
    deterministic: bool = False
    """Whether planning must not use measurements of the run, so that two runs give bitwise equal results."""

    @property
    def base(self) -> Base:
        return self.executor.base


@phase(Phase.LOADING)
def open_engine(
    options: Options,
    base: BaseSpec | Base,
    device: torch.device,
    shape: ModelShape,
    jobs: Sequence[JobShape],
    checkpoints: Callable[[str], Path],
    show_note: Callable[[str], None],
) -> Engine:
    """Choose a layout (which layers each worker holds) for these jobs, load the base model accordingly unless
    `base` is loaded already, and return the engine. `checkpoints` maps a job to the folder of its
    checkpoints; `show_note` is called with sentences about the choice."""
    # Chosen before the base is loaded: the machine counts what the process holds without it.
    choice = choose_layout(shape, jobs, describe_machine(options, base, device, shape))
    if options.mechanisms is not None:
        choice = replace(choice, mechanisms=options.mechanisms)
    for sentence in (choice.user_note, memory_warning(options, device)):
        if sentence:
            show_note(sentence)
    if options.staff is not None:
        spec = base.spec if isinstance(base, Base) else base
        return _workers_engine(options, options.staff, spec, device, choice, checkpoints)
    set_memory_limit(device, options.gpu_memory)
    if choice.is_streamed:
        assert isinstance(base, BaseSpec), "a loaded base is not streamed"
        executor = streamed_executor(load_streamed(base, device, choice.layout, choice.reads_weight_files))
    else:
        loaded = base if isinstance(base, Base) else load_base(base, device)
        executor = resident_executor(loaded, part=choice.layout.for_worker(0), captures_early=False)
    known = choice.cost_model or uncalibrated_cost_model(executor.base.shape)
    return _add_notes(Engine(executor, choice, known, deterministic=options.deterministic))


def _workers_engine(
    options: Options,
    control: WorkerControl,
    spec: BaseSpec,
    device: torch.device,
    choice: LayoutChoice,
    checkpoints: Callable[[str], Path],
) -> Engine:
    limit = options.gpu_memory and options.gpu_memory // workers_per_device(options, device)
    driver = open_pipeline(
        control,
        spec,
        device,
        choice.layout,
        checkpoints,
        max_bytes=choice.stream_device.budget_bytes if choice.stream_device else limit,
        deterministic=options.deterministic,
    )
    driver.paces.loads = choice.load_pace
    paces = driver.paces.guessed_stages if options.deterministic else driver.paces.stages
    engine = Engine(
        driver,
        choice,
        # Not the shape of this worker: the layers of its stages may not be consecutive.
        uncalibrated_cost_model(choice.memory.shape if choice.is_streamed else driver.base.shape),
        # There is one trace in an output: of several shares, that of the first.
        timeline=None if options.share else TimelineWatcher(driver),
        pacing=lambda: choice.pacing(
            paces(),
            are_measured=driver.paces.has_measurements and not options.deterministic,
            # A run that resumes begins with an empty pipeline, and must come to the same microbatches.
            hands_over=not options.deterministic,
        ),
        price=partial(_price_function, driver, choice),
        other_peak_bytes=lambda: driver.peaks,
        deterministic=options.deterministic,
    )
    return _add_notes(engine)


def _add_notes(engine: Engine) -> Engine:
    if not engine.choice.is_streamed:
        return engine
    return replace(engine, final_notes=partial(stream_notes, engine.executor, engine.choice))


def _price_function(driver: Driver, choice: LayoutChoice, shapes: JobShapes) -> Price:
    """Return a predictor of the time of windows (a few global batches of every job each). The predictor uses
    the measured passes of the stages or, before any are measured, the profile of this machine."""

    def price(program: Program) -> float | None:
        if driver.paces.has_measurements:
            return driver.paces.predicted_seconds(program)
        return choice.predict_seconds(program, shapes)

    return price


def stream_notes(executor: Executor | Driver, choice: LayoutChoice, seconds: float) -> list[str]:
    """Return sentences that the user sees at the end of a run whose base was streamed from host memory or
    files and whose training took `seconds`."""
    notes = []
    if isinstance(executor, Driver):
        reports, shards = executor.reports, executor.shards
        copied_bytes = shards * sum(report.copied_bytes for report in reports)
        waited = max((report.waited_seconds for report in reports), default=0.0)
        source = f"host to {shards * len(reports)} workers; the one that waited longest for it did so"
        seconds = seconds if reports else 0.0
    else:
        weights = executor.weights.wait_time
        copied_bytes, waited = weights.copied_bytes, weights.total_seconds()
        source = (
            f"{'files of the base' if choice.reads_weight_files else 'host'}; training waited for the host"
        )
        if failed := executor.passes.failed_captures:
            notes.append(
                f"Passes in {failed} sizes were launched kernel by kernel, since the memory did not suffice "
                "to capture them."
            )
    if seconds:
        share = f"{waited / seconds:.0%} of the time, {choice.waiting_fraction:.0%} were predicted"
        notes.insert(0, f"Streamed: {copied_bytes / 2**30:.1f} GiB came from the {source} in {share}.")
    return notes
