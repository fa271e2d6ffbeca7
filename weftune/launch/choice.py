"""The choice of how to run jobs on a machine: how many processes train, and how the base model is divided
among them. `weftune plan`, `weftune train` and `weftune.train` all use these functions. No weights are
loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from weftune.core.shapes import JobShape
from weftune.errors import Mistake, PlanError
from weftune.jobs.store.scheduler import Admission, admit_jobs
from weftune.launch.plan_case import PlanCase, read_case
from weftune.plan.cost import profile_cost
from weftune.plan.cost.cluster import detect_cluster, detect_cpu, first_gpu_name, limit_memory
from weftune.plan.cost.memory import format_bytes
from weftune.plan.cost.prior import flop_terms
from weftune.plan.cost.profile import Profile, find_local_profile
from weftune.plan.cost.time import Rate
from weftune.plan.layout.choose import (
    PIPELINE_ROUNDS,
    PROCESS_BYTES,
    LayoutChoice,
    Machine,
    choose_layout,
)
from weftune.plan.layout.division import AUTO, Division, WindowPrice, Workload
from weftune.plan.layout.foresee import StageTimes
from weftune.plan.layout.need import StreamDevice, gpu_device
from weftune.plan.layout.split import JobWork, data_sheet_cost, job_seconds
from weftune.plan.layout.stream_choice import fits_whole
from weftune.plan.outlook.forecast import price_window
from weftune.plan.program.prices import Link
from weftune.trainer.options import host_budget

if TYPE_CHECKING:
    from weftune.base.spec import BaseSpec
    from weftune.jobs.spec.spec import RunSpec
    from weftune.run.measure.link import HostLink
    from weftune.trainer.options import Options

ASSUMED_HOST_BYTES = 1 << 50
"""Size in bytes of the host memory that is assumed for a cluster, since its description does not state it."""


def choose_planned_layout(case: PlanCase) -> LayoutChoice:
    """Return the layout in which the jobs of `case` should run on its devices (how the model and the jobs are
    divided). `weftune plan` and `weftune train` both call this function. Raise PlanError if no job fits."""
    machine = planned_machine(case)
    choice = choose_layout(case.shape, case.shapes, machine, _workload(case, machine))
    admit_first_jobs(case.shapes, choice)
    return choice


def _workload(case: PlanCase, machine: Machine) -> Workload:
    job_window = cache(case.job_window)

    def price_layout(choice: LayoutChoice) -> WindowPrice:
        return price_window(choice, job_window, stage_times(case, choice.machine))

    return Workload(
        windows={one.name: job_window(one.name, PIPELINE_ROUNDS, False) for one in case.jobs},
        seconds=solo_job_seconds(case, machine),
        shape=case.shape,
        times=stage_times(case, replace(machine, shards=1)),
        price=price_layout,
        # Plans do not know the rounds in which shares train trials.
        max_shares=1 if case.sweeps else None,
        shard_counts=case.shard_counts,
        # On a CPU, the cores that compute the layers compute the sums, too.
        may_overlap=case.may_overlap and machine.on_gpu,
    )


def solo_job_seconds(case: PlanCase, machine: Machine) -> dict[str, float]:
    """Return, for each job, the predicted seconds of its whole training alone on one device."""
    profile = machine.profile
    cost = (
        profile_cost.profile_cost_model(profile, case.shape)
        if profile
        else data_sheet_cost(case.shape, case.speeds[0])
    )
    seconds = {}
    for one in case.jobs:
        batches = one.curriculum.job_window(0, 4, True).batches
        work = JobWork(shape=one.shape, steps=one.total.steps, batches=batches)
        seconds[one.name] = job_seconds(work, cost, machine.max_tokens)
    return seconds


def admit_first_jobs(jobs: Sequence[JobShape], choice: LayoutChoice) -> Admission:
    """Return which jobs the scheduler admits when the run starts. Raise PlanError if no job can be
    admitted."""
    found = admit_jobs(jobs, [], choice.memory.misfit_reason)
    if not found.admitted_names:
        raise PlanError(
            Mistake(f"job {name}", f"even alone it {why}") for name, why in found.misfit_reasons.items()
        )
    return found


# -- the processes of a run -----------------------------------------------------------------------------


def planner_chooses_division(options: Options) -> bool:
    """Return whether the options leave the numbers of processes to the planner: if one of them is `AUTO`, or
    if none requests several processes on a machine with several GPUs."""
    from weftune.run.measure.memory import visible_gpus

    if AUTO in (options.pipeline, options.shards):
        return True
    return not options.starts_processes and visible_gpus(options.device) > 1


def choose_processes(run: RunSpec, options: Options, max_steps: int | None) -> tuple[Options, str]:
    """Return the options with the numbers of processes that the planner chooses for this machine, and a
    sentence with the reason. `weftune plan` makes the same choice."""
    from weftune.run.measure.memory import visible_gpus

    gpus = visible_gpus(options.device)
    cluster = detect_cluster() if gpus else detect_cpu()
    if gpus and options.gpu_memory is not None:
        cluster = limit_memory(cluster, options.gpu_memory)
    cluster = replace(cluster, devices=cluster.devices[: max(1, gpus)])
    case = read_case(run, cluster, options, on_this_machine=True, max_steps=max_steps)
    choice = choose_planned_layout(case)
    return with_chosen_division(options, choice), division_sentence(case, choice)


def with_chosen_division(options: Options, choice: LayoutChoice) -> Options:
    """Return the options with the numbers of processes that the chosen layout needs."""
    division, stream = choice.machine.division, choice.stream_device
    several = division.workers_per_share > 1
    return replace(
        options,
        gpus=division.shares if division.shares > 1 else None,
        pipeline=division.stages if division.stages > 1 else None,
        replicas=division.replicas,
        shards=division.shards,
        capacity=division.capacity,
        gpu_memory=stream.budget_bytes if stream is not None and several else options.gpu_memory,
    )


# -- the machine ----------------------------------------------------------------------------------------


def planned_machine(case: PlanCase) -> Machine:
    """Return the machine that the options describe. Numbers of processes that the planner is to choose are
    `AUTO` there."""
    division, machine = requested_division(case), _whole_machine(case)
    known = len(case.cluster.devices)
    if machine.on_gpu and division.shares > 1 and division.workers_per_share > 1 and division.devices > known:
        raise PlanError(
            f"{division.flags}: {division.devices} GPUs are needed, and {case.cluster.name} has {known}; "
            "write smaller numbers"
        )
    if division.shares > 1 and division.workers_per_share == 1:
        return _machine_per_share(case, machine, division)
    return machine


def requested_division(case: PlanCase) -> Division:
    """Return how many shares (parts of the jobs), replicas, pipeline stages and shards the options request. A
    number is `AUTO` if the planner chooses it: on several GPUs, if no option requests processes or one of
    them is `auto`."""
    options, cluster = case.options, case.cluster
    is_searched = not options.starts_processes or AUTO in (options.pipeline, options.shards)
    several = cluster.devices[0].is_gpu and len(cluster.devices) > 1
    unknown = AUTO if is_searched and several else 1
    replicas, shards = (one if one > 1 else unknown for one in (options.replicas, options.shards))
    stages = options.pipeline or unknown
    shares = unknown
    if options.gpus is not None:
        workers = max(1, replicas * stages * shards)
        shares = min(options.gpus or len(cluster.devices) // workers, len(case.jobs))
    return Division(shares=shares, replicas=replicas, stages=stages, shards=shards)


def train_flags(case: PlanCase, choice: LayoutChoice) -> str:
    """Return the options of `weftune train` that request the chosen numbers of workers."""
    machine, options = choice.machine, case.options
    flags = machine.division.flags
    if options.gpus is not None and machine.shares == 1:
        flags = "--gpus 1"
    if choice.stream_device is None or options.gpu_memory is not None or machine.workers == 1:
        return flags
    return f"{flags} --gpu-memory {choice.stream_device.budget_bytes >> 20}MiB"


def division_sentence(case: PlanCase, choice: LayoutChoice) -> str:
    """Return a sentence that says how the devices are used, and why."""
    devices = len(case.cluster.devices)
    kind = "GPUs" if choice.machine.on_gpu else "processes"
    division, flags = choice.machine.division, train_flags(case, choice)
    if choice.is_streamed and devices > 1:
        return f"{devices} {kind} stream the base together, as no division of it fits in their memory."
    if division.devices == devices == 1:
        return f"one process, since there is one device. The base is {choice.reason}."
    if not choice.candidates:
        return f"{division.description}: the base is {choice.reason}."
    best, *others = choice.candidates
    speeds = f"{best.tokens_per_second:,.0f} tokens/s are predicted"
    if others:
        speeds += f", and {others[0].tokens_per_second:,.0f} for {others[0].division.description}"
    idle = devices - division.devices
    sentence = f"{division.devices} {kind} as {division.description} ({flags}): {speeds}."
    if idle > 0:
        sentence += (
            f" {idle} of {devices} {kind} stay idle, since no division over more of them is predicted to be "
            "more than 1 % faster."
        )
    return sentence


def _machine_per_share(case: PlanCase, machine: Machine, division: Division) -> Machine:
    """Return a machine on which every device holds the whole base and trains its own part of the jobs. On a
    CPU, each process counts as a device. Raise PlanError if the base does not fit."""
    devices = case.options.gpus or len(case.cluster.devices)
    known = len(case.cluster.devices)
    if machine.on_gpu and devices > known:
        raise PlanError(f"--gpus {devices}: {case.cluster.name} has {known}; write --gpus all")
    budget = machine.budget_bytes if machine.on_gpu else machine.budget_bytes // devices
    if not fits_whole(case.shape, case.shapes, budget):
        raise PlanError(
            f"--gpus {devices}: the base and a job do not fit the {format_bytes(budget)} that they may "
            "take of one "
            f"device; cut the base into stages with --pipeline {max(2, devices)}"
        )
    return replace(machine, budget_bytes=budget)


def _whole_machine(case: PlanCase) -> Machine:
    """Return a description of all devices as one machine, with the requested numbers of processes, which may
    be `AUTO`."""
    options, devices, division = case.options, case.cluster.devices, requested_division(case)
    on_gpu = devices[0].is_gpu
    processes = max(1, division.stages) * max(1, division.replicas) * max(1, division.shards)
    profile = _find_profile(case)
    worker_profile = profile if processes == 1 else _find_profile(case, processes)
    known = worker_profile or profile
    machine = options.machine(
        on_gpu=on_gpu,
        device_bytes=min(device.budget for device in devices),
        process_bytes=0 if on_gpu else (known.process_bytes_of(processes) if known else 0) or PROCESS_BYTES,
        host_bytes=host_budget() if case.on_this_machine else ASSUMED_HOST_BYTES,
        # The processes of a CPU share it, however many there are.
        devices=len(devices) if on_gpu else processes,
        workers=division.stages,
        # GPUs are divided where there are more workers than GPUs; the processes of a CPU share its memory.
        workers_per_device=max(1, processes // len(devices)) if on_gpu else processes,
        shares=division.shares,
        device_flops=case.speeds[0].flops if on_gpu and len(devices) > 1 else None,
        profile=profile,
        worker_profile=worker_profile,
        gpu=partial(_stream_gpu, case),
    )
    return replace(
        machine, replicas=division.replicas, shards=division.shards, link=_link_between_workers(case)
    )


def _link_between_workers(case: PlanCase) -> Link | None:
    """Return bandwidth (bytes per second) and latency (seconds) between two GPUs from the data sheet. Return
    None for processes on a CPU, whose link is unknown."""
    return case.cluster.link if case.cluster.devices[0].is_gpu else None


def _find_profile(case: PlanCase, neighbours: int = 1) -> Profile | None:
    """Return the profile (measured times) that `weftune doctor --profile` has saved for this machine and base
    model, or None if there is none. On a CPU, `neighbours` is the number of processes that share its
    cores."""
    if not case.on_this_machine:
        return None
    return find_local_profile(
        case.shape, first_gpu_name() if case.cluster.devices[0].is_gpu else None, neighbours
    )


def stage_times(case: PlanCase, machine: Machine) -> StageTimes:
    """Return a predictor of the times of pipeline stages. The predictor uses the measured profile of a worker
    or, without a profile, the data sheet of the device."""
    shape, profile = case.shape, machine.worker_profile or machine.profile
    output_bytes = shape.hidden * shape.bytes_per_value
    if profile is not None:
        terms, rate = profile_cost.pass_terms(profile, shape), profile_cost.step_rate(profile)
        times = StageTimes(shape.layers, terms, rate, _link_between_workers(case), output_bytes)
    else:
        sheet = flop_terms(shape).multiply_by(1 / case.speeds[0].flops)
        times = StageTimes(shape.layers, sheet, Rate(), case.cluster.link, output_bytes)
    return times.divide_among_shards(shape, machine.shards)


def time_source(case: PlanCase, choice: LayoutChoice) -> str:
    """Return a phrase for the user that says whether predicted times rest on measurements or a data sheet."""
    sheet, machine, stream = case.speeds[0], choice.machine, choice.stream_device
    if stream is not None:
        if not machine.on_gpu:
            return "those of a simulated device, not measured"
        measured = "predicted from this GPU's link and products, measured just now"
        return sheet.source if stream.flops == sheet.flops else measured
    profile = machine.worker_profile or machine.profile
    return sheet.source if profile is None else profile_cost.profile_source(profile)


def _stream_gpu(case: PlanCase, budget: int, host: int, workers: int) -> StreamDevice:
    """Return a description of the GPU for a base that is streamed from host memory, with the bandwidth of its
    link. Without a measurement, GPUs under one PCIe root complex divide the bandwidth of the data sheet."""
    link = _measured_link(case.base) if case.on_this_machine else None
    if link is not None:
        return gpu_device(
            budget, host, link.bandwidth, link.flops, link.memory_bandwidth, link.duplex_bandwidth
        )
    crowd = max(case.cluster.root_sizes) if workers > 1 else 1
    sheet = case.speeds[0]
    return gpu_device(budget, host, case.cluster.host_link.bandwidth / crowd, sheet.flops, sheet.bandwidth)


def _measured_link(base: BaseSpec) -> HostLink | None:
    """Measure the bandwidth of the host-to-device link as a run does. Return None if the GPU cannot be used
    or is full."""
    import torch

    from weftune.run.measure.link import measure_link

    if not torch.cuda.is_available():
        return None
    # `base_dtype` returns this dtype too, but imports all of transformers.
    dtype: torch.dtype = getattr(torch, base.dtype or "bfloat16")
    try:
        return measure_link(torch.device("cuda", 0), dtype)
    except torch.OutOfMemoryError:
        return None
