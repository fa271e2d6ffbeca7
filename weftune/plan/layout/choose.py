"""How to run: the layout of the base on the devices, the token capacity, and why. The only place that decides
it: `weftune train` asks for the machine at hand, `weftune plan` for that one or another.

A base lies whole on one device if it fits there, else it is streamed from host memory; several workers hold
a stage each, or stream the base together where a stage does not fit one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weftune.core.shapes import JobShape, LayerRange, ModelShape
from weftune.errors import HostTooSmall, PlanError
from weftune.plan.cost.estimate import layer_bytes
from weftune.plan.cost.memory import SLACK_BYTES, UNFITTED, MemoryFit, MemoryModel, gib
from weftune.plan.cost.prior import arithmetic
from weftune.plan.cost.profile import Profile
from weftune.plan.cost.profile_cost import cost_of, directions, memory_of, source_of, step_rate
from weftune.plan.cost.ring import TRAVEL_ROUNDS
from weftune.plan.cost.time import NO_TIME, CostModel, JobShapes, Rate
from weftune.plan.layout.cut import cut_layers, measured_costs, typical_work
from weftune.plan.layout.foresee import StageTimes, taking_turns
from weftune.plan.layout.need import StreamDevice
from weftune.plan.layout.offloaded import is_faster, is_worth, offloaded_round, offloading, would_gain
from weftune.plan.layout.one_device import (
    choose_for_jobs,
    fits_whole,
    in_files,
    pretended_place,
)
from weftune.plan.layout.seats import in_order, most_that_fit, seat, too_large
from weftune.plan.layout.stream_choice import StreamChoice, choose_for_workers
from weftune.plan.program.layout import Layout, in_stages, one_device
from weftune.plan.program.program import Program
from weftune.plan.window.length import WindowPace, first_pace
from weftune.plan.window.pipeline import LoadPace

WINDOW_ROUNDS, PIPELINE_ROUNDS = 4, 16
"""Global batches of each job in a window: several workers fill and drain once a window, so theirs is long."""
PROCESS_BYTES = 512 << 20
"""What a process that trains on a CPU holds before anything is loaded, where nobody has measured it."""
MOST_TOKENS = {False: 1024, True: 8192}
"""The token capacity that a CPU and a GPU get where memory allows more."""


def _no_link(_budget: int, _host: int) -> StreamDevice:
    raise AssertionError("nobody has said how fast this device is")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a run finds: its workers with their devices, which are all alike, and the host behind them."""

    on_gpu: bool
    budget: int
    """Bytes that the run may take of each worker's device, where the worker's part of the base stays."""
    taken: int = 0
    """What the first worker's process holds there before anything is loaded."""
    stream_budget: int | None = None
    """The same for a base that comes and goes; None: it may not."""
    host_budget: int = 0
    """Bytes that the run may take of the host's memory, of all hosts together."""
    capacity: int | None = None
    """At most so many tokens in a microbatch; None: as many as suit the device."""
    workers: int = 1
    """Of one replica."""
    replicas: int = 1
    profile: Profile | None = None
    """What stages are cut by, and what a single worker's times are taken from."""
    worker_profile: Profile | None = None
    """The same with as many threads as one of several workers has."""
    gpu: Callable[[int, int], StreamDevice] = _no_link
    """A GPU with these budgets, its own and the host's, as measured or by its data sheet: asked for only
    where a base has to be streamed."""
    files: Callable[[StreamDevice, HostTooSmall], StreamDevice] = lambda place, _short: in_files(place)
    """The same device for weights that stay in their files; raises where they cannot."""

    @property
    def most(self) -> int:
        return self.capacity or MOST_TOKENS[self.on_gpu]

    @property
    def first_only(self) -> int:
        """Bytes of `taken` that only the first of several workers holds."""
        if self.on_gpu or self.worker_profile is None or self.workers == 1:
            return 0
        return self.worker_profile.first_only_bytes

    def place(self, budget: int) -> StreamDevice:
        """A device of which a streamed run may take so much; without a GPU one is pretended."""
        return (self.gpu if self.on_gpu else pretended_place)(budget, self.host_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    shape: ModelShape
    """Of all of the base."""
    layout: Layout
    capacity: int
    """No microbatch has more tokens, unless one sample does."""
    memory: MemoryModel
    """By which jobs come aboard and windows get their capacity."""
    aboard: tuple[JobShape, ...]
    """The jobs that it was made for: those that can be aboard together."""
    seconds: float | None = None
    """Of a round of theirs, one global batch of each, where the layout was searched for."""
    bytes: int
    """On the fullest device at the peak, with full microbatches; the process is counted."""
    host_bytes: int = 0
    """Of all workers."""
    unhidden: float = 0.0
    """The share of a round in which devices wait for the host."""
    why: str
    """The rest of a sentence that begins with `The base is`."""
    note: str = ""
    """What a run says of it; nothing where all of the base stays on one device."""
    mapped: bool = False
    """Whether streamed weights stay in their files and are read from there in every round."""
    place: StreamDevice | None = None
    """The device that a base is streamed to."""
    rounds: int
    """Global batches of each job in a window."""
    cost: CostModel | None = None
    """What one worker's passes take by its profile; None without a profile, or with several workers."""
    first_seconds: float = 0.0
    """What the first pass of one worker takes beyond that; several begin while others still wait for rows."""
    unhidden_steps: Rate = NO_TIME
    """What devices wait for Steps whose state comes from host memory; `cost` has it already."""
    times: StageTimes | None = None
    """What each stage's passes take, where several workers have a profile."""
    loads: LoadPace | None = None
    """What stages take on their way from the host to several workers."""

    @property
    def streamed(self) -> bool:
        return self.place is not None

    @property
    def captured(self) -> bool:
        """Whether passes keep to few sizes, since they are captured: on GPUs, of fused layers."""
        return self.memory.fused

    @property
    def first_pace(self) -> WindowPace:
        """What a round is predicted to take before a run has recorded anything."""
        if self.seconds is not None:
            return WindowPace(round_seconds=self.seconds)
        cost = self.cost or arithmetic(self.shape)
        # As if stages worked one after another.
        return first_pace(cost, self.shape, on_gpu=self.memory.fused, max_tokens=self.capacity)

    def seconds_of(self, program: Program, shapes: JobShapes) -> float | None:
        """What a window will take by the profile; None where there is none."""
        if self.times is not None:
            return self.times.timeline(program, self.layout, shapes, self.loads).makespan
        return None if self.cost is None else self.cost.program_seconds(program, shapes)


def choose(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice:
    """How these jobs run on this machine. PlanError says what does not fit, where nothing is made of it by
    letting jobs wait."""
    assert jobs, "there is nothing to train"
    choose_one = _by_workers if machine.workers * machine.replicas > 1 else _by_one
    return choose_one(shape, jobs, machine)


def _by_one(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice:
    return _streamed(shape, jobs, machine) or _whole(shape, jobs, machine)


def _by_workers(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice:
    return _streamed_by_workers(shape, jobs, machine) or _in_stages(shape, jobs, machine)


# -- one device -----------------------------------------------------------------------------------------


def _whole(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice:
    profile = machine.profile
    memory = MemoryModel(shape, machine.budget, machine.taken, machine.on_gpu, _fit(shape, machine))
    cost = None if profile is None else cost_of(profile, shape)
    together = fitting(jobs, memory)
    choice = Choice(
        shape=shape,
        layout=one_device(shape.layers),
        capacity=machine.most,
        memory=memory,
        aboard=together,
        bytes=full_bytes(memory, together, machine.most),
        why=f"whole on one device, which has {gib(machine.budget)} for a run",
        rounds=WINDOW_ROUNDS,
        cost=cost,
        first_seconds=profile.first_seconds if profile else 0.0,
    )
    return _optimizer_offloaded(choice, jobs, machine) or choice


def _optimizer_offloaded(plain: Choice, jobs: Sequence[JobShape], machine: Machine) -> Choice | None:
    """The same with master weights and moments in host memory. None unless that lets more jobs aboard at
    about the same speed, or a job that fits only so, or all of them at a higher speed."""
    if not machine.on_gpu:
        return None
    memory = offloading(plain.memory, machine.host_budget)
    all_aboard = len(plain.aboard) == len(jobs)
    found = (_all_faster if all_aboard else _more_aboard)(plain, memory, jobs, machine)
    if found is None:
        return None
    together, place, reason = found
    after = offloaded_round(memory, together, place, machine.most)
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
        aboard=together,
        bytes=full_bytes(memory, together, machine.most),
        host_bytes=host_bytes,
        unhidden=share,
        why=why,
        note=f"The base is {why}.",
        rounds=TRAVEL_ROUNDS,
        cost=plain.cost and replace(plain.cost, step=plain.cost.step.plus(steps)),
        unhidden_steps=steps,
    )


class _Offload(NamedTuple):
    together: tuple[JobShape, ...]
    """Those that are aboard so."""
    place: StreamDevice
    reason: str
    """The rest of a sentence after `since`."""


def _more_aboard(
    plain: Choice, memory: MemoryModel, jobs: Sequence[JobShape], machine: Machine
) -> _Offload | None:
    """`memory` is that of the offloaded optimizer. None where fewer jobs aboard are as good."""
    together = fitting(jobs, memory)
    too_large = [job for job in jobs if plain.memory.why_not([job]) is not None]
    only_so = any(memory.why_not([job]) is None for job in too_large)
    if not only_so and len(together) <= len(plain.aboard):
        return None
    place = machine.place(machine.budget)
    if not only_so:
        names = {job.name for job in too_large}
        others = [job for job in jobs if job.name not in names]
        if not is_worth(memory, plain.memory, others, place, machine.most):
            return None
    reason = f"{len(together)} of {len(jobs)} jobs are aboard so and {len(plain.aboard)} otherwise"
    return _Offload(together, place, reason)


def _all_faster(
    plain: Choice, memory: MemoryModel, jobs: Sequence[JobShape], machine: Machine
) -> _Offload | None:
    """The same where all of them are aboard either way: None unless a step is shorter."""
    most = machine.most
    if not would_gain(plain.memory, jobs, most) or memory.why_not(jobs) is not None:
        return None
    place = machine.place(machine.budget)
    if not is_faster(memory, plain.memory, jobs, place, most):
        return None
    (now, again), (before, before_again) = (_passes(one, jobs, most) for one in (memory, plain.memory))
    reason = f"microbatches have {now:,} tokens so and {before:,} otherwise"
    if before_again:
        reason += f", and {again} layers are recomputed instead of {before_again}"
    return _Offload(plain.aboard, place, reason)


def _passes(memory: MemoryModel, jobs: Sequence[JobShape], most: int) -> tuple[int, int]:
    """Tokens of a microbatch, and layers that are recomputed."""
    recompute = memory.recompute(jobs, most)
    return memory.capacity(jobs, most, recompute), recompute.layers


def _streamed(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice | None:
    """None where the base may not be streamed, or need not be: on a GPU if every job can train alone without,
    on a pretended one if as many as can be aboard do."""
    budget = machine.stream_budget
    if budget is None or (machine.on_gpu and fits_whole(shape, jobs, budget)):
        return None
    place = machine.place(budget)
    try:
        found = choose_for_jobs(shape, jobs, place, machine.most)
    except HostTooSmall as short:
        place = machine.files(place, short)
        found = choose_for_jobs(shape, jobs, place, machine.most)
    if found.choice.whole:
        return None
    choice = _as_streamed(shape, machine, place, found.choice, found.aboard)
    if machine.profile is None:
        return choice
    cost = _streamed_cost(shape, machine.profile, choice.layout, choice.unhidden)
    return replace(choice, cost=cost, first_seconds=machine.profile.first_seconds)


def _as_streamed(
    shape: ModelShape,
    machine: Machine,
    place: StreamDevice,
    choice: StreamChoice,
    aboard: Sequence[JobShape],
) -> Choice:
    """By one worker or several, without the times of a profile."""
    beside = _beside(shape, machine, choice.host_bytes)
    memory = MemoryModel(
        shape,
        place.budget + beside,
        beside,
        machine.on_gpu,
        MemoryFit(head=_fit(shape, machine).head),
        choice.cut,
        place.slack,
        first_only=machine.first_only,
    )
    # A pretended device is as large as was asked for beside what the host's memory counts with it.
    head = int(memory.fit.head * memory.head_bytes(math.inf))
    rounds = TRAVEL_ROUNDS if choice.cut.travels else WINDOW_ROUNDS
    return Choice(
        shape=shape,
        layout=choice.cut,
        capacity=choice.capacity,
        memory=replace(memory, budget=memory.budget + head),
        aboard=tuple(aboard),
        seconds=choice.step_seconds,
        bytes=choice.device_bytes,
        host_bytes=choice.host_bytes,
        unhidden=choice.unhidden,
        why=choice.why,
        note=f"The base is {choice.why}.",
        mapped=choice.mapped,
        place=place,
        rounds=rounds if machine.workers == 1 else PIPELINE_ROUNDS,
    )


def _streamed_cost(shape: ModelShape, profile: Profile, layout: Layout, unhidden: float) -> CostModel:
    """All of a pass, what is recomputed of it, and the waits that the search foresees."""
    known = directions(profile, shape)
    return taking_turns(cost_of(profile, shape), known, layout, shape.layers).times(1 / (1 - unhidden))


def _beside(shape: ModelShape, machine: Machine, host_bytes: int) -> int:
    """A pretended device is a part of the host, and measured with the process and what lies in its memory."""
    if machine.on_gpu:
        return 0
    fit = _fit(shape, machine)
    return machine.taken + host_bytes + (0 if fit is UNFITTED else int(fit.slack * SLACK_BYTES))


def _fit(shape: ModelShape, machine: Machine) -> MemoryFit:
    """Factors of the memory model, as the profile's passes over a resident base have taken memory."""
    profile = machine.profile if machine.workers * machine.replicas == 1 else machine.worker_profile
    whole = MemoryModel(shape, machine.budget, machine.taken, machine.on_gpu)
    return UNFITTED if profile is None else memory_of(profile, whole)


# -- several workers -------------------------------------------------------------------------------------


def _in_stages(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice:
    """A stage for every worker; a replica that is one worker holds all of the base."""
    held, note = _layers(shape, machine)
    layout = in_stages(held, machine.replicas)
    memory = MemoryModel(
        shape,
        machine.budget,
        machine.taken,
        machine.on_gpu,
        _fit(shape, machine),
        layout,
        first_only=machine.first_only,
    )
    together = fitting(jobs, memory)
    counts = " + ".join(str(one.stop - one.start) for one in held)
    times = _stage_times(shape, machine)
    return Choice(
        shape=shape,
        layout=layout,
        capacity=machine.most,
        memory=memory,
        aboard=together,
        bytes=full_bytes(memory, together, machine.most),
        why=f"cut into {len(held)} stages of {counts} layers" if len(held) > 1 else "whole on each replica",
        note=note,
        rounds=PIPELINE_ROUNDS,
        times=times,
    )


def _layers(shape: ModelShape, machine: Machine) -> tuple[tuple[LayerRange, ...], str]:
    """Of every stage; and the sentence that says by which times they are alike."""
    if machine.workers == 1:
        return (LayerRange(0, shape.layers, shape.layers),), ""
    if machine.profile is None:
        return cut_layers(shape, machine.workers), ""
    costs = measured_costs(machine.profile, shape, typical_work(shape, machine.most))
    held = cut_layers(shape, machine.workers, costs)
    counts = " + ".join(str(one.stop - one.start) for one in held)
    return held, f"The stages hold {counts} layers, alike by times {source_of(machine.profile)}."


def _streamed_by_workers(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> Choice | None:
    """None where the base may not be streamed, or a part of it fits every worker with any one of the jobs."""
    budget = machine.stream_budget
    if budget is None or machine.workers == 1:
        return None
    need = _parted_bytes(shape, jobs, machine, budget)
    if need <= budget:
        return None
    place, ordered = machine.place(budget), in_order(jobs)

    def attempt(count: int) -> StreamChoice:
        together, later = ordered[:count], ordered[count:]
        return choose_for_workers(shape, together, later, place, machine.workers, machine.most, need)

    count, found = _for_most(attempt, len(jobs))
    layer = layer_bytes(shape)
    return replace(
        _as_streamed(shape, machine, place, found, ordered[:count]),
        times=_stage_times(shape, machine),
        loads=LoadPace(tuple(stage.count * layer for stage in found.cut.stages), place.bandwidth),
    )


def _parted_bytes(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine, budget: int) -> int:
    """What a worker needs whose part of the base stays; a pretended device has nothing but that on it."""
    layout = in_stages(cut_layers(shape, machine.workers))
    slack = None if machine.on_gpu else 0
    memory = MemoryModel(shape, budget, fused=machine.on_gpu, layout=layout, slack=slack)
    return max(memory.least_bytes([job]) for job in jobs)


def _for_most(attempt: Callable[[int], StreamChoice], count: int) -> tuple[int, StreamChoice]:
    """For as many jobs as can be; if not one fits, the sentence that says why."""
    found: dict[int, StreamChoice] = {}
    errors: list[PlanError] = []

    def fits(count: int) -> bool:
        try:
            found[count] = attempt(count)
        except PlanError as error:
            errors.append(error)
        return count in found

    most = most_that_fit(fits, count)
    if not most:
        raise errors[-1]
    return most, found[most]


def _stage_times(shape: ModelShape, machine: Machine) -> StageTimes | None:
    profile = machine.worker_profile
    if profile is None:
        return None
    return StageTimes(shape.layers, directions(profile, shape), step_rate(profile))


# -- who is aboard ---------------------------------------------------------------------------------------


def fitting(jobs: Sequence[JobShape], memory: MemoryModel) -> tuple[JobShape, ...]:
    """Those that are aboard from the start, as the scheduler admits them."""
    names = {job.name for job in jobs}
    first = [job for job in jobs if job.starts_from not in names]
    never = too_large(first, memory.why_not)
    return seat([job for job in first if job.name not in never], (), memory.why_not).seated


def full_bytes(memory: MemoryModel, together: Sequence[JobShape], most: int) -> int:
    """With microbatches as large as memory allows."""
    recompute = memory.recompute(together, most)
    return memory.peak_bytes(together, memory.capacity(together, most, recompute), recompute)
