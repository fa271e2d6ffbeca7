"""The loop over a pipeline: the same life of jobs, with windows planned for stages and a trace of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weftune.core.shapes import LayerRange, ModelShape
from weftune.jobs.store.store import Store
from weftune.plan.cost.learned import Company, Promise
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.cost.time import CostModel
from weftune.plan.layout.cut import stage_shape
from weftune.plan.program.program import Program
from weftune.plan.window.rounds import Course
from weftune.plan.window.window import Pacing, plan_window
from weftune.report.timelines import Drawn, Timelines, drawn, write_timelines
from weftune.run.workers.driver import Driver
from weftune.run.workers.trace import Trace, timeline_of
from weftune.trainer.journal import Journal
from weftune.trainer.loop import Callback, Loop, Room
from weftune.trainer.window_length import WindowPace

PIPELINE_ROUNDS = 16
"""Global batches of each job in a window: a pipeline fills and drains once a window, so it is a long
one where rounds are quick."""
SPARE = 1
"""Microbatches in flight beyond what 1F1B has, so that a late arrival finds its stage at work."""
TRACE = "trace.json"


def stage_memory(shape: ModelShape, held: Sequence[LayerRange], budget: int, taken: int = 0) -> MemoryModel:
    """Of the heaviest of these stages."""
    heaviest = max((stage_shape(shape, one) for one in held), key=lambda one: one.parameters)
    return MemoryModel(heaviest, budget, taken, in_flight=len(held) + SPARE)


class PipelinedLoop(Loop):
    def __init__(
        self,
        pipeline: Driver,
        tokenizer: Any,
        store: Store,
        memory: MemoryModel,
        most: int,
        journal: Journal,
        cost: CostModel | None = None,
    ) -> None:
        super().__init__(pipeline.base, tokenizer, store, memory, most, journal, cost, executor=pipeline)
        self.pipeline = pipeline
        self.rounds = PIPELINE_ROUNDS
        # As if its stages, each no larger than the one that memory is counted of, worked one after another.
        self.first_pace = WindowPace(self.first_pace.row_seconds * pipeline.stages)
        self.trace = Trace()
        self.timelines: Timelines | None = None
        """The last window in which jobs trained, once paces were known."""

    def run(self, stop: Callable[[], bool], callback: Callback | None = None) -> None:
        try:
            super().run(stop, callback)
        finally:
            self.trace.write(self.store.output / TRACE)
            if self.timelines is not None:
                write_timelines(self.store.output, self.timelines)

    def _window(self, courses: Sequence[Course], room: Room) -> Program:
        pacing = Pacing(self.pipeline.paces.stages(), spare=SPARE)
        layout, ladder = self.pipeline.layout, self.pipeline.captures is not None
        return plan_window(courses, layout, room.capacity, ladder, room.recompute, pacing)

    def _execute(self, program: Program, stop: Callable[[], bool], callback: Callback | None) -> None:
        # Made before the window runs: afterwards the paces have learnt from it.
        foreseen = self._foreseen(program)
        super()._execute(program, stop, callback)
        self.trace.add(program, self.pipeline.reports)
        if foreseen is not None and not any(report.shortage for report in self.pipeline.reports):
            measured = drawn(timeline_of(self.pipeline.reports), program)
            self.timelines = Timelines(foreseen=foreseen, measured=measured)

    def _foreseen(self, program: Program) -> Drawn | None:
        paces = self.pipeline.paces
        if not (program.batches and paces.measured):
            return None
        return drawn(paces.timeline(program), program)

    def _promise(self, program: Program, company: Company) -> Promise:
        return self.learned.promise(program, company, self.pipeline.paces.predicted_seconds)

    def _peak_bytes(self) -> int:
        return max([super()._peak_bytes(), *self.pipeline.peaks])
