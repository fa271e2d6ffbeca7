"""A stage's times become lines over rows."""

import pytest

from tests.plan.works import work
from weftune.plan.program.program import (
    Backward,
    BackwardHalf,
    Forward,
    ForwardHalf,
    MicrobatchPlan,
    PlacedSample,
    Program,
    SegmentPlan,
    Step,
    cut_sample,
)
from weftune.plan.window.orders import one_forward_one_backward
from weftune.plan.window.overlap import overlap_microbatches
from weftune.run.workers.agreed import TimedAction, WorkerReport
from weftune.run.workers.driver import microbatch_seconds
from weftune.run.workers.paces import BACKWARD_GUESS, MAX_MEASUREMENTS, Paces


def test_until_every_stage_was_measured_its_layers_are_the_guess():
    program = one_forward_one_backward(work(1, 1, 2), 2)
    paces = Paces([3, 1])
    assert [pace.forward.per_token for pace in paces.stages()] == [3.0, 1.0]
    assert paces.stages()[0].backward.per_token == 3 * BACKWARD_GUESS
    assert paces.predicted_seconds(program) is None


def test_guesses_stay_when_every_stage_has_been_measured():
    program, paces = one_forward_one_backward(work(1, 1, 1), 2), Paces([3, 1])
    before = paces.guessed_stages()
    times = [
        [TimedAction(Forward(0, stage), 0.0, 1.0), TimedAction(Backward(0, stage), 0.0, 2.0)]
        for stage in (0, 1)
    ]
    paces.add_measurements(program, [WorkerReport(times=one) for one in times])
    assert paces.has_measurements
    assert paces.guessed_stages() == before != paces.stages()


def test_half_layers_count_with_their_pass():
    program = overlap_microbatches(one_forward_one_backward(work(2, 1, 1), 1), layers=1)
    paces, times, now = Paces([1]), [], 0.0
    for action in program.actions:
        seconds = {ForwardHalf: 1.0, BackwardHalf: 2.0, Forward: 0.5, Backward: 0.0}.get(type(action))
        if seconds is not None:
            times.append(TimedAction(action, now, now + seconds))
            now += seconds
    paces.add_measurements(program, [WorkerReport(times=times)])
    (pace,) = paces.stages()
    assert (pace.forward(1), pace.backward(1)) == (2.5, 4.0)
    assert paces.predicted_seconds(program) == pytest.approx(now)
    seconds = microbatch_seconds([WorkerReport(times=times)], Forward | ForwardHalf)
    assert seconds == {0: 2.5, 1: 2.5}


def test_a_windows_times_predict_the_next_like_it():
    program = one_forward_one_backward(work(1, 1, 1), 2)
    reports = [
        WorkerReport(
            times=[
                TimedAction(Forward(0, stage), 0.0, 1.0),
                TimedAction(Backward(0, stage), 0.0, 2.0),
                TimedAction(Step("job0", 1), 0.0, 0.25),
            ]
        )
        for stage in range(2)
    ]
    paces = Paces([1, 1])
    paces.add_measurements(program, reports)
    assert paces.predicted_seconds(program) == pytest.approx(1 + 1 + 2 + 2 + 0.25)


def test_workers_of_one_stage_in_different_replicas_teach_the_same_pace():
    program = one_forward_one_backward(work(1, 1, 1), 2)
    reports = [
        WorkerReport(
            times=[
                TimedAction(Forward(0, worker % 2), 0.0, 1.0 + worker),
                TimedAction(Backward(0, worker % 2), 0.0, 2.0),
            ]
        )
        for worker in range(4)
    ]
    paces = Paces([1, 1])
    paces.add_measurements(program, reports)
    assert [pace.forward.per_token for pace in paces.stages()] == pytest.approx([(1 + 3) / 2, (2 + 4) / 2])


def test_passes_are_remembered_as_multiples_of_their_line_in_the_order_in_which_they_ran():
    program = one_forward_one_backward(work(1, 1, 2), 1)
    passes = [
        TimedAction(Forward(0, 0), 0.0, 1.0),
        TimedAction(Backward(0, 0), 1.0, 2.0),
        TimedAction(Forward(1, 0), 2.0, 5.0),
        TimedAction(Backward(1, 0), 5.0, 8.0),
    ]
    paces = Paces([1])
    paces.add_measurements(program, [WorkerReport(times=passes)])
    assert paces.stages()[0].spread == pytest.approx([0.5, 0.5, 1.5, 1.5])


def test_what_is_promised_counts_that_workers_wait_for_one_anothers_slow_passes():
    program = one_forward_one_backward(work(4, 4, 1), 2)
    paces = Paces([1, 1])
    reports = [
        WorkerReport(
            times=[
                TimedAction(kind(number, worker), 10.0 * number + back, 10.0 * number + back + taken)
                for number in range(16)
                for back, kind in enumerate((Forward, Backward))
                for taken in [3.0 if (number + worker) % 2 else 1.0]
            ]
        )
        for worker in range(2)
    ]
    paces.add_measurements(program, reports)
    assert paces.predicted_seconds(program) > 1.05 * paces.timeline(program).makespan


def test_many_passes_of_chunks_do_not_displace_those_of_whole_samples():
    """Passes of one size do not tell how long a pass takes besides the time of its rows."""
    whole, half = PlacedSample(0, 100, 0), cut_sample(PlacedSample(0, 100, 0), 50)
    plans = tuple(MicrobatchPlan((SegmentPlan("a", 1, (one,)),)) for one in (whole, *half))
    program, paces = Program(100, plans, (), ((),)), Paces([1])

    def add_measurements(number, seconds, times):
        both = [TimedAction(kind(number), 0.0, seconds) for kind in (Forward, Backward)]
        paces.add_measurements(program, [WorkerReport(times=both * times)])

    add_measurements(0, 1.5, 2)
    add_measurements(1, 1.0, 3 * MAX_MEASUREMENTS)
    (pace,) = paces.stages()
    assert (pace.forward.fixed, pace.forward.per_token) == pytest.approx((0.5, 0.01))
