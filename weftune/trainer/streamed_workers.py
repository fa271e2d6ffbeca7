"""The loop over several ranks that stream a base together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from weftune.jobs.store.store import Store
from weftune.plan.cost.prior import arithmetic
from weftune.plan.layout.choose import Choice
from weftune.plan.program.program import Program
from weftune.plan.window.rounds import Course
from weftune.plan.window.window import plan_window
from weftune.run.workers.driver import Driver
from weftune.trainer.journal import Journal
from weftune.trainer.loop import Callback, Room
from weftune.trainer.pipelined import PipelinedLoop


class RankedLoop(PipelinedLoop):
    def __init__(
        self,
        pipeline: Driver,
        tokenizer: Any,
        store: Store,
        choice: Choice,
        journal: Journal,
    ) -> None:
        # This rank's layers are no base of their own: their numbers have gaps.
        super().__init__(pipeline, tokenizer, store, choice, journal, arithmetic(choice.memory.shape))
        pipeline.paces.loads = choice.loads
        self.seconds = 0.0
        """Of all windows."""

    def run(self, stop: Callable[[], bool], callback: Callback | None = None) -> None:
        super().run(stop, callback)
        if self.seconds:
            reports = self.pipeline.reports
            copied = sum(report.copied_bytes for report in reports)
            waited = max(report.waited for report in reports)
            self.journal.note(
                f"Streamed: {copied / 2**30:.1f} GiB came from the host to {len(reports)} ranks; the one "
                f"that waited longest for it did so in {waited / self.seconds:.0%} of the time, "
                f"{self.choice.unhidden:.0%} were predicted."
            )

    def _execute(self, program: Program, stop: Callable[[], bool], callback: Callback | None) -> None:
        began = time.monotonic()
        super()._execute(program, stop, callback)
        self.seconds += time.monotonic() - began

    def _window(self, courses: Sequence[Course], room: Room) -> Program:
        return plan_window(courses, self.choice.layout, room.capacity)
