"""The checker accepts what the planner makes and refuses every way of breaking it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.planner import Course, plan_window
from weft.plan.program import (
    Backward,
    Evaluate,
    Forward,
    GlobalBatch,
    IllegalProgram,
    MicrobatchPlan,
    Placed,
    Save,
    Step,
    check,
)


def placed(lengths):
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(
        Placed(i, length, offset) for i, (length, offset) in enumerate(zip(lengths, offsets, strict=True))
    )


def course(job, batches, step=0, evaluation=(), evaluate_at=(), save_at=(), begins=False):
    made = tuple(
        GlobalBatch(job, step + 1 + i, placed(lengths), supervised=sum(lengths))
        for i, lengths in enumerate(batches)
    )
    return Course(
        job, step, made, placed(evaluation), frozenset(evaluate_at), frozenset(save_at), begins=begins
    )


def two_jobs():
    return plan_window(
        [
            course(
                "a", [[5, 9, 3], [7, 2]], evaluation=[6, 4], evaluate_at={0, 2}, save_at={0, 2}, begins=True
            ),
            course("b", [[8, 8], [4], [10]], step=4),
        ],
        capacity=20,
    )


def test_a_planned_window_is_legal_and_mixes_jobs():
    program = two_jobs()
    check(program, {"a": 0, "b": 4})
    assert program.shared() >= 2
    steps = [a for a in program.actions if isinstance(a, Step)]
    assert [a for a in steps if a.job == "a"] == [Step("a", 1), Step("a", 2)]
    assert [a for a in steps if a.job == "b"] == [Step("b", 5), Step("b", 6), Step("b", 7)]
    assert isinstance(program.actions[0], Evaluate)
    assert Save("a", 0) in program.actions
    assert Save("a", 2) in program.actions


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.lists(lengths, max_size=4), lengths, st.integers(0, 9)), min_size=1, max_size=6
    ),
    room=st.integers(0, 100),
    dead=st.sets(st.integers(0, 5)),
)
def test_every_window_is_legal_with_and_without_dead_jobs(jobs, room, dead):
    courses = [
        course(str(i), batches, step, held_out, {step, step + 2}, {step + 1}, begins=step == 0)
        for i, (batches, held_out, step) in enumerate(jobs)
    ]
    program = plan_window(courses, 40 + room)
    done = {c.job: c.step for c in courses}
    for job in dead:
        program = program.without(str(job))
        assert str(job) not in program.jobs
        check(program, done)


def broken(program, how):
    actions = list(program.actions)
    first = next(i for i, a in enumerate(actions) if isinstance(a, Forward))
    match how:
        case "a Step before its Backward":
            step = next(a for a in actions if isinstance(a, Step))
            actions.remove(step)
            actions.insert(first + 1, step)
        case "a Backward without its Forward":
            del actions[first]
        case "a Forward twice":
            actions.insert(first, actions[first])
        case "a Backward left out":
            actions.remove(next(a for a in actions if isinstance(a, Backward)))
        case "the next batch before the Step":
            actions.remove(Step("b", 5))
        case "a Save of a step not made":
            actions.insert(first, Save("a", 2))
        case "an evaluation too early":
            late = [a for a in actions if isinstance(a, Evaluate)][-1]
            actions.remove(late)
            actions.insert(first, late)
        case "a microbatch over capacity":
            return replace(program, capacity=5)
        case "a sample left out":
            number = actions[first].microbatch
            segment = program.microbatches[number].segments[0]
            cut = MicrobatchPlan((replace(segment, samples=segment.samples[1:]),))
            return replace(
                program,
                microbatches=(*program.microbatches[:number], cut, *program.microbatches[number + 1 :]),
            )
        case "a wrong offset":
            batch = program.batches[0]
            moved = replace(batch, samples=(replace(batch.samples[0], offset=1), *batch.samples[1:]))
            return replace(program, batches=(moved, *program.batches[1:]))
    return replace(program, actions=tuple(actions))


@pytest.mark.parametrize(
    "how",
    [
        "a Step before its Backward",
        "a Backward without its Forward",
        "a Forward twice",
        "a Backward left out",
        "the next batch before the Step",
        "a Save of a step not made",
        "an evaluation too early",
        "a microbatch over capacity",
        "a sample left out",
        "a wrong offset",
    ],
)
def test_the_checker_refuses(how):
    with pytest.raises(IllegalProgram):
        check(broken(two_jobs(), how), {"a": 0, "b": 4})


def test_a_job_may_not_skip_a_batch_at_the_seam():
    with pytest.raises(IllegalProgram):
        check(plan_window([course("a", [[3]], step=4)], 10), {"a": 3})
