"""Several ranks that stream a base together: whether they have to, how, and the loop over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weftune.base.load import base_dtype
from weftune.base.spec import BaseSpec
from weftune.core.shapes import JobShape, ModelShape
from weftune.errors import PlanError
from weftune.jobs.store.store import Store
from weftune.plan.cost.memory import MemoryFit, MemoryModel
from weftune.plan.cost.prior import arithmetic
from weftune.plan.layout.cut import cut_layers
from weftune.plan.layout.need import StreamDevice, layer_bytes
from weftune.plan.layout.one_device import gpu_place, pretended_place
from weftune.plan.layout.worker_choice import RanksChoice, choose_ranks
from weftune.plan.layout.worker_memory import RanksMemory
from weftune.plan.program.program import Program
from weftune.plan.window.pipeline import LoadPace
from weftune.plan.window.rounds import Course
from weftune.plan.window.window import plan_window
from weftune.run.measure.link import measure_link
from weftune.run.measure.memory import taken_bytes
from weftune.run.workers.driver import Driver
from weftune.run.workers.groups import WorkerPlace
from weftune.trainer.journal import Journal
from weftune.trainer.loop import Callback, Room
from weftune.trainer.pipelined import PipelinedLoop, stage_memory
from weftune.trainer.streamed import host_budget
from weftune.trainer.window_length import WindowPace


@dataclass(frozen=True, slots=True)
class RankStreaming:
    """A choice, and the device that it was made for."""

    choice: RanksChoice
    place: StreamDevice

    def memory(self, shape: ModelShape, device: torch.device) -> RanksMemory:
        """Made before the base is loaded. A pretended device is a part of the host, and measured with it."""
        beside = 0
        if device.type != "cuda":
            beside = taken_bytes(device) + self.choice.host_bytes
        return RanksMemory(shape, self.place.budget + beside, beside, cut=self.choice.cut, device=self.place)


def rank_streaming(
    spec: BaseSpec,
    shape: ModelShape,
    jobs: Sequence[JobShape],
    ranks: WorkerPlace,
    device: torch.device,
    budget: int,
    most: int,
) -> RankStreaming | None:
    """How the ranks stream the base within `budget` bytes of each one's device; None if a part of it fits
    each with any one of the jobs.

    As many of the jobs as fit at once are planned for, in the order in which they would come aboard.
    """
    on_gpu = device.type == "cuda"
    parted = _parted(shape, ranks, budget, on_gpu)
    need = max(parted.least_bytes([job]) for job in jobs)
    if need <= budget:
        return None
    # Ranks of other machines have memory of their own.
    host = host_budget() * ranks.ranks // ranks.local_ranks
    if on_gpu:
        link = measure_link(device, base_dtype(spec, device))
        place = gpu_place(budget, host, link.bandwidth, link.flops)
    else:
        place = pretended_place(budget, host)
    ordered = sorted(jobs, key=lambda job: (-job.priority, job.order))

    def attempt(count: int) -> RanksChoice | PlanError:
        try:
            return choose_ranks(shape, ordered[:count], ordered[count:], place, ranks.ranks, most, need)
        except PlanError as error:
            return error

    return RankStreaming(_for_most(attempt, len(jobs)), place)


def _for_most(attempt: Callable[[int], RanksChoice | PlanError], count: int) -> RanksChoice:
    """For as many jobs as can be, by halving; if not one fits, the sentence that says why."""
    found: list[RanksChoice] = []
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


def _parted(shape: ModelShape, ranks: WorkerPlace, budget: int, on_gpu: bool) -> MemoryModel:
    """What a rank needs whose part of the base stays; a pretended device has nothing but that on it."""
    memory = replace(stage_memory(shape, cut_layers(shape, ranks.stages), budget), fused=on_gpu)
    return memory if on_gpu else replace(memory, fit=MemoryFit(slack=0.0))


class RankedLoop(PipelinedLoop):
    def __init__(
        self,
        pipeline: Driver,
        tokenizer: Any,
        store: Store,
        memory: RanksMemory,
        choice: RanksChoice,
        journal: Journal,
    ) -> None:
        # This rank's layers are no base of their own: their numbers have gaps.
        cost = arithmetic(memory.shape)
        super().__init__(pipeline, tokenizer, store, memory, choice.capacity, journal, cost)
        layer = layer_bytes(memory.shape)
        sizes = tuple((stage.stop - stage.start) * layer for stage in choice.cut.stages)
        pipeline.paces.loads = LoadPace(sizes, memory.device.bandwidth)
        self.choice = choice
        self.first_pace = WindowPace(round_seconds=choice.step_seconds)
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
        return plan_window(courses, self.choice.cut, room.capacity, self.pipeline.captures is not None)
