"""The next window of a pipeline: the same courses as on one device, cut, grouped and ordered for its stages.

Jobs form groups whose rounds take turns, so that other groups fill the time in which a job's batch waits for
its Step. A window ends with the round in which a job evaluates, since what follows depends on the outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

from weftune.plan.cost.time import Line
from weftune.plan.pack.group import JobLengths, group
from weftune.plan.pack.merge import BatchSample, MergeRules, merge
from weftune.plan.pack.segments import QUICK, pack_segments
from weftune.plan.program.check import check
from weftune.plan.program.prices import Link, PassPrice, Prices, free_cluster
from weftune.plan.program.program import (
    Action,
    GlobalBatch,
    MicrobatchPlan,
    PlacedSample,
    Program,
    Save,
    SegmentPlan,
    Step,
    kept_together,
)
from weftune.plan.program.recompute import NOTHING, Recompute
from weftune.plan.program.simulate import simulate
from weftune.plan.program.timeline import Timeline
from weftune.plan.window.orders import Work, evaluated, gpipe, multi_job, one_forward_one_backward
from weftune.plan.window.replicas import ReplicaWork, Rounds, deal, deal_looks, replicated
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.template import Queue, template

Groups = tuple[tuple[str, ...], ...]
MOST_SPLITS = 4
"""Maximum factor by which a round is cut into more microbatches than it needs, if that fills the pipeline."""


PATIENCE = 1.02
"""Factor by which a window of replicas may be predicted longer so that no device waits for gradients."""


class PipelineOrder(StrEnum):
    gpipe = "gpipe"
    alternating = "1f1b"
    multi_job = "multi-job"
    template = "template"


@dataclass(frozen=True, slots=True)
class StagePace:
    """Time of a microbatch on one stage, by its rows, and of a Step."""

    forward: Line
    backward: Line
    step: float = 0.0
    """Seconds of one job's Step."""
    spread: tuple[float, ...] = ()
    """Times of passes as multiples of what the lines predict, in the order in which they ran."""


BACKWARD_GUESS = 1.5
"""Time of a backward relative to a forward, until one has been measured."""


def guessed_pace(layers: int) -> StagePace:
    """Return the pace of a stage of `layers` layers before anything was measured: proportions only."""
    return StagePace(Line(0.0, float(layers)), Line(0.0, BACKWARD_GUESS * layers))


@dataclass(frozen=True, slots=True)
class PipelineRules:
    """Inputs of the planner of a pipeline's windows, besides the courses."""

    capacity: int
    paces: tuple[StagePace, ...]
    """Pace of each stage."""
    order: PipelineOrder | None = None
    """Order of the pipeline. None selects the one that the simulator finds fastest."""
    recompute: Recompute = NOTHING
    spare: int = 0
    """Number of microbatches in flight beyond what 1F1B has, on all stages but the last: they hide slow links
    and varying pass times."""
    replicas: int = 1
    """Number of copies of all stages, which share every batch. They run in the multi-job order, whatever
    `order` says: only that order predicts all replicas together."""

    @property
    def stages(self) -> int:
        return len(self.paces)

    @property
    def distance(self) -> int:
        """Number of microbatches from a batch's last to the first of the job's next one: the shares that
        replicas exchange are in transit as long as one more stage would take."""
        return self.stages + (self.replicas > 1)


def plan_pipeline(courses: Sequence[JobWindow], rules: PipelineRules) -> Program:
    """Plan a window that trains the courses' batches up to the first evaluation, and check it."""
    step = {course.job: course.step for course in courses}
    beginners = [course for course in courses if course.begins]
    looking = [course for course in beginners if course.evaluates_at(course.step)]
    # A job that evaluates as it begins needs the outcome before its first batch; no job trains meanwhile.
    batches = [] if looking else _batches(courses)
    program = _trained(batches, courses, rules) if batches else _empty(rules)
    after = step | {batch.job: batch.step for batch in batches}
    last = {batch.job: batch.step for batch in batches}
    due = looking or [course for course in courses if course.evaluates_at(last.get(course.job, -1))]
    program = _with_evaluation(program, [_look(course, after[course.job]) for course in due], rules)
    # A job that waits meanwhile begins in the next window, and must not save at the same step in both.
    program = _with_saves(program, courses, looking or beginners)
    program = replace(program, recompute=rules.recompute)
    check(program, step)
    return program


@dataclass(frozen=True, slots=True)
class LoadPace:
    """Bytes of the stages that are loaded from the host, and the speed of the links."""

    stage_bytes: tuple[int, ...]
    bandwidth: float
    """Bytes per second of each device's link."""


def timeline_foreseen(
    program: Program, paces: Sequence[StagePace], loads: LoadPace | None = None
) -> Timeline:
    """Return the timeline that the simulator predicts for a window, ignoring links between devices."""
    return timeline_priced(program, pace_prices(program.microbatches, paces), loads)


def timeline_priced(
    program: Program, prices: Prices, loads: LoadPace | None = None, link: Link | None = None
) -> Timeline:
    """Return the simulated timeline of a window. Without a `link` between devices, sending takes no time."""
    cluster = free_cluster(len(program.devices))
    cluster = cluster if link is None else replace(cluster, link=link)
    if loads is not None:
        prices = replace(prices, weight_bytes=loads.stage_bytes)
        host = Link(loads.bandwidth)
        cluster = replace(cluster, devices=tuple(replace(one, host=host) for one in cluster.devices))
    return simulate(program, prices, cluster)


def _look(course: JobWindow, step: int) -> SegmentPlan:
    return SegmentPlan(course.job, step, course.evaluation)


def _batches(courses: Sequence[JobWindow]) -> list[GlobalBatch]:
    """Return the batches round by round, up to and including the first round in which a job evaluates."""
    found: list[GlobalBatch] = []
    for turn in range(max((len(course.batches) for course in courses), default=0)):
        moving = [course for course in courses if turn < len(course.batches)]
        found += [course.batches[turn] for course in moving]
        if any(course.evaluates_at(course.batches[turn].step) for course in moving):
            break
    return found


def _empty(rules: PipelineRules) -> Program:
    lists = ((),) * (rules.stages * rules.replicas)
    return Program(rules.capacity, (), (), lists, tuple(range(rules.stages)), replicas=rules.replicas)


# -- training -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidate:
    program: Program
    seconds: float


def _trained(batches: Sequence[GlobalBatch], courses: Sequence[JobWindow], rules: PipelineRules) -> Program:
    """Return the program that is fastest in the simulator among a few that differ in how finely rounds are
    cut and in the order in which they run."""
    longest = max(_tokens(together) for batch in batches for together in kept_together(batch.samples))
    # Among equals the first is taken: with spare microbatches it waits less for links and slow passes.
    orders = [PipelineOrder.multi_job, PipelineOrder.alternating] if rules.order is None else [rules.order]
    best: _Candidate | None = None
    for splits in range(1, MOST_SPLITS + 1):
        room = max(longest, -(-rules.capacity // splits))
        groups = _groups(batches, [course.job for course in courses], room, rules)
        dealt = _dealt(batches, groups, room, rules)
        prices = pace_prices(dealt.work.microbatches, rules.paces)
        if rules.replicas > 1:
            fastest = _of_replicas(dealt, prices, rules)
        else:
            found = [_ordered(order, dealt.work, prices, groups, rules) for order in orders]
            candidates = [_Candidate(one, _seconds(one, prices)) for one in found]
            fastest = min(candidates, key=lambda one: one.seconds)
        if best is not None and fastest.seconds >= best.seconds:
            break
        best = fastest
        if room == longest:
            break
    assert best is not None
    return best.program


def _of_replicas(dealt: ReplicaWork, prices: Prices, rules: PipelineRules) -> _Candidate:
    """Return the patient order, which hides links that the prices omit, unless waiting itself costs time."""
    found = [
        replicated(dealt, rules.stages, prices, rules.spare, patient=patient) for patient in (True, False)
    ]
    patient, prompt = (_Candidate(one, _seconds(one, prices)) for one in found)
    return patient if patient.seconds <= PATIENCE * prompt.seconds else prompt


def _seconds(program: Program, prices: Prices) -> float:
    return simulate(program, prices, free_cluster(len(program.devices))).makespan


def _groups(
    batches: Sequence[GlobalBatch], jobs: Sequence[str], capacity: int, rules: PipelineRules
) -> Groups:
    """Return groups that take turns, based on a replica's expected share of each job's first batch."""
    firsts: dict[str, GlobalBatch] = {}
    for batch in batches:
        firsts.setdefault(batch.job, batch)
    lengths = [
        JobLengths(
            job, firsts[job].tokens / len(firsts[job].samples), -(-firsts[job].tokens // rules.replicas)
        )
        for job in jobs
        if job in firsts
    ]
    return group(lengths, capacity, rules.distance).groups


def _dealt(batches: Sequence[GlobalBatch], groups: Groups, room: int, rules: PipelineRules) -> ReplicaWork:
    """Return microbatches that the jobs of a group share, laid out for each replica by itself so that a job's
    batches are far enough apart."""
    # A bucket of the template runs in one piece, so no sample may go into another group's round. With
    # replicas, two microbatches could each hold a sample that waits for the other's round.
    shift = rules.order is not PipelineOrder.template and rules.replicas == 1
    merging = MergeRules(room, rules.distance, limits=QUICK)
    laid = [
        merge(rounds, merging, shift=shift).microbatches
        for rounds in deal(_rounds(batches, groups), rules.replicas)
    ]
    starts = accumulate((len(one) for one in laid), initial=0)
    numbers = tuple(
        tuple(start + place for place, held in enumerate(one) if held)
        for start, one in zip(starts, laid, strict=False)
    )
    microbatches = _microbatches([held for one in laid for held in one], batches)
    return ReplicaWork(Work(rules.capacity, microbatches, tuple(batches)), numbers)


def _rounds(batches: Sequence[GlobalBatch], groups: Groups) -> Rounds:
    """Return rounds with the samples of one batch of every job of a group, the groups taking turns."""
    by_job: dict[str, list[GlobalBatch]] = {}
    for batch in batches:
        by_job.setdefault(batch.job, []).append(batch)
    rounds: Rounds = []
    for turn in range(max(len(found) for found in by_job.values())):
        for members in groups:
            turns = [by_job[job][turn] for job in members if turn < len(by_job[job])]
            samples = [
                BatchSample(batch.job, batch.step, number, _tokens(together))
                for batch in turns
                for number, together in enumerate(kept_together(batch.samples))
            ]
            rounds += [samples] if samples else []
    return rounds


def _tokens(samples: Iterable[PlacedSample]) -> int:
    return sum(placed.length for placed in samples)


def _microbatches(
    laid: Sequence[Sequence[BatchSample]], batches: Sequence[GlobalBatch]
) -> tuple[MicrobatchPlan, ...]:
    placed = {(batch.job, batch.step): kept_together(batch.samples) for batch in batches}
    microbatches = []
    for held in laid:
        segments: dict[tuple[str, int], list[int]] = {}
        for one in held:
            segments.setdefault((one.job, one.batch), []).append(one.sample)
        microbatches.append(
            MicrobatchPlan(
                tuple(
                    SegmentPlan(*key, tuple(one for number in sorted(chosen) for one in placed[key][number]))
                    for key, chosen in segments.items()
                )
            )
        )
    return tuple(microbatches)


def pace_prices(microbatches: Sequence[MicrobatchPlan], paces: Sequence[StagePace]) -> Prices:
    return Prices(
        tuple(
            tuple(
                PassPrice(pace.forward(one.rows), pace.backward(one.rows), kept_bytes=one.rows)
                for pace in paces
            )
            for one in microbatches
        ),
        step=sum(pace.step for pace in paces) / len(paces),
    )


def _ordered(
    order: PipelineOrder, work: Work, prices: Prices, groups: Groups, rules: PipelineRules
) -> Program:
    stages = rules.stages
    match order:
        case PipelineOrder.gpipe:
            return gpipe(work, stages)
        case PipelineOrder.alternating:
            return one_forward_one_backward(work, stages)
        case PipelineOrder.multi_job:
            return multi_job(work, stages, prices, rules.spare)
        case PipelineOrder.template:
            return template(work, _queues(work, prices, groups, stages)).program


def _queues(work: Work, prices: Prices, groups: Groups, stages: int) -> list[Queue]:
    """Return a bucket per group. Its microbatches have the same price, as the template requires."""
    home = {job: number for number, members in enumerate(groups) for job in members}
    held: dict[int, list[int]] = {}
    for number in work.filled:
        held.setdefault(home[work.microbatches[number].jobs[0]], []).append(number)
    return [
        Queue(tuple(numbers), tuple(_mean(numbers, prices, stage) for stage in range(stages)))
        for numbers in held.values()
    ]


def _mean(numbers: Sequence[int], prices: Prices, stage: int) -> PassPrice:
    passes = [prices.passes[number][stage] for number in numbers]
    return PassPrice(
        sum(one.forward for one in passes) / len(passes), sum(one.backward for one in passes) / len(passes)
    )


# -- evaluation and checkpoints --------------------------------------------------------------------------


def _with_evaluation(program: Program, held_out: Sequence[SegmentPlan], rules: PipelineRules) -> Program:
    """Add the evaluation after all training: forwards through all stages, shared by the replicas."""
    packed = pack_segments(held_out, _evaluation_room(held_out, rules))
    before = len(program.microbatches)
    shares = deal_looks(packed, rules.replicas)
    numbers = [[before + place for place in own] for own in shares]
    return replace(
        program,
        microbatches=(*program.microbatches, *packed),
        devices=tuple(
            (*actions, *evaluated(numbers[replica], stage, program.homes(replica)))
            for device, actions in enumerate(program.devices)
            for replica, stage in [divmod(device, rules.stages)]
        ),
    )


def _evaluation_room(held_out: Sequence[SegmentPlan], rules: PipelineRules) -> int:
    """Return a capacity small enough that every replica gets something to evaluate."""
    if rules.replicas == 1 or not held_out:
        return rules.capacity
    longest = max(_tokens(together) for segment in held_out for together in kept_together(segment.samples))
    even = -(-sum(segment.tokens for segment in held_out) // rules.replicas)
    return min(rules.capacity, max(longest, even))


def _with_saves(program: Program, courses: Sequence[JobWindow], beginners: Sequence[JobWindow]) -> Program:
    """Add a Save right after its Step. A job that begins is saved at its current step, before anything else.
    Only one replica's devices save, since the others hold the same."""
    at = {course.job: course.save_at for course in courses}
    begin = [Save(course.job, course.step) for course in beginners if course.step in course.save_at]

    def saved(actions: Sequence[Action]) -> tuple[Action, ...]:
        found: list[Action] = [*begin]
        for action in actions:
            found.append(action)
            if isinstance(action, Step) and action.step in at[action.job]:
                found.append(Save(action.job, action.step))
        return tuple(found)

    saving, others = program.devices[: program.width], program.devices[program.width :]
    return replace(program, devices=(*(saved(actions) for actions in saving), *others))
