"""The loop over a base that is streamed from host memory, and what the planner is told of host and link."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch

from weftune.base.host.streamed import weights_in_files
from weftune.base.load import base_dtype
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError, HostTooSmall
from weftune.jobs.store.store import Store
from weftune.plan.layout.choose import Choice
from weftune.plan.layout.need import StreamDevice
from weftune.plan.layout.one_device import gpu_place, in_files
from weftune.plan.program.program import Program
from weftune.plan.window.rounds import Course
from weftune.plan.window.window import plan_window
from weftune.run.measure.link import measure_files, measure_link
from weftune.run.measure.memory import CPU_SHARE
from weftune.run.stream.executor import StreamExecutor
from weftune.trainer.journal import Journal
from weftune.trainer.loop import Callback, Loop, Room


def host_budget() -> int:
    """Bytes of the host's memory that a run may take."""
    return int(psutil.virtual_memory().available * CPU_SHARE)


def measured_gpu(spec: BaseSpec, device: torch.device, budget: int, host: int) -> StreamDevice:
    """With its link and its products as they are now."""
    link = measure_link(device, base_dtype(spec, device))
    return gpu_place(budget, host, link.bandwidth, link.flops, link.both_ways)


def from_files(
    spec: BaseSpec, device: torch.device, place: StreamDevice, short: HostTooSmall
) -> StreamDevice:
    """The same place for a base whose weights stay in their files; if they cannot, both reasons."""
    try:
        weights = weights_in_files(spec, device)
    except BaseModelError as error:
        raise HostTooSmall([*short.mistakes, *error.mistakes]) from None
    if device.type != "cuda":
        return in_files(place)
    files = measure_files(weights.files)
    both_ways = None if place.both_ways is None else min(place.both_ways, files)
    return replace(in_files(place), bandwidth=min(place.bandwidth, files), both_ways=both_ways)


class StreamedLoop(Loop):
    def __init__(
        self,
        executor: StreamExecutor,
        tokenizer: Any,
        store: Store,
        choice: Choice,
        journal: Journal,
    ) -> None:
        memory, most = choice.memory, choice.capacity
        super().__init__(executor.base, tokenizer, store, memory, most, journal, choice.cost, executor)
        self.choice = choice
        self.layout, self.rounds = choice.layout, choice.rounds
        self.streamer, self.graphs = executor.streamer, executor.graphs
        self.seconds = 0.0
        """Of all windows."""

    def run(self, stop: Callable[[], bool], callback: Callback | None = None) -> None:
        super().run(stop, callback)
        if self.seconds:
            place = "base's files" if self.choice.mapped else "host"
            self.journal.note(
                f"Streamed: {self.streamer.waited.copied_bytes / 2**30:.1f} GiB came from the {place}; "
                f"training waited for the host in {self.streamer.waited.total() / self.seconds:.0%} of the "
                f"time, {self.choice.unhidden:.0%} were predicted."
            )
        if self.graphs is not None and self.graphs.refused:
            self.journal.note(
                f"Passes in {len(self.graphs.refused)} sizes were launched kernel by kernel, since the "
                "memory did not suffice to capture them."
            )

    def _execute(self, program: Program, stop: Callable[[], bool], callback: Callback | None) -> None:
        began = time.monotonic()
        super()._execute(program, stop, callback)
        self.seconds += time.monotonic() - began

    def _window(self, courses: Sequence[Course], room: Room) -> Program:
        return plan_window(courses, self.choice.layout, room.capacity, self.executor.captures is not None)
