"""The next window of a base that is streamed over several ranks: rounds go through all stages, hopping from
rank to rank, and back.

Microbatches and the order in which each stage sees them are those of one device that holds all of the base.
As in a pipeline, a window ends with the round in which somebody evaluates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from weftune.plan.program.check import check
from weftune.plan.program.check_slots import check_slots
from weftune.plan.program.program import Action, Backward, Evaluate, Forward, Program, Reduce, Save, Step
from weftune.plan.program.worker_cut import RankCut, RanksCut
from weftune.plan.window.orders import transported
from weftune.plan.window.rounds import Course, Laid, Round, all_batches, lay_rounds
from weftune.plan.window.streamed import Visit, together, with_moves


def plan_ranks(courses: Sequence[Course], cut: RanksCut, capacity: int) -> Program:
    """Train the courses' batches up to the first evaluation. Every rank begins and ends with the stages in
    its slots that it needs first; the result is checked before it is given out."""
    done = {course.job: course.step for course in courses}
    courses = _until_a_look(courses)
    laid = lay_rounds(courses, capacity)
    runs = [together(one.evaluated, laid, _look_room(laid, cut, capacity)) for one in laid.rounds]
    program = Program(
        capacity,
        laid.microbatches,
        all_batches(courses),
        devices=tuple(_listed(laid, runs, cut.of(rank)) for rank in range(cut.ranks)),
        stages=cut.homes,
    )
    check(program, done)
    for rank in range(cut.ranks):
        check_slots(program, cut.of(rank), rank)
    return program


def _until_a_look(courses: Sequence[Course]) -> list[Course]:
    """Who evaluates where it begins must know the outcome before its first batch; nobody trains meanwhile."""
    if looking := [course for course in courses if course.begins and _evaluates(course, course.step)]:
        return [replace(course, batches=()) for course in looking]
    looks = [
        turn
        for course in courses
        for turn, batch in enumerate(course.batches, start=1)
        if _evaluates(course, batch.step)
    ]
    return (
        [replace(course, batches=course.batches[: min(looks)]) for course in courses] if looks else [*courses]
    )


def _evaluates(course: Course, step: int) -> bool:
    return bool(course.evaluation) and step in course.evaluate_at


def _look_room(laid: Laid, cut: RanksCut, capacity: int) -> int:
    """Rows of an evaluation that may be on their way at once: what a rank keeps of inputs in training."""
    rounds = (sum(laid.microbatches[one.microbatch].rows for one in each.trained) for each in laid.rounds)
    return len(cut.stages) // cut.ranks * max((capacity, *rounds))


def _listed(laid: Laid, runs: Sequence[Sequence[Sequence[int]]], cut: RankCut) -> tuple[Action, ...]:
    """One rank's actions; `runs` are the microbatches that each round evaluates."""
    visits = [list(_visits(one, looks, cut)) for one, looks in zip(laid.rounds, runs, strict=True)]
    actions = list(with_moves(laid.rounds, visits, cut))
    homes = [stage % cut.ranks for stage in range(len(cut.stages))]
    return tuple(transported(actions if cut.rank == 0 else _late(actions, laid), homes))


def _visits(one: Round, looks: Sequence[Sequence[int]], cut: RankCut) -> Iterator[Visit]:
    """There and back through the rank's own stages, the last stage of all turning each microbatch round at
    once; then the runs of `looks`."""
    last, numbers = len(cut.stages) - 1, [trained.microbatch for trained in one.trained]
    if numbers:
        for stage in (stage for stage in cut.own if stage < last):
            yield Visit(stage, tuple(Forward(number, stage) for number in numbers))
        for stage in reversed(cut.own):
            actions: list[Action] = []
            for trained in one.trained:
                actions += [Forward(trained.microbatch, stage)] if stage == last else []
                actions += [Backward(trained.microbatch, stage)]
                if stage == cut.rank:
                    actions += [Reduce(step.job, step.step) for step in trained.steps]
                    actions += trained.steps
            yield Visit(stage, tuple(actions))
    for run in looks:
        for stage in cut.own:
            yield Visit(stage, tuple(Evaluate(number, stage) for number in run))


def _late(actions: Iterable[Action], laid: Laid) -> Iterator[Action]:
    """Every Step as late as it may be: until then the first rank's word is on its way."""
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
