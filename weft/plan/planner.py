"""The only public entry of `plan`: what the next window does, from records of the jobs aboard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.plan.check import check
from weft.plan.memory import NOTHING, Recompute
from weft.plan.program import (
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
from weft.plan.segments import pack_segments


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


class _Window:
    """Collects actions; a round is one global batch of every job that still has one."""

    def __init__(self, capacity: int, ladder: bool) -> None:
        self.capacity = capacity
        self.ladder = ladder
        self.microbatches: list[MicrobatchPlan] = []
        self.actions: list[Action] = []

    def train(self, batches: Sequence[GlobalBatch]) -> None:
        segments = [SegmentPlan(batch.job, batch.step, batch.samples) for batch in batches]
        packed = pack_segments(segments, self.capacity, self.ladder)
        last = {job: index for index, microbatch in enumerate(packed) for job in microbatch.jobs}
        for index, microbatch in enumerate(packed):
            number = self._add(microbatch)
            self.actions += [Forward(number), Backward(number)]
            self.actions += [Step(b.job, b.step) for b in batches if last[b.job] == index]

    def evaluate(self, courses: Iterable[Course], step: dict[str, int]) -> None:
        due = [c for c in courses if c.evaluation and step[c.job] in c.evaluate_at]
        packed = pack_segments((SegmentPlan(c.job, step[c.job], c.evaluation) for c in due), self.capacity)
        self.actions += [Evaluate(self._add(microbatch)) for microbatch in packed]

    def save(self, courses: Iterable[Course], step: dict[str, int]) -> None:
        self.actions += [Save(c.job, step[c.job]) for c in courses if step[c.job] in c.save_at]

    def _add(self, microbatch: MicrobatchPlan) -> int:
        self.microbatches.append(microbatch)
        return len(self.microbatches) - 1


def plan_window(
    courses: Sequence[Course], capacity: int, ladder: bool = False, recompute: Recompute = NOTHING
) -> Program:
    """Train every course's batches, round by round, samples of different jobs sharing microbatches.

    With a `ladder`, training passes keep to few sizes, as captured graphs want it. The result is checked
    before it is handed out.
    """
    window = _Window(capacity, ladder)
    step = {course.job: course.step for course in courses}
    newcomers = [course for course in courses if course.begins]
    window.evaluate(newcomers, step)
    window.save(newcomers, step)
    for turn in range(max((len(course.batches) for course in courses), default=0)):
        moving = [course for course in courses if turn < len(course.batches)]
        window.train([course.batches[turn] for course in moving])
        step |= {course.job: course.batches[turn].step for course in moving}
        window.evaluate(moving, step)
        window.save(moving, step)
    program = Program(
        capacity=capacity,
        microbatches=tuple(window.microbatches),
        batches=tuple(batch for course in courses for batch in course.batches),
        devices=(tuple(window.actions),),
        recompute=recompute,
    )
    check(program, {course.job: course.step for course in courses})
    return program
