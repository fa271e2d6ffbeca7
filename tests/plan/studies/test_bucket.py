"""Buckets hide communication behind other groups' compute, and their number is the one of least time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.pipelines import load, loads, pipelines, stage
from weftune.plan.cost.time import Line
from weftune.plan.studies.bucket import arrange, bucket, end_to_end, make_bucket
from weftune.plan.studies.fuse import fuse
from weftune.plan.studies.stage import PipelineCost, StagePass


def talkative(stages: int, communication: float, microbatches: int = 8) -> PipelineCost:
    """Stages whose forward and backward each take a second and communicate for so long."""
    one = StagePass(Line(1.0, 0.0), communication=Line(communication, 0.0))
    return PipelineCost((stage(one, one),) * stages, microbatches)


def test_one_bucket_of_one_group_takes_what_the_stage_model_says():
    pipe = PipelineCost((stage(), stage(backward=StagePass(Line(5.0, 0.0)))), 6)
    group = load("a", 30, seconds=0.3)
    found = bucket([group], pipe)
    assert found.seconds == pytest.approx(pipe.first_seconds(group))
    assert [trial.buckets for trial in found.trials] == [1]


def test_without_communication_every_group_is_a_bucket_of_its_own():
    groups = [load(f"job{number}", 100, stages=4) for number in range(4)]
    found = bucket(groups, PipelineCost((stage(),) * 4, 4))
    assert [len(one.groups) for one in found.buckets] == [1, 1, 1, 1]


def test_groups_share_a_bucket_where_that_hides_their_communication():
    groups = [load(f"job{number}", 100) for number in range(4)]
    found = bucket(groups, talkative(stages=2, communication=0.8))
    assert [len(one.groups) for one in found.buckets] == [2, 2]
    seconds = {trial.buckets: trial.seconds for trial in found.trials}
    # Two buckets: 8 · 2 · 2 · (1 + 1) at the slowest stage, and (2 + 2) to fill and drain.
    assert seconds[2] == found.seconds == pytest.approx(68.0)
    # One by one, nothing hides the 0.8: 8 · 4 · 2 · 1.8, and 3.6.
    assert seconds[4] == pytest.approx(118.8)


def test_a_bucket_is_never_faster_than_its_busier_lane_or_its_slowest_group():
    groups = [load("a", 100), load("b", 100)]
    assert make_bucket(groups, talkative(2, 0.5)).forward == (2.0, 2.0)
    assert make_bucket(groups, talkative(2, 3.0)).forward == (6.0, 6.0)
    lazy = StagePass(Line(0.0, 0.01), communication=Line(0.0, 0.01))
    pipe = PipelineCost((stage(lazy, lazy),), 1)
    assert make_bucket([load("a", 100, 1), load("b", 1, 1)], pipe).forward == pytest.approx((2.0,))


def test_adapters_of_a_bucket_fuse_only_if_every_group_is_one_job():
    one, other, third = (load(name, 0, 1, seconds=1.0, share=0.25) for name in "abc")
    pipe = PipelineCost((stage(StagePass(Line(0.0, 0.0)), StagePass(Line(0.0, 0.0))),), 1)
    assert make_bucket([one, other], pipe).forward == (1.0,)
    assert make_bucket([one, other + third], pipe).forward == (2.0,)


def test_buckets_that_do_not_fit_together_are_not_chosen():
    pipe = talkative(stages=2, communication=0.8)
    tight = replace(pipe, stages=tuple(replace(one, budget=150 * 21) for one in pipe.stages))
    groups = [load(f"job{number}", 100) for number in range(3)]
    found = bucket(groups, tight)
    assert [len(one.groups) for one in found.buckets] == [1, 1, 1]
    assert [trial.seconds is None for trial in found.trials] == [True, True, False]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_chosen_number_is_the_best_that_was_tried_and_the_longest_bucket_goes_first(data):
    pipe = data.draw(pipelines(tight=False))
    groups = data.draw(loads(len(pipe.stages), 7))
    found = bucket(groups, pipe)
    assert len(found.trials) == len(groups)
    assert found.seconds == min(trial.seconds for trial in found.trials)
    assert found.seconds == end_to_end(found.buckets, pipe.microbatches)
    latencies = [one.paces[0] for one in found.buckets]
    assert latencies == sorted(latencies, reverse=True)
    assert sorted(name for one in found.buckets for group in one.groups for name in group.jobs) == sorted(
        name for group in groups for name in group.jobs
    )


def test_where_nothing_communicates_the_groups_stay_as_fused():
    pipe = PipelineCost((stage(),) * 2, 4)
    fusion = fuse([load("a", 10), load("b", 10)], pipe)
    found = arrange(fusion, pipe)
    assert found.bucketing.buckets[0].groups == tuple(group.load for group in fusion.groups)
    assert found.reason == "as many groups as fused, 1: there is no communication to hide"


def test_groups_stay_apart_where_fused_they_would_have_nothing_to_hide_their_communication_behind():
    heavy = StagePass(Line(0.1, 0.01), communication=Line(0.0, 0.01))
    pipe = PipelineCost((stage(heavy, heavy),), 4)
    fusion = fuse([load("a", 100, 1), load("b", 100, 1)], pipe)
    assert len(fusion.groups) == 1
    found = arrange(fusion, pipe)
    (together,) = found.bucketing.buckets
    assert [group.jobs for group in together.groups] == [("a",), ("b",)]
    # Fused: 4 · 2 · (0.1 + 2 + 2). Apart in one bucket: 4 · 2 · (0.2 + 2).
    assert found.bucketing.seconds == pytest.approx(17.6)
    assert found.reason.endswith("a round takes 17.6 s end to end, not 32.8 s")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_an_arrangement_is_never_slower_than_the_fused_groups_in_their_best_buckets(data):
    pipe = data.draw(pipelines(tight=False))
    share = data.draw(st.floats(0.0, 1.0))
    stages = tuple(
        replace(one, forward=replace(one.forward, communication=Line(share, share))) for one in pipe.stages
    )
    pipe = replace(pipe, stages=stages)
    fusion = fuse(data.draw(loads(len(stages), 6)), pipe)
    fused = bucket([group.load for group in fusion.groups], pipe)
    assert arrange(fusion, pipe).bucketing.seconds <= fused.seconds


def test_of_many_groups_few_numbers_of_buckets_are_tried_and_the_largest_is_one():
    found = bucket(
        [load(f"job{number}", 10 + number, 1) for number in range(40)], PipelineCost((stage(),), 2)
    )
    assert [trial.buckets for trial in found.trials] == [*range(1, 17), 32, 40]
