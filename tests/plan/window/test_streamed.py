"""A streamed window: the resident one's microbatches in its order, every stage alone in its slot."""

from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.program.test_check import course
from weftune.plan.program.check import check, check_slots
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout
from weftune.plan.program.program import (
    Backward,
    Evaluate,
    Evict,
    Forward,
    IllegalProgram,
    Load,
    Program,
    Save,
    Step,
)
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import plan_window

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def cut(*layers: int, resident: set[int] = frozenset(), slots: int = 2) -> Layout:
    """Stages of so many layers each."""
    ends = [sum(layers[:number]) for number in range(len(layers) + 1)]
    bits = (number in resident for number in range(len(layers)))
    stages = (StageLayers(start, stop, bit) for (start, stop), bit in zip(pairwise(ends), bits, strict=True))
    return Layout(tuple(stages), (slots,))


@st.composite
def cuts(draw: st.DrawFn) -> Layout:
    layers = draw(st.lists(st.integers(1, 3), min_size=1, max_size=9))
    resident = draw(st.sets(st.integers(0, len(layers) - 1)))
    return cut(*layers, resident=resident, slots=draw(st.integers(1, 4)))


@st.composite
def job_sets(draw: st.DrawFn) -> list[JobWindow]:
    jobs = draw(st.lists(st.lists(LENGTHS, max_size=3), min_size=1, max_size=4))
    found = []
    for number, batches in enumerate(jobs):
        step = draw(st.integers(0, 5))
        steps = st.sets(st.integers(step, step + 3))
        found.append(
            course(
                f"job{number}", batches, step, draw(LENGTHS), draw(steps), draw(steps), draw(st.booleans())
            )
        )
    return found


def two_jobs() -> list[JobWindow]:
    first = course("a", [[9, 9, 3], [9, 2]], evaluation=[9, 9], evaluate_at={1, 2}, save_at={1})
    return [first, course("b", [[8, 8], [4]], step=4)]


def done(courses: list[JobWindow]) -> dict[str, int]:
    return {one.job: one.step for one in courses}


def loads(program: Program) -> list[int]:
    return [action.stage for action in program.actions if isinstance(action, Load)]


def order(program: Program, kind: type, stage: int) -> list[int]:
    return [one.microbatch for one in program.actions if isinstance(one, kind) and one.stage == stage]


@settings(max_examples=150, deadline=None)
@given(job_sets(), cuts(), st.integers(0, 60))
def test_every_stage_sees_the_microbatches_of_the_resident_window_in_its_order(courses, chosen, room):
    streamed = plan_window(courses, chosen, 40 + room)
    resident = plan_window(courses, one_device_layout(), 40 + room)
    assert streamed.microbatches == resident.microbatches
    assert streamed.batches == resident.batches
    for kind in (Forward, Backward, Evaluate):
        for stage in range(len(chosen.stages)):
            assert order(streamed, kind, stage) == order(resident, kind, 0)
    for kind in (Step, Save):
        told = [[one for one in each.actions if isinstance(one, kind)] for each in (streamed, resident)]
        assert told[0] == told[1]


@settings(max_examples=150, deadline=None)
@given(job_sets(), cuts(), st.data())
def test_every_streamed_window_is_legal_and_so_is_what_a_dead_job_leaves_of_it(courses, chosen, data):
    program = plan_window(courses, chosen, 60)
    check(program, done(courses))
    check_slots(program, chosen.for_worker(0))
    left = program.without(data.draw(st.sampled_from(courses)).job)
    check(left, done(courses))
    check_slots(left, chosen.for_worker(0))
    assert loads(left) == loads(program)


@settings(max_examples=100, deadline=None)
@given(job_sets(), cuts())
def test_a_stage_gives_its_slot_to_another_right_behind_its_last_pass(courses, chosen):
    actions = plan_window(courses, chosen, 60).actions
    for here, action in enumerate(actions):
        if isinstance(action, Evict):
            before, after = actions[here - 1], actions[here + 1]
            assert isinstance(before, Forward | Backward | Evaluate)
            assert before.stage == action.stage
            assert isinstance(after, Load)
            assert after.stage != action.stage
            assert chosen.for_worker(0).slot_of_stage(after.stage) == chosen.for_worker(0).slot_of_stage(
                action.stage
            )
            uses = (one for one in actions[here + 2 :] if getattr(one, "stage", None) == after.stage)
            assert not isinstance(next(uses, None), Evict), "what is loaded is used before it goes"
        if isinstance(action, Load):
            assert isinstance(actions[here - 1], Evict)


@settings(max_examples=60, deadline=None)
@given(job_sets(), st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_with_everything_resident_nothing_moves_and_one_stage_is_the_resident_window(courses, layers):
    program = plan_window(courses, cut(*layers, resident=set(range(len(layers)))), 60)
    assert not any(isinstance(action, Load | Evict) for action in program.actions)
    whole = plan_window(courses, cut(sum(layers), resident={0}), 60)
    assert whole == plan_window(courses, one_device_layout(), 60)


def test_a_round_goes_stage_by_stage_and_turns_round_at_the_last():
    program = plan_window([course("a", [[9, 8]])], cut(1, 1, 1, slots=3), 10)
    assert program.actions == (
        *(Forward(0, 0), Forward(1, 0), Forward(0, 1), Forward(1, 1)),
        *(Forward(0, 2), Backward(0, 2), Forward(1, 2), Backward(1, 2)),
        *(Backward(0, 1), Backward(1, 1), Backward(0, 0), Backward(1, 0), Step("a", 1)),
    )


def test_a_job_steps_right_behind_its_last_backward_on_the_first_stage():
    actions = plan_window(two_jobs(), cut(1, 1, 1), 20).actions
    for here, action in enumerate(actions):
        if isinstance(action, Step):
            before = next(one for one in reversed(actions[:here]) if not isinstance(one, Step))
            assert isinstance(before, Backward)
            assert before.stage == 0


@pytest.mark.parametrize(("streamed", "slots"), [(5, 1), (5, 2), (6, 2), (7, 3), (4, 4), (3, 5)])
def test_a_round_loads_each_streamed_stage_twice_save_those_that_find_their_slot_still_full(streamed, slots):
    program = plan_window([course("a", [[9]] * 3)], cut(*[1] * streamed, slots=slots), 10)
    assert len(loads(program)) == 3 * 2 * max(0, streamed - slots)


def test_loads_come_in_the_order_that_they_are_needed_in_and_as_soon_as_their_slot_is_free():
    program = plan_window([course("a", [[9]])], cut(1, 1, 1, 1, 1, resident={2}), 10)
    assert program.actions == (
        *(Forward(0, 0), Evict(0), Load(3), Forward(0, 1), Evict(1), Load(4), Forward(0, 2), Forward(0, 3)),
        *(Forward(0, 4), Backward(0, 4), Evict(4), Load(1), Backward(0, 3), Evict(3), Load(0)),
        *(Backward(0, 2), Backward(0, 1), Backward(0, 0), Step("a", 1)),
    )


def test_after_an_evaluation_the_waiting_stages_come_back():
    looking = course("a", [[9]], evaluation=[9], evaluate_at={1}, save_at={1})
    program = plan_window([looking], cut(1, 1, 1, slots=1), 10)
    assert program.actions[-5:] == (Load(2), Evaluate(1, 2), Evict(2), Load(0), Save("a", 1))


def streamed_window() -> tuple[Program, Layout]:
    chosen = cut(1, 1, 1, 1, resident={3}, slots=1)
    return plan_window([course("a", [[9]])], chosen, 10), chosen


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (lambda actions: [one for one in actions if one != Evict(0)], "finds stage 0 in its slot"),
        (lambda actions: [Evict(1), *actions], "gives up a stage that is not in its slot"),
        (lambda actions: [Evict(0), *actions], "uses a stage that is not in its slot"),
        (lambda actions: [Evict(3), *actions], "moves a resident stage"),
        (lambda actions: actions[:-3], "other stages than those that wait"),
    ],
)
def test_the_checker_of_slots_refuses(broken, sentence):
    program, chosen = streamed_window()
    with pytest.raises(IllegalProgram, match=sentence):
        check_slots(replace(program, devices=(tuple(broken(list(program.actions))),)), chosen.for_worker(0))


def test_the_checker_of_slots_refuses_another_number_of_stages():
    program, _ = streamed_window()
    with pytest.raises(IllegalProgram, match="4 stages are planned, but the layout has 2"):
        check_slots(program, cut(1, 1).for_worker(0))


def test_an_evaluation_larger_than_what_training_keeps_goes_through_the_stages_in_runs():
    looking = course("a", [[10]], evaluation=[10] * 9, evaluate_at={1})
    program = plan_window([looking], cut(1, 1, slots=1), capacity=10)
    looks = [action for action in program.actions if isinstance(action, Evaluate)]
    # Two stages keep an input of 10 rows each, so two microbatches of 10 rows may be on their way at once.
    assert [(one.microbatch - looks[0].microbatch, one.stage) for one in looks[:6]] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0),
    ]  # fmt: skip
    assert len(looks) == 2 * 9


def test_where_inputs_are_offloaded_an_evaluation_holds_no_more_than_training_does():
    looking = course("a", [[10] * 6], evaluation=[10] * 99, evaluate_at={1})
    lengths = {}
    for offloaded in (0, 60):
        chosen = replace(cut(*[1] * 8, slots=1), offloaded_rows=offloaded)
        program = plan_window([looking], chosen, capacity=10)
        first = [isinstance(action, Evaluate) and action.stage == 0 for action in program.actions]
        lengths[offloaded] = max(sum(run) for looks, run in groupby(first) if looks)
    # Of every stage a round of six microbatches; or of inputs and gradients a round and a microbatch each, of
    # which one is what the microbatch at work hands on.
    assert lengths == {0: 8 * 6, 60: 2 * 6 + 1}


def test_with_a_ladder_trained_microbatches_have_the_sizes_of_the_resident_ones():
    chosen, courses = cut(1, 1, slots=1), [course("a", [[150, 140], [300]]), course("b", [[200], [10]])]
    program = plan_window(courses, chosen, 512, pads_to_ladder=True)
    assert [one.rows for one in program.microbatches] == [512, 384]
    assert (
        program.microbatches
        == plan_window(courses, one_device_layout(), 512, pads_to_ladder=True).microbatches
    )
