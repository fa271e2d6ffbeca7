"""Observers of a run's windows, which add notes or files at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from weftune.plan.layout.choose import Choice
from weftune.plan.program.program import Program
from weftune.report.gantt import Drawn, Timelines, drawn, write_timelines
from weftune.run.executor import Executor
from weftune.run.workers.driver import Driver
from weftune.run.workers.trace import Trace, timeline_of

TRACE = "trace.json"
Note = Callable[[str], None]


class Watcher(Protocol):
    def begin(self, program: Program) -> None:
        """Observe that a window is about to run."""

    def end(self, program: Program) -> None:
        """Observe that the window has run."""

    def close(self, output: Path, seconds: float, note: Note) -> None:
        """Add notes or files when the run is over, however it ended; its windows took `seconds` in all."""


class StreamWatcher:
    """A watcher of a base that is streamed in this process: bytes loaded from the host, and time waited for
    them."""

    def __init__(self, executor: Executor, choice: Choice) -> None:
        self._executor, self._choice = executor, choice

    def begin(self, program: Program) -> None:
        pass

    def end(self, program: Program) -> None:
        pass

    def close(self, output: Path, seconds: float, note: Note) -> None:
        waited = self._executor.weights.waited
        if seconds:
            place = "base's files" if self._choice.mapped else "host"
            note(
                f"Streamed: {waited.copied_bytes / 2**30:.1f} GiB came from the {place}; training waited for "
                f"the host in {waited.total() / seconds:.0%} of the time, {self._choice.unhidden:.0%} were "
                "predicted."
            )
        if refused := self._executor.passes.refused:
            note(
                f"Passes in {refused} sizes were launched kernel by kernel, since the memory did not suffice "
                "to capture them."
            )


class WorkerStreamWatcher:
    """A watcher of a base that is streamed by several workers: bytes loaded from the host, and time waited
    for them."""

    def __init__(self, driver: Driver, choice: Choice) -> None:
        self._driver, self._choice = driver, choice

    def begin(self, program: Program) -> None:
        pass

    def end(self, program: Program) -> None:
        pass

    def close(self, output: Path, seconds: float, note: Note) -> None:
        if seconds and (reports := self._driver.reports):
            copied = sum(report.copied_bytes for report in reports)
            waited = max(report.waited for report in reports)
            note(
                f"Streamed: {copied / 2**30:.1f} GiB came from the host to {len(reports)} workers; the one "
                f"that waited longest for it did so in {waited / seconds:.0%} of the time, "
                f"{self._choice.unhidden:.0%} were predicted."
            )


class TimelineWatcher:
    """A watcher of several workers: a trace of all windows, and a chart of the last one as predicted and as
    measured."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._trace = Trace()
        self._foreseen: Drawn | None = None
        self._timelines: Timelines | None = None
        """Timelines of the last window with training, once speeds were known."""

    def begin(self, program: Program) -> None:
        # Computed before the window runs: afterwards the paces have learnt from it.
        paces = self._driver.paces
        known = program.batches and paces.measured
        self._foreseen = drawn(paces.timeline(program), program) if known else None

    def end(self, program: Program) -> None:
        reports = self._driver.reports
        self._trace.add(program, reports)
        if self._foreseen is not None and not any(report.shortage for report in reports):
            self._timelines = Timelines(
                foreseen=self._foreseen, measured=drawn(timeline_of(reports), program)
            )

    def close(self, output: Path, seconds: float, note: Note) -> None:
        self._trace.write(output / TRACE)
        if self._timelines is not None:
            write_timelines(output, self._timelines)
