"""The dynamic programme finds the best contiguous grouping, and says why each group ends where it does."""

import time
from functools import reduce
from itertools import combinations, pairwise
from operator import add

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.plan.pipelines import GIB, load, loads, pipelines, stage
from weftune.errors import PlanError
from weftune.plan.cost.time import Line
from weftune.plan.studies.fuse import fuse, price, why_not
from weftune.plan.studies.stage import PipelineCost, StagePass


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
            fused = max(sum(a.shared for a in adapters), max(a.longest for a in adapters))
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
        assert price(grouping.groups, pipe) == pytest.approx(grouping.seconds, rel=1e-9)
    assert found.seconds == pytest.approx(min(expected.values()), rel=1e-9)
    assert sum(group.seconds for group in found.groups) == pytest.approx(found.seconds, rel=1e-9)
    assert price([group.load for group in found.groups], pipe) == pytest.approx(found.seconds, rel=1e-9)
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
        "wide: alone, with 110000000 tokens a microbatch, it needs 4.13 GiB on stage 0, "
        "but 4.00 GiB are available"
    )
    assert why_not(wide, pipe) is not None
    assert why_not(load("fine", 10, 1), pipe) is None


def test_no_jobs_make_no_groups():
    assert fuse([], PipelineCost((stage(),), 1)).groups == ()


@pytest.mark.timed
def test_128_jobs_on_eight_stages_are_fused_in_under_two_seconds():
    jobs = [load(f"job{n}", 64 + 37 * n % 4096, stages=8, seconds=0.01 * (n % 7)) for n in range(128)]
    pipe = PipelineCost((stage(),) * 8, 8)
    began = time.process_time()
    fusion = fuse(jobs, pipe)
    assert time.process_time() - began < 2.0
    assert fusion.seconds <= price([reduce(add, jobs)], pipe)
