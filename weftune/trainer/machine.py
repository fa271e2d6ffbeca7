"""A description of this machine for the planner: devices, memory, link and profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch

from weftune.base.host.streamed import weights_in_files
from weftune.base.load import base_dtype
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.shapes import ModelShape
from weftune.errors import BaseModelError, HostTooSmall, UserError
from weftune.plan.cost.cluster import PCIE
from weftune.plan.cost.memory import gib
from weftune.plan.cost.profile import Profile, find_profile, read_profile
from weftune.plan.layout.choose import MAX_TOKENS, PROCESS_BYTES, Machine
from weftune.plan.layout.need import StreamDevice
from weftune.plan.layout.one_device import gpu_place, in_files
from weftune.plan.window.length import speed_by_sheet
from weftune.run.measure.link import measure_files, measure_link
from weftune.run.measure.memory import CPU_SHARE, budget_bytes, steady_budget_bytes, taken_bytes
from weftune.run.profile import key_here
from weftune.run.workers.groups import WorkerPlace, own_gpus
from weftune.run.workers.messages import Staff

UNKNOWN_FLOPS, UNKNOWN_MEMORY, FILE_BANDWIDTH = 1e14, 1e12, 2e9
"""Operations per second and bytes per second of a GPU without a data sheet, and bytes per second of a disk,
used if nothing may be measured."""
PLENTY = 0.9
"""Share of a plan's memory that must be free if the plan ignores how much is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The base, the device and the limits that a run was started with."""

    spec: BaseSpec
    base: Base | None
    """The base, if it is in memory already."""
    device: torch.device
    shape: ModelShape
    staff: Staff | None
    memory: int | None
    gpu_memory: int | None
    capacity: int | None
    profile: Path | None
    checkpoints: Callable[[str], Path]
    deterministic: bool = False
    """Whether the plan must not depend on anything that is measured now: neither times nor free memory."""
    shares: int = 1
    """Number of processes like this one that share the host's memory, each with a share of the jobs."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def budget(self) -> int:
        return self.gpu_memory or self.memory or self.device_budget

    @property
    def device_budget(self) -> int:
        """Bytes of the device for a run without a limit set by the user."""
        return (steady_budget_bytes if self.deterministic else budget_bytes)(self.device)

    @property
    def place(self) -> WorkerPlace:
        return self.staff.wires.place if self.staff else WorkerPlace(0, 1)

    @property
    def sharing(self) -> int:
        """Number of workers that share one device."""
        return 1 if own_gpus(self.place, self.device) else self.place.local_workers


def machine_here(setup: Setup) -> Machine:
    """Describe this process's device, or those of all workers, which are identical."""
    if setup.base is not None and setup.gpu_memory is not None and setup.staff is None:
        raise UserError("gpu_memory: this base is on its device already; give its name and Weftune loads it")
    place, device = setup.place, setup.device
    profile = _profile(setup)
    return Machine(
        on_gpu=setup.on_gpu,
        budget=_resident_budget(setup) // setup.sharing,
        taken=_taken_bytes(setup),
        stream_budget=_stream_budget(setup),
        # Workers of other machines have memory of their own.
        host_budget=host_budget(setup.deterministic) * place.workers // (place.local_workers * setup.shares),
        capacity=setup.capacity,
        workers=place.stages,
        replicas=place.replicas,
        profile=profile,
        worker_profile=profile if place.workers == 1 else _worker_profile(setup),
        gpu=sheet_gpu if setup.deterministic else partial(measured_gpu, setup.spec, device),
        files=partial(from_files, setup.spec, device, measured=not setup.deterministic),
    )


def short_of_memory(setup: Setup) -> str:
    """Return a warning if a plan that ignores free memory counts on more than there is; empty otherwise."""
    if not setup.deterministic or setup.gpu_memory or setup.memory:
        return ""
    free, planned = budget_bytes(setup.device), setup.device_budget
    if free >= PLENTY * planned:
        return ""
    return (
        f"warning: deterministic: this run is planned for {gib(planned)} whatever is free, and now "
        f"{gib(free)} is; give --memory the same in every run, or make room"
    )


def _taken_bytes(setup: Setup) -> int:
    """Return the bytes that the process holds; always the same for a deterministic run on a CPU."""
    if setup.deterministic and not setup.on_gpu:
        return PROCESS_BYTES
    return taken_bytes(setup.device)


def _resident_budget(setup: Setup) -> int:
    """Return the budget for a resident base. On a CPU, a small GPU is simulated only for a streamed base."""
    return setup.budget if setup.on_gpu else setup.memory or setup.device_budget


def _stream_budget(setup: Setup) -> int | None:
    """Return the budget for a streamed base. One GPU streams whenever the base does not fit; a CPU only if it
    simulates a small GPU; several workers only if it was requested, since they must be connected for it from
    the start."""
    if setup.staff is None:
        return None if setup.base is not None else setup.budget if setup.on_gpu else setup.gpu_memory
    if not setup.place.ring or setup.gpu_memory is None:
        return None
    # Every worker simulates a device of its own.
    return setup.gpu_memory // (setup.sharing if setup.on_gpu else 1)


def _profile(setup: Setup) -> Profile | None:
    key, path = key_here(setup.shape, setup.device), setup.profile
    profile = find_profile(key) if path is None else read_profile(path, key)
    if profile is None and path is not None:
        raise UserError(
            f"{path} is no profile of {setup.spec.model} on this device; weftune doctor --profile makes one"
        )
    return profile


def _worker_profile(setup: Setup) -> Profile | None:
    """Return a profile measured with as many threads as each worker of this machine has."""
    key = key_here(setup.shape, setup.device)
    if not setup.on_gpu:
        key = replace(key, threads=torch.get_num_threads())
    return find_profile(key)


def most_tokens(device: torch.device) -> int:
    """Return the token capacity that a device gets if memory allows more."""
    return MAX_TOKENS[device.type == "cuda"]


def host_budget(deterministic: bool = False) -> int:
    """Return the bytes of host memory that a run may take: a share of what is free, or of all if
    `deterministic`."""
    memory = psutil.virtual_memory()
    return int((memory.total if deterministic else memory.available) * CPU_SHARE)


def sheet_gpu(budget: int, host: int, _workers: int = 1) -> StreamDevice:
    """Return the GPU as its data sheet describes it: the same in every run."""
    speed = speed_by_sheet(on_gpu=True)
    if speed is None:
        return gpu_place(budget, host, PCIE.bandwidth, UNKNOWN_FLOPS, UNKNOWN_MEMORY)
    return gpu_place(budget, host, PCIE.bandwidth, speed.flops, speed.bandwidth)


def measured_gpu(
    spec: BaseSpec, device: torch.device, budget: int, host: int, _workers: int = 1
) -> StreamDevice:
    """Return the GPU with its link and its matrix products as measured now."""
    link = measure_link(device, base_dtype(spec, device))
    return gpu_place(budget, host, link.bandwidth, link.flops, link.memory_bandwidth, link.both_ways)


def from_files(
    spec: BaseSpec, device: torch.device, place: StreamDevice, short: HostTooSmall, measured: bool = True
) -> StreamDevice:
    """Return the device for a base whose weights stay in their files; if they cannot, raise an error with
    both reasons."""
    try:
        weights = weights_in_files(spec, device)
    except BaseModelError as error:
        raise HostTooSmall([*short.mistakes, *error.mistakes]) from None
    if device.type != "cuda":
        return in_files(place)
    files = measure_files(weights.files) if measured else FILE_BANDWIDTH
    both_ways = None if place.both_ways is None else min(place.both_ways, files)
    return replace(in_files(place), bandwidth=min(place.bandwidth, files), both_ways=both_ways)
