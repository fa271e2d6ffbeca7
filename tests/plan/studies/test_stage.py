"""The stage-time model is MuxTune's, with forward and backward apart."""

from functools import reduce
from operator import add

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.pipelines import load, loads, pipelines, stage
from weftune.plan.cost.time import Line
from weftune.plan.studies.stage import GroupLoad, PipelineCost, StagePass, one_adapter


def test_a_pass_is_the_line_over_summed_tokens_plus_attentions_squares_over_the_shards():
    one = stage(forward=StagePass(Line(1.0, 0.5), per_square=0.25), shards=2)
    both = GroupLoad(("a",), 10, 100, (one_adapter(0, 0, 1),)) + GroupLoad(
        ("b",), 4, 16, (one_adapter(0, 0, 1),)
    )
    (time,) = PipelineCost((one,), 1).times(both)
    assert time.forward.compute == pytest.approx((1.0 + 0.5 * 14 + 0.25 * 116) / 2)


def test_fused_adapters_take_their_shares_but_no_less_than_the_slowest():
    small, large = one_adapter(1.0, 2.0, 0.1), one_adapter(4.0, 5.0, 0.1)
    assert (small + large).forward.seconds == 4.0
    busy = reduce(add, [one_adapter(1.0, 2.0, 0.8)] * 5)
    assert busy.forward.seconds == pytest.approx(4.0)
    assert busy.backward.seconds == pytest.approx(8.0)


def test_equal_stages_take_microbatches_plus_stages_less_one_paces():
    pipe = PipelineCost((stage(),) * 4, microbatches=6)
    job = load("a", 100, stages=4)
    pace = (1.0 + 0.01 * 100) + (2.0 + 0.02 * 100)
    assert pipe.first_seconds(job) == pytest.approx((6 + 4 - 1) * pace)
    assert pipe.added_seconds(job) == pytest.approx(6 * pace)


def test_the_slowest_stage_sets_the_pace_and_the_others_are_passed_once():
    slow = stage(backward=StagePass(Line(9.0, 0.0)))
    pipe = PipelineCost((stage(), slow, stage()), microbatches=5)
    each = [time.compute for time in pipe.times(load("a", 50, stages=3))]
    assert pipe.first_seconds(load("a", 50, stages=3)) == pytest.approx(each[0] + each[2] + 5 * each[1])


def test_the_first_stage_holds_a_copy_for_every_stage_and_the_last_holds_one():
    pipe = PipelineCost((stage(resident=500, budget=4600), stage(resident=700)), microbatches=1)
    assert pipe.peak_bytes(load("a", 100)) == (500 + 100 * (1 + 20), 700 + 100 * (1 + 10))
    assert pipe.shortage(load("a", 195)) is None
    short = pipe.shortage(load("a", 196))
    assert short is not None
    assert (short.stage, short.need, short.budget) == (0, 500 + 196 * 21, 4600)


def test_communication_counts_only_where_nothing_hides_it():
    one = stage(forward=StagePass(Line(1.0, 0.0), communication=Line(0.5, 0.01)))
    (time,) = PipelineCost((one,), 1).times(load("a", 100, stages=1))
    assert time.forward.compute == 1.0
    assert time.forward.alone == pytest.approx(2.5)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_group_is_never_slower_than_its_jobs_one_after_another_nor_faster_than_one_of_them(data):
    pipe = data.draw(pipelines())
    jobs = data.draw(loads(len(pipe.stages), 6))
    alone = [pipe.added_seconds(job) for job in jobs]
    together = pipe.added_seconds(reduce(add, jobs))
    assert max(alone) <= together * (1 + 1e-9)
    assert together <= sum(alone) * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_paces_are_the_compute_seconds_of_the_times(data):
    pipe = data.draw(pipelines())
    group = reduce(add, data.draw(loads(len(pipe.stages), 4)))
    assert pipe.paces(group) == pytest.approx([time.compute for time in pipe.times(group)])
