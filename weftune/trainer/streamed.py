"""The loop over a base that is streamed from host memory: whether to, how, and the windows that it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from weftune.base.host.streamed import weights_in_files
from weftune.base.load import base_dtype
from weftune.base.spec import BaseSpec
from weftune.core.shapes import JobShape, ModelShape
from weftune.errors import BaseModelError, HostTooSmall
from weftune.jobs.store.store import Store
from weftune.plan.layout.need import StreamDevice
from weftune.plan.layout.one_device import choose_company, fits_whole, gpu_place, in_files, pretended_place
from weftune.plan.layout.ring import TRAVEL_ROUNDS
from weftune.plan.layout.stream_choice import StreamChoice
from weftune.plan.layout.streamed_memory import StreamedMemory
from weftune.plan.program.program import Program
from weftune.plan.window.rounds import Course
from weftune.plan.window.window import plan_window
from weftune.run.executor import Executor
from weftune.run.measure.link import measure_files, measure_link
from weftune.run.measure.memory import CPU_SHARE, taken_bytes
from weftune.trainer.journal import Journal
from weftune.trainer.loop import Callback, Loop, Room
from weftune.trainer.window_length import WindowPace


@dataclass(frozen=True, slots=True)
class Streaming:
    """A choice, and what a run may take of the device by it."""

    choice: StreamChoice
    budget: int
    slack: int

    def memory(self, shape: ModelShape, device: torch.device) -> StreamedMemory:
        """Made before the base is loaded. A pretended device is a part of the host, and measured with it."""
        beside = 0
        if device.type != "cuda":
            beside = taken_bytes(device) + self.choice.host_bytes
        return StreamedMemory(shape, self.budget + beside, beside, cut=self.choice.cut, slack=self.slack)


def streaming(
    spec: BaseSpec,
    shape: ModelShape,
    jobs: Sequence[JobShape],
    device: torch.device,
    budget: int,
    most: int,
) -> Streaming | None:
    """How to stream the base within `budget` bytes of the device; None if every job can train without.

    As many of the jobs as fit at once are planned for, in the order in which they would come aboard.
    """
    if device.type != "cuda":
        place = pretended_place(budget, host_budget())
    elif fits_whole(shape, jobs, budget):
        return None
    else:
        link = measure_link(device, base_dtype(spec, device))
        place = gpu_place(budget, host_budget(), link.bandwidth, link.flops, link.both_ways)
    try:
        choice = choose_company(shape, jobs, place, most).choice
    except HostTooSmall as short:
        choice = choose_company(shape, jobs, _from_files(spec, device, place, short), most).choice
    return None if choice.whole else Streaming(choice, budget, place.slack)


def host_budget() -> int:
    """Bytes of the host's memory that a run may take."""
    return int(psutil.virtual_memory().available * CPU_SHARE)


def _from_files(
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
        executor: Executor,
        tokenizer: Any,
        store: Store,
        memory: StreamedMemory,
        choice: StreamChoice,
        journal: Journal,
    ) -> None:
        super().__init__(executor.base, tokenizer, store, memory, choice.capacity, journal, executor=executor)
        self.choice = choice
        self.first_pace = WindowPace(round_seconds=choice.step_seconds)
        if choice.cut.travels:
            self.rounds = TRAVEL_ROUNDS
        self.weights, self.passes = executor.weights, executor.passes
        self.seconds = 0.0
        """Of all windows."""

    def run(self, stop: Callable[[], bool], callback: Callback | None = None) -> None:
        super().run(stop, callback)
        if self.seconds:
            place = "base's files" if self.choice.mapped else "host"
            self.journal.note(
                f"Streamed: {self.weights.waited.copied_bytes / 2**30:.1f} GiB came from the {place}; "
                f"training waited for the host in {self.weights.waited.total() / self.seconds:.0%} of the "
                f"time, {self.choice.unhidden:.0%} were predicted."
            )
        if self.passes.refused:
            self.journal.note(
                f"Passes in {self.passes.refused} sizes were launched kernel by kernel, since the "
                "memory did not suffice to capture them."
            )

    def _execute(self, program: Program, stop: Callable[[], bool], callback: Callback | None) -> None:
        began = time.monotonic()
        super()._execute(program, stop, callback)
        self.seconds += time.monotonic() - began

    def _window(self, courses: Sequence[Course], room: Room) -> Program:
        return plan_window(courses, self.choice.cut, room.capacity, self.executor.captures is not None)
