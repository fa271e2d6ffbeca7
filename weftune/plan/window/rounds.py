"""The only public entry of `plan`: what the next window does, from records of the jobs aboard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weftune.plan.pack.segments import pack_segments
from weftune.plan.program.check import check
from weftune.plan.program.program import (
    Action,
    Backward,
    Evaluate,
    Forward,
    GlobalBatch,
    MicrobatchPlan,
    Placed,
    Program,
    Save,
    SegmentPlan,
    Step,
)
from weftune.plan.program.recompute import NOTHING, Recompute


@dataclass(frozen=True, slots=True)
class Course:
    """One job's part of a window: the batches it trains next, and when it looks up or saves on the way."""

    job: str
    step: int
    """Its last executed step."""
    batches: tuple[GlobalBatch, ...]
    evaluation: tuple[Placed, ...]
    evaluate_at: frozenset[int]
    save_at: frozenset[int]
    begins: bool = False
    """True in the window a job starts in: it evaluates and saves before its first batch."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A microbatch of a round, and the Steps of the jobs whose last rows it holds."""

    microbatch: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One global batch of every job that still has one; then who evaluates, and who saves."""

    trained: tuple[Trained, ...]
    evaluated: tuple[int, ...]
    """Microbatches of held-out samples."""
    saves: tuple[Save, ...]


@dataclass(frozen=True, slots=True)
class Laid:
    """Courses laid out in rounds: what is done, whatever the order that devices do it in."""

    microbatches: tuple[MicrobatchPlan, ...]
    rounds: tuple[Round, ...]


class _Window:
    """Collects microbatches and rounds."""

    def __init__(self, capacity: int, ladder: bool) -> None:
        self.capacity = capacity
        self.ladder = ladder
        self.microbatches: list[MicrobatchPlan] = []
        self.rounds: list[Round] = []

    def add(self, batches: Sequence[GlobalBatch], courses: Sequence[Course], step: dict[str, int]) -> None:
        """A round of these batches, after which the courses are at `step`."""
        trained = self._train(batches)
        evaluated = self._evaluate(courses, step)
        saves = tuple(Save(c.job, step[c.job]) for c in courses if step[c.job] in c.save_at)
        self.rounds.append(Round(trained, evaluated, saves))

    def _train(self, batches: Sequence[GlobalBatch]) -> tuple[Trained, ...]:
        segments = [SegmentPlan(batch.job, batch.step, batch.samples) for batch in batches]
        packed = pack_segments(segments, self.capacity, self.ladder)
        last = {job: index for index, microbatch in enumerate(packed) for job in microbatch.jobs}
        return tuple(
            Trained(self._number(one), tuple(Step(b.job, b.step) for b in batches if last[b.job] == index))
            for index, one in enumerate(packed)
        )

    def _evaluate(self, courses: Iterable[Course], step: dict[str, int]) -> tuple[int, ...]:
        due = [c for c in courses if c.evaluation and step[c.job] in c.evaluate_at]
        packed = pack_segments((SegmentPlan(c.job, step[c.job], c.evaluation) for c in due), self.capacity)
        return tuple(self._number(microbatch) for microbatch in packed)

    def _number(self, microbatch: MicrobatchPlan) -> int:
        self.microbatches.append(microbatch)
        return len(self.microbatches) - 1


def lay_rounds(courses: Sequence[Course], capacity: int, ladder: bool = False) -> Laid:
    """Every course's batches, round by round, samples of different jobs sharing microbatches.

    With a `ladder`, training passes keep to few sizes, as captured graphs want it.
    """
    window = _Window(capacity, ladder)
    step = {course.job: course.step for course in courses}
    window.add([], [course for course in courses if course.begins], step)
    for turn in range(max((len(course.batches) for course in courses), default=0)):
        moving = [course for course in courses if turn < len(course.batches)]
        step |= {course.job: course.batches[turn].step for course in moving}
        window.add([course.batches[turn] for course in moving], moving, step)
    return Laid(tuple(window.microbatches), tuple(window.rounds))


def plan_window(
    courses: Sequence[Course], capacity: int, ladder: bool = False, recompute: Recompute = NOTHING
) -> Program:
    """Train every course's batches on one device. The result is checked before it is handed out."""
    laid = lay_rounds(courses, capacity, ladder)
    actions: list[Action] = []
    for one in laid.rounds:
        for trained in one.trained:
            actions += [Forward(trained.microbatch), Backward(trained.microbatch), *trained.steps]
        actions += [Evaluate(number) for number in one.evaluated]
        actions += one.saves
    program = Program(
        capacity, laid.microbatches, all_batches(courses), (tuple(actions),), recompute=recompute
    )
    check(program, {course.job: course.step for course in courses})
    return program


def all_batches(courses: Iterable[Course]) -> tuple[GlobalBatch, ...]:
    return tuple(batch for course in courses for batch in course.batches)
