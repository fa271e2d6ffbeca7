"""Replicas of a pipeline share every batch, evenly, and none of their lists can wait for another forever."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.program.test_check import course
from weftune.plan.cost.time import Line
from weftune.plan.pack.merge import BatchSample
from weftune.plan.program.check import check
from weftune.plan.program.prices import Link, PassPrice, PricedCluster, Prices
from weftune.plan.program.program import Backward, Evaluate, Forward, IllegalProgram, Reduce, Save, Send, Step
from weftune.plan.program.simulate import simulate
from weftune.plan.window.pace import StagePace, predict_timeline
from weftune.plan.window.pipeline import PipelineRules, plan_pipeline
from weftune.plan.window.replicas import distribute_samples

PACE = StagePace(Line(0.0, 1.0), Line(0.0, 2.0))


def rules(stages=2, replicas=2, capacity=40, spare=1, pace=PACE):
    return PipelineRules(capacity, (pace,) * stages, spare_microbatches=spare, replicas=replicas)


def of(program, device, kind):
    return [action for action in program.devices[device] if isinstance(action, kind)]


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@settings(max_examples=120, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.lists(lengths, max_size=4), lengths, st.integers(0, 9)), min_size=1, max_size=5
    ),
    room=st.integers(0, 60),
    stages=st.integers(1, 3),
    replicas=st.integers(2, 4),
    fixed=st.floats(0.0, 50.0),
    spare=st.integers(0, 2),
)
def test_every_window_of_replicas_is_legal_and_trains_the_same_batches_as_one_pipeline(
    jobs, room, stages, replicas, fixed, spare
):
    courses = [
        course(str(i), batches, step, held_out, {step + 2}, {step, step + 1}, begins=step == 0)
        for i, (batches, held_out, step) in enumerate(jobs)
    ]
    pace = StagePace(Line(fixed, 1.0), Line(fixed, 2.0))
    program = plan_pipeline(courses, rules(stages, replicas, 40 + room, spare, pace))
    check(program, {c.job: c.step for c in courses})
    check(program.without("0"), {c.job: c.step for c in courses})
    alone = plan_pipeline(courses, rules(stages, 1, 40 + room, spare, pace))
    assert program.batches == alone.batches
    looked, wanted = (
        Counter(
            (s.job, s.step, placed)
            for action, plan in one.forward_passes()
            if isinstance(action, Evaluate)
            for s in plan.segments
            for placed in s.samples
        )
        for one in (program, alone)
    )
    assert looked == wanted
    steps = {(one.job, one.step) for one in program.batches}
    for device in range(len(program.devices)):
        assert {(a.job, a.step) for a in of(program, device, Step)} == steps
        assert bool(of(program, device, Save)) == (device < stages and bool(of(alone, 0, Save)))
    for stage in range(stages):
        orders = {
            tuple(one for one in of(program, device, Reduce) if one.payload == "norm")
            for device in program.same_stage_devices(stage)
        }
        assert len(orders) == 1, "the ranks of a group add gradients up in one order"


@given(
    st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=9), min_size=1, max_size=6),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_samples_are_dealt_evenly_and_each_once(rounds, in_flight):
    samples = [
        [BatchSample("a", turn, place, length) for place, length in enumerate(one)]
        for turn, one in enumerate(rounds)
    ]
    dealt = distribute_samples(samples, in_flight)
    assert Counter(one for own in dealt for part in own for one in part) == Counter(
        one for part in samples for one in part
    )
    tokens = [
        before + sum(one.length for part in own for one in part)
        for before, own in zip(in_flight, dealt, strict=True)
    ]
    assert max(tokens) - min(tokens) <= max(*in_flight, *(one for part in rounds for one in part))
    assert dealt == distribute_samples(samples, in_flight)


def even_window(replicas, stages=2, jobs=2):
    courses = [course(str(i), [[10, 10, 10, 10]] * 6) for i in range(jobs)]
    return plan_pipeline(courses, rules(stages, replicas, capacity=20))


@pytest.mark.parametrize("stages", [1, 2])
def test_two_replicas_take_about_half_the_time(stages):
    seconds = [
        predict_timeline(even_window(replicas, stages, jobs=4), (PACE,) * stages).makespan
        for replicas in (1, 2)
    ]
    assert seconds[1] < 0.55 * seconds[0]


def test_a_batch_of_one_sample_is_trained_by_one_replica_and_reduced_by_all():
    program = plan_pipeline([course("a", [[9], [8], [7]])], rules())
    for batch in program.batches:
        key = batch.job, batch.step
        shares = [Reduce(*key, "gradient") in actions for actions in program.devices]
        assert sum(shares[0::2]) == sum(shares[1::2]) == 1
        assert all(Reduce(*key) in actions and Step(*key) in actions for actions in program.devices)


def test_a_reduction_stands_where_the_others_have_come_to_their_end():
    """The replica with less to do goes on to another job's pass instead of waiting at the Reduce."""
    courses = [course("a", [[30, 10]]), course("b", [[10, 10, 10]])]
    program = plan_pipeline(courses, rules(stages=1, capacity=30))
    timeline = predict_timeline(program, (PACE,))
    for device in range(2):
        passes = [one for one in timeline.events_of(device) if isinstance(one.action, Forward | Backward)]
        assert sum(one.stop - one.start for one in passes) == pytest.approx(passes[-1].stop)


# -- what the checker refuses ----------------------------------------------------------------------------


def broken(program, device, change):
    lists = list(program.devices)
    lists[device] = tuple(change(list(lists[device])))
    return replace(program, devices=tuple(lists))


def without(action):
    return lambda actions: [one for one in actions if one != action]


def test_a_share_that_is_not_handed_out_is_found():
    program = even_window(2)
    share = next(one for one in of(program, 3, Reduce) if one.payload == "gradient")
    with pytest.raises(IllegalProgram, match="before the other replicas were told"):
        check(broken(program, 3, without(share)))


def test_a_step_left_out_in_one_replica_is_found():
    program = plan_pipeline([course("a", [[9], [8]])], rules(stages=1))
    idle = next(d for d in range(2) if Reduce("a", 2, "gradient") not in program.devices[d])
    with pytest.raises(IllegalProgram, match="does not make every Step"):
        check(broken(program, idle, without(Step("a", 2))))


def test_gradients_are_never_added_onto_those_of_the_batch_before():
    program = plan_pipeline([course("a", [[9], [8]])], rules(stages=1))
    idle = next(d for d in range(2) if Reduce("a", 2, "gradient") not in program.devices[d])

    def late(actions):
        actions.remove(Step("a", 1))
        return [*actions, Step("a", 1)]

    with pytest.raises(IllegalProgram, match="a is at step 0"):
        check(broken(program, idle, late))


def test_a_microbatch_in_two_replicas_is_found():
    program = plan_pipeline([course("a", [], 3, [5, 6], {3}, begins=True)], rules(stages=1))
    look = of(program, 0, Evaluate)[0]
    with pytest.raises(IllegalProgram, match="runs in two replicas"):
        check(broken(program, 1, lambda actions: [*actions, look]))


def idle_at_the_second_batch():
    """A Program of one job, and the device that has nothing of its second batch."""
    program = plan_pipeline([course("a", [[9], [8]])], rules(stages=1))
    return program, next(d for d in range(2) if Reduce("a", 2, "gradient") not in program.devices[d])


def test_a_device_without_a_share_hands_out_nothing():
    program, idle = idle_at_the_second_batch()
    share = Reduce("a", 2, "gradient")
    with pytest.raises(IllegalProgram, match=r"payload='gradient'\) hands out nothing"):
        check(broken(program, idle, lambda actions: [*actions[:-1], share, actions[-1]]))


def test_a_second_step_of_a_device_without_a_share_is_found():
    program, idle = idle_at_the_second_batch()
    with pytest.raises(IllegalProgram, match=r"Step\(job='a', step=2\) comes a second time"):
        check(broken(program, idle, lambda actions: [*actions, Step("a", 2)]))


def test_held_out_samples_that_never_reach_the_last_stage_are_found():
    program = plan_pipeline([course("a", [], 3, [5], {3}, begins=True)], rules(stages=2, replicas=1))
    check(program, {"a": 3})
    without_send = broken(program, 0, lambda actions: [one for one in actions if not isinstance(one, Send)])
    with pytest.raises(IllegalProgram, match="a microbatch is never run on one of the stages"):
        check(replace(without_send, devices=(without_send.devices[0], ())), {"a": 3})


def test_replicas_with_another_number_of_devices_are_found():
    program = even_window(2, stages=1)
    with pytest.raises(IllegalProgram, match="replicas differ in their devices"):
        check(replace(program, devices=(*program.devices, ())))


def crossing(first, second):
    """One microbatch of each of two jobs on both of two replicas; each device adds up as it is told."""
    courses = [course("a", [[9, 9]]), course("b", [[8, 8]])]
    program = plan_pipeline(courses, rules(stages=1, capacity=9))

    def listed(device, order):
        found = []
        for job in order:
            (number,) = (
                action.microbatch
                for action in of(program, device, Forward)
                if program.microbatches[action.microbatch].jobs == (job,)
            )
            found += [Forward(number), Backward(number), Reduce(job, 1, "gradient"), Reduce(job, 1)]
            found += [Step(job, 1)]
        return tuple(found)

    return replace(program, devices=(listed(0, first), listed(1, second)))


def test_devices_of_a_group_that_reduce_in_crossed_orders_are_found_to_wait_forever():
    check(crossing("ab", "ab"))
    with pytest.raises(IllegalProgram, match="waits forever at Reduce"):
        check(crossing("ab", "ba"))


# -- what it costs -----------------------------------------------------------------------------------------


def test_the_simulator_lets_a_reduction_wait_for_the_gradients_to_cross_the_link():
    program = plan_pipeline([course("a", [[10, 10]])], rules(stages=1))
    passes = tuple((PassPrice(1.0, 2.0),) for _ in program.microbatches)
    quick = simulate(program, Prices(passes, step=0.5), PricedCluster(2)).makespan
    assert quick == pytest.approx(3.5)
    cluster = PricedCluster(2, link=Link(bandwidth=100.0, latency=0.25))
    prices = Prices(passes, step=0.5, adapter_bytes={"a": (400,)})
    # The gradient takes 0.25 + 4 seconds; the word on the Step 0.25 more to the other replica.
    assert simulate(program, prices, cluster).makespan == pytest.approx(3.0 + 4.25 + 0.25 + 0.5)
