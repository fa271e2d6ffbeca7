"""Windows in rounds: one global batch of every job, then evaluations and saves, in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weftune.plan.pack.segments import pack_segments
from weftune.plan.program.check import check
from weftune.plan.program.check_slots import check_slots
from weftune.plan.program.layout import Layout, OnWorker
from weftune.plan.program.program import (
    Action,
    Backward,
    Evaluate,
    Evict,
    Forward,
    GlobalBatch,
    Load,
    MicrobatchPlan,
    PlacedSample,
    Program,
    Reduce,
    Save,
    SegmentPlan,
    Step,
)
from weftune.plan.program.recompute import NOTHING, Recompute
from weftune.plan.window.orders import transported


@dataclass(frozen=True, slots=True)
class JobWindow:
    """One job's part of a window: the batches it trains next, and when it evaluates or saves in between."""

    job: str
    step: int
    """Last executed step."""
    batches: tuple[GlobalBatch, ...]
    evaluation: tuple[PlacedSample, ...]
    evaluate_at: frozenset[int]
    save_at: frozenset[int]
    begins: bool = False
    """Whether the job starts in this window: it evaluates and saves before its first batch."""

    def evaluates_at(self, step: int) -> bool:
        """Return whether its held-out samples are evaluated after this step."""
        return bool(self.evaluation) and step in self.evaluate_at


@dataclass(frozen=True, slots=True)
class Trained:
    """A microbatch of a round, and the Steps of the jobs whose last rows it holds."""

    microbatch: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One global batch of every job that still has one, then evaluations and saves."""

    trained: tuple[Trained, ...]
    evaluated: tuple[int, ...]
    """Microbatches of held-out samples."""
    saves: tuple[Save, ...]


@dataclass(frozen=True, slots=True)
class LaidRounds:
    """Courses laid out in rounds: what is done, regardless of the order in which devices do it."""

    microbatches: tuple[MicrobatchPlan, ...]
    rounds: tuple[Round, ...]


class _Window:
    """A collector of microbatches and rounds."""

    def __init__(self, capacity: int, ladder: bool, groups: Sequence[frozenset[str]]) -> None:
        self.capacity = capacity
        self.groups = groups
        self.ladder = ladder
        self.microbatches: list[MicrobatchPlan] = []
        self.rounds: list[Round] = []

    def add(self, batches: Sequence[GlobalBatch], courses: Sequence[JobWindow], step: dict[str, int]) -> None:
        """Add a round of these batches, after which the courses are at `step`."""
        trained = self._train(batches)
        evaluated = self._evaluate(courses, step)
        saves = tuple(Save(c.job, step[c.job]) for c in courses if step[c.job] in c.save_at)
        self.rounds.append(Round(trained, evaluated, saves))

    def _train(self, batches: Sequence[GlobalBatch]) -> tuple[Trained, ...]:
        if len(self.groups) < 2:
            return self._train_group(batches)
        parts = [[batch for batch in batches if batch.job in group] for group in self.groups]
        return tuple(one for part in parts if part for one in _steps_last(self._train_group(part)))

    def _train_group(self, batches: Sequence[GlobalBatch]) -> tuple[Trained, ...]:
        segments = [SegmentPlan(batch.job, batch.step, batch.samples) for batch in batches]
        packed = pack_segments(segments, self.capacity, self.ladder)
        last = {job: index for index, microbatch in enumerate(packed) for job in microbatch.jobs}
        steps: list[list[Step]] = [[] for _ in packed]
        for batch in batches:
            steps[last[batch.job]].append(Step(batch.job, batch.step))
        return tuple(Trained(self._number(one), tuple(due)) for one, due in zip(packed, steps, strict=True))

    def _evaluate(self, courses: Iterable[JobWindow], step: dict[str, int]) -> tuple[int, ...]:
        due = [c for c in courses if c.evaluation and step[c.job] in c.evaluate_at]
        packed = pack_segments((SegmentPlan(c.job, step[c.job], c.evaluation) for c in due), self.capacity)
        return tuple(self._number(microbatch) for microbatch in packed)

    def _number(self, microbatch: MicrobatchPlan) -> int:
        self.microbatches.append(microbatch)
        return len(self.microbatches) - 1


def _steps_last(group: Sequence[Trained]) -> Iterator[Trained]:
    """Yield the microbatches with all Steps after the last one."""
    *others, last = group
    yield from (replace(one, steps=()) for one in others)
    yield replace(last, steps=tuple(step for one in group for step in one.steps))


def even_groups(tokens: Mapping[str, int], count: int) -> list[frozenset[str]]:
    """Divide jobs into at most `count` groups of about equal tokens: the largest first, to the smallest
    group."""
    groups: list[set[str]] = [set() for _ in range(max(1, min(count, len(tokens))))]
    sums = [0] * len(groups)
    for job in sorted(tokens, key=lambda job: -tokens[job]):
        # Among equals the one with fewer jobs.
        at = min(range(len(groups)), key=lambda one: (sums[one], len(groups[one])))
        groups[at].add(job)
        sums[at] += tokens[job]
    return [frozenset(group) for group in groups]


def _groups(courses: Sequence[JobWindow], count: int) -> list[frozenset[str]]:
    tokens = {course.job: sum(batch.tokens for batch in course.batches) for course in courses}
    return even_groups(tokens, count)


def lay_rounds(
    courses: Sequence[JobWindow], capacity: int, ladder: bool = False, groups: int = 1
) -> LaidRounds:
    """Lay out every course's batches, round by round; samples of different jobs share microbatches.

    With a `ladder`, training passes keep to few sizes, as captured graphs require. With several `groups`, a
    job shares microbatches with others of its group, and the Steps of a group follow its last one: what they
    wait for is transferred during the passes of another group.
    """
    window = _Window(capacity, ladder, _groups(courses, groups) if groups > 1 else ())
    step = {course.job: course.step for course in courses}
    window.add([], [course for course in courses if course.begins], step)
    for turn in range(max((len(course.batches) for course in courses), default=0)):
        moving = [course for course in courses if turn < len(course.batches)]
        step |= {course.job: course.batches[turn].step for course in moving}
        window.add([course.batches[turn] for course in moving], moving, step)
    return LaidRounds(tuple(window.microbatches), tuple(window.rounds))


def plan_rounds(
    courses: Sequence[JobWindow],
    layout: Layout,
    capacity: int,
    ladder: bool = False,
    recompute: Recompute = NOTHING,
) -> Program:
    """Plan a window that trains every course's batches round by round: a stage serves all microbatches of a
    round before the next takes its turn, so that one Load serves them all.

    Microbatches, and the order in which each stage sees them, are the same in every layout, so losses have
    the same bits. A window of several workers ends with the round in which a job evaluates: what follows
    depends on the outcome, which only the first worker knows. Every worker begins and ends with the stages in
    its slots that it needs first. The result is checked before it is returned.
    """
    done = {course.job: course.step for course in courses}
    courses = _until_an_evaluation(courses) if layout.workers > 1 else courses
    laid = lay_rounds(courses, capacity, ladder, layout.job_groups)
    room = _evaluation_rows(laid, layout, capacity)
    runs = [_together(one.evaluated, laid, room) for one in laid.rounds]
    program = Program(
        capacity,
        laid.microbatches,
        all_batches(courses),
        devices=tuple(_listed(laid, runs, layout.on(worker)) for worker in range(layout.workers)),
        stages=layout.homes,
        recompute=recompute,
    )
    check(program, done)
    for worker in range(layout.workers):
        check_slots(program, layout.on(worker))
    return program


def _until_an_evaluation(courses: Sequence[JobWindow]) -> list[JobWindow]:
    """Return the courses up to the first evaluation. A job that evaluates as it begins needs the outcome
    before its first batch; no job trains meanwhile."""
    if waiting := [course for course in courses if course.begins and course.evaluates_at(course.step)]:
        return [replace(course, batches=()) for course in waiting]
    rounds = [
        turn
        for course in courses
        for turn, batch in enumerate(course.batches, start=1)
        if course.evaluates_at(batch.step)
    ]
    if not rounds:
        return [*courses]
    return [replace(course, batches=course.batches[: min(rounds)]) for course in courses]


def _evaluation_rows(laid: LaidRounds, layout: Layout, capacity: int) -> int:
    """Return the rows of an evaluation that may be in flight at once: as many as the inputs that training
    holds, less those of its current microbatch."""
    rounds = (sum(laid.microbatches[one.microbatch].rows for one in each.trained) for each in laid.rounds)
    largest = max(rounds, default=0)
    if layout.offloads:
        held = layout.on(0).held_inputs
        return held.rounds * largest + (held.microbatches - 1) * capacity
    return len(layout.stages) // layout.workers * max(capacity, largest)


def _together(numbers: Sequence[int], laid: LaidRounds, room: int) -> list[list[int]]:
    """Split microbatches into runs of at most `room` rows. Each run but the first loads every stage again."""
    runs: list[list[int]] = []
    taken = room
    for number in numbers:
        rows = laid.microbatches[number].rows
        if taken + rows > room:
            runs.append([])
            taken = 0
        runs[-1].append(number)
        taken += rows
    return runs


@dataclass(frozen=True, slots=True)
class Visit:
    """One stage at work, until another takes its turn."""

    stage: int
    actions: tuple[Action, ...]
    """Passes of the stage, and the Steps among them."""


def _listed(laid: LaidRounds, runs: Sequence[Sequence[Sequence[int]]], part: OnWorker) -> tuple[Action, ...]:
    """Return one worker's actions; `runs` are the microbatches that each round evaluates."""
    visits = [list(_visits(one, run, part)) for one, run in zip(laid.rounds, runs, strict=True)]
    actions = list(_with_moves(laid.rounds, visits, part))
    ordered = actions if part.worker == 0 else _steps_late(actions, laid)
    return tuple(transported(ordered, part.layout.homes))


def _visits(one: Round, runs: Sequence[Sequence[int]], part: OnWorker) -> Iterator[Visit]:
    """Yield the visits forward and back through the worker's own stages, where the last stage of all runs
    each backward right after its forward; then the evaluation runs."""
    last, numbers = len(part.stages) - 1, [trained.microbatch for trained in one.trained]
    if numbers:
        for stage in (stage for stage in part.own if stage < last):
            yield Visit(stage, tuple(Forward(number, stage) for number in numbers))
        for stage in reversed(part.own):
            actions: list[Action] = []
            for trained in one.trained:
                actions += [Forward(trained.microbatch, stage)] if stage == last else []
                actions += [Backward(trained.microbatch, stage)]
                actions += _steps(trained, part) if stage == part.own[0] else []
            yield Visit(stage, tuple(actions))
    for run in runs:
        for stage in part.own:
            yield Visit(stage, tuple(Evaluate(number, stage) for number in run))


def _steps(trained: Trained, part: OnWorker) -> Iterator[Action]:
    """Yield the Steps. Several workers agree on every Step by a Reduce."""
    if part.layout.workers > 1:
        yield from (Reduce(step.job, step.step) for step in trained.steps)
    yield from trained.steps


def _with_moves(
    rounds: Sequence[Round], visits: Sequence[Sequence[Visit]], part: OnWorker
) -> Iterator[Action]:
    """Yield the actions of every round's visits, the moves after each visit, and the round's Saves."""
    moved = moves([visit for each in visits for visit in each], part)
    for one, each in zip(rounds, visits, strict=True):
        for visit in each:
            yield from visit.actions
            yield from next(moved)
        yield from one.saves


def moves(visits: Sequence[Visit], part: OnWorker) -> Iterator[tuple[Action, ...]]:
    """Return the actions after each visit: if another stage needs the slot next, it is loaded there at
    once."""
    streamed = set(part.streamed)
    needed = {part.slot(stage): stage for stage in part.waiting}
    found: list[tuple[Action, ...]] = []
    for visit in reversed(visits):
        found.append(())
        if visit.stage in streamed:
            slot = part.slot(visit.stage)
            if needed[slot] != visit.stage:
                found[-1] = Evict(visit.stage), Load(needed[slot])
            needed[slot] = visit.stage
    return reversed(found)


def _steps_late(actions: Iterable[Action], laid: LaidRounds) -> Iterator[Action]:
    """Yield the actions with each Step as late as possible: until then the first worker's decision is in
    transit."""
    due: dict[str, Step] = {}
    for action in actions:
        match action:
            case Step(job):
                due[job] = action
                continue
            case Forward(number) | Evaluate(number):
                needed: Iterable[str] = laid.microbatches[number].jobs
            case Save(job):
                needed = (job,)
            case _:
                needed = ()
        yield from [due.pop(job) for job in needed if job in due]
        yield action
    yield from due.values()


def all_batches(courses: Iterable[JobWindow]) -> tuple[GlobalBatch, ...]:
    return tuple(batch for course in courses for batch in course.batches)
