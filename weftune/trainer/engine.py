"""What makes a run's passes: all of the base on one device, a stage of it in each of several processes, or
stages that take turns on one device or on those of several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from weftune.base.host.streamed import load_streamed
from weftune.base.load import load_base
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.shapes import JobShape, LayerRange, ModelShape
from weftune.errors import UserError
from weftune.jobs.store.store import Store
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.cost.profile import Profile, find_profile, read_profile
from weftune.plan.cost.profile_cost import cost_of, memory_of, source_of
from weftune.plan.layout.cut import PartCosts, cut_layers, measured_costs, typical_work
from weftune.plan.layout.stream_choice import StreamChoice
from weftune.plan.layout.streamed_memory import StreamedMemory
from weftune.plan.layout.worker_choice import RanksChoice
from weftune.plan.layout.worker_memory import RanksMemory
from weftune.plan.program.layout import in_stages
from weftune.run.assemble import streamed_executor
from weftune.run.executor import Executor
from weftune.run.measure.memory import budget_bytes, limit_bytes, taken_bytes
from weftune.run.profile import key_here
from weftune.run.workers.driver import Driver, open_pipeline
from weftune.run.workers.groups import WorkerPlace, own_gpus
from weftune.run.workers.messages import Staff
from weftune.trainer.journal import Journal
from weftune.trainer.loop import Loop
from weftune.trainer.pipelined import PipelinedLoop, stage_memory
from weftune.trainer.streamed import StreamedLoop, Streaming, streaming
from weftune.trainer.streamed_workers import RankedLoop, RankStreaming, rank_streaming

MOST_TOKENS = {"cpu": 1024, "cuda": 8192}
"""The token capacity that a device gets where memory allows more."""


def most_tokens(device: torch.device) -> int:
    return MOST_TOKENS.get(device.type, 1024)


class Engine(Protocol):
    @property
    def base(self) -> Base: ...

    def loop(self, tokenizer: Any, store: Store, journal: Journal) -> Loop: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a run was asked to run on."""

    spec: BaseSpec
    base: Base | None
    """Where it is in memory already."""
    device: torch.device
    shape: ModelShape
    staff: Staff | None
    memory: int | None
    gpu_memory: int | None
    capacity: int | None
    profile: Path | None
    checkpoints: Callable[[str], Path]

    @property
    def most(self) -> int:
        """Tokens of a microbatch."""
        return self.capacity or most_tokens(self.device)

    @property
    def budget(self) -> int:
        return self.gpu_memory or self.memory or budget_bytes(self.device)


def open_engine(setup: Setup, jobs: Sequence[JobShape], note: Callable[[str], None]) -> Engine:
    """Load the base as these jobs need it; `note` hears what was chosen."""
    if setup.staff is not None:
        if (found := _rank_streaming(setup, setup.staff.wires.place, jobs)) is not None:
            note(f"The base is {found.choice.why}.")
            return _over_ranks(setup, setup.staff, found)
        return _in_stages(setup, setup.staff, note)
    if (chosen := _streaming(setup, jobs)) is not None:
        note(f"The base is {chosen.choice.why}.")
        return _streamed(setup, chosen)
    return _whole(setup)


# -- one device -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Whole:
    base: Base
    memory: MemoryModel
    most: int
    profile: Profile | None

    def loop(self, tokenizer: Any, store: Store, journal: Journal) -> Loop:
        if self.profile is None:
            return Loop(self.base, tokenizer, store, self.memory, self.most, journal)
        memory = replace(self.memory, fit=memory_of(self.profile, self.memory))
        cost = cost_of(self.profile, self.base.shape)
        return Loop(self.base, tokenizer, store, memory, self.most, journal, cost)


def _whole(setup: Setup) -> Whole:
    # Made before the base is loaded: it counts what the process holds without it.
    memory = MemoryModel(setup.shape, _resident_budget(setup), taken_bytes(setup.device))
    base = setup.base or load_base(setup.spec, setup.device)
    return Whole(base, memory, setup.most, _profile(setup, base.shape, base.device))


def _resident_budget(setup: Setup) -> int:
    """On a CPU a small GPU is pretended only for a base that is streamed."""
    on_gpu = setup.device.type == "cuda"
    return setup.budget if on_gpu else setup.memory or budget_bytes(setup.device)


def _profile(setup: Setup, shape: ModelShape, device: torch.device) -> Profile | None:
    key, path = key_here(shape, device), setup.profile
    profile = find_profile(key) if path is None else read_profile(path, key)
    if profile is None and path is not None:
        raise UserError(
            f"{path} is no profile of {setup.spec.model} on this device; weftune doctor --profile makes one"
        )
    return profile


# -- stages in several processes ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InStages:
    pipeline: Driver
    memory: MemoryModel
    most: int

    @property
    def base(self) -> Base:
        return self.pipeline.base

    def loop(self, tokenizer: Any, store: Store, journal: Journal) -> Loop:
        return PipelinedLoop(self.pipeline, tokenizer, store, self.memory, self.most, journal)


def _in_stages(setup: Setup, staff: Staff, note: Callable[[str], None]) -> InStages:
    held = _layers(setup, staff.wires.place, note)
    memory = _stage_memory(setup, staff.wires.place, held)
    most = setup.gpu_memory and setup.gpu_memory // _sharing(setup, staff.wires.place)
    layout = in_stages(held, staff.wires.place.replicas)
    pipeline = open_pipeline(staff, setup.spec, setup.device, layout, setup.checkpoints, most=most)
    return InStages(pipeline, memory, setup.most)


def _stage_memory(setup: Setup, place: WorkerPlace, held: Sequence[LayerRange]) -> MemoryModel:
    budget, taken = _resident_budget(setup) // _sharing(setup, place), taken_bytes(setup.device)
    if place.stages == 1:
        return MemoryModel(setup.shape, budget, taken)
    return stage_memory(setup.shape, held, budget, taken)


def _sharing(setup: Setup, place: WorkerPlace) -> int:
    """Ranks on one device."""
    return 1 if own_gpus(place, setup.device) else place.local_ranks


def _layers(setup: Setup, place: WorkerPlace, note: Callable[[str], None]) -> tuple[LayerRange, ...]:
    """Of every stage, as this first rank cuts for all; a replica that is one process holds all."""
    shape = setup.shape
    if place.stages == 1:
        return (LayerRange(0, shape.layers, shape.layers),)
    profile = _profile(setup, shape, setup.device)
    if profile is None:
        return cut_layers(shape, place.stages)
    held = cut_layers(shape, place.stages, measured_costs(profile, shape, typical_work(shape, setup.most)))
    counts = " + ".join(str(one.stop - one.start) for one in held)
    note(f"The stages hold {counts} layers, alike by times {source_of(profile)}.")
    return held


def costs_here(shape: ModelShape, device: torch.device) -> PartCosts | None:
    """What a run on this device will cut stages by, if the cache has a profile of it."""
    profile = find_profile(key_here(shape, device))
    return measured_costs(profile, shape, typical_work(shape, most_tokens(device))) if profile else None


# -- stages that take turns ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Streamed:
    executor: Executor
    memory: StreamedMemory
    choice: StreamChoice

    @property
    def base(self) -> Base:
        return self.executor.base

    def loop(self, tokenizer: Any, store: Store, journal: Journal) -> Loop:
        return StreamedLoop(self.executor, tokenizer, store, self.memory, self.choice, journal)


def _streaming(setup: Setup, jobs: Sequence[JobShape]) -> Streaming | None:
    """On a GPU whenever the base does not fit; on a CPU only where it is to pretend to be a small one."""
    if setup.base is not None and setup.gpu_memory is not None:
        raise UserError("gpu_memory: this base is on its device already; give its name and Weftune loads it")
    if setup.base is not None or (setup.gpu_memory is None and setup.device.type != "cuda"):
        return None
    limit_bytes(setup.device, setup.gpu_memory)
    return streaming(setup.spec, setup.shape, jobs, setup.device, setup.budget, setup.most)


def _streamed(setup: Setup, chosen: Streaming) -> Streamed:
    memory = chosen.memory(setup.shape, setup.device)
    choice = chosen.choice
    executor = streamed_executor(load_streamed(setup.spec, setup.device, choice.cut, choice.mapped))
    return Streamed(executor, memory, choice)


# -- stages that take turns in several processes ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OverRanks:
    pipeline: Driver
    memory: RanksMemory
    choice: RanksChoice

    @property
    def base(self) -> Base:
        return self.pipeline.base

    def loop(self, tokenizer: Any, store: Store, journal: Journal) -> Loop:
        return RankedLoop(self.pipeline, tokenizer, store, self.memory, self.choice, journal)


def _rank_streaming(setup: Setup, place: WorkerPlace, jobs: Sequence[JobShape]) -> RankStreaming | None:
    """Only where it was asked for, since ranks are wired for it when they meet."""
    if not place.ring or setup.gpu_memory is None:
        return None
    # Every rank pretends a device of its own.
    budget = setup.gpu_memory // (_sharing(setup, place) if setup.device.type == "cuda" else 1)
    return rank_streaming(setup.spec, setup.shape, jobs, place, setup.device, budget, setup.most)


def _over_ranks(setup: Setup, staff: Staff, found: RankStreaming) -> OverRanks:
    memory, layout = found.memory(setup.shape, setup.device), found.choice.cut
    most = found.place.budget
    pipeline = open_pipeline(staff, setup.spec, setup.device, layout, setup.checkpoints, most=most)
    return OverRanks(pipeline, memory, found.choice)
