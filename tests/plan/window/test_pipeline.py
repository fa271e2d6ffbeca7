"""Windows for pipelines: the same batches as on one device, legal in every order, ended by an evaluation."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.program.test_check import course
from tests.plan.works import stage_prices
from weftune.plan.cost.time import Line
from weftune.plan.program.check import check
from weftune.plan.program.prices import PricedCluster
from weftune.plan.program.program import Evaluate, Forward, Save, Step
from weftune.plan.program.simulate import simulate
from weftune.plan.window.pace import StagePace, pace_prices
from weftune.plan.window.pipeline import (
    PipelineOrder,
    PipelineRules,
    divide_into_microbatches,
    mix_groups,
    order_passes,
    plan_pipeline,
    window_seconds,
)

PACE = StagePace(Line(0.0, 1.0), Line(0.0, 2.0))


def rules(stages=3, capacity=40, order=None, pace=PACE):
    return PipelineRules(capacity, (pace,) * stages, order)


def of(program, device, kind):
    return [action for action in program.devices[device] if isinstance(action, kind)]


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.lists(lengths, max_size=4), lengths, st.integers(0, 9)), min_size=1, max_size=5
    ),
    room=st.integers(0, 60),
    stages=st.integers(1, 4),
    order=st.sampled_from([None, *PipelineOrder]),
)
def test_every_window_is_legal_and_trains_whole_rounds_up_to_the_first_evaluation(jobs, room, stages, order):
    courses = [
        course(str(i), batches, step, held_out, {step + 2}, {step, step + 1}, begins=step == 0)
        for i, (batches, held_out, step) in enumerate(jobs)
    ]
    program = plan_pipeline(courses, rules(stages, 40 + room, order))
    check(program, {c.job: c.step for c in courses})
    rounds = 2 if any(len(c.batches) >= 2 for c in courses) else 1
    planned = {(b.job, b.step) for c in courses for b in c.batches[:rounds]}
    assert {(b.job, b.step) for b in program.batches} == planned
    looked = {
        (s.job, s.step) for a, m in program.forward_passes() if isinstance(a, Evaluate) for s in m.segments
    }
    assert looked == {(c.job, c.step + 2) for c in courses if len(c.batches) >= 2}
    for device in range(stages):
        saves = {(a.job, a.step) for a in of(program, device, Save)}
        begun = {(c.job, 0) for c in courses if c.begins_run}
        assert saves == begun | {(c.job, c.step + 1) for c in courses if c.batches}


def test_who_evaluates_where_it_begins_looks_and_saves_before_anybody_trains():
    new = course("new", [[5, 5]], 0, [6, 7], {0}, {0}, begins=True)
    old = course("old", [[5, 5]], 4)
    program = plan_pipeline([new, old], rules())
    assert program.batches == ()
    assert [m.jobs for m in program.microbatches] == [("new",)]
    for device in range(3):
        assert of(program, device, Save) == [Save("new", 0)]
        assert len(of(program, device, Evaluate)) == 1
        assert not of(program, device, Forward)


def test_who_waits_for_another_to_look_saves_where_it_begins_once_in_the_window_it_trains_in():
    """Twice the same step, and one rank may write the second checkpoint while another names the first."""
    looking = course("looking", [[5, 5]], 0, [6, 7], {0}, {0}, begins=True)
    waiting = course("waiting", [[5, 5]], 0, save_at={0}, begins=True)
    first = plan_pipeline([looking, waiting], rules())
    then = plan_pipeline([replace(looking, begins_run=False), waiting], rules())
    for device in range(3):
        assert of(first, device, Save) == [Save("looking", 0)]
        assert Save("waiting", 0) in of(then, device, Save)


def test_a_save_stands_between_its_step_and_the_next_on_every_device():
    program = plan_pipeline([course(j, [[9, 8], [7, 7], [5]], 0, save_at={1, 2}) for j in "ab"], rules())
    for actions in program.devices:
        for place, action in enumerate(actions):
            if isinstance(action, Save):
                assert actions[place - 1] == Step(action.job, action.step)


def test_one_job_is_cut_finer_than_it_must_be_since_that_fills_the_pipeline():
    whole = course("a", [[10, 10, 10, 10]] * 3)
    program = plan_pipeline([whole], rules(stages=4))
    assert len(of(program, 0, Forward)) > 3
    dear = StagePace(Line(1000.0, 1.0), Line(2000.0, 2.0))
    assert len(of(plan_pipeline([whole], rules(stages=4, pace=dear)), 0, Forward)) == 3


def test_with_as_many_equal_jobs_as_stages_hardly_anybody_waits_in_the_middle():
    courses = [course(str(i), [[10, 10]] * 12) for i in range(4)]
    program = plan_pipeline(courses, rules(stages=4, capacity=20))
    prices = [[(20.0, 40.0)] * 4 for _ in program.microbatches]
    timeline = simulate(program, stage_prices(prices), PricedCluster(4))
    assert max(timeline.bubbles(timeline.steady_span())) < 0.03


@pytest.mark.parametrize("order", PipelineOrder)
def test_jobs_that_end_inside_the_window_leave_the_others_to_go_on(order):
    courses = [course("long", [[9, 4]] * 4), course("short", [[8]], 7)]
    program = plan_pipeline(courses, rules(2, 20, order))
    assert [a for a in of(program, 1, Step) if a.job == "short"] == [Step("short", 8)]
    assert [a.step for a in of(program, 1, Step) if a.job == "long"] == [1, 2, 3, 4]


def test_two_jobs_of_few_tokens_fill_a_pipeline_with_smaller_microbatches_in_groups():
    courses = [course(job, [[30, 20, 10, 20]] * 4, 0) for job in "ab"]
    coarse = rules(4, 320)
    fine = replace(coarse, min_rows=20)
    plans = [plan_pipeline(courses, one) for one in (coarse, fine)]
    at_once, in_parts = (window_seconds(one, pace_prices(one.microbatches, coarse.paces)) for one in plans)
    assert in_parts < 0.9 * at_once


def test_passes_that_cost_mostly_fixed_time_are_not_made_smaller():
    courses = [course(job, [[30, 20, 10, 20]] * 4, 0) for job in "ab"]
    slow = StagePace(Line(1000.0, 1.0), Line(2000.0, 2.0))
    fine = replace(rules(4, 320, pace=slow), min_rows=20)
    assert max(one.rows for one in plan_pipeline(courses, fine).microbatches) == 80


@pytest.mark.parametrize("count", [2, 3])
def test_groups_whose_microbatches_alternate_keep_batches_and_their_order(count):
    courses = [course(job, [[5, 9, 7, 3]] * 3, 0) for job in "abc"]
    batches = [one.batches[turn] for turn in range(3) for one in courses]
    groups = (("a",), ("b", "c")) if count == 2 else (("a",), ("b",), ("c",))
    apart = divide_into_microbatches(batches, groups, 12, rules(), moves_samples=False)
    mixed = mix_groups(apart, groups)
    assert sorted(map(str, mixed.microbatches)) == sorted(
        str(one) for one in apart.microbatches if one.segments
    )
    assert mixed.microbatches != apart.microbatches
    for members in groups:
        own = [one for one in mixed.microbatches if one.jobs[0] in members]
        assert own == [one for one in apart.microbatches if one.segments and one.jobs[0] in members]
    first_jobs = [one.jobs[0] for one in mixed.microbatches[: 2 * count]]
    assert set(first_jobs) == {members[0] for members in groups}
    check(
        order_passes(
            PipelineOrder.multi_job, mixed, pace_prices(mixed.microbatches, (PACE,) * 3), groups, rules()
        )
    )
