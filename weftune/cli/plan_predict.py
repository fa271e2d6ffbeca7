"""The result of `weftune plan`: predictions for the first window and the whole run, on any machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from weftune.cli.plan_jobs import PlanCase
from weftune.core.shapes import JobShape
from weftune.errors import Mistake, PlanError
from weftune.jobs.store.scheduler import Admission, admit_jobs
from weftune.plan.cost import profile_cost
from weftune.plan.cost.cluster import first_gpu_name
from weftune.plan.cost.memory import format_bytes
from weftune.plan.cost.prior import counted_terms
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
from weftune.plan.layout.split import JobWork, job_seconds, sheet_cost
from weftune.plan.layout.stream_choice import fits_whole
from weftune.plan.outlook.ablate import ablate, compare
from weftune.plan.outlook.explain import explain, explain_streams
from weftune.plan.outlook.forecast import (
    Ablation,
    Forecast,
    Prediction,
    ShareOutlook,
    predict_window,
    price_window,
    share_outlook,
)
from weftune.plan.outlook.promise import FirstWindow, first_window
from weftune.plan.outlook.streamed import StreamOutlook, ablate_streams, round_timeline, stream_outlook
from weftune.plan.outlook.whole_run import WholeRun, job_ends, rounds_at_rate
from weftune.plan.program.program import Program
from weftune.plan.program.simulate import Timeline
from weftune.trainer.options import host_budget

if TYPE_CHECKING:
    from weftune.base.spec import BaseSpec
    from weftune.run.measure.link import HostLink


ENOUGH = 1 << 50
"""Bytes of host memory assumed for a cluster, since a cluster's description does not contain them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan, which can be shown as text or written as JSON."""

    case: PlanCase
    choice: LayoutChoice
    outlook: Prediction | StreamOutlook
    """Prediction for the devices; with shares, for the devices of the first share."""
    shares: ShareOutlook | None
    """Prediction for all shares, if each device trains a share of the jobs."""
    window: FirstWindow
    admission: Admission
    run: WholeRun
    source: str
    """Source of the predicted times, such as a profile or a data sheet."""
    flags: str
    """Flags of `weftune train` that request the chosen number of workers."""
    sentences: Sequence[str] = ()
    """A sentence for each decision, if requested."""
    ablations: Sequence[Ablation] = ()
    """What each mechanism of the plan is worth, if requested."""

    @property
    def forecast(self) -> Forecast:
        return self.outlook.forecast

    @property
    def program(self) -> Program:
        return self.outlook.program if isinstance(self.outlook, Prediction) else self.window.program

    def timeline(self) -> Timeline:
        """Return the timeline of `program`, which is drawn as a Gantt chart."""
        if isinstance(self.outlook, Prediction):
            return self.outlook.timeline
        return round_timeline(self.outlook.case, self.choice.layout, self.program)


def predict(case: PlanCase, *, with_sentences: bool = False, with_ablations: bool = False) -> Plan:
    """Choose a layout as `weftune train` would, and predict the first window and the whole run."""
    choice = choose_planned(case)
    machine, totals = choice.machine, case.totals
    if machine.shares > 1 and not machine.on_gpu:
        # The shares of a CPU share its cores.
        speeds = [replace(speed, flops=speed.flops / machine.shares) for speed in case.speeds]
        case = replace(case, speeds=speeds)
    admission, source = _admit_jobs(case.shapes, choice), time_source(case, choice)
    outlook: Prediction | StreamOutlook
    shares = _share_outlook(case, choice) if machine.shares > 1 else None
    if choice.is_streamed and shares is None:
        outlook = stream_outlook(choice)
        window = first_window(choice, _shapes(case, admission), case.job_window)
        seconds = outlook.forecast.seconds
        ends = job_ends(totals, admission.admitted_names, admission.wait_reasons, lambda _: seconds)
        run = WholeRun(ends, choice.peak_device_bytes, outlook.case.device.budget_bytes)
        sentences = explain_streams(outlook, source) if with_sentences else []
        ablations = ablate_streams(outlook) if with_ablations else ()
    else:
        outlook = _predict_outlook(case, choice, admission) if shares is None else shares.parts[0]
        window = outlook.window
        if shares is None:
            run = _whole_run(case, [outlook], [admission.wait_reasons])
        else:
            pairs = zip(shares.shares, shares.parts, strict=True)
            later = [[name for name in one.jobs if name not in part.window.shapes] for one, part in pairs]
            run = _whole_run(case, shares.parts, later)
        sentences = explain(outlook, source) if with_sentences else []
        ablations = _ablations(case, outlook) if with_ablations else ()
    return Plan(
        case=case,
        choice=choice,
        outlook=outlook,
        shares=shares,
        window=window,
        admission=admission,
        run=run,
        source=source,
        flags=train_flags(case, choice),
        sentences=sentences,
        ablations=ablations,
    )


def choose_planned(case: PlanCase) -> LayoutChoice:
    """Return the choice for a case: the question that `weftune plan` and `weftune train` both ask. Raise
    PlanError if no job fits."""
    machine = planned_machine(case)
    choice = choose_layout(case.shape, case.shapes, machine, _workload(case, machine))
    _admit_jobs(case.shapes, choice)
    return choice


def _workload(case: PlanCase, machine: Machine) -> Workload:
    job_window = cache(case.job_window)

    def price(choice: LayoutChoice) -> WindowPrice:
        return price_window(choice, job_window, stage_times(case, choice.machine))

    return Workload(
        windows={one.name: job_window(one.name, PIPELINE_ROUNDS, False) for one in case.jobs},
        seconds=_job_seconds(case, machine),
        shape=case.shape,
        times=stage_times(case, replace(machine, shards=1)),
        price=price,
        # Plans do not know the rounds in which shares train trials.
        max_shares=1 if case.sweeps else None,
        shard_counts=case.shard_counts,
    )


def _job_seconds(case: PlanCase, machine: Machine) -> dict[str, float]:
    """Return the seconds of each job's whole training on one device."""
    profile = machine.profile
    cost = profile_cost.cost_of(profile, case.shape) if profile else sheet_cost(case.shape, case.speeds[0])
    seconds = {}
    for one in case.jobs:
        batches = one.curriculum.job_window(0, 4, True).batches
        work = JobWork(shape=one.shape, steps=one.total.steps, batches=batches)
        seconds[one.name] = job_seconds(work, cost, machine.max_tokens)
    return seconds


def _admit_jobs(jobs: Sequence[JobShape], choice: LayoutChoice) -> Admission:
    """Return the jobs admitted first, by the rule of the scheduler; raise PlanError if none can be."""
    found = admit_jobs(jobs, [], choice.memory.misfit_reason)
    if not found.admitted_names:
        raise PlanError(
            Mistake(f"job {name}", f"even alone it {why}") for name, why in found.too_large.items()
        )
    return found


def _shapes(case: PlanCase, admission: Admission) -> list[JobShape]:
    """Return the shapes of the admitted jobs, in the order of admission."""
    by_name = {job.name: job for job in case.shapes}
    return [by_name[name] for name in admission.admitted_names]


def _predict_outlook(case: PlanCase, choice: LayoutChoice, admission: Admission) -> Prediction:
    return predict_window(
        choice, _shapes(case, admission), case.job_window, stage_times(case, choice.machine)
    )


def _share_outlook(case: PlanCase, choice: LayoutChoice) -> ShareOutlook:
    """Divide the jobs into shares by the seconds of their whole training, and predict each share."""
    machine = choice.machine
    workers = machine.division.workers_per_share
    seconds = {name: alone / workers for name, alone in _job_seconds(case, machine).items()}

    def predict_alone(jobs: Sequence[JobShape]) -> Prediction:
        own = choose_layout(case.shape, jobs, replace(machine, shares=1))
        return _predict_outlook(case, own, _admit_jobs(jobs, own))

    return share_outlook(case.shapes, seconds, machine.shares, predict_alone)


def _whole_run(case: PlanCase, parts: Sequence[Prediction], waiting: Sequence[Iterable[str]]) -> WholeRun:
    """Predict the whole run on devices that train different jobs; `waiting` are the jobs queued on each."""
    ends: dict[str, float] = {}
    for part, names in zip(parts, waiting, strict=True):
        rate = rounds_at_rate(case.totals, part.forecast.tokens_per_second)
        ends |= job_ends(case.totals, part.window.shapes, names, rate)
    need_bytes = max(part.window.promise.peak_bytes for part in parts)
    return WholeRun(ends, need_bytes, max(part.choice.memory.budget_bytes for part in parts))


def _ablations(case: PlanCase, prediction: Prediction) -> tuple[Ablation, ...]:
    """Return what each mechanism of the shown plan is worth; with shares, of the plan of the first one."""
    machine, jobs = prediction.choice.machine, list(prediction.window.shapes.values())
    rows = ablate(
        prediction,
        lambda name, rounds: case.job_window(name, rounds, False),
        stage_times(case, machine),
    )
    for mechanism, number in (("replicas", machine.replicas), ("shards", machine.shards)):
        if number == 1:
            continue
        own = replace(machine, workers=machine.workers * number, **{mechanism: 1})
        with suppress(PlanError):
            choice = choose_layout(case.shape, jobs, own)
            other = _predict_outlook(case, choice, _admit_jobs(jobs, choice))
            rows.append(compare(prediction, mechanism, f"{own.workers} stages instead", other.forecast))
    return tuple(rows)


def stage_needs(prediction: Prediction) -> list[int]:
    """Return the bytes on each device with full microbatches; all adapters are counted on each device."""
    memory, program = prediction.choice.memory, prediction.program
    needs = memory.worker_needs(list(prediction.window.shapes.values()), program.capacity, program.recompute)
    return [need.total_bytes(memory.fit) for need in needs]


# -- the machine ----------------------------------------------------------------------------------------


def planned_machine(case: PlanCase) -> Machine:
    """Return the machine that the options describe. On several GPUs, numbers that no option fixes are chosen
    if no option starts processes, or if one of them is `auto`."""
    division, machine = requested_division(case), _machine_of(case)
    known = len(case.cluster.devices)
    if machine.on_gpu and division.shares > 1 and division.workers_per_share > 1 and division.devices > known:
        raise PlanError(
            f"{division.flags}: {division.devices} GPUs are needed, and {case.cluster.name} has {known}; "
            "write smaller numbers"
        )
    if division.shares > 1 and division.workers_per_share == 1:
        return _machine_in_shares(case, machine, division)
    return machine


def requested_division(case: PlanCase) -> Division:
    """Return the numbers that the options fix, and `AUTO` for numbers that are to be chosen."""
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
    """Return the flags of `weftune train` that request the chosen numbers of workers."""
    machine, options = choice.machine, case.options
    flags = machine.division.flags
    if options.gpus is not None and machine.shares == 1:
        flags = "--gpus 1"
    if choice.stream_device is None or options.gpu_memory is not None or machine.workers == 1:
        return flags
    return f"{flags} --gpu-memory {choice.stream_device.budget_bytes >> 20}MiB"


def division_sentence(case: PlanCase, choice: LayoutChoice) -> str:
    """Return how the devices are used, and why, as a sentence."""
    devices = len(case.cluster.devices)
    kind = "GPUs" if choice.machine.on_gpu else "processes"
    division, flags = choice.machine.division, train_flags(case, choice)
    if choice.is_streamed and devices > 1:
        return f"{devices} {kind} stream the base together, as no division of it fits in their memory."
    if division.devices == devices == 1:
        return f"one process, since there is one device. The base is {choice.reason}."
    if not choice.candidates:
        return f"{division.text}: the base is {choice.reason}."
    best, *others = choice.candidates
    speeds = f"{best.tokens_per_second:,.0f} tokens/s are predicted"
    if others:
        speeds += f", and {others[0].tokens_per_second:,.0f} for {others[0].division.text}"
    idle = devices - division.devices
    sentence = f"{division.devices} {kind} as {division.text} ({flags}): {speeds}."
    if idle > 0:
        sentence += (
            f" {idle} of {devices} {kind} stay idle, since no division over more of them is predicted to be "
            "more than 1 % faster."
        )
    return sentence


def _machine_in_shares(case: PlanCase, machine: Machine, division: Division) -> Machine:
    """Return a machine whose devices each have the whole base; on a CPU they are processes."""
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


def _machine_of(case: PlanCase) -> Machine:
    """Return the machine for the requested division, in which numbers may be `AUTO`."""
    options, devices, division = case.options, case.cluster.devices, requested_division(case)
    on_gpu = devices[0].is_gpu
    processes = max(1, division.stages) * max(1, division.replicas) * max(1, division.shards)
    profile = _profile(case)
    worker_profile = profile if processes == 1 else _profile(case, processes)
    known = worker_profile or profile
    machine = options.machine(
        on_gpu=on_gpu,
        device_bytes=min(device.budget for device in devices),
        process_bytes=0 if on_gpu else (known.process_bytes_of(processes) if known else 0) or PROCESS_BYTES,
        host_bytes=host_budget() if case.on_this_machine else ENOUGH,
        # The processes of a CPU share it, however many there are.
        devices=len(devices) if on_gpu else processes,
        workers=division.stages,
        # GPUs are divided where there are more workers than GPUs; the processes of a CPU share its memory.
        workers_per_device=max(1, processes // len(devices)) if on_gpu else processes,
        shares=division.shares,
        device_flops=case.speeds[0].flops if on_gpu and len(devices) > 1 else None,
        profile=profile,
        worker_profile=worker_profile,
        gpu=partial(_gpu, case),
    )
    return replace(machine, replicas=division.replicas, shards=division.shards)


def _profile(case: PlanCase, neighbours: int = 1) -> Profile | None:
    """Return this machine's profile for this base; None unless `weftune doctor --profile` has written one."""
    if not case.on_this_machine:
        return None
    return find_local_profile(
        case.shape, first_gpu_name() if case.cluster.devices[0].is_gpu else None, neighbours
    )


def stage_times(case: PlanCase, machine: Machine) -> StageTimes:
    """Return the times of stages, from the profile of a worker or, without one, from the data sheet."""
    shape, profile = case.shape, machine.worker_profile or machine.profile
    if profile is not None:
        rate = profile_cost.step_rate(profile)
        times = StageTimes(shape.layers, profile_cost.directions(profile, shape), rate)
    else:
        sheet = counted_terms(shape).times(1 / case.speeds[0].flops)
        handed = shape.hidden * shape.bytes_per_value
        times = StageTimes(shape.layers, sheet, Rate(), case.cluster.link, handed)
    return times.for_shards(shape, machine.shards)


def time_source(case: PlanCase, choice: LayoutChoice) -> str:
    """Return a description of where the times come from."""
    sheet, machine, stream = case.speeds[0], choice.machine, choice.stream_device
    if stream is not None:
        if not machine.on_gpu:
            return "those of a simulated device, not measured"
        measured = "predicted from this GPU's link and products, measured just now"
        return sheet.source if stream.flops == sheet.flops else measured
    profile = machine.worker_profile or machine.profile
    return sheet.source if profile is None else profile_cost.source_of(profile)


def _gpu(case: PlanCase, budget: int, host: int, workers: int) -> StreamDevice:
    """Return the device as a run would see it; devices under one PCIe root complex share its bandwidth."""
    link = _measured_link(case.base) if case.on_this_machine else None
    if link is not None:
        return gpu_device(budget, host, link.bandwidth, link.flops, link.memory_bandwidth, link.both_ways)
    crowd = max(case.cluster.root_sizes) if workers > 1 else 1
    sheet = case.speeds[0]
    return gpu_device(budget, host, case.cluster.host_link.bandwidth / crowd, sheet.flops, sheet.bandwidth)


def _measured_link(base: BaseSpec) -> HostLink | None:
    """Measure the host-to-device link as a run does. Return None if the GPU cannot be used or is full."""
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
