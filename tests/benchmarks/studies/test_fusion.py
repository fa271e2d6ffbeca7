"""The stage-time model is MuxTune's; the dynamic programme finds the best contiguous grouping and says why
each group ends where it does; buckets hide communication, and their number is the one of least time."""

import time
from dataclasses import replace
from functools import reduce
from itertools import combinations, pairwise
from operator import add

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from benchmarks.studies.fusion import (
    GroupLoad,
    PipelineCost,
    StagePass,
    arrange_buckets,
    end_to_end,
    fuse,
    make_bucket,
    make_buckets,
    misfit_reason,
    one_adapter,
    predict_seconds,
)
from tests.cases import core_slowness
from tests.plan.pipelines import GIB, load, loads, pipelines, stage
from weftune.errors import PlanError
from weftune.plan.cost.time import Line


def test_a_pass_is_the_line_over_summed_tokens_plus_attentions_squares_over_the_shards():
    one = stage(forward=StagePass(Line(1.0, 0.5), per_square=0.25), shards=2)
    both = GroupLoad(("a",), 10, 100, (one_adapter(0, 0, 1),)) + GroupLoad(
        ("b",), 4, 16, (one_adapter(0, 0, 1),)
    )
    ((forward, _),) = PipelineCost((one,), 1).times(both)
    assert forward.compute == pytest.approx((1.0 + 0.5 * 14 + 0.25 * 116) / 2)


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
    each = [one.compute + back.compute for one, back in pipe.times(load("a", 50, stages=3))]
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
    ((forward, _),) = PipelineCost((one,), 1).times(load("a", 100, stages=1))
    assert forward.compute == 1.0
    assert forward.unoverlapped_seconds == pytest.approx(2.5)


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
    assert pipe.paces(group) == pytest.approx([one.compute + back.compute for one, back in pipe.times(group)])


def stage_seconds(jobs, pipe):
    """Forward and backward of a group on every stage, from the jobs themselves and not from their sum."""
    tokens, squares = sum(job.tokens for job in jobs), sum(job.squares for job in jobs)
    each = []
    for number, one in enumerate(pipe.stages):
        total = 0.0
        for way in ("forward", "backward"):
            fitted = getattr(one, way)
            base = fitted.line.fixed + fitted.line.per_token * tokens + fitted.per_square * squares
            adapters = [getattr(job.adapters[number], way) for job in jobs]
            fused = max(sum(a.busy_seconds for a in adapters), max(a.longest_seconds for a in adapters))
            total += base / one.shards + fused
        each.append(total)
    return each


def fits(jobs, pipe):
    tokens = sum(job.tokens for job in jobs)
    count = len(pipe.stages)
    return all(
        one.resident_bytes + tokens * (one.gradient_bytes + (count - i) * one.activation_bytes) <= one.budget
        for i, one in enumerate(pipe.stages)
    )


def seconds_of(groups, pipe):
    first, *others = [stage_seconds(group, pipe) for group in groups]
    slowest = first.index(max(first))
    filling = sum(first) - first[slowest] + pipe.microbatches * first[slowest]
    return filling + sum(pipe.microbatches / len(each) * sum(each) for each in others)


def brute_force(jobs, pipe):
    """The least time over every way to cut the sorted jobs into groups that fit, for each number of cuts."""
    ordered = sorted(jobs, key=lambda job: (job.tokens, job.jobs))
    best = {}
    for cuts in range(len(ordered)):
        times = []
        for places in combinations(range(1, len(ordered)), cuts):
            edges = [0, *places, len(ordered)]
            groups = [ordered[a:b] for a, b in pairwise(edges)]
            if all(fits(group, pipe) for group in groups):
                times.append(seconds_of(groups, pipe))
        if times:
            best[cuts + 1] = min(times)
    return best


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_fusion_equals_brute_force_over_contiguous_groupings_of_up_to_nine_jobs(data):
    pipe = data.draw(pipelines())
    jobs = data.draw(loads(len(pipe.stages), 9))
    if any(not fits([job], pipe) for job in jobs):
        with pytest.raises(PlanError):
            fuse(jobs, pipe)
        return
    found, expected = fuse(jobs, pipe), brute_force(jobs, pipe)
    event(f"{len(found.groups)} groups of {len(jobs)} jobs")
    by_count = {count: grouping.seconds for count, grouping in found.by_count.items()}
    assert by_count == pytest.approx(expected, rel=1e-9)
    for count, grouping in found.by_count.items():
        assert len(grouping.groups) == count
        assert predict_seconds(grouping.groups, pipe) == pytest.approx(grouping.seconds, rel=1e-9)
    assert found.seconds == pytest.approx(min(expected.values()), rel=1e-9)
    assert sum(group.seconds for group in found.groups) == pytest.approx(found.seconds, rel=1e-9)
    assert predict_seconds([group.load for group in found.groups], pipe) == pytest.approx(
        found.seconds, rel=1e-9
    )
    assert sorted(name for group in found.groups for name in group.jobs) == sorted(
        name for job in jobs for name in job.jobs
    )
    assert all(pipe.shortage(group.load) is None for group in found.groups)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_plan_does_not_depend_on_the_order_in_which_jobs_are_given(data):
    pipe = data.draw(pipelines(tight=False))
    jobs = data.draw(loads(len(pipe.stages), 7))
    assert fuse(data.draw(st.permutations(jobs)), pipe) == fuse(jobs, pipe)


def test_jobs_fuse_where_the_fixed_part_rules_and_one_fills_the_pipeline_alone_where_tokens_do():
    jobs = [load(f"job{number}", 100, stages=4) for number in range(4)]
    fixed = stage(StagePass(Line(1.0, 0.0)), StagePass(Line(1.0, 0.0)))
    assert len(fuse(jobs, PipelineCost((fixed,) * 4, 8)).groups) == 1
    per_token = stage(StagePass(Line(0.0, 0.01)), StagePass(Line(0.0, 0.01)))
    filling, others = fuse(jobs, PipelineCost((per_token,) * 4, 8)).groups
    assert (len(filling.jobs), len(others.jobs)) == (1, 3)


def test_the_reason_tells_memory_from_time():
    pipe = PipelineCost((stage(budget=25 * 11),), 4)
    ten, twenty = fuse([load("ten", 10, 1), load("twenty", 20, 1)], pipe).groups
    assert ten.reason.startswith("with twenty the group needs 330 bytes on stage 0, but 275 bytes are")
    assert twenty.reason == "no job is left to join"
    linear = PipelineCost((stage(StagePass(Line(0.0, 1.0)), StagePass(Line(0.0, 1.0))),) * 2, 1)
    small, _ = fuse([load("small", 1), load("large", 9)], linear).groups
    # Apart: (1+1) + (9+9) of adding, and the small one passes the other stage: 22. Together: 2 · 20 = 40.
    assert small.reason == "with large in the group the best plan takes 18 s more than 22 s"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_reason_ever_admits_that_joining_were_faster(data):
    pipe = data.draw(pipelines())
    jobs = [job for job in data.draw(loads(len(pipe.stages), 7)) if fits([job], pipe)]
    *others, last = fuse(jobs, pipe).groups or [None]
    assert last is None or last.reason == "no job is left to join"
    assert all(
        "more than" in group.reason or "no less" in group.reason or "needs" in group.reason
        for group in others
    )
    assert not any(" -" in group.reason for group in others)


def test_jobs_that_do_not_fit_even_alone_are_named_with_their_number():
    pipe = PipelineCost((stage(resident=3 * GIB, budget=4 * GIB),), 2)
    wide = load("wide", 110_000_000, stages=1)
    with pytest.raises(PlanError) as caught:
        fuse([load("fine", 10, 1), wide, load("empty", 0, 1)], pipe)
    assert str(caught.value) == (
        "empty: has no tokens to train on\n"
        "wide: alone, with 110000000 tokens per microbatch, it needs 4.13 GiB on stage 0, "
        "but 4.00 GiB are available"
    )
    assert misfit_reason(wide, pipe) is not None
    assert misfit_reason(load("fine", 10, 1), pipe) is None


def test_no_jobs_make_no_groups():
    assert fuse([], PipelineCost((stage(),), 1)).groups == ()


@pytest.mark.timed
def test_128_jobs_on_eight_stages_are_fused_in_under_two_seconds():
    jobs = [load(f"job{n}", 64 + 37 * n % 4096, stages=8, seconds=0.01 * (n % 7)) for n in range(128)]
    pipe = PipelineCost((stage(),) * 8, 8)
    began = time.process_time()
    fusion = fuse(jobs, pipe)
    assert time.process_time() - began < 2.0 * core_slowness()
    assert fusion.seconds <= predict_seconds([reduce(add, jobs)], pipe)


def talkative(stages: int, communication: float, microbatches: int = 8) -> PipelineCost:
    """Stages whose forward and backward each take a second and communicate for so long."""
    one = StagePass(Line(1.0, 0.0), communication=Line(communication, 0.0))
    return PipelineCost((stage(one, one),) * stages, microbatches)


def test_one_bucket_of_one_group_takes_what_the_stage_model_says():
    pipe = PipelineCost((stage(), stage(backward=StagePass(Line(5.0, 0.0)))), 6)
    group = load("a", 30, seconds=0.3)
    found = make_buckets([group], pipe)
    assert found.seconds == pytest.approx(pipe.first_seconds(group))
    assert [*found.trials] == [1]


def test_without_communication_every_group_is_a_bucket_of_its_own():
    groups = [load(f"job{number}", 100, stages=4) for number in range(4)]
    found = make_buckets(groups, PipelineCost((stage(),) * 4, 4))
    assert [len(one.groups) for one in found.buckets] == [1, 1, 1, 1]


def test_groups_share_a_bucket_where_that_hides_their_communication():
    groups = [load(f"job{number}", 100) for number in range(4)]
    found = make_buckets(groups, talkative(stages=2, communication=0.8))
    assert [len(one.groups) for one in found.buckets] == [2, 2]
    seconds = found.trials
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
    found = make_buckets(groups, tight)
    assert [len(one.groups) for one in found.buckets] == [1, 1, 1]
    assert [seconds is None for seconds in found.trials.values()] == [True, True, False]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_chosen_number_is_the_best_that_was_tried_and_the_longest_bucket_goes_first(data):
    pipe = data.draw(pipelines(tight=False))
    groups = data.draw(loads(len(pipe.stages), 7))
    found = make_buckets(groups, pipe)
    assert len(found.trials) == len(groups)
    assert found.seconds == min(found.trials.values())
    assert found.seconds == end_to_end(found.buckets, pipe.microbatches)
    latencies = [one.paces[0] for one in found.buckets]
    assert latencies == sorted(latencies, reverse=True)
    assert sorted(name for one in found.buckets for group in one.groups for name in group.jobs) == sorted(
        name for group in groups for name in group.jobs
    )


def test_where_nothing_communicates_the_groups_stay_as_fused():
    pipe = PipelineCost((stage(),) * 2, 4)
    fusion = fuse([load("a", 10), load("b", 10)], pipe)
    found = arrange_buckets(fusion, pipe)
    assert found.buckets[0].groups == tuple(group.load for group in fusion.groups)
    assert found.reason == "as many groups as fused, 1: there is no communication to hide"


def test_groups_stay_apart_where_fused_they_would_have_nothing_to_hide_their_communication_behind():
    heavy = StagePass(Line(0.1, 0.01), communication=Line(0.0, 0.01))
    pipe = PipelineCost((stage(heavy, heavy),), 4)
    fusion = fuse([load("a", 100, 1), load("b", 100, 1)], pipe)
    assert len(fusion.groups) == 1
    found = arrange_buckets(fusion, pipe)
    (together,) = found.buckets
    assert [group.jobs for group in together.groups] == [("a",), ("b",)]
    # Fused: 4 · 2 · (0.1 + 2 + 2). Apart in one bucket: 4 · 2 · (0.2 + 2).
    assert found.seconds == pytest.approx(17.6)
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
    fused = make_buckets([group.load for group in fusion.groups], pipe)
    assert arrange_buckets(fusion, pipe).seconds <= fused.seconds


def test_of_many_groups_few_numbers_of_buckets_are_tried_and_the_largest_is_one():
    found = make_buckets(
        [load(f"job{number}", 10 + number, 1) for number in range(40)], PipelineCost((stage(),), 2)
    )
    assert [*found.trials] == [*range(1, 17), 32, 40]
