"""The loop over a pipeline: the same life of jobs, with windows planned for stages and a trace of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from weftune.jobs.store.store import Store
from weftune.plan.cost.learned import Company, Promise, sizes_of
from weftune.plan.cost.memory import SPARE
from weftune.plan.cost.time import CostModel
from weftune.plan.layout.choose import Choice
from weftune.plan.program.program import Program
from weftune.plan.window.rounds import Course
from weftune.plan.window.window import Pacing, plan_window
from weftune.report.timelines import Drawn, Timelines, drawn, write_timelines
from weftune.run.workers.driver import Driver
from weftune.run.workers.trace import Trace, timeline_of
from weftune.trainer.journal import Journal
from weftune.trainer.loop import Callback, Loop, Room

TRACE = "trace.json"


class PipelinedLoop(Loop):
    def __init__(
        self,
        pipeline: Driver,
        tokenizer: Any,
        store: Store,
        choice: Choice,
        journal: Journal,
        cost: CostModel | None = None,
    ) -> None:
        memory, most = choice.memory, choice.capacity
        super().__init__(pipeline.base, tokenizer, store, memory, most, journal, cost, executor=pipeline)
        self.pipeline = pipeline
        self.choice = choice
        self.layout, self.rounds = choice.layout, choice.rounds
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
        layout = self.pipeline.layout
        return plan_window(courses, layout, room.capacity, recompute=room.recompute, pacing=pacing)

    def _execute(self, program: Program, stop: Callable[[], bool], callback: Callback | None) -> None:
        # Made before the window runs: afterwards the paces have learnt from it.
        foreseen = self._foreseen(program)
        super()._execute(program, stop, callback)
        self.trace.add(program, self.pipeline.reports)
        if foreseen is not None:
            measured = drawn(timeline_of(self.pipeline.reports), program)
            self.timelines = Timelines(foreseen=foreseen, measured=measured)

    def _foreseen(self, program: Program) -> Drawn | None:
        paces = self.pipeline.paces
        if not (program.batches and paces.measured):
            return None
        return drawn(paces.timeline(program), program)

    def _promise(self, program: Program, company: Company) -> Promise:
        return self.learned.promise(program, company, partial(self._predicted_seconds, company))

    def _predicted_seconds(self, company: Company, program: Program) -> float | None:
        """By the stages' own passes; before there are any, by the profile."""
        paces = self.pipeline.paces
        if paces.measured:
            return paces.predicted_seconds(program)
        return self.choice.seconds_of(program, sizes_of(company))

    def _peak_bytes(self) -> int:
        return max([super()._peak_bytes(), *self.pipeline.peaks])
