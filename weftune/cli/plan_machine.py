"""The machine that a plan is made for, as a run would find it: this one, or one described by a data sheet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weftune.base.spec import BaseSpec
    from weftune.cli.plan import Wanted
    from weftune.plan.cost.profile import Profile
    from weftune.plan.layout.choose import Choice, Machine
    from weftune.plan.layout.foresee import StageTimes
    from weftune.plan.layout.need import StreamDevice
    from weftune.run.measure.link import HostLink

ENOUGH = 1 << 50
"""Bytes of host memory assumed for a cluster, whose description does not say how much there is."""


def machine_of(wanted: Wanted) -> Machine:
    """Return the machine that the options describe: with the requested workers or shares, or, if nothing is
    requested of several devices, with those that `choose` decides."""
    from weftune.plan.layout.choose import AUTO

    asked, devices = wanted.asked, wanted.cluster.devices
    if asked.gpus is not None:
        return _in_shares(wanted, asked.gpus or len(devices))
    if asked.pipeline is None:
        return _in_workers(wanted, 1 if len(devices) == 1 or asked.replicas > 1 else AUTO)
    return _in_workers(wanted, asked.pipeline)


def train_flags(wanted: Wanted, choice: Choice) -> str:
    """Return the flags of `weftune train` that request the chosen workers."""
    asked, machine = wanted.asked, choice.machine
    if asked.gpus is not None:
        return f"--gpus {asked.gpus or len(wanted.cluster.devices)}"
    if machine.shares > 1:
        return f"--gpus {machine.shares}"
    if machine.workers == 1:
        return ""
    flags = f"--pipeline {machine.workers}"
    if choice.place is None or asked.limit is not None:
        return flags
    return f"{flags} --gpu-memory {choice.place.budget >> 20}MiB"


def _in_shares(wanted: Wanted, devices: int) -> Machine:
    """Return the requested number of devices, each with the whole base. On a CPU they are processes."""
    from weftune.errors import PlanError
    from weftune.plan.cost.memory import gib
    from weftune.plan.layout.one_device import fits_whole

    one, known = _in_workers(wanted, 1), len(wanted.cluster.devices)
    if one.on_gpu and devices > known:
        raise PlanError(f"--gpus {devices}: {wanted.cluster.name} has {known}; write --gpus all")
    shares = min(devices, len(wanted.jobs))
    budget = one.budget if one.on_gpu else one.budget // devices
    if not fits_whole(wanted.shape, wanted.shapes, budget):
        raise PlanError(
            f"--gpus {devices}: the base and a job do not fit the {gib(budget)} that they may take of one "
            f"device; cut the base into stages with --pipeline {max(2, devices)}"
        )
    return replace(one, budget=budget, host_budget=one.host_budget // shares, shares=shares)


def _in_workers(wanted: Wanted, workers: int) -> Machine:
    """Return the machine for this number of workers, which may be `AUTO`."""
    from weftune.plan.layout.choose import AUTO, PROCESS_BYTES, Machine

    asked, devices = wanted.asked, wanted.cluster.devices
    on_gpu, processes = devices[0].is_gpu, max(1, workers) * asked.replicas
    profile = profile_of(wanted)
    worker_profile = profile if processes == 1 else profile_of(wanted, processes)
    known = worker_profile or profile
    budget = asked.memory or min(device.budget for device in devices)
    # GPUs are divided where there are more workers than GPUs; the processes of a CPU share its memory.
    sharing = max(1, processes // len(devices)) if on_gpu else processes
    limit = asked.limit if workers > 1 or not on_gpu else budget
    if workers > 1 and on_gpu and limit is not None:
        limit //= sharing
    return Machine(
        on_gpu=on_gpu,
        devices=max(1, len(devices) // asked.replicas),
        budget=budget // sharing,
        taken=0 if on_gpu else (known.process_bytes_of(processes) if known else 0) or PROCESS_BYTES,
        stream_budget=limit,
        limited=asked.limit is not None,
        host_budget=host_budget() if asked.here else ENOUGH,
        workers=workers,
        replicas=asked.replicas,
        # Trials are not divided into shares: they are compared while they train.
        shares=AUTO if workers == AUTO and asked.replicas == 1 and not wanted.sweeps else 1,
        profile=profile,
        worker_profile=worker_profile,
        gpu=partial(gpu_of, wanted),
    )


def profile_of(wanted: Wanted, neighbours: int = 1) -> Profile | None:
    """Return this machine's profile for this base; None unless `weftune doctor --profile` has made one."""
    from weftune.plan.cost.cluster import gpu_here
    from weftune.plan.cost.profile import profile_here

    if not wanted.asked.here:
        return None
    return profile_here(wanted.shape, gpu_here() if wanted.cluster.devices[0].is_gpu else None, neighbours)


def times_of(wanted: Wanted, machine: Machine) -> StageTimes:
    """Return the times of stages, from the profile of a worker or else from the data sheet."""
    from weftune.plan.cost.prior import counted
    from weftune.plan.cost.profile_cost import directions, step_rate
    from weftune.plan.cost.time import Rate
    from weftune.plan.layout.foresee import StageTimes

    shape, profile = wanted.shape, machine.worker_profile or machine.profile
    if profile is not None:
        return StageTimes(shape.layers, directions(profile, shape), step_rate(profile))
    sheet = counted(shape).times(1 / wanted.speeds[0].flops)
    handed = shape.hidden * shape.bytes_per_value
    return StageTimes(shape.layers, sheet, Rate(), wanted.cluster.link, handed)


def source_of(wanted: Wanted, choice: Choice) -> str:
    """Return the source of the times."""
    from weftune.plan.cost import profile_cost

    sheet, machine, place = wanted.speeds[0], choice.machine, choice.place
    if place is not None:
        if not machine.on_gpu:
            return "a pretended device's, not measured"
        measured = "foreseen from this GPU's link and products, measured just now"
        return sheet.source if place.flops == sheet.flops else measured
    profile = machine.worker_profile or machine.profile
    return sheet.source if profile is None else profile_cost.source_of(profile)


def gpu_of(wanted: Wanted, budget: int, host: int, workers: int) -> StreamDevice:
    """Return the device as the run would find it; that of another machine by its data sheet. Devices under
    one root complex share its bandwidth."""
    from weftune.plan.layout.one_device import gpu_place

    link = measured_link(wanted.base) if wanted.asked.here else None
    if link is not None:
        return gpu_place(budget, host, link.bandwidth, link.flops, link.memory_bandwidth, link.both_ways)
    cluster = wanted.cluster
    crowd = max(cluster.roots) if workers > 1 else 1
    sheet = wanted.speeds[0]
    return gpu_place(budget, host, cluster.host.bandwidth / crowd, sheet.flops, sheet.bandwidth)


def host_budget() -> int:
    """Return the bytes of this host's memory that a run may take."""
    import psutil

    from weftune.plan.cost.cluster import USABLE

    return int(psutil.virtual_memory().available * USABLE[False])


def measured_link(base: BaseSpec) -> HostLink | None:
    """Measure the link as the run does. Return None if torch cannot use this machine's GPU, or it is full."""
    import torch

    from weftune.run.measure.link import measure_link

    if not torch.cuda.is_available():
        return None
    # The same as base_dtype, which would import all of transformers.
    dtype: torch.dtype = getattr(torch, base.dtype or "bfloat16")
    try:
        return measure_link(torch.device("cuda", 0), dtype)
    except torch.OutOfMemoryError:
        return None
