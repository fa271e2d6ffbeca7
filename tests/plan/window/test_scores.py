"""Samples are scored once, before any batch, in every layout, and other jobs train in the same window."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.program.test_check import course, placed
from tests.plan.window.test_streamed import cuts
from weftune.plan.cost.time import Line
from weftune.plan.program.check import check
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.prices import PricedCluster
from weftune.plan.program.program import (
    Backward,
    Evaluate,
    Forward,
    ForwardPass,
    IllegalProgram,
    Reduce,
    Score,
    Send,
    Step,
)
from weftune.plan.program.simulate import simulate
from weftune.plan.window.pace import EVALUATION_SHARE, WINDOW_SECONDS, StagePace, WindowPace, pace_prices
from weftune.plan.window.pace import shorten_windows as cut_windows
from weftune.plan.window.pipeline import PipelineRules, plan_pipeline
from weftune.plan.window.window import plan_window

LENGTHS = st.lists(st.integers(1, 40), max_size=8)
PACE = StagePace(Line(0.0, 1.0), Line(0.0, 2.0))


@st.composite
def windows(draw):
    """Windows of jobs that are scored, and of jobs that train."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        step = draw(st.integers(0, 3))
        if scored := draw(LENGTHS):
            found.append(replace(course(f"job{number}", [], step), scored_samples=placed(scored)))
        else:
            batches = draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), max_size=3))
            found.append(course(f"job{number}", batches, step, [5], {step, step + 1}, begins=step == 0))
    return found


def scored_samples(program):
    return sorted(
        (segment.job, segment.step, one.sample, one.length)
        for action, plan in program.forward_passes()
        if isinstance(action, Score)
        for segment in plan.segments
        for one in segment.samples
    )


def requested(windows):
    return sorted(
        (one.job, one.step, sample.sample, sample.length) for one in windows for sample in one.scored_samples
    )


@settings(max_examples=100, deadline=None)
@given(windows(), cuts(), st.integers(0, 60))
def test_every_sample_is_scored_once_with_a_resident_or_a_streamed_base(jobs, chosen, room):
    for layout in (one_device_layout(), chosen):
        program = plan_window(jobs, layout, 40 + room)
        assert scored_samples(program) == requested(jobs)


@settings(max_examples=60, deadline=None)
@given(windows(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 60))
def test_every_sample_is_scored_once_in_a_pipeline_before_any_training(jobs, stages, replicas, room):
    program = plan_pipeline(jobs, PipelineRules(40 + room, (PACE,) * stages, replicas=replicas))
    assert scored_samples(program) == requested(jobs)
    for actions in program.devices:
        passes = [type(one) for one in actions if isinstance(one, Score | Forward | Backward | Evaluate)]
        assert Score not in passes[passes.count(Score) :]


def test_samples_of_several_jobs_are_scored_in_one_microbatch_while_another_job_trains():
    jobs = [replace(course(name, []), scored_samples=placed([5, 4])) for name in "ab"] + [
        course("c", [[9]], 7)
    ]
    program = plan_window(jobs, one_device_layout(), 20)
    assert [type(action).__name__ for action in program.actions] == ["Score", "Forward", "Backward", "Step"]
    assert program.microbatches[0].jobs == ("a", "b")


def test_a_window_scores_what_fits_its_seconds_and_at_least_one_sample():
    jobs = [replace(course(name, []), scored_samples=placed([5] * 6)) for name in "ab"]
    of_eight = WindowPace(WINDOW_SECONDS / EVALUATION_SHARE / 40)
    assert [len(one.scored_samples) for one in cut_windows(jobs, of_eight)] == [6, 2]
    assert [len(one.scored_samples) for one in cut_windows(jobs, WindowPace(1e9))] == [1, 0]
    assert [len(one.scored_samples) for one in cut_windows(jobs, WindowPace())] == [6, 6]


def test_a_score_is_priced_as_a_forward_that_keeps_nothing():
    job = replace(course("a", []), scored_samples=placed([20, 30]))
    program = plan_pipeline([job], PipelineRules(30, (PACE,) * 2))
    assert sum(isinstance(one, Send) for one in program.devices[0]) == 2
    prices = pace_prices(program.microbatches, (PACE,) * 2)
    timeline = simulate(program, prices, PricedCluster(2))
    as_evaluation = replace(
        program,
        devices=tuple(
            tuple(Evaluate(one.microbatch, one.stage) if isinstance(one, Score) else one for one in actions)
            for actions in program.devices
        ),
    )
    expected = simulate(as_evaluation, prices, PricedCluster(2))
    assert timeline.makespan == expected.makespan > 0
    assert timeline.memory == expected.memory


def test_a_sample_scored_twice_or_at_another_step_is_found():
    job = replace(course("a", [], step=2), scored_samples=placed([5]))
    program = plan_window([job], one_device_layout(), 10)
    with pytest.raises(IllegalProgram, match="a is at step 1"):
        check(program, {"a": 1})
    twice = replace(program, microbatches=program.microbatches * 2, devices=((*program.actions, Score(1)),))
    with pytest.raises(IllegalProgram, match="sample 0 of a is scored twice at step 2"):
        check(twice, {"a": 2})


# -- mismatched samples -----------------------------------------------------------------------------------


@st.composite
def mismatched_windows(draw):
    """Windows of jobs that train, some of them with samples that are scored before each batch and before each
    evaluation."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        step = draw(st.integers(0, 3))
        batches = draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=3))
        job = course(f"job{number}", batches, step, [5, 7], {step, step + 2}, begins=step == 0)
        if draw(st.booleans()):
            own = [replace(one, mismatched=placed([10] * len(one.samples))) for one in job.batches]
            held_out = tuple(replace(one, sample=one.sample + 100) for one in placed([9, 9]))
            job = replace(job, batches=tuple(own), mismatched=held_out)
        found.append(job)
    return found


def assert_scored_in_time(program, jobs, last):
    """Check that all mismatched samples of a batch or an evaluation were scored before it on the device that
    computes losses, after the step before it."""
    by_name = {one.job: one for one in jobs}
    step, scored = {one.job: one.step for one in jobs}, {}
    for action in program.devices[last]:
        if isinstance(action, Step):
            step[action.job] = action.step
        if not isinstance(action, ForwardPass) or action.stage != len(program.stages) - 1:
            continue
        for segment in program.microbatches[action.microbatch].segments:
            job = by_name[segment.job]
            if isinstance(action, Score):
                found = scored.setdefault((segment.job, segment.step), set())
                found |= {one.sample for one in segment.samples}
                assert segment.step == step[segment.job]
            elif isinstance(action, Forward):
                wanted = {one.sample for one in program.batch(segment.job, segment.step).mismatched}
                assert wanted <= scored.get((segment.job, segment.step - 1), set())
            elif isinstance(action, Evaluate):
                wanted = {one.sample for one in job.mismatched}
                assert wanted <= scored.get((segment.job, segment.step), set())


@settings(max_examples=100, deadline=None)
@given(mismatched_windows(), cuts(), st.integers(0, 60))
def test_mismatched_samples_are_scored_before_their_batch_and_before_evaluations(jobs, chosen, room):
    for layout in (one_device_layout(), chosen):
        program = plan_window(jobs, layout, 40 + room)
        assert_scored_in_time(program, jobs, layout.stage_workers[-1])
        if layout == one_device_layout():
            assert len(program.batches) == sum(len(one.batches) for one in jobs)


@settings(max_examples=60, deadline=None)
@given(mismatched_windows(), st.integers(1, 3), st.integers(0, 60))
def test_mismatched_samples_are_scored_in_time_in_a_pipeline(jobs, stages, room):
    program = plan_pipeline(jobs, PipelineRules(40 + room, (PACE,) * stages))
    assert_scored_in_time(program, jobs, stages - 1)


def test_a_window_of_a_pipeline_holds_several_batches_with_mismatched_samples():
    kto = course("a", [[9, 8], [7, 6], [5, 4]])
    kto = replace(kto, batches=tuple(replace(one, mismatched=placed([9, 9])) for one in kto.batches))
    program = plan_pipeline([kto, course("b", [[30]] * 4)], PipelineRules(40, (PACE,) * 2))
    assert [(one.job, one.step) for one in program.batches] == [
        *(("a", 1), ("b", 1), ("a", 2), ("b", 2)),
        *(("a", 3), ("b", 3), ("b", 4)),
    ]
    own = [one for one in program.devices[1] if isinstance(one, Score | Step)]
    before = [one.step for one in own if isinstance(one, Step) and one.job == "a"]
    assert [type(one) for one in own if not isinstance(one, Step) or one.job == "a"] == [Score, Step] * 3
    assert before == [1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(mismatched_windows(), st.integers(1, 3), st.integers(2, 3), st.integers(0, 60))
def test_replicas_exchange_their_scores_before_the_losses_that_need_them(jobs, stages, replicas, room):
    program = plan_pipeline(jobs, PipelineRules(40 + room, (PACE,) * stages, replicas=replicas))
    scored = {
        (segment.job, segment.step)
        for action, plan in program.forward_passes()
        if isinstance(action, Score)
        for segment in plan.segments
    }
    wanted = {Reduce(*key, payload) for key in scored for payload in ("scores", "kl")}
    for device, actions in enumerate(program.devices):
        found = [one for one in actions if isinstance(one, Reduce) and one.payload in ("scores", "kl")]
        assert len(found) == len(set(found))
        assert set(found) == (wanted if device % stages == stages - 1 else set())
    simulate(
        program, pace_prices(program.microbatches, (PACE,) * stages), PricedCluster(len(program.devices))
    )


def without(program, device, removed):
    lists = list(program.devices)
    lists[device] = tuple(one for one in lists[device] if one != removed)
    return replace(program, devices=tuple(lists))


def swapped(program, device, first, second):
    other = {first: second, second: first}
    lists = list(program.devices)
    lists[device] = tuple(other.get(one, one) for one in lists[device])
    return replace(program, devices=tuple(lists))


def test_an_exchange_of_scores_that_is_missing_or_out_of_order_is_found():
    kto = course("a", [[9, 8]])
    kto = replace(kto, batches=(replace(kto.batches[0], mismatched=placed([9, 9])),))
    program = plan_pipeline([kto], PipelineRules(20, (PACE,), replicas=2))
    sent, added = Reduce("a", 0, "scores"), Reduce("a", 0, "kl")
    score = next(one for one in program.devices[1] if isinstance(one, Score))
    wrong = {
        "before the scores of a in all replicas are known": without(program, 1, added),
        "before the other replicas were sent the scores": without(program, 1, sent),
        "before the last Score of this replica": swapped(program, 1, score, sent),
    }
    for sentence, tampered in wrong.items():
        with pytest.raises(IllegalProgram, match=sentence):
            check(tampered, {"a": 0})
    alone = plan_pipeline([course("b", [[9, 8]])], PipelineRules(20, (PACE,), replicas=2))
    with pytest.raises(IllegalProgram, match="replicas exchange different scores"):
        check(replace(alone, devices=((sent, added, *alone.devices[0]), alone.devices[1])), {"b": 0})
