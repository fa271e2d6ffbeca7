"""The checker accepts what the planner makes and refuses every way of breaking it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.works import work
from weftune.core.shapes import LayerRange
from weftune.plan.cost.time import Line
from weftune.plan.program.check import check
from weftune.plan.program.layout import one_device_layout, pipeline_layout
from weftune.plan.program.program import (
    Backward,
    BackwardHalf,
    Evaluate,
    Evict,
    Forward,
    ForwardHalf,
    GlobalBatch,
    IllegalProgram,
    Load,
    MicrobatchPlan,
    PlacedSample,
    Program,
    Recv,
    Reduce,
    Save,
    SegmentPlan,
    Send,
    Step,
    cut_sample,
)
from weftune.plan.window.orders import one_forward_one_backward
from weftune.plan.window.overlap import overlap_microbatches
from weftune.plan.window.pace import StagePace
from weftune.plan.window.pipeline import PipelineOrder
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import Pacing, plan_window


def placed(lengths):
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(
        PlacedSample(i, length, offset)
        for i, (length, offset) in enumerate(zip(lengths, offsets, strict=True))
    )


def course(job, batches, step=0, evaluation=(), evaluate_at=(), save_at=(), begins=False):
    made = tuple(
        GlobalBatch(job, step + 1 + i, placed(lengths), supervised_tokens=sum(lengths))
        for i, lengths in enumerate(batches)
    )
    return JobWindow(
        job, step, made, placed(evaluation), frozenset(evaluate_at), frozenset(save_at), begins_run=begins
    )


def two_jobs():
    return plan_window(
        [
            course(
                "a", [[5, 9, 3], [7, 2]], evaluation=[6, 4], evaluate_at={0, 2}, save_at={0, 2}, begins=True
            ),
            course("b", [[8, 8], [4], [10]], step=4),
        ],
        one_device_layout(),
        capacity=20,
    )


def test_a_planned_window_is_legal_and_mixes_jobs():
    program = two_jobs()
    check(program, {"a": 0, "b": 4})
    assert program.shared_count() >= 2
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
    program = plan_window(courses, one_device_layout(), 40 + room)
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
        case "a microbatch one row over capacity":
            return replace(program, capacity=max(one.rows for one in program.microbatches) - 1)
        case "padding one row over capacity":
            largest = max(program.microbatches, key=lambda one: one.tokens)
            padded = replace(largest, padded_rows=program.capacity + 1)
            return with_microbatch(program, program.microbatches.index(largest), padded)
        case "a sample left out":
            number = actions[first].microbatch
            segment = program.microbatches[number].segments[0]
            cut = MicrobatchPlan((replace(segment, samples=segment.samples[1:]),))
            return with_microbatch(program, number, cut)
        case "one sample twice and another never":
            number = actions[first].microbatch
            held = program.microbatches[number].segments
            one = next(segment for segment in held if len(segment.samples) > 1)
            twice = replace(one, samples=(one.samples[1], *one.samples[1:]))
            return with_microbatch(
                program, number, MicrobatchPlan(tuple(twice if s is one else s for s in held))
            )
        case "a batch that nobody planned":
            return replace(program, batches=program.batches[:-1])
        case "a wrong offset in the batch":
            batch = program.batches[0]
            moved = replace(batch, samples=(replace(batch.samples[0], offset=1), *batch.samples[1:]))
            return replace(program, batches=(moved, *program.batches[1:]))
        case "a wrong offset in batch and segments alike":
            return shifted(program, program.batches[-1])
        case "an Evaluate twice":
            once = next(a for a in actions if isinstance(a, Evaluate))
            actions.insert(actions.index(once), once)
        case "held-out samples evaluated by two microbatches":
            once = next(a for a in actions if isinstance(a, Evaluate))
            actions.insert(actions.index(once), Evaluate(len(program.microbatches)))
            again = program.microbatches[once.microbatch]
            program = replace(program, microbatches=(*program.microbatches, again))
        case "two segments of one job":
            number = actions[first].microbatch
            held = program.microbatches[number].segments
            one = next(segment for segment in held if len(segment.samples) > 1)
            halves = replace(one, samples=one.samples[:1]), replace(one, samples=one.samples[1:])
            others = tuple(segment for segment in held if segment is not one)
            return with_microbatch(program, number, MicrobatchPlan((*halves, *others)))
        case "a microbatch that never runs":
            return replace(program, microbatches=(*program.microbatches, program.microbatches[0]))
        case "a Step twice":
            actions.append(Step("b", 7))
        case "a Step that no batch asks for":
            actions.append(Step("b", 8))
    return replace(program, devices=(tuple(actions),))


def with_microbatch(program, number, microbatch):
    held = list(program.microbatches)
    held[number] = microbatch
    return replace(program, microbatches=tuple(held))


def shifted(program, batch):
    """The batch's samples stand one token further on, in the batch and in the segments that train it."""

    def moved(one):
        if (one.job, one.step) != (batch.job, batch.step):
            return one
        return replace(one, samples=tuple(replace(s, offset=s.offset + 1) for s in one.samples))

    return replace(
        program,
        batches=tuple(map(moved, program.batches)),
        microbatches=tuple(
            replace(one, segments=tuple(map(moved, one.segments))) for one in program.microbatches
        ),
    )


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (
            "a Step before its Backward",
            r"Step\(job='a', step=1\) comes before the last Backward of its batch",
        ),
        ("a Backward without its Forward", r"the samples of \('a', 1\) are not trained exactly once each"),
        ("a Forward twice", r"the samples of \('a', 1\) are not trained exactly once each"),
        ("a Backward left out", r"Step\(job='a', step=1\) comes before the last Backward of its batch"),
        ("the next batch before the Step", r"Forward\(microbatch=\d, stage=0\): b is only at step 4"),
        ("a Save of a step not made", r"Save\(job='a', step=2\): a is at step 0"),
        ("an evaluation too early", r"Evaluate\(microbatch=\d, stage=0\): a is at step 0"),
        ("a microbatch one row over capacity", r"microbatch 1 has 20 rows, more than 19"),
        ("padding one row over capacity", r"microbatch \d has 21 rows, more than 20"),
        ("a sample left out", r"the samples of \('a', 1\) are not trained exactly once each"),
        (
            "one sample twice and another never",
            r"the samples of \('a', 1\) are not trained exactly once each",
        ),
        ("a batch that nobody planned", "the batches trained are not the batches planned"),
        ("a wrong offset in the batch", r"the samples of \('a', 1\) are not trained exactly once each"),
        ("a wrong offset in batch and segments alike", r"sample 0 of \('b', 7\) has the wrong offset"),
        ("an Evaluate twice", r"Evaluate\(microbatch=0, stage=0\) runs a microbatch a second time"),
        ("held-out samples evaluated by two microbatches", "sample 0 of a is evaluated twice at step 0"),
        ("two segments of one job", r"microbatch 1 holds two segments of one job: \('\w', '\w'"),
        ("a microbatch that never runs", "a microbatch is never run$"),
        ("a Step twice", r"Step\(job='b', step=7\) comes before the last Backward of its batch"),
        ("a Step that no batch asks for", r"Step\(job='b', step=8\) comes before the last Backward"),
    ],
)
def test_the_checker_refuses(how, sentence):
    program, done = two_jobs(), {"a": 0, "b": 4}
    check(program, done)
    with pytest.raises(IllegalProgram, match=sentence):
        check(broken(program, how), done)


def test_a_microbatch_may_fill_the_capacity_to_the_last_row():
    program = two_jobs()
    check(replace(program, capacity=max(one.rows for one in program.microbatches)), {"a": 0, "b": 4})


def test_a_job_may_not_skip_a_batch_at_the_seam():
    program = plan_window([course("a", [[3]], step=4)], one_device_layout(), 10)
    check(program, {"a": 4})
    with pytest.raises(IllegalProgram, match="a is only at step 3"):
        check(program, {"a": 3})


def swapped(program, device, one, other):
    """The two actions of a device change places."""
    actions = list(program.devices[device])
    i, j = actions.index(one), actions.index(other)
    actions[i], actions[j] = actions[j], actions[i]
    return with_list(program, device, actions)


def with_list(program, device, actions):
    return replace(
        program, devices=(*program.devices[:device], tuple(actions), *program.devices[device + 1 :])
    )


def left_out(program, device, *gone):
    return with_list(program, device, [one for one in program.devices[device] if one not in gone])


def moved_before(program, device, one, other):
    actions = [action for action in program.devices[device] if action != one]
    actions.insert(actions.index(other), one)
    return with_list(program, device, actions)


def pipeline():
    """Two stages, two jobs of two microbatches: job0 has 0 and 1, job1 has 2 and 3, then again."""
    return one_forward_one_backward(work(jobs=2, steps=2, microbatches=2), 2)


ACTIVATION = (0, 1, "activation")
GRADIENT = (0, 0, "gradient")


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (
            lambda p: swapped(p, 1, Recv(*ACTIVATION, 0), Forward(0, 1)),
            "before its activation",
        ),
        (lambda p: swapped(p, 0, Recv(*GRADIENT, 1), Backward(0, 0)), "before its gradient"),
        (lambda p: swapped(p, 0, Forward(0, 0), Send(*ACTIVATION, 1)), "before what it sends"),
        (lambda p: swapped(p, 0, Send(0, 1, "activation", 1), Send(1, 1, "activation", 1)), "before what"),
        (lambda p: left_out(p, 1, Recv(*ACTIVATION, 0), Forward(0, 1)), "no Forward before it"),
        (
            lambda p: with_list(p, 1, (*p.devices[1], Forward(0, 1))),
            r"Forward\(microbatch=0, stage=1\) runs a microbatch a second time",
        ),
        (lambda p: left_out(p, 0, Send(*ACTIVATION, 1)), "differ in their order|waits forever"),
        (lambda p: left_out(p, 0, Send(7, 1, "activation", 1)), "waits forever"),
        (lambda p: left_out(p, 1, Step("job0", 1)), "only at step"),
        (lambda p: left_out(p, 1, Step("job1", 2)), "left over"),
        (lambda p: replace(p, devices=(*p.devices, (Forward(0, 1),))), "does not live on device 2"),
        (
            lambda p: left_out(p, 1, *(a for a in p.devices[1] if getattr(a, "microbatch", 0) == 7)),
            "Backward",
        ),
        (lambda p: with_list(p, 0, (*p.devices[0], Recv(0, 0, "gradient", 1))), "never used"),
        (lambda p: with_list(p, 0, (*p.devices[0], Send(*ACTIVATION, 1))), "second time"),
        (lambda p: with_list(p, 0, (Evict(0), *p.devices[0])), "not loaded"),
        (lambda p: with_list(p, 0, (*p.devices[0], Evict(0))), "other stages than it began"),
        (lambda p: with_list(p, 0, (Load(0), *p.devices[0])), "other stages than it began"),
        (lambda p: with_list(p, 0, (*p.devices[0], Evict(0), Evict(0))), "not there"),
        (lambda p: with_list(p, 1, (Load(0), *p.devices[1])), "does not live on device 1"),
    ],
)
def test_the_checker_refuses_in_a_pipeline(break_it, sentence):
    program = pipeline()
    check(program)
    with pytest.raises(IllegalProgram, match=sentence):
        check(break_it(program))


def test_devices_that_wait_for_each_other_are_refused():
    """Device 0 would send the last activation only after a gradient that device 1 makes from it."""
    program = one_forward_one_backward(work(jobs=1, steps=1, microbatches=1), 2)
    forward, send, receive, backward, *rest = program.devices[0]
    with pytest.raises(IllegalProgram) as refused:
        check(with_list(program, 0, (forward, receive, backward, send, *rest)))
    assert str(refused.value) == (
        f"device 0 waits forever at {receive} for device 1, which waits at {program.devices[1][0]} for "
        f"device 0, which waits at {receive}"
    )


@settings(max_examples=40, deadline=None)
@given(
    stages=st.integers(1, 4),
    replicas=st.integers(1, 3),
    shards=st.sampled_from([1, 2, 4]),
    order=st.sampled_from([None, *PipelineOrder]),
    jobs=st.lists(st.lists(lengths, min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_no_planned_window_of_stages_replicas_and_shards_makes_devices_wait_forever(
    stages, replicas, shards, order, jobs
):
    if stages * replicas == 1:
        return
    layers = [LayerRange(stage, stage + 1, stages) for stage in range(stages)]
    pace = StagePace(Line(0.0, 1.0), Line(0.0, 2.0))
    planned = plan_window(
        [course(str(number), batches) for number, batches in enumerate(jobs)],
        pipeline_layout(layers, replicas, shards),
        64,
        pacing=Pacing((pace,) * stages, order if replicas == 1 else None),
    )
    check(planned)
    assert len(planned.devices) == stages * replicas, "shards of a device have one list"


def test_a_device_that_waits_for_one_that_has_ended_is_refused():
    layers = [LayerRange(0, 1, 2), LayerRange(1, 2, 2)]
    only_evaluates = course("a", [], evaluation=[3], evaluate_at={0}, begins=True)
    program = plan_window([only_evaluates], pipeline_layout(layers), 10)
    send = next(one for one in program.devices[0] if isinstance(one, Send))
    with pytest.raises(
        IllegalProgram, match=r"at Recv.* for device 0, which has reached the end of its list"
    ):
        check(left_out(program, 0, send))


def test_the_first_device_steps_at_once_and_the_others_right_before_the_next_forward():
    program = pipeline()
    for device, actions in enumerate(program.devices):
        for place, action in enumerate(actions):
            if isinstance(action, Step):
                before, after = actions[place - 1], (*actions, None)[place + 1]
                if device == 0:
                    assert before == Reduce(action.job, action.step)
                else:
                    assert after is None or isinstance(after, Step | Recv | Forward)


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda p: left_out(p, 0, Reduce("job0", 1)), "comes before its Reduce"),
        (lambda p: left_out(p, 1, Reduce("job0", 1)), "comes before its Reduce"),
        (lambda p: with_list(p, 1, (Reduce("job0", 1), *p.devices[1])), "before the last Backward"),
        (lambda p: with_list(p, 1, (*p.devices[1], Reduce("job1", 2))), "a second time"),
        (lambda p: moved_before(p, 0, Reduce("job0", 1), Backward(1, 0)), "before the last Backward"),
    ],
)
def test_the_checker_refuses_what_breaks_the_word_between_devices(break_it, sentence):
    program = pipeline()
    check(program)
    with pytest.raises(IllegalProgram, match=sentence):
        check(break_it(program))


def test_a_step_that_holds_up_what_it_waits_for_is_refused():
    """Device 1 would send the gradient only after a Step for which device 0 needs that gradient."""
    program = one_forward_one_backward(work(jobs=1, steps=1, microbatches=1), 2)
    receive, forward, backward, send, reduce, step = program.devices[1]
    with pytest.raises(IllegalProgram, match=r"at Recv.* for device 1, which waits at Step.* for device 0"):
        check(with_list(program, 1, (receive, forward, backward, reduce, step, send)))


def test_arrivals_in_another_order_than_they_were_sent_are_refused():
    program = pipeline()
    other = swapped(program, 1, Recv(2, 1, "activation", 0), Recv(3, 1, "activation", 0))
    other = swapped(other, 1, Forward(2, 1), Forward(3, 1))
    other = swapped(other, 1, Backward(2, 1), Backward(3, 1))
    other = swapped(other, 1, Send(2, 0, "gradient", 0), Send(3, 0, "gradient", 0))
    with pytest.raises(IllegalProgram, match="differ in their order"):
        check(other)


def test_a_streamed_stage_is_used_between_its_load_and_its_evict():
    program = plan_window([course("a", [[3, 4]])], one_device_layout(), 10)
    forward, backward, step = program.actions
    streamed = (Load(0), forward, Evict(0), Load(0), backward, Evict(0), step)
    check(replace(program, devices=(streamed,)))
    for missing, sentence in (
        (0, "ends with other stages than it began with"),
        (3, "Backward.* uses a stage that is not loaded"),
    ):
        without = tuple(one for place, one in enumerate(streamed) if place != missing)
        with pytest.raises(IllegalProgram, match=sentence):
            check(replace(program, devices=(without,)))


def test_a_stage_that_was_there_before_may_be_evicted_if_it_returns():
    program = plan_window([course("a", [[3, 4]])], one_device_layout(), 10)
    forward, backward, step = program.actions
    check(replace(program, devices=((forward, Evict(0), Load(0), backward, step),)))


def test_a_load_of_a_stage_that_is_already_there_is_refused():
    program = plan_window([course("a", [[3, 4]])], one_device_layout(), 10)
    twice = (Load(0), Load(0), *program.actions, Evict(0))
    with pytest.raises(IllegalProgram, match=r"Load\(stage=0\) brings a stage that is already there"):
        check(replace(program, devices=(twice,)))


def in_chunks(*actions):
    """One sample of three chunks, each a microbatch of its own."""
    sample = PlacedSample(0, 12, 0, supervised_tokens=7)
    chunks = cut_sample(sample, 4)
    assert [one.length for one in chunks] == [4, 4, 4]
    microbatches = tuple(MicrobatchPlan((SegmentPlan("a", 1, (chunk,)),)) for chunk in chunks)
    batches = (GlobalBatch("a", 1, (sample,), 7),)
    return Program(4, microbatches, batches, ((*actions, Step("a", 1)),))


FORTH = Forward(0), Forward(1), Forward(2)
BACK = Backward(2), Backward(1), Backward(0)


def test_chunks_of_a_sample_go_forth_in_order_and_back_in_the_opposite_one():
    check(in_chunks(*FORTH, *BACK))


@pytest.mark.parametrize(
    ("actions", "sentence"),
    [
        ((Forward(1), Forward(0), Forward(2), *BACK), r"Forward\(microbatch=1, .* sample 0 out of order"),
        ((Forward(0), Forward(2), Forward(1), *BACK), r"Forward\(microbatch=2, .* sample 0 out of order"),
        ((*FORTH, Backward(2), Backward(0), Backward(1)), r"Backward\(microbatch=0, .* out of order"),
        ((*FORTH, Backward(0), Backward(1), Backward(2)), r"Backward\(microbatch=0, .* out of order"),
        (
            (Forward(0), Forward(1), Backward(1), Forward(2), Backward(2), Backward(0)),
            r"Forward\(microbatch=2, .* out of order",
        ),
    ],
)
def test_chunks_out_of_order_are_refused(actions, sentence):
    with pytest.raises(IllegalProgram, match=sentence):
        check(in_chunks(*actions))


def test_a_chunk_shares_its_microbatch_with_no_other_sample():
    whole = replace(in_chunks(*FORTH, *BACK))
    last = whole.microbatches[2].segments[0]
    other = PlacedSample(1, 2, 12)
    shared = MicrobatchPlan((replace(last, samples=(*last.samples, other)),))
    batch = replace(whole.batches[0], samples=(*whole.batches[0].samples, other))
    changed = replace(whole, capacity=6, microbatches=(*whole.microbatches[:2], shared), batches=(batch,))
    with pytest.raises(IllegalProgram, match="runs a chunk together with other samples"):
        check(changed)


def test_a_sample_with_a_missing_chunk_is_refused():
    whole = in_chunks(*FORTH, *BACK)
    actions = (Forward(0), Forward(1), Backward(1), Backward(0), Step("a", 1))
    with pytest.raises(IllegalProgram, match="are not trained exactly once each"):
        check(replace(whole, microbatches=whole.microbatches[:2], devices=(actions,)))


def on_one_device(*actions):
    """One microbatch through three stages of one device."""
    sample = (PlacedSample(0, 4, 0),)
    microbatches = (MicrobatchPlan((SegmentPlan("a", 1, sample),)),)
    batches = (GlobalBatch("a", 1, sample, 4),)
    return Program(4, microbatches, batches, ((*actions, Step("a", 1)),), stages=(0, 0, 0))


def test_several_stages_of_one_device_hand_on_to_each_other_without_a_message():
    there = [Forward(0, stage) for stage in range(3)]
    back = [Backward(0, stage) for stage in (2, 1, 0)]
    check(on_one_device(*there, *back))
    with pytest.raises(IllegalProgram, match=r"Forward\(microbatch=0, stage=2\) comes before its activation"):
        check(on_one_device(there[0], there[2], there[1], *back))
    with pytest.raises(IllegalProgram, match=r"Backward\(microbatch=0, stage=0\) comes before its gradient"):
        check(on_one_device(*there, back[0], back[2], back[1]))
    with pytest.raises(IllegalProgram, match="goes to its own device"):
        check(on_one_device(there[0], Send(0, 1, "activation", 0), *there[1:], *back))


def test_of_several_jobs_evaluated_together_each_must_be_at_its_step():
    courses = [course(job, [], evaluation=[3], evaluate_at={0}, begins=True) for job in ("a", "b")]
    program = plan_window(courses, one_device_layout(), 10)
    assert [one.jobs for one in program.microbatches] == [("a", "b")]
    check(program, {"a": 0, "b": 0})
    with pytest.raises(IllegalProgram, match=r"Evaluate\(microbatch=0, stage=0\): b is at step 1"):
        check(program, {"a": 0, "b": 1})


def replaced(program, device, one, *others):
    actions = list(program.devices[device])
    place = actions.index(one)
    actions[place : place + 1] = others
    return with_list(program, device, actions)


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (
            lambda p: replaced(p, 0, Send(*ACTIVATION, 1), Send(*ACTIVATION, 2)),
            r"Send\(.* peer=2\) goes to a device without that stage",
        ),
        (
            lambda p: replaced(p, 0, Send(*ACTIVATION, 1), Send(0, 3, "activation", 1)),
            r"Send\(.* stage=3, .*\) comes before what it sends is computed",
        ),
        (
            lambda p: with_list(p, 2, (*p.devices[2], Send(0, 3, "activation", 0))),
            r"Send\(.* stage=3, .*\) goes to a device without that stage",
        ),
        (
            lambda p: with_list(p, 0, (*p.devices[0], Send(0, -1, "gradient", 2))),
            r"Send\(.* stage=-1, .*\) goes to a device without that stage",
        ),
        (
            lambda p: replaced(p, 1, Recv(*ACTIVATION, 0), Recv(*ACTIVATION, 2)),
            r"Recv\(.* peer=2\) comes from a device without the stage before it",
        ),
        (
            lambda p: replaced(p, 1, Recv(*ACTIVATION, 0), Recv(0, 2, "activation", 1)),
            r"Recv\(.* stage=2, .*\) is of a stage that does not live on device 1",
        ),
        (
            lambda p: replaced(p, 1, Recv(*ACTIVATION, 0), *[Recv(*ACTIVATION, 0)] * 2),
            r"Recv\(.*\) is received a second time",
        ),
        (
            lambda p: replaced(p, 1, Reduce("job0", 1), Reduce("job0", 1, "gradient"), Reduce("job0", 1)),
            r"Reduce\(.* payload='gradient'\) has no replica to hand its gradient to",
        ),
    ],
)
def test_the_checker_refuses_messages_that_go_astray(break_it, sentence):
    program = one_forward_one_backward(work(jobs=2, steps=2, microbatches=2), 3)
    check(program)
    with pytest.raises(IllegalProgram, match=sentence):
        check(break_it(program))


def overlapping(jobs=2, steps=1):
    """Microbatches 0 and 1 are of job0 and take turns at half layers, and so do 2 and 3."""
    return overlap_microbatches(one_forward_one_backward(work(jobs, steps, microbatches=2), 1), layers=1)


def as_chunk(program, number):
    microbatch = program.microbatches[number]
    (segment,) = microbatch.segments
    whole = cut_sample(segment.samples[0], 1)
    return with_microbatch(program, number, replace(microbatch, segments=(replace(segment, samples=whole),)))


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda p: left_out(p, 0, ForwardHalf(0, 0, 1)), r"^Forward\(.*comes after 1 of 2 half layers"),
        (lambda p: swapped(p, 0, ForwardHalf(0, 0, 0), ForwardHalf(0, 0, 1)), "is out of order: 0 half"),
        (lambda p: with_list(p, 0, (p.actions[0], *p.actions)), "is out of order: 1 half layers have run"),
        (lambda p: moved_before(p, 0, Forward(0), ForwardHalf(0, 0, 1)), "comes after 1 of 2 half layers"),
        (lambda p: with_list(p, 0, (*p.actions, ForwardHalf(0, 0, 1))), "comes after its Forward"),
        (lambda p: swapped(p, 0, BackwardHalf(0, 0, 0), BackwardHalf(0, 0, 1)), "is out of order: 0 half"),
        (lambda p: moved_before(p, 0, BackwardHalf(0, 0, 1), Forward(0)), "has no Forward before it"),
        (lambda p: left_out(p, 0, BackwardHalf(0, 0, 0)), r"^Backward\(.*comes after 1 of 2 half layers"),
        (
            lambda p: left_out(p, 0, BackwardHalf(0, 0, 0), BackwardHalf(0, 0, 1)),
            "comes after 0 of 2 half layers",
        ),
        (
            lambda p: left_out(p, 0, ForwardHalf(0, 0, 0), ForwardHalf(0, 0, 1)),
            "has no half layers before it",
        ),
        (lambda p: replace(p, half_layer_count=4), "comes after 2 of 4 half layers"),
        (lambda p: replace(p, half_layer_count=0), "is out of order"),
        (
            lambda p: moved_before(p, 0, ForwardHalf(2, 0, 0), Backward(0)),
            "makes three overlapping microbatches in flight",
        ),
        (lambda p: as_chunk(p, 0), "runs a part of a chunk"),
        (lambda p: with_list(p, 0, (Evict(0), *p.actions)), "uses a stage that is not loaded"),
    ],
)
def test_the_checker_refuses_half_layers(break_it, sentence):
    program = overlapping()
    check(program)
    with pytest.raises(IllegalProgram, match=sentence):
        check(break_it(program))


def test_a_half_layer_may_not_come_before_the_step_of_the_batch_before():
    program = overlapping(jobs=1, steps=2)
    check(program)
    early = moved_before(program, 0, ForwardHalf(2, 0, 0), Step("job0", 1))
    with pytest.raises(IllegalProgram, match=r"ForwardHalf\(.*: job0 is only at step 0"):
        check(early)


def test_half_layers_are_not_left_to_the_next_window():
    program = overlapping()
    rest = (Forward(3), BackwardHalf(3, 0, 1), BackwardHalf(3, 0, 0), Backward(3), Step("job1", 1))
    with pytest.raises(IllegalProgram, match="half layers are left over"):
        check(replace(left_out(program, 0, *rest), hands_over=True))


def test_a_stage_that_sends_its_output_has_no_half_layers():
    program = with_list(pipeline(), 0, (ForwardHalf(0, 0, 0), *pipeline().devices[0]))
    with pytest.raises(IllegalProgram, match="needs all layers in one stage of one replica"):
        check(program)
