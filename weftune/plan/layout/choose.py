"""The choice of how to run: the layout of the base on the devices, the token capacity, and the reasons.
`weftune train` calls `choose` for the machine that it runs on, `weftune plan` for that or another machine.

The base is held whole on one device if it fits there, otherwise it is streamed from host memory. Several
workers hold a stage each, or stream the base together if a stage does not fit on one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from weftune.core.shapes import JobShape, LayerRange, ModelShape
from weftune.errors import HostTooSmall, PlanError
from weftune.plan.cost.estimate import layer_bytes
from weftune.plan.cost.memory import SLACK_BYTES, UNFITTED, MemoryFit, MemoryModel, gib
from weftune.plan.cost.prior import arithmetic
from weftune.plan.cost.profile import Profile
from weftune.plan.cost.profile_cost import cost_of, directions, memory_of, source_of, step_rate
from weftune.plan.cost.ring import TRAVEL_ROUNDS
from weftune.plan.cost.time import NO_TIME, CostModel, JobShapes, Rate
from weftune.plan.layout.foresee import StageTimes, taking_turns
from weftune.plan.layout.need import StreamDevice, emulated_device, in_files
from weftune.plan.layout.offloaded import is_faster, is_worth, offloaded_round, offloading, would_gain
from weftune.plan.layout.seats import in_order, most_that_fit, seat, too_large
from weftune.plan.layout.stages import (
    PartCosts,
    StageCount,
    choose_stages,
    cut_layers,
    measured_costs,
    typical_work,
)
from weftune.plan.layout.stream_choice import StreamChoice, choose_for_jobs, choose_for_workers, fits_whole
from weftune.plan.program.layout import Layout, in_stages, one_device
from weftune.plan.program.program import Program
from weftune.plan.window.pace import LoadPace, WindowPace, first_pace

WINDOW_ROUNDS, PIPELINE_ROUNDS = 4, 16
"""Global batches of each job per window. Windows of several workers are long: they fill and drain once."""
PROCESS_BYTES = 512 << 20
"""Bytes that a process training on a CPU is assumed to hold before anything is loaded, if not measured."""
MAX_TOKENS = {False: 1024, True: 8192}
"""Default of the most tokens per microbatch, on a GPU (True) and on a CPU (False)."""
AUTO = 0
"""Number of workers or shares that lets `choose` decide."""


def _no_link(_budget: int, _host: int, _workers: int) -> StreamDevice:
    raise AssertionError("the speed of this device is not known")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that a run finds: its workers with identical devices, and the host behind them."""

    on_gpu: bool
    devices: int = 1
    """Number of devices of each replica. It matters only if `workers` is `AUTO`."""
    budget: int
    """Bytes available to the run on each worker's device if the worker's part of the base stays resident."""
    taken: int = 0
    """Device bytes held by the first worker's process before anything is loaded."""
    stream_budget: int | None = None
    """Device bytes available when the base is streamed. None disables streaming."""
    limited: bool = False
    """Whether the user set the device bytes. Only then may the stages that `choose` selects be streamed."""
    host_budget: int = 0
    """Bytes of host memory available to the run, all hosts together."""
    capacity: int | None = None
    """Maximum tokens per microbatch. None uses the default of the device."""
    workers: int = 1
    """Number of workers per replica, or `AUTO`."""
    replicas: int = 1
    shares: int = 1
    """Number of machines like this one that each train a share of the jobs, or `AUTO`."""
    profile: Profile | None = None
    """Profile used to cut stages and to predict the times of a single worker."""
    worker_profile: Profile | None = None
    """Profile measured with as many threads as one of several workers has."""
    gpu: Callable[[int, int, int], StreamDevice] = _no_link
    """Returns the GPU, measured or from its data sheet, given device bytes, host bytes and the number of
    workers. Called only if a base has to be streamed."""
    files: Callable[[StreamDevice, HostTooSmall], StreamDevice] = lambda device, _short: in_files(device)
    """Returns the device for a base that is streamed from its files, or raises if that is impossible."""

    @property
    def max_tokens(self) -> int:
        return self.capacity or MAX_TOKENS[self.on_gpu]

    @property
    def first_only_bytes(self) -> int:
        """Bytes of `taken` that only the first of several workers holds."""
        if self.on_gpu or self.worker_profile is None or self.workers == 1:
            return 0
        return self.worker_profile.first_only_bytes

    def stream_device(self, budget: int) -> StreamDevice:
        """Return a device with `budget` bytes for a streamed run; without a GPU, an emulated one."""
        if not self.on_gpu:
            return emulated_device(budget, self.host_budget)
        return self.gpu(budget, self.host_budget, self.workers)

    def shared_by(self, replicas: int) -> Machine:
        """Return the machine of one replica: its part of the devices, or of the memory of the only device."""
        if self.devices >= replicas:
            return replace(self, devices=self.devices // replicas)
        return replace(self, devices=1, budget=self.budget * self.devices // replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    machine: Machine
    """Machine that each share of the jobs runs on, with the chosen numbers of workers and shares."""
    layout: Layout
    capacity: int
    """Maximum tokens per microbatch, unless a single sample has more."""
    memory: MemoryModel
    """Memory model used for admission and for the token capacity of windows."""
    attached: tuple[JobShape, ...]
    """Jobs that the choice was made for: those that can run together."""
    seconds: float | None = None
    """Predicted seconds per round (one global batch of every job). None without a search."""
    bytes: int
    """Peak bytes on the fullest device with full microbatches, including the process."""
    host_bytes: int = 0
    """Host bytes of all workers."""
    unhidden: float = 0.0
    """Share of a round's time in which devices wait for the host."""
    why: str
    """Reason, as the rest of a sentence that begins with `The base is`."""
    note: str = ""
    """Sentence that a run reports about the choice. Empty if the base simply stays whole on one device."""
    mapped: bool = False
    """Whether streamed weights stay in their files and are read from there in every round."""
    stream_device: StreamDevice | None = None
    """Device that the base is streamed to. None unless the base is streamed."""
    rounds: int
    """Global batches of each job per window."""
    cost: CostModel | None = None
    """Cost model of one worker's passes from its profile. None without a profile or with several workers."""
    first_seconds: float = 0.0
    """Extra seconds of one worker's first pass. Several workers begin while others still wait for rows."""
    unhidden_steps: Rate = NO_TIME
    """Time that devices wait for optimizer steps with state in host memory. Already included in `cost`."""
    times: StageTimes | None = None
    """Times of each stage's passes. None unless several workers have a profile."""
    loads: LoadPace | None = None
    """Bytes of each stage and bandwidth from the host. None unless several workers stream the base."""

    @property
    def shape(self) -> ModelShape:
        return self.memory.shape

    @property
    def streamed(self) -> bool:
        return self.stream_device is not None

    @property
    def captured(self) -> bool:
        """Whether passes are captured as CUDA graphs, so that microbatches are padded to a few sizes."""
        return self.memory.fused

    @property
    def first_pace(self) -> WindowPace:
        """Predicted pace of a round before the run has measured anything."""
        if self.seconds is not None:
            return WindowPace(round_seconds=self.seconds)
        cost = self.cost or arithmetic(self.shape)
        # Stages are assumed to work one after another.
        return first_pace(cost, self.shape, on_gpu=self.memory.fused, max_tokens=self.capacity)

    def seconds_of(self, program: Program, shapes: JobShapes) -> float | None:
        """Return the seconds of a window predicted from the profile. None without a profile."""
        if self.times is not None:
            return self.times.timeline(program, self.layout, shapes, self.loads).makespan
        return None if self.cost is None else self.cost.program_seconds(program, shapes)


def choose(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice:
    """Choose how these jobs run on this machine. Raise PlanError if a job does not fit even alone."""
    assert jobs, "there is nothing to train"
    if machine.workers == AUTO:
        machine = _with_workers(shape, jobs, machine)
    if machine.workers * machine.replicas > 1:
        return _streamed_by_workers(shape, jobs, machine) or _in_stages(shape, jobs, machine)
    return _streamed(shape, jobs, machine) or _whole(shape, jobs, machine)


def choose_workers(shape: ModelShape, machine: Machine, jobs: int) -> StageCount:
    """Choose the number of workers or shares for this number of jobs. `choose` calls this itself; a run calls
    it before it starts its workers, when the sizes of its jobs are not known yet."""
    memory = MemoryModel(shape, machine.budget, machine.taken, machine.on_gpu)
    kind = "GPU" if machine.on_gpu else "machine"
    return choose_stages(memory, machine.devices, kind, jobs, part_costs(shape, machine))


def _with_workers(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Machine:
    """Return the machine with the chosen numbers: shares of the jobs if the base fits on one device, else as
    few stages as fit, else all devices, which stream the base together."""
    streaming = replace(machine, workers=machine.devices, shares=1)
    try:
        found = choose_workers(shape, machine, len(jobs) if machine.shares == AUTO else 1)
    except PlanError:
        if not machine.on_gpu or machine.devices == 1:
            raise
        return streaming
    if found.stages > 1:
        stream_budget = machine.stream_budget if machine.limited else None
        return replace(machine, workers=found.stages, shares=1, stream_budget=stream_budget)
    if found.shares > 1 and not fits_whole(shape, jobs, machine.budget):
        # A share would refuse the job that does not fit.
        return streaming
    host_budget = machine.host_budget // found.shares
    return replace(machine, workers=1, shares=found.shares, host_budget=host_budget)


def part_costs(shape: ModelShape, machine: Machine) -> PartCosts | None:
    """Return the measured costs that stages are balanced by. None without a profile."""
    if machine.profile is None:
        return None
    return measured_costs(machine.profile, shape, typical_work(shape, machine.max_tokens))


# -- one device -----------------------------------------------------------------------------------------


def _whole(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice:
    profile = machine.profile
    host_budget = machine.host_budget if machine.on_gpu else 0
    memory = MemoryModel(
        shape, machine.budget, machine.taken, machine.on_gpu, _fit(shape, machine), host_budget=host_budget
    )
    cost = None if profile is None else cost_of(profile, shape)
    together = fitting(jobs, memory)
    choice = Choice(
        machine=machine,
        layout=one_device(shape.layers),
        capacity=machine.max_tokens,
        memory=memory,
        attached=together,
        bytes=full_bytes(memory, together, machine.max_tokens),
        why=f"whole on one device, which has {gib(machine.budget)} for a run",
        rounds=WINDOW_ROUNDS,
        cost=cost,
        first_seconds=profile.first_seconds if profile else 0.0,
    )
    return _optimizer_offloaded(choice, jobs, machine) or choice


def _optimizer_offloaded(plain: Choice, jobs: Sequence[JobShape], machine: Machine) -> Choice | None:
    """Return `plain` with master weights and moments in host memory. None unless that admits more jobs at
    about the same speed, admits a job that does not fit otherwise, or runs all jobs faster."""
    if not machine.on_gpu:
        return None
    memory = offloading(plain.memory, machine.host_budget)
    # The device is measured only if offloading may help, and once.
    device = cache(lambda: machine.stream_device(machine.budget))
    if len(plain.attached) == len(jobs):
        together, reason = plain.attached, _why_faster(plain, memory, jobs, device)
    else:
        together = fitting(jobs, memory)
        reason = _why_more(plain, memory, jobs, together, device)
    if not reason:
        return None
    after = offloaded_round(memory, together, device(), machine.max_tokens)
    host_bytes, share = memory.host_bytes(together), after.unhidden / after.seconds
    why = (
        f"{plain.why}; master weights and moments of adapters live in host memory, {gib(host_bytes)} of it, "
        f"since {reason}, and the GPU waits for Steps in {share:.0%} of a round"
    )
    steps = Rate(parameter=after.unhidden / sum(job.trainable for job in together))
    return replace(
        plain,
        layout=replace(plain.layout, optimizer_offloaded=True),
        memory=memory,
        attached=together,
        bytes=full_bytes(memory, together, machine.max_tokens),
        host_bytes=host_bytes,
        unhidden=share,
        why=why,
        note=f"The base is {why}.",
        rounds=TRAVEL_ROUNDS,
        cost=plain.cost and replace(plain.cost, step=plain.cost.step.plus(steps)),
        unhidden_steps=steps,
    )


def _why_more(
    plain: Choice,
    memory: MemoryModel,
    jobs: Sequence[JobShape],
    together: Sequence[JobShape],
    device: Callable[[], StreamDevice],
) -> str:
    """Return why offloading the optimizer admits more jobs, as the rest of a sentence after `since`. Empty if
    running fewer jobs is as good. `memory` is the memory model with the optimizer offloaded."""
    too_large = {job.name for job in jobs if plain.memory.why_not([job]) is not None}
    only_so = any(memory.why_not([job]) is None for job in jobs if job.name in too_large)
    if not only_so and len(together) <= len(plain.attached):
        return ""
    if not only_so:
        others = [job for job in jobs if job.name not in too_large]
        if not is_worth(memory, plain.memory, others, device(), plain.machine.max_tokens):
            return ""
    return f"{len(together)} of {len(jobs)} jobs are admitted with it and {len(plain.attached)} without"


def _why_faster(
    plain: Choice, memory: MemoryModel, jobs: Sequence[JobShape], device: Callable[[], StreamDevice]
) -> str:
    """Return why a step of all jobs is shorter with the optimizer offloaded; empty if it is not."""
    max_tokens = plain.machine.max_tokens
    if not would_gain(plain.memory, jobs, max_tokens) or memory.why_not(jobs) is not None:
        return ""
    if not is_faster(memory, plain.memory, jobs, device(), max_tokens):
        return ""
    after, before = (one.recompute(jobs, max_tokens) for one in (memory, plain.memory))
    reason = (
        f"microbatches have {memory.capacity(jobs, max_tokens, after):,} tokens with it and "
        f"{plain.memory.capacity(jobs, max_tokens, before):,} without"
    )
    if before.layers:
        reason += f", and {after.layers} layers are recomputed instead of {before.layers}"
    return reason


def _streamed(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice | None:
    """Return the streamed choice. None if the base may not be streamed or need not be: on a GPU if every job
    can train alone without streaming, on an emulated device if the jobs that run together can."""
    budget = machine.stream_budget
    if budget is None or (machine.on_gpu and fits_whole(shape, jobs, budget)):
        return None
    device = machine.stream_device(budget)
    try:
        found = choose_for_jobs(shape, jobs, device, machine.max_tokens)
    except HostTooSmall as short:
        device = machine.files(device, short)
        found = choose_for_jobs(shape, jobs, device, machine.max_tokens)
    if found.whole:
        return None
    choice, profile = _as_streamed(shape, machine, device, found), machine.profile
    if profile is None:
        return choice
    # The cost of a whole pass includes what is recomputed and the waits predicted by the search.
    cost = taking_turns(cost_of(profile, shape), directions(profile, shape), choice.layout, shape.layers)
    return replace(choice, cost=cost.times(1 / (1 - choice.unhidden)), first_seconds=profile.first_seconds)


def _as_streamed(shape: ModelShape, machine: Machine, device: StreamDevice, choice: StreamChoice) -> Choice:
    """Return the choice for one worker or several, without the times of a profile."""
    fit, beside = _fit(shape, machine), 0
    if not machine.on_gpu:
        # An emulated device is part of the host and is measured with the process and what lies in its memory.
        beside = machine.taken + choice.host_bytes
        beside += 0 if fit is UNFITTED else int(fit.slack * SLACK_BYTES)
    memory = MemoryModel(
        shape,
        device.budget + beside,
        beside,
        machine.on_gpu,
        MemoryFit(head=fit.head),
        choice.cut,
        device.slack,
        first_only_bytes=machine.first_only_bytes,
    )
    # An emulated device has the requested size in addition to what is counted with it in host memory.
    head = int(memory.fit.head * memory.head_bytes(math.inf))
    rounds = TRAVEL_ROUNDS if choice.cut.travels else WINDOW_ROUNDS
    return Choice(
        machine=machine,
        layout=choice.cut,
        capacity=choice.capacity,
        memory=replace(memory, budget=memory.budget + head),
        attached=choice.attached,
        seconds=choice.step_seconds,
        bytes=choice.device_bytes,
        host_bytes=choice.host_bytes,
        unhidden=choice.unhidden,
        why=choice.why,
        note=f"The base is {choice.why}.",
        mapped=choice.mapped,
        stream_device=device,
        rounds=rounds if machine.workers == 1 else PIPELINE_ROUNDS,
    )


def _fit(shape: ModelShape, machine: Machine) -> MemoryFit:
    """Return the correction factors of the memory model, fitted to the profile."""
    profile = machine.profile if machine.workers * machine.replicas == 1 else machine.worker_profile
    whole = MemoryModel(shape, machine.budget, machine.taken, machine.on_gpu)
    return UNFITTED if profile is None else memory_of(profile, whole)


# -- several workers -------------------------------------------------------------------------------------


def _in_stages(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice:
    """Return a choice with one stage per worker. A replica of one worker holds the whole base."""
    held: Sequence[LayerRange] = (LayerRange(0, shape.layers, shape.layers),)
    note = ""
    if machine.workers > 1:
        held = cut_layers(shape, machine.workers, part_costs(shape, machine))
    counts = " + ".join(str(one.stop - one.start) for one in held)
    if machine.workers > 1 and machine.profile is not None:
        note = f"The stages hold {counts} layers, alike by times {source_of(machine.profile)}."
    layout = in_stages(held, machine.replicas)
    memory = MemoryModel(
        shape,
        machine.budget,
        machine.taken,
        machine.on_gpu,
        _fit(shape, machine),
        layout,
        first_only_bytes=machine.first_only_bytes,
    )
    together = fitting(jobs, memory)
    return Choice(
        machine=machine,
        layout=layout,
        capacity=machine.max_tokens,
        memory=memory,
        attached=together,
        bytes=full_bytes(memory, together, machine.max_tokens),
        why=f"cut into {len(held)} stages of {counts} layers" if len(held) > 1 else "whole on each replica",
        note=note,
        rounds=PIPELINE_ROUNDS,
        times=_stage_times(shape, machine),
    )


def _streamed_by_workers(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice | None:
    """Return the streamed choice. None if streaming is disabled, or if any job fits in stages."""
    budget = machine.stream_budget
    if budget is None or machine.workers == 1:
        return None
    # An emulated device holds nothing besides the worker's part of the base.
    slack, layout = None if machine.on_gpu else 0, in_stages(cut_layers(shape, machine.workers))
    resident = MemoryModel(shape, budget, fused=machine.on_gpu, layout=layout, slack=slack)
    need = max(resident.least_bytes([job]) for job in jobs)
    if need <= budget:
        return None
    device, ordered = machine.stream_device(budget), in_order(jobs)
    found: dict[int, StreamChoice] = {}
    errors: list[PlanError] = []

    def fits(count: int) -> bool:
        together, later = ordered[:count], ordered[count:]
        try:
            found[count] = choose_for_workers(
                shape, together, later, device, machine.workers, machine.max_tokens, need
            )
        except PlanError as error:
            errors.append(error)
        return count in found

    count = most_that_fit(fits, len(jobs))
    if not count:
        raise errors[-1]
    layer = layer_bytes(shape)
    return replace(
        _as_streamed(shape, machine, device, found[count]),
        times=_stage_times(shape, machine),
        loads=LoadPace(tuple(one.count * layer for one in found[count].cut.stages), device.bandwidth),
    )


def _stage_times(shape: ModelShape, machine: Machine) -> StageTimes | None:
    profile = machine.worker_profile
    if profile is None:
        return None
    return StageTimes(shape.layers, directions(profile, shape), step_rate(profile))


# -- admission ------------------------------------------------------------------------------------------


def fitting(jobs: Sequence[JobShape], memory: MemoryModel) -> tuple[JobShape, ...]:
    """Return the jobs that run from the start, as the scheduler admits them."""
    names = {job.name for job in jobs}
    first = [job for job in jobs if job.starts_from not in names]
    never = too_large(first, memory.why_not)
    return seat([job for job in first if job.name not in never], (), memory.why_not).seated


def full_bytes(memory: MemoryModel, together: Sequence[JobShape], max_tokens: int) -> int:
    """Return the peak bytes with microbatches as large as memory allows."""
    recompute = memory.recompute(together, max_tokens)
    return memory.peak_bytes(together, memory.capacity(together, max_tokens, recompute), recompute)
