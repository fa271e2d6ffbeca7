"""What makes a run's passes: all of the base on one device, a stage of it in each of several processes, or
stages that take turns on one device or on those of several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from weftune.base.host.streamed import load_streamed
from weftune.base.load import load_base
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.shapes import JobShape, ModelShape
from weftune.errors import UserError
from weftune.jobs.store.store import Store
from weftune.plan.cost.profile import Profile, find_profile, read_profile
from weftune.plan.layout import choose
from weftune.plan.layout.choose import Choice, Machine
from weftune.plan.layout.cut import PartCosts, measured_costs, typical_work
from weftune.run.measure.memory import budget_bytes, limit_bytes, taken_bytes
from weftune.run.profile import key_here
from weftune.run.stream.executor import StreamExecutor
from weftune.run.workers.driver import Driver, open_pipeline
from weftune.run.workers.groups import WorkerPlace, own_gpus
from weftune.run.workers.messages import Staff
from weftune.trainer import streamed
from weftune.trainer.journal import Journal
from weftune.trainer.loop import Loop
from weftune.trainer.pipelined import PipelinedLoop
from weftune.trainer.streamed import StreamedLoop
from weftune.trainer.streamed_workers import RankedLoop

MOST_TOKENS = {kind: choose.MOST_TOKENS[kind == "cuda"] for kind in ("cpu", "cuda")}
"""The token capacity that a device gets where memory allows more."""


def most_tokens(device: torch.device) -> int:
    return MOST_TOKENS.get(device.type, 1024)


class Engine(Protocol):
    @property
    def base(self) -> Base: ...

    @property
    def choice(self) -> Choice: ...

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
    def budget(self) -> int:
        return self.gpu_memory or self.memory or budget_bytes(self.device)


def open_engine(setup: Setup, jobs: Sequence[JobShape], note: Callable[[str], None]) -> Engine:
    """Load the base as these jobs need it; `note` hears what was chosen."""
    # Before the base is loaded: the machine counts what the process holds without it.
    choice = choose.choose(setup.shape, jobs, machine_here(setup))
    if choice.note:
        note(choice.note)
    if setup.staff is not None:
        return (_over_ranks if choice.streamed else _in_stages)(setup, setup.staff, choice)
    return (_streamed if choice.streamed else _whole)(setup, choice)


# -- what the planner is told ----------------------------------------------------------------------------


def machine_here(setup: Setup) -> Machine:
    """This process with its device, or with the other workers' like it."""
    if setup.base is not None and setup.gpu_memory is not None and setup.staff is None:
        raise UserError("gpu_memory: this base is on its device already; give its name and Weftune loads it")
    place = setup.staff.wires.place if setup.staff else WorkerPlace(0, 1)
    profile, device = _profile(setup, setup.shape, setup.device), setup.device
    return Machine(
        on_gpu=device.type == "cuda",
        budget=_resident_budget(setup) // _sharing(setup, place),
        taken=taken_bytes(device),
        stream_budget=_stream_budget(setup, place),
        # Workers of other machines have memory of their own.
        host_budget=streamed.host_budget() * place.ranks // place.local_ranks,
        capacity=setup.capacity,
        workers=place.stages,
        replicas=place.replicas,
        profile=profile,
        worker_profile=profile if place.ranks == 1 else _worker_profile(setup),
        gpu=partial(streamed.measured_gpu, setup.spec, device),
        files=partial(streamed.from_files, setup.spec, device),
    )


def _resident_budget(setup: Setup) -> int:
    """On a CPU a small GPU is pretended only for a base that is streamed."""
    on_gpu = setup.device.type == "cuda"
    return setup.budget if on_gpu else setup.memory or budget_bytes(setup.device)


def _stream_budget(setup: Setup, place: WorkerPlace) -> int | None:
    """One GPU streams whenever the base does not fit; a CPU only where it is to pretend to be a small one;
    several workers only where it was asked for, since they are wired for it when they meet."""
    on_gpu = setup.device.type == "cuda"
    if setup.staff is None:
        return None if setup.base is not None else setup.budget if on_gpu else setup.gpu_memory
    if not place.ring or setup.gpu_memory is None:
        return None
    # Every worker pretends a device of its own.
    return setup.gpu_memory // (_sharing(setup, place) if on_gpu else 1)


def _sharing(setup: Setup, place: WorkerPlace) -> int:
    """Ranks on one device."""
    return 1 if own_gpus(place, setup.device) else place.local_ranks


def _profile(setup: Setup, shape: ModelShape, device: torch.device) -> Profile | None:
    key, path = key_here(shape, device), setup.profile
    profile = find_profile(key) if path is None else read_profile(path, key)
    if profile is None and path is not None:
        raise UserError(
            f"{path} is no profile of {setup.spec.model} on this device; weftune doctor --profile makes one"
        )
    return profile


def _worker_profile(setup: Setup) -> Profile | None:
    """With as many threads as each of the workers on this machine has."""
    key = key_here(setup.shape, setup.device)
    if setup.device.type != "cuda":
        key = replace(key, threads=torch.get_num_threads())
    return find_profile(key)


def costs_here(shape: ModelShape, device: torch.device) -> PartCosts | None:
    """What a run on this device will cut stages by, if the cache has a profile of it."""
    profile = find_profile(key_here(shape, device))
    return measured_costs(profile, shape, typical_work(shape, most_tokens(device))) if profile else None


# -- one device -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Whole:
    base: Base
    choice: Choice

    def loop(self, tokenizer: Any, store: Store, journal: Journal) -> Loop:
        choice = self.choice
        return Loop(self.base, tokenizer, store, choice.memory, choice.capacity, journal, choice.cost)


def _whole(setup: Setup, choice: Choice) -> Whole:
    limit_bytes(setup.device, setup.gpu_memory)
    return Whole(setup.base or load_base(setup.spec, setup.device), choice)


@dataclass(frozen=True, slots=True)
class Streamed:
    executor: StreamExecutor
    choice: Choice

    @property
    def base(self) -> Base:
        return self.executor.base

    def loop(self, tokenizer: Any, store: Store, journal: Journal) -> Loop:
        return StreamedLoop(self.executor, tokenizer, store, self.choice, journal)


def _streamed(setup: Setup, choice: Choice) -> Streamed:
    limit_bytes(setup.device, setup.gpu_memory)
    return Streamed(
        StreamExecutor(load_streamed(setup.spec, setup.device, choice.layout, choice.mapped)), choice
    )


# -- several processes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InStages:
    pipeline: Driver
    choice: Choice

    @property
    def base(self) -> Base:
        return self.pipeline.base

    def loop(self, tokenizer: Any, store: Store, journal: Journal) -> Loop:
        return PipelinedLoop(self.pipeline, tokenizer, store, self.choice, journal)


def _in_stages(setup: Setup, staff: Staff, choice: Choice) -> InStages:
    most = setup.gpu_memory and setup.gpu_memory // _sharing(setup, staff.wires.place)
    return InStages(_opened(setup, staff, choice, most), choice)


@dataclass(frozen=True, slots=True)
class OverRanks:
    pipeline: Driver
    choice: Choice

    @property
    def base(self) -> Base:
        return self.pipeline.base

    def loop(self, tokenizer: Any, store: Store, journal: Journal) -> Loop:
        return RankedLoop(self.pipeline, tokenizer, store, self.choice, journal)


def _over_ranks(setup: Setup, staff: Staff, choice: Choice) -> OverRanks:
    assert choice.place is not None, "it is streamed"
    return OverRanks(_opened(setup, staff, choice, choice.place.budget), choice)


def _opened(setup: Setup, staff: Staff, choice: Choice, most: int | None) -> Driver:
    return open_pipeline(staff, setup.spec, setup.device, choice.layout, setup.checkpoints, most=most)
