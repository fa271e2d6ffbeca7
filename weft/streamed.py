"""The loop over a base that is streamed from host memory: whether to, how, and the windows that it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import psutil
import torch

from weft.base.load import base_dtype
from weft.base.spec import BaseSpec
from weft.base.streamed import weights_in_files
from weft.errors import BaseModelError, HostTooSmall, PlanError
from weft.jobs.store import Store
from weft.journal import Journal
from weft.loop import Callback, Loop, Room
from weft.plan.memory import FUSED_SLACK_BYTES, MemoryModel
from weft.plan.planner import Course
from weft.plan.program import Program
from weft.plan.stream_choice import StreamChoice, choose_stream
from weft.plan.stream_memory import StreamedMemory
from weft.plan.stream_need import ASKING_SECONDS, STAGING_BYTES, STREAM_SLACK_BYTES, StreamDevice
from weft.plan.stream_ring import ROUNDS
from weft.plan.stream_window import plan_streamed
from weft.run.link import measure_files, measure_link
from weft.run.measure import CPU_SHARE, taken_bytes
from weft.run.stream_executor import StreamExecutor
from weft.shapes import JobShape, ModelShape

Choice = TypeVar("Choice")


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
    on_gpu = device.type == "cuda"
    slack = STREAM_SLACK_BYTES if on_gpu else 0
    resident = MemoryModel(shape, budget, fused=on_gpu)
    if on_gpu and all(resident.why_not([job]) is None for job in jobs):
        return None
    link = measure_link(device, base_dtype(spec, device))
    place = StreamDevice(
        budget=budget,
        host_budget=host_budget(),
        bandwidth=link.bandwidth,
        flops=link.flops,
        slack=slack,
        whole_slack=FUSED_SLACK_BYTES if on_gpu else None,
        fused=on_gpu,
        asking=ASKING_SECONDS if on_gpu else 0.0,
    )
    ordered = sorted(jobs, key=lambda job: (-job.priority, job.order))
    try:
        choice = _for_most(shape, ordered, place, most)
    except HostTooSmall as short:
        choice = _for_most(shape, ordered, _from_files(spec, device, place, short), most)
    return None if choice.whole else Streaming(choice, budget, slack)


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
        return replace(place, staging=0)
    bandwidth = min(place.bandwidth, measure_files(weights.files))
    return replace(place, staging=STAGING_BYTES, bandwidth=bandwidth)


def _for_most(shape: ModelShape, jobs: Sequence[JobShape], place: StreamDevice, most: int) -> StreamChoice:
    """So that each of the others can train by itself later, if there is such a way."""

    def attempt(count: int, waiting: Sequence[JobShape]) -> StreamChoice | PlanError:
        company = jobs[:count]
        tokens = sum(job.batch_tokens for job in company)
        try:
            return choose_stream(shape, company, place, most, tokens, waiting=waiting)
        except PlanError as error:
            return error

    try:
        return for_most(lambda count: attempt(count, jobs[count:]), len(jobs))
    except PlanError:
        return for_most(lambda count: attempt(count, ()), len(jobs))


def for_most(attempt: Callable[[int], Choice | PlanError], count: int) -> Choice:
    """For as many jobs as can be, by halving; if not one fits, the sentence that says why."""
    found: list[Choice] = []
    fits, too_many = 0, count + 1
    while too_many - fits > 1:
        tried = count if too_many > count else (fits + too_many) // 2
        outcome = attempt(tried)
        if isinstance(outcome, PlanError):
            too_many, why_not = tried, outcome
        else:
            fits, found = tried, [outcome]
    if not found:
        raise why_not
    return found[0]


class StreamedLoop(Loop):
    def __init__(
        self,
        executor: StreamExecutor,
        tokenizer: Any,
        store: Store,
        memory: StreamedMemory,
        choice: StreamChoice,
        journal: Journal,
    ) -> None:
        super().__init__(executor.base, tokenizer, store, memory, choice.capacity, journal, executor=executor)
        self.choice = choice
        if choice.cut.travels:
            self.rounds = ROUNDS
        self.streamer = executor.streamer
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

    def _execute(self, program: Program, stop: Callable[[], bool], callback: Callback | None) -> None:
        began = time.monotonic()
        super()._execute(program, stop, callback)
        self.seconds += time.monotonic() - began

    def _window(self, courses: Sequence[Course], room: Room) -> Program:
        return plan_streamed(courses, self.choice.cut, room.capacity)
