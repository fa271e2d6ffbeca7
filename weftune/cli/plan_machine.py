"""The machine that a plan is made for, as a run would find it: this one, or one described by a data sheet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weftune.base.spec import BaseSpec
    from weftune.cli.plan import Wanted
    from weftune.plan.cost.profile import Profile
    from weftune.plan.layout.choose import Machine
    from weftune.plan.layout.foresee import StageTimes
    from weftune.plan.layout.need import StreamDevice
    from weftune.run.measure.link import HostLink

ENOUGH = 1 << 50
"""Bytes of host memory assumed for a cluster, whose description does not say how much there is."""


@dataclass(frozen=True, slots=True)
class LaunchChoice:
    """The workers that jobs get, and the flags of `weftune train` that request them."""

    machine: Machine
    flags: str = ""
    shares: int = 1
    """Number of devices that each hold the whole base and train a share of the jobs; `machine` is one."""


def launch_choice(wanted: Wanted) -> LaunchChoice:
    """Return the requested workers; without a request, follow the rule of `--pipeline auto`: shares where the
    base fits a device, else as few stages as fit, else all devices stream it together."""
    from weftune.errors import PlanError
    from weftune.plan.cost.memory import SPARE
    from weftune.plan.layout.cut import measured_costs, typical_work
    from weftune.plan.layout.one_device import fits_whole
    from weftune.plan.layout.stage_count import Devices, choose_stages

    asked, devices = wanted.asked, wanted.cluster.devices
    if asked.gpus is not None:
        return _in_shares(wanted, asked.gpus or len(devices))
    if asked.pipeline is not None and asked.pipeline > 1:
        return _in_workers(wanted, asked.pipeline)
    if asked.pipeline is None and (len(devices) == 1 or asked.replicas > 1):
        return LaunchChoice(machine_of(wanted))
    one = machine_of(replace(wanted, asked=replace(asked, replicas=1)))
    kind = "GPU" if one.on_gpu else "machine"
    found = Devices(kind, len(devices), one.budget, one.taken, one.on_gpu).shared_by(asked.replicas)
    count = len(wanted.jobs) if asked.replicas == 1 and not wanted.sweeps else 1
    profile = one.profile
    costs = measured_costs(profile, wanted.shape, typical_work(wanted.shape, one.most)) if profile else None
    try:
        chosen = choose_stages(wanted.shape, found, SPARE, count, costs)
    except PlanError:
        if not one.on_gpu or len(devices) == 1:
            raise
        return _in_workers(wanted, len(devices), streamed=True)
    if chosen.stages > 1:
        return _in_workers(wanted, chosen.stages)
    if chosen.shares == 1:
        return LaunchChoice(one)
    if not fits_whole(wanted.shape, wanted.shapes, one.budget):
        # A share would refuse the job that does not fit.
        return _in_workers(wanted, len(devices), streamed=True)
    share = replace(one, host_budget=one.host_budget // chosen.shares)
    return LaunchChoice(share, f"--gpus {chosen.shares}", chosen.shares)


def _in_shares(wanted: Wanted, devices: int) -> LaunchChoice:
    """Return the requested number of devices, each with the whole base. On a CPU they are processes."""
    from weftune.errors import PlanError
    from weftune.plan.cost.memory import gib
    from weftune.plan.layout.one_device import fits_whole

    one, known = machine_of(wanted), len(wanted.cluster.devices)
    if one.on_gpu and devices > known:
        raise PlanError(f"--gpus {devices}: {wanted.cluster.name} has {known}; write --gpus all")
    shares = min(devices, len(wanted.jobs))
    budget = one.budget if one.on_gpu else one.budget // devices
    share = replace(one, budget=budget, host_budget=one.host_budget // shares)
    if not fits_whole(wanted.shape, wanted.shapes, budget):
        raise PlanError(
            f"--gpus {devices}: the base and a job do not fit the {gib(budget)} that they may take of one "
            f"device; cut the base into stages with --pipeline {max(2, devices)}"
        )
    return LaunchChoice(share, f"--gpus {devices}", shares)


def _in_workers(wanted: Wanted, workers: int, streamed: bool = False) -> LaunchChoice:
    return LaunchChoice(machine_of(wanted, workers, streamed), f"--pipeline {workers}")


def machine_of(wanted: Wanted, workers: int = 1, streamed: bool = False) -> Machine:
    """Return the machine for this number of workers.

    `streamed` lets several workers stream the base although no memory limit was given.
    """
    from weftune.plan.layout.choose import PROCESS_BYTES, Machine

    asked, devices = wanted.asked, wanted.cluster.devices
    on_gpu, processes = devices[0].is_gpu, workers * asked.replicas
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
        budget=budget // sharing,
        taken=0 if on_gpu else (known.process_bytes_of(processes) if known else 0) or PROCESS_BYTES,
        stream_budget=budget // sharing if streamed else limit,
        host_budget=host_budget() if asked.here else ENOUGH,
        workers=workers,
        replicas=asked.replicas,
        profile=profile,
        worker_profile=worker_profile,
        gpu=lambda own, host: gpu_of(wanted, own, host, workers),
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


def source_of(wanted: Wanted, machine: Machine, place: StreamDevice | None) -> str:
    """Return the source of the times. `place` is the device that a base is streamed to, or None."""
    from weftune.plan.cost import profile_cost

    sheet = wanted.speeds[0]
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
