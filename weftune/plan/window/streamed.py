"""The next window of a base that is streamed on one device: the rounds of the resident one, stage by stage.

A stage serves all microbatches of a round before the next takes its turn, so that one Load serves them all.
Microbatches and the order in which each stage sees them are the resident ones: losses have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weftune.plan.program.check import check
from weftune.plan.program.check_slots import check_slots
from weftune.plan.program.program import Action, Backward, Evaluate, Evict, Forward, Load, Program
from weftune.plan.program.stream_cut import StreamCut
from weftune.plan.window.rounds import Course, Laid, Round, all_batches, lay_rounds


@dataclass(frozen=True, slots=True)
class Visit:
    """One stage at work, until another takes its turn."""

    stage: int
    actions: tuple[Action, ...]
    """Its passes, and the Steps among them."""


def plan_streamed(courses: Sequence[Course], cut: StreamCut, capacity: int, ladder: bool = False) -> Program:
    """Train every course's batches. It begins and ends with `cut.waiting` in the slots, and is checked. With
    a `ladder`, training passes keep to few sizes, as captured ones want it."""
    laid = lay_rounds(courses, capacity, ladder)
    room = _room(laid, cut, capacity)
    visits = [list(_visits(one, together(one.evaluated, laid, room), len(cut.stages))) for one in laid.rounds]
    program = Program(
        capacity,
        laid.microbatches,
        all_batches(courses),
        devices=(tuple(with_moves(laid.rounds, visits, cut)),),
        stages=(0,) * len(cut.stages),
    )
    check(program, {course.job: course.step for course in courses})
    check_slots(program, cut)
    return program


def _room(laid: Laid, cut: StreamCut, capacity: int) -> int:
    """Rows of an evaluation that may be on their way at once: as many as training holds of inputs, less those
    that its microbatch at work makes of them."""
    rounds = (sum(laid.microbatches[one.microbatch].rows for one in each.trained) for each in laid.rounds)
    largest = max(rounds, default=0)
    if cut.offloads:
        held = cut.held_inputs
        return held.rounds * largest + (held.microbatches - 1) * capacity
    return len(cut.stages) * max(capacity, largest)


def together(numbers: Sequence[int], laid: Laid, room: int) -> list[list[int]]:
    """Microbatches in runs of so many rows: what is more than one run has every stage come once more."""
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


def _visits(one: Round, looks: Sequence[Sequence[int]], stages: int) -> Iterator[Visit]:
    """There and back, the last stage turning each microbatch round at once; then the runs of `looks`."""
    last, numbers = stages - 1, [trained.microbatch for trained in one.trained]
    if numbers:
        for stage in range(last):
            yield Visit(stage, tuple(Forward(number, stage) for number in numbers))
        for stage in reversed(range(stages)):
            actions: list[Action] = []
            for trained in one.trained:
                actions += [Forward(trained.microbatch, stage)] if stage == last else []
                actions += [Backward(trained.microbatch, stage)]
                actions += trained.steps if stage == 0 else []
            yield Visit(stage, tuple(actions))
    for run in looks:
        for stage in range(stages):
            yield Visit(stage, tuple(Evaluate(number, stage) for number in run))


def with_moves(
    rounds: Sequence[Round], visits: Sequence[Sequence[Visit]], cut: StreamCut
) -> Iterator[Action]:
    """The visits of every round, what moves behind each, and the round's Saves."""
    moved = moves([visit for each in visits for visit in each], cut)
    for one, each in zip(rounds, visits, strict=True):
        for visit in each:
            yield from visit.actions
            yield from next(moved)
        yield from one.saves


def moves(visits: Sequence[Visit], cut: StreamCut) -> Iterator[tuple[Action, ...]]:
    """What follows each visit: where another stage needs the slot next, it is loaded there at once."""
    streamed = set(cut.streamed)
    needed = {cut.slot(stage): stage for stage in cut.waiting}
    found: list[tuple[Action, ...]] = []
    for visit in reversed(visits):
        found.append(())
        if visit.stage in streamed:
            slot = cut.slot(visit.stage)
            if needed[slot] != visit.stage:
                found[-1] = Evict(visit.stage), Load(needed[slot])
            needed[slot] = visit.stage
    return reversed(found)
