"""The choice of how to run a fine-tuning: the layout of the base on the devices, the token capacity, and the
reasons.

`weftune train` calls `choose_layout` for the machine that it runs on, and `weftune plan` for this or another
machine. On a single device, the base stays in device memory if it fits there, and is otherwise streamed from
host memory. Several workers hold one stage (consecutive layers) each, or stream the base together if a stage
does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from weftune.core.shapes import JobShape, LayerRange, ModelShape, shard_shape
from weftune.errors import HostTooSmall, PlanError
from weftune.plan.cost.estimate import layer_bytes
from weftune.plan.cost.memory import (
    ENOUGH_TOKENS,
    SLACK_BYTES,
    SPARE,
    UNFITTED,
    MemoryFit,
    MemoryModel,
    answers_bytes,
    format_bytes,
)
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.cost.profile import Profile
from weftune.plan.cost.profile_cost import (
    fit_profile_memory,
    pass_terms,
    profile_cost_model,
    profile_source,
    step_rate,
)
from weftune.plan.cost.ring import TRAVEL_ROUNDS
from weftune.plan.cost.time import NO_TIME, CostModel, JobShapes, Rate
from weftune.plan.layout.division import AUTO, Candidate, Division, Workload, search_divisions
from weftune.plan.layout.foresee import StageTimes, shared_device_cost
from weftune.plan.layout.need import StreamDevice, emulated_device, file_device, undominated_jobs
from weftune.plan.layout.offloaded import (
    is_offloading_faster,
    is_offloading_worthwhile,
    offload_optimizer,
    offloaded_round,
    would_more_memory_help,
)
from weftune.plan.layout.seats import assign_seats, find_misfits, largest_fitting_count, order_for_seats
from weftune.plan.layout.stages import (
    PartCosts,
    cut_layers,
    measured_costs,
    typical_work,
)
from weftune.plan.layout.stream_choice import StreamChoice, choose_for_jobs, choose_for_workers, fits_whole
from weftune.plan.program.layout import Layout, one_device_layout, pipeline_layout
from weftune.plan.program.prices import Link
from weftune.plan.program.program import Program
from weftune.plan.window.pace import LoadPace, StagePace, WindowPace, first_pace, pace_from_data_sheet
from weftune.plan.window.window import ALL_MECHANISMS, Mechanisms, Pacing

WINDOW_ROUNDS, PIPELINE_ROUNDS = 4, 16
"""Maximum number of global batches of each job per window (the part of a run that is planned at a time), for
one worker and for a pipeline. A pipeline has longer windows, since it may have to fill and drain in each of
them."""
PROCESS_BYTES = 512 << 20
"""Bytes that a training process on a CPU is assumed to hold before anything is loaded, unless measured."""
CPU_CHUNK_ROWS = 128
"""Minimum rows of the chunks into which long samples may be cut on a CPU. The number is small, since even a
few rows keep a CPU busy."""
MIN_ROWS = {False: 128, True: 1024}
"""Smallest maximum of rows per microbatch that the planner of a pipeline tries, on a GPU (key True) and on a
CPU (key False)."""
MAX_TOKENS = {False: 1024, True: 8192}
"""Default maximum of tokens per microbatch, on a GPU (key True) and on a CPU (key False)."""


def _refuse_unmeasured_device(_budget: int, _host: int, _workers: int) -> StreamDevice:
    raise AssertionError("the speed of this device is not known")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that a run is planned for: its identical devices, the memory of its host, and how many
    workers it should use."""

    on_gpu: bool
    devices: int = 1
    """Number of devices. It is used only if the planner chooses the number of workers, replicas, shards or
    shares (groups of jobs with their own workers)."""
    budget_bytes: int
    """Bytes available to the run on each worker's device if the worker's part of the base stays resident."""
    process_bytes: int = 0
    """Device bytes held by the first worker's process before anything is loaded."""
    stream_budget_bytes: int | None = None
    """Device bytes available when the base is streamed. None disables streaming."""
    has_user_limit: bool = False
    """Whether the user limited the device bytes. Only then may the planner stream a base that is divided
    among several devices."""
    host_budget_bytes: int = 0
    """Bytes of host memory available to the run, summed over all hosts."""
    decoder_bytes: int = 0
    """Minimum device bytes reserved for the cached keys and values of generated text."""
    capacity: int | None = None
    """Maximum tokens per microbatch. None uses the default of the device."""
    workers: int = 1
    """Number of pipeline stages per replica, or `AUTO` if the planner is to choose it."""
    replicas: int = 1
    """Number of copies of all pipeline stages (data parallelism), or `AUTO` if the planner is to choose
    it."""
    shards: int = 1
    """Number of workers among which each layer is divided (tensor parallelism), or `AUTO` if the planner is
    to choose it."""
    shares: int = 1
    """Number of parts into which the jobs are divided, each trained by its own workers, or `AUTO` if the
    planner is to choose it."""
    overlaps: bool = False
    """Whether the all-reduces over shards of one microbatch overlap with the computation of another."""
    link: Link | None = None
    """Link between two workers. None means that sending takes no time."""
    device_flops: float | None = None
    """FLOP/s of each GPU if there are several. None if the FLOP/s are unknown, or if there is only one
    device."""
    profile: Profile | None = None
    """Measured profile of the device, used to divide the layers into stages and to predict the times of a
    single worker."""
    worker_profile: Profile | None = None
    """Profile of the device, measured with as many threads as each of several workers has."""
    measure_gpu: Callable[[int, int, int], StreamDevice] = _refuse_unmeasured_device
    """Function that returns the GPU with its speeds, measured or from the data sheet, given the available
    device bytes, host bytes and the number of workers. The function is called only if the base may be
    streamed."""
    make_file_device: Callable[[StreamDevice, HostTooSmall], StreamDevice] = lambda device, _short: (
        file_device(device)
    )
    """Function that returns the device for a base that is streamed from its files instead of host memory, or
    raises an error if that is impossible."""

    @property
    def max_tokens(self) -> int:
        return self.capacity or MAX_TOKENS[self.on_gpu]

    @property
    def first_only_bytes(self) -> int:
        """Process memory that only the first of several workers needs, in bytes."""
        if self.on_gpu or self.worker_profile is None or self.workers == 1:
            return 0
        return self.worker_profile.first_only_bytes

    def stream_device(self, budget_bytes: int) -> StreamDevice:
        """Return the device to which a base is streamed, with `budget_bytes` bytes for the run. Without a
        GPU, the device is emulated in host memory."""
        if not self.on_gpu:
            return emulated_device(budget_bytes, self.host_budget_bytes)
        return self.measure_gpu(budget_bytes, self.host_budget_bytes, self.workers)

    @property
    def division(self) -> Division:
        return Division(
            shares=self.shares,
            replicas=self.replicas,
            stages=self.workers,
            shards=self.shards,
            capacity=self.capacity,
            overlaps=self.overlaps,
        )

    def with_division(self, division: Division) -> Machine:
        """Return the part of the machine that trains one share (part) of the jobs, with the numbers of
        workers and the token capacity of `division`."""
        return replace(
            self,
            shares=division.shares,
            replicas=division.replicas,
            workers=division.stages,
            shards=division.shards,
            overlaps=division.overlaps,
            capacity=division.capacity,
            host_budget_bytes=self.host_budget_bytes // division.shares,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """The chosen way to run jobs on a machine: layout, capacity and memory model, with predictions and
    reasons."""

    machine: Machine
    """Part of the machine on which each share (part) of the jobs runs, with the chosen numbers of workers and
    shares."""
    layout: Layout
    capacity: int
    """Maximum tokens per microbatch, unless a single sample has more."""
    memory: MemoryModel
    """Memory model by which jobs are admitted and the token capacity of microbatches is set."""
    attached_jobs: tuple[JobShape, ...]
    """Jobs for which the choice was made: those that can run together from the start."""
    round_seconds: float | None = None
    """Predicted seconds per round (one global batch of every job). None unless the base is streamed."""
    peak_device_bytes: int
    """Predicted peak bytes on the fullest device with full microbatches, including the process."""
    host_bytes: int = 0
    """Bytes of host memory that all workers together need."""
    waiting_fraction: float = 0.0
    """Fraction of the time of a round (one global batch of every job) in which devices wait for the host."""
    reason: str
    """Reason for the choice, as the rest of a sentence that begins with `The base is`."""
    user_note: str = ""
    """Sentence about the layout that a run shows to the user. Empty if the whole base stays on one device."""
    reads_weight_files: bool = False
    """Whether streamed weights stay in their files and are read from there in every round (one global batch
    of every job)."""
    stream_device: StreamDevice | None = None
    """Device that the base is streamed to. None unless the base is streamed."""
    window_rounds: int
    """Maximum number of global batches of each job per window, the part of a run that is planned at a
    time."""
    cost_model: CostModel | None = None
    """Time model of a single worker, computed from the profile (measurements) of its device. None without a
    profile or with several workers."""
    first_pass_seconds: float = 0.0
    """Additional seconds of the first pass of a single worker. 0 with several workers."""
    step_wait: Rate = NO_TIME
    """Seconds per job and per parameter for which devices wait for optimizer steps whose state is in host
    memory. `cost_model` includes this time."""
    stage_times: StageTimes | None = None
    """Predictor of the times of forwards and backwards on each stage. None unless there are several workers
    and a profile."""
    load_pace: LoadPace | None = None
    """Weight bytes of each stage and bandwidth from the host. None unless several workers stream the base."""
    mechanisms: Mechanisms = ALL_MECHANISMS
    """Optional methods of planning a window (a few global batches of every job), such as cutting long samples
    into chunks, and whether each method is used."""
    candidates: tuple[Candidate, ...] = ()
    """Divisions of the devices among jobs, stages and shards whose speed was predicted, the chosen one first.
    Empty if no sample lengths of the jobs were given."""

    @property
    def shape(self) -> ModelShape:
        return self.memory.shape

    @property
    def is_streamed(self) -> bool:
        return self.stream_device is not None

    @property
    def captures_graphs(self) -> bool:
        """Whether passes are captured as CUDA graphs, so that microbatches are padded to a few sizes."""
        return self.memory.uses_fused_ops

    @property
    def min_chunk_rows(self) -> int:
        """Minimum rows of the chunks into which long samples may be cut. 0 if samples stay whole, since some
        layers have a recurrent state."""
        if self.shape.is_recurrent:
            return 0
        return ENOUGH_TOKENS if self.memory.uses_fused_ops else CPU_CHUNK_ROWS

    def pacing(
        self,
        paces: Sequence[StagePace],
        *,
        are_measured: bool = False,
        hands_over: bool = True,
    ) -> Pacing | None:
        """Return the options for planning the windows (a few global batches of every job each) of a pipeline
        whose stages have the speeds in `paces`, or None if the layout is no pipeline.

        Cutting samples into chunks and much smaller microbatches are allowed only if the speeds are measured,
        since guessed ones contain no fixed time per pass.
        """
        if not self.layout.is_pipeline:
            return None
        return Pacing(
            tuple(paces),
            self.mechanisms.order,
            SPARE,
            min_chunk_rows=self.min_chunk_rows if are_measured and self.mechanisms.cuts_samples else 0,
            min_rows=MIN_ROWS[self.memory.uses_fused_ops] if are_measured else 0,
            searches_groups=self.mechanisms.searches_groups,
            hands_over=hands_over and self.mechanisms.hands_over,
        )

    @property
    def first_pace(self) -> WindowPace:
        """Predicted speed of training before the run has measured anything."""
        if self.round_seconds is not None:
            return WindowPace(round_seconds=self.round_seconds)
        cost, machine = self.cost_model or uncalibrated_cost_model(self.shape), self.machine
        if machine.on_gpu and machine.device_flops is not None and not cost.is_measured:
            # A shard has a part of every matrix product. Stages and replicas work at the same time.
            workers = self.layout.workers * self.layout.replicas
            return pace_from_data_sheet(self.shape, workers * machine.device_flops)
        # Processes on a CPU share it, so that stages are assumed to work one after another.
        return first_pace(cost, self.shape, on_gpu=machine.on_gpu, max_tokens=self.capacity)

    def predict_seconds(self, program: Program, shapes: JobShapes) -> float | None:
        """Return the seconds that the device's profile predicts for a program, or None without a profile."""
        if self.stage_times is not None:
            return self.stage_times.timeline(program, self.layout, shapes, self.load_pace).makespan
        return None if self.cost_model is None else self.cost_model.program_seconds(program, shapes)


def choose_layout(
    shape: ModelShape, jobs: Sequence[JobShape], machine: Machine, workload: Workload | None = None
) -> LayoutChoice:
    """Return how these jobs should run on this machine: layout, token capacity and memory model.

    Numbers of workers that are `AUTO` in `machine` are chosen by speeds that are predicted from `workload`,
    which must then be given. Raise PlanError if a job does not fit even alone, or if a job generates answers
    in its evaluations although the base is divided or streamed.
    """
    assert jobs, "there is nothing to train"
    decoder_bytes = max(machine.decoder_bytes, answers_bytes(shape, jobs))
    machine = replace(machine, decoder_bytes=decoder_bytes)
    candidates = () if workload is None else _price_candidates(shape, jobs, machine, workload)
    if AUTO in (machine.workers, machine.replicas, machine.shards, machine.shares):
        assert workload is not None, "a choice needs prices"
        machine = _choose_division(machine, candidates)
    else:
        best = candidates[0].division if candidates else machine.division
        machine = machine.with_division(best if best.overlaps else machine.division)
    return replace(_choose_undivided(shape, jobs, machine), candidates=candidates)


def _choose_undivided(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> LayoutChoice:
    """Return the layout and capacity for a machine whose numbers of workers, replicas and shards are
    given."""
    if machine.workers * machine.replicas * machine.shards > 1:
        _check_decoder_fits(machine, "several processes share the base or its batches")
        return _choose_streamed_by_workers(shape, jobs, machine) or _choose_pipeline(shape, jobs, machine)
    if (streamed := _choose_streamed(shape, jobs, machine)) is not None:
        _check_decoder_fits(machine, f"the base is {streamed.reason}")
        return streamed
    return _choose_resident(shape, jobs, machine)


def _check_decoder_fits(machine: Machine, reason: str) -> None:
    if machine.decoder_bytes:
        raise PlanError(
            "Answers are generated on one device that holds the whole base, and in this run "
            f"{reason}; leave eval.generate out, and run `weftune eval` on the finished adapters"
        )


def _price_candidates(
    shape: ModelShape, jobs: Sequence[JobShape], machine: Machine, workload: Workload
) -> tuple[Candidate, ...]:
    """Return the fastest ways to divide the machine's devices among the jobs without streaming the base, the
    best one first."""

    def build(division: Division, share: Sequence[JobShape]) -> LayoutChoice | None:
        if machine.decoder_bytes and division.workers_per_share > 1:
            return None
        own = replace(machine.with_division(division), stream_budget_bytes=None)
        if division.workers_per_share == 1:
            choice = _choose_resident(shape, share, own)
            return choice if _does_each_job_fit(choice.memory, share) else None
        fits = _does_each_job_fit(_pipeline_memory(shape, own, _cut_stages(shape, own)), share)
        return _choose_pipeline(shape, share, own) if fits else None

    limits = workload.search_space(machine.division, machine.devices)
    fixed = (machine.shares, machine.replicas, machine.workers, machine.shards)
    devices = max(machine.devices, math.prod(max(1, number) for number in fixed))
    return tuple(search_divisions(jobs, workload, limits, devices, build))


def _does_each_job_fit(memory: MemoryModel, jobs: Sequence[JobShape]) -> bool:
    """Return whether every job fits in memory if it runs alone."""
    return all(
        # Most layouts have no room for the weights, which is quickly seen.
        memory.peak_bytes([job], 0) <= memory.budget_bytes and memory.misfit_reason([job]) is None
        for job in undominated_jobs(jobs)
    )


def _choose_division(machine: Machine, candidates: Sequence[Candidate]) -> Machine:
    """Return the machine with the numbers of workers of the best candidate. If there is no candidate, since
    no division fits in memory, all GPUs stream the base together."""
    if candidates:
        division = candidates[0].division
        several = division.devices > 1
        limited = machine.stream_budget_bytes if machine.has_user_limit or not several else None
        return replace(machine.with_division(division), stream_budget_bytes=limited)
    if machine.on_gpu and machine.devices > 1 and machine.stream_budget_bytes is not None:
        return replace(machine, workers=machine.devices, shares=1, replicas=1, shards=1)
    return machine.with_division(Division())


def part_costs(shape: ModelShape, machine: Machine) -> PartCosts | None:
    """Return the measured costs of the parts of a base, by which stages are balanced. None without a
    profile."""
    if machine.profile is None:
        return None
    return measured_costs(machine.profile, shape, typical_work(shape, machine.max_tokens))


# -- one device -----------------------------------------------------------------------------------------


def _choose_resident(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> LayoutChoice:
    profile = machine.profile
    host_budget = machine.host_budget_bytes if machine.on_gpu else 0
    memory = MemoryModel(
        shape,
        machine.budget_bytes,
        machine.process_bytes,
        machine.on_gpu,
        _memory_fit(shape, machine),
        host_budget_bytes=host_budget,
        decoder_bytes=machine.decoder_bytes,
    )
    answers = (
        f", {format_bytes(memory.decoder_bytes)} of them for generated answers"
        if memory.decoder_bytes
        else ""
    )
    cost = None if profile is None else profile_cost_model(profile, shape)
    together = fitting_jobs(jobs, memory)
    choice = LayoutChoice(
        machine=machine,
        layout=one_device_layout(shape.layers),
        capacity=machine.max_tokens,
        memory=memory,
        attached_jobs=together,
        peak_device_bytes=peak_device_bytes(memory, together, machine.max_tokens),
        reason=f"whole on one device, which has {format_bytes(machine.budget_bytes)} for a run{answers}",
        window_rounds=WINDOW_ROUNDS,
        cost_model=cost,
        first_pass_seconds=profile.first_seconds if profile else 0.0,
    )
    return _offload_optimizer(choice, jobs, machine) or choice


def _offload_optimizer(
    resident_choice: LayoutChoice, jobs: Sequence[JobShape], machine: Machine
) -> LayoutChoice | None:
    """Return `resident_choice` with the optimizer offloaded, which keeps master weights and moments in host
    memory. Return None unless this admits more jobs at about the same speed, admits a job that does not fit
    otherwise, or runs all jobs faster."""
    if not machine.on_gpu:
        return None
    memory = offload_optimizer(resident_choice.memory, machine.host_budget_bytes)
    # The device is measured only if offloading may help, and once.
    device = cache(lambda: machine.stream_device(machine.budget_bytes))
    if len(resident_choice.attached_jobs) == len(jobs):
        together, reason = (
            resident_choice.attached_jobs,
            _faster_step_reason(resident_choice, memory, jobs, device),
        )
    else:
        together = fitting_jobs(jobs, memory)
        reason = _more_jobs_reason(resident_choice, memory, jobs, together, device)
    if not reason:
        return None
    after = offloaded_round(memory, together, device(), machine.max_tokens)
    host_bytes, share = memory.host_bytes(together), after.exposed_seconds / after.seconds
    why = (
        f"{resident_choice.reason}; master weights and moments of adapters live in host memory, "
        f"{format_bytes(host_bytes)} of it, "
        f"since {reason}, and the GPU waits for Steps in {share:.0%} of a round"
    )
    steps = Rate(parameter=after.exposed_seconds / sum(job.trainable_parameters for job in together))
    return replace(
        resident_choice,
        layout=replace(resident_choice.layout, offloads_optimizer=True),
        memory=memory,
        attached_jobs=together,
        peak_device_bytes=peak_device_bytes(memory, together, machine.max_tokens),
        host_bytes=host_bytes,
        waiting_fraction=share,
        reason=why,
        user_note=f"The base is {why}.",
        window_rounds=TRAVEL_ROUNDS,
        cost_model=resident_choice.cost_model
        and replace(resident_choice.cost_model, step=resident_choice.cost_model.step.add(steps)),
        step_wait=steps,
    )


def _more_jobs_reason(
    resident_choice: LayoutChoice,
    memory: MemoryModel,
    jobs: Sequence[JobShape],
    attached_jobs: Sequence[JobShape],
    device: Callable[[], StreamDevice],
) -> str:
    """Return the reason for offloading the optimizer to admit more jobs, as the rest of a sentence after
    `since`. Return an empty string if offloading is not worthwhile. `memory` is the memory model with the
    optimizer offloaded, and `attached_jobs` are the jobs that fit with this model."""
    too_large = {job.name for job in jobs if resident_choice.memory.misfit_reason([job]) is not None}
    only_so = any(memory.misfit_reason([job]) is None for job in jobs if job.name in too_large)
    if not only_so and len(attached_jobs) <= len(resident_choice.attached_jobs):
        return ""
    if not only_so:
        others = [job for job in jobs if job.name not in too_large]
        if not is_offloading_worthwhile(
            memory, resident_choice.memory, others, device(), resident_choice.machine.max_tokens
        ):
            return ""
    return (
        f"{len(attached_jobs)} of {len(jobs)} jobs are admitted with it "
        f"and {len(resident_choice.attached_jobs)} without"
    )


def _faster_step_reason(
    resident_choice: LayoutChoice,
    memory: MemoryModel,
    jobs: Sequence[JobShape],
    device: Callable[[], StreamDevice],
) -> str:
    """Return the reason why a step of all jobs is faster with the optimizer offloaded, as the rest of a
    sentence after `since`. Return an empty string if the step is not faster."""
    max_tokens = resident_choice.machine.max_tokens
    if (
        not would_more_memory_help(resident_choice.memory, jobs, max_tokens)
        or memory.misfit_reason(jobs) is not None
    ):
        return ""
    if not is_offloading_faster(memory, resident_choice.memory, jobs, device(), max_tokens):
        return ""
    after, before = (one.choose_recompute(jobs, max_tokens) for one in (memory, resident_choice.memory))
    reason = (
        f"microbatches have {memory.choose_capacity(jobs, max_tokens, after):,} tokens with it and "
        f"{resident_choice.memory.choose_capacity(jobs, max_tokens, before):,} without"
    )
    if before.recomputed_layers:
        reason += (
            f", and {after.recomputed_layers} layers are recomputed instead of {before.recomputed_layers}"
        )
    return reason


def _choose_streamed(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> LayoutChoice | None:
    """Return the layout for streaming the base to one device, or None if streaming is disabled or not needed.
    On a GPU, streaming is needed only if some job cannot train alone without it; on an emulated device, only
    if the jobs do not fit together without it."""
    budget = machine.stream_budget_bytes
    if budget is None or (machine.on_gpu and fits_whole(shape, jobs, budget, machine.decoder_bytes)):
        return None
    device = machine.stream_device(budget)
    try:
        found = choose_for_jobs(shape, jobs, device, machine.max_tokens)
    except HostTooSmall as short:
        device = machine.make_file_device(device, short)
        found = choose_for_jobs(shape, jobs, device, machine.max_tokens)
    if found.is_resident:
        return None
    choice, profile = _streamed_choice(shape, machine, device, found), machine.profile
    if profile is None:
        return choice
    # The cost of a whole pass includes what is recomputed and the waits predicted by the search.
    cost = shared_device_cost(
        profile_cost_model(profile, shape), pass_terms(profile, shape), choice.layout, shape.layers
    )
    return replace(
        choice,
        cost_model=cost.multiply_by(1 / (1 - choice.waiting_fraction)),
        first_pass_seconds=profile.first_seconds,
    )


def _streamed_choice(
    shape: ModelShape, machine: Machine, device: StreamDevice, choice: StreamChoice
) -> LayoutChoice:
    """Return the layout choice for a base that is streamed to one or several workers. The fields that follow
    from a profile of the device are not set."""
    fit, beside = _memory_fit(shape, machine), 0
    if not machine.on_gpu:
        # An emulated device is part of the host and is measured with the process and what lies in its memory.
        beside = machine.process_bytes + choice.host_bytes
        beside += 0 if fit is UNFITTED else int(fit.slack * SLACK_BYTES)
    memory = MemoryModel(
        _local_shape(shape, machine),
        device.budget_bytes + beside,
        beside,
        machine.on_gpu,
        MemoryFit(head=fit.head),
        choice.layout,
        device.slack_bytes,
        first_only_bytes=machine.first_only_bytes,
    )
    # An emulated device has the requested size in addition to what is counted with it in host memory.
    head = int(memory.fit.head * memory.logit_bytes(math.inf))
    rounds = TRAVEL_ROUNDS if choice.layout.adapters_travel else WINDOW_ROUNDS
    return LayoutChoice(
        machine=machine,
        layout=choice.layout,
        capacity=choice.capacity,
        memory=replace(memory, budget_bytes=memory.budget_bytes + head),
        attached_jobs=choice.attached_jobs,
        round_seconds=choice.round_seconds,
        peak_device_bytes=choice.device_bytes,
        host_bytes=choice.host_bytes,
        waiting_fraction=choice.waiting_fraction,
        reason=choice.reason,
        user_note=f"The base is {choice.reason}.",
        reads_weight_files=choice.reads_weight_files,
        stream_device=device,
        window_rounds=rounds if machine.workers == 1 else PIPELINE_ROUNDS,
    )


def _memory_fit(shape: ModelShape, machine: Machine) -> MemoryFit:
    """Return the correction factors of the memory model that follow from the machine's profile. Without a
    profile, all factors are 1."""
    profile = machine.profile if machine.workers * machine.replicas == 1 else machine.worker_profile
    whole = MemoryModel(shape, machine.budget_bytes, machine.process_bytes, machine.on_gpu)
    return UNFITTED if profile is None else fit_profile_memory(profile, whole)


# -- several workers -------------------------------------------------------------------------------------


def _choose_pipeline(shape: ModelShape, jobs: Sequence[JobShape], machine: Machine) -> LayoutChoice:
    """Return the layout in which each worker holds one stage, or a shard or replica of it, without
    streaming."""
    stage_ranges, note = _cut_stages(shape, machine), ""
    counts = " + ".join(str(one.stop - one.start) for one in stage_ranges)
    if machine.workers > 1 and machine.profile is not None:
        note = f"The stages hold {counts} layers, alike by times {profile_source(machine.profile)}."
    memory = _pipeline_memory(shape, machine, stage_ranges)
    together = fitting_jobs(jobs, memory)
    return LayoutChoice(
        machine=machine,
        layout=memory.layout,
        capacity=machine.max_tokens,
        memory=memory,
        attached_jobs=together,
        peak_device_bytes=peak_device_bytes(memory, together, machine.max_tokens),
        reason=_pipeline_reason(machine, counts),
        user_note=note,
        window_rounds=PIPELINE_ROUNDS,
        stage_times=_stage_times(shape, machine),
    )


def _cut_stages(shape: ModelShape, machine: Machine) -> Sequence[LayerRange]:
    """Return the layers of each pipeline stage, balanced by the machine's profile if there is one."""
    if machine.workers == 1:
        return (LayerRange(0, shape.layers, shape.layers),)
    return cut_layers(shape, machine.workers, part_costs(shape, machine))


def _local_shape(shape: ModelShape, machine: Machine) -> ModelShape:
    """Return the shape of the base or, if layers are divided, of one shard of it."""
    return shard_shape(shape, machine.shards) if machine.shards > 1 else shape


def _pipeline_memory(shape: ModelShape, machine: Machine, stages: Sequence[LayerRange]) -> MemoryModel:
    """Return the memory model of a run in which each worker holds a stage, or a shard of one."""
    return MemoryModel(
        _local_shape(shape, machine),
        machine.budget_bytes,
        machine.process_bytes,
        machine.on_gpu,
        _memory_fit(shape, machine),
        pipeline_layout(stages, machine.replicas, machine.shards, machine.overlaps),
        first_only_bytes=machine.first_only_bytes,
    )


def _pipeline_reason(machine: Machine, layer_counts: str) -> str:
    divided = f"with every layer divided among {machine.shards} workers" if machine.shards > 1 else ""
    if machine.overlaps:
        divided += ", whose sums overlap with the computation of another microbatch"
    if machine.workers > 1:
        return f"cut into {machine.workers} stages of {layer_counts} layers{', ' if divided else ''}{divided}"
    return f"whole on each replica{', ' if divided else ''}{divided}" if machine.replicas > 1 else divided


def _choose_streamed_by_workers(
    shape: ModelShape, jobs: Sequence[JobShape], machine: Machine
) -> LayoutChoice | None:
    """Return the layout for streaming the base to several workers together. Return None if streaming is
    disabled, or if every job fits alone on workers that each hold one stage, or a shard of one."""
    budget = machine.stream_budget_bytes
    if budget is None or machine.workers * machine.shards == 1:
        return None
    stages = cut_layers(shape, machine.workers) if machine.workers > 1 else _cut_stages(shape, machine)
    local = _local_shape(shape, machine)
    # An emulated device holds nothing besides the worker's part of the base.
    slack, layout = None if machine.on_gpu else 0, pipeline_layout(stages, shards=machine.shards)
    resident = MemoryModel(
        local, budget, uses_fused_ops=machine.on_gpu, layout=layout, fixed_slack_bytes=slack
    )
    need = max(resident.least_bytes([job]) for job in jobs)
    if need <= budget:
        return None
    device = replace(machine.stream_device(budget), worker_link=machine.link)
    ordered = order_for_seats(jobs)
    found: dict[int, StreamChoice] = {}
    errors: list[PlanError] = []

    def fits(count: int) -> bool:
        together, later = ordered[:count], ordered[count:]
        try:
            found[count] = choose_for_workers(
                local, together, later, device, machine.workers, machine.max_tokens, need
            )
        except PlanError as error:
            errors.append(error)
        return count in found

    count = largest_fitting_count(fits, len(jobs))
    if not count:
        raise errors[-1]
    layer = layer_bytes(local)
    return replace(
        _streamed_choice(shape, machine, device, found[count]),
        stage_times=_stage_times(shape, machine),
        load_pace=LoadPace(
            tuple(one.layer_count * layer for one in found[count].layout.stages), device.bandwidth
        ),
    )


def _stage_times(shape: ModelShape, machine: Machine) -> StageTimes | None:
    profile = machine.worker_profile
    if profile is None:
        return None
    output_bytes = shape.hidden * shape.bytes_per_value
    times = StageTimes(
        shape.layers, pass_terms(profile, shape), step_rate(profile), machine.link, output_bytes
    )
    return times.divide_among_shards(shape, machine.shards)


# -- admission ------------------------------------------------------------------------------------------


def fitting_jobs(jobs: Sequence[JobShape], memory: MemoryModel) -> tuple[JobShape, ...]:
    """Return the jobs that run together from the start, selected by the rules of the scheduler: in the order
    of priority, as many as fit in memory."""
    names = {job.name for job in jobs}
    first = [job for job in jobs if job.source_job not in names]
    never = find_misfits(first, memory.misfit_reason)
    return assign_seats([job for job in first if job.name not in never], (), memory.misfit_reason).seated_jobs


def peak_device_bytes(memory: MemoryModel, attached_jobs: Sequence[JobShape], max_tokens: int) -> int:
    """Return the predicted peak bytes on the fullest device with the largest microbatches that fit."""
    recompute = memory.choose_recompute(attached_jobs, max_tokens)
    return memory.peak_bytes(
        attached_jobs, memory.choose_capacity(attached_jobs, max_tokens, recompute), recompute
    )
