"""Long samples are cut into chunks where the simulator finds that a pipeline is then faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.program.test_check import course
from weftune.core.shapes import LayerRange
from weftune.plan.cost.time import Line
from weftune.plan.program.check import check
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.program.prices import PricedCluster
from weftune.plan.program.program import Backward, Forward, PlacedSample, Recompute, cut_sample, group_samples
from weftune.plan.program.simulate import simulate
from weftune.plan.window.pace import StagePace, pace_prices
from weftune.plan.window.pipeline import PipelineOrder, PipelineRules, plan_pipeline
from weftune.plan.window.window import Pacing, plan_window

PACE = StagePace(Line(1.0, 0.1), Line(2.0, 0.2))
LONG = [[400] * 6] * 2
"""Two batches of six samples, which one pipeline of four stages idles through."""


def rules(stages=4, min_chunk_rows=8, pace=PACE, capacity=400):
    return PipelineRules(capacity, (pace,) * stages, spare_microbatches=1, min_chunk_rows=min_chunk_rows)


def simulated(program, planned_by):
    prices = pace_prices(program.microbatches, planned_by.paces)
    return simulate(program, prices, PricedCluster(planned_by.stages))


def test_one_job_of_long_samples_fills_a_pipeline_of_four_stages():
    even = StagePace(Line(0.0, 0.1), Line(0.0, 0.2))
    whole, cut = (
        simulated(plan_pipeline([course("a", LONG)], one), one)
        for one in (rules(pace=even, min_chunk_rows=0), rules(pace=even, min_chunk_rows=50))
    )
    assert 1 - sum(whole.busy_fractions()) / 4 == pytest.approx(1 / 3)
    assert 1 - sum(cut.busy_fractions()) / 4 == pytest.approx(3 / (48 + 3))
    assert cut.makespan < 0.8 * whole.makespan
    assert all(mine <= theirs for mine, theirs in zip(cut.peaks, whole.peaks, strict=True)), "rows in flight"


def test_smaller_chunks_are_made_only_while_they_are_faster():
    """Fixed times of passes limit the number of chunks."""
    sizes = [
        max(one.rows for one in plan_pipeline([course("a", LONG)], rules(pace=pace)).microbatches)
        for pace in (
            PACE,
            StagePace(Line(5.0, 0.1), Line(10.0, 0.2)),
            StagePace(Line(40.0, 0.1), Line(80.0, 0.2)),
        )
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < 200
    assert sizes[-1] == 400


def grouped(window):
    return replace(
        window, batches=tuple(replace(one, samples=group_samples(one.samples, 2)) for one in window.batches)
    )


def mismatched(window):
    one = PlacedSample(0, 20, 0)
    return replace(window, batches=tuple(replace(batch, mismatched=(one,)) for batch in window.batches))


@pytest.mark.parametrize(
    ("windows", "changed"),
    [
        ([course("a", LONG)], {"min_chunk_rows": 0}),
        ([course("a", LONG)], {"min_chunk_rows": 201}),
        ([course("a", LONG)], {"recompute": Recompute(True, 1)}),
        ([course("a", LONG)], {"order": PipelineOrder.multi_job}),
        ([course("a", LONG)], {"replicas": 2}),
        ([grouped(course("a", LONG))], {"capacity": 800}),
        ([mismatched(course("a", LONG))], {}),
        ([course(name, LONG) for name in "abcdefgh"], {"min_chunk_rows": 200}),
    ],
)
def test_samples_stay_whole_where_chunks_are_not_allowed_or_not_faster(windows, changed):
    assert not plan_pipeline(windows, replace(rules(), **changed)).has_chunks


def test_a_sample_that_stays_whole_limits_the_cut_of_others():
    pairs = grouped(course("b", [[100, 50] * 2] * 2))
    program = plan_pipeline([course("a", LONG), pairs], rules())
    chunks = [one.chunk for one in program.microbatches if one.chunk]
    assert {one.segments[0].job for one in program.microbatches if one.chunk} == {"a"}
    assert max(one.length for one in chunks) >= 150


def test_virtual_tokens_are_all_in_the_first_chunk():
    window = course("a", LONG)
    before = replace(window, batches=tuple(replace(one, prefix_rows=6 * 90) for one in window.batches))
    program = plan_pipeline([before], rules())
    firsts = [one.chunk for one in program.microbatches if one.chunk and one.chunk.chunk_start == 0]
    assert firsts
    assert min(one.length for one in firsts) > 90


def test_chunks_are_not_padded_since_their_passes_are_not_captured():
    layout = pipeline_layout([LayerRange(n, n + 1, 4) for n in range(4)])
    pacing = Pacing((PACE,) * 4, min_chunk_rows=8)
    program = plan_window([course("a", [[399] * 6])], layout, 512, pads_to_ladder=True, pacing=pacing)
    assert program.has_chunks
    assert all(one.rows == one.tokens for one in program.microbatches if one.chunk)


@given(length=st.integers(1, 300), supervised=st.integers(0, 300), rows=st.integers(1, 310))
def test_chunks_are_of_about_equal_size_and_cover_the_sample(length, supervised, rows):
    sample = PlacedSample(3, length, 70, min(supervised, length))
    chunks = cut_sample(sample, rows)
    sizes = [one.length for one in chunks]
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= rows
    assert sum(one.supervised_tokens for one in chunks) == sample.supervised_tokens
    assert all(one.sample_offset == 70 for one in chunks)
    assert sum(one.squares for one in chunks) == length**2, "attention costs what it costs whole"


@given(length=st.integers(1, 3000), rows=st.integers(1, 3100), square_cost=st.floats(1e-6, 1.0))
def test_chunks_cover_the_sample_and_take_equally_long(length, rows, square_cost):
    chunks = cut_sample(PlacedSample(3, length, 70, length), rows, square_cost)
    assert sum(one.length for one in chunks) == length
    assert min(one.length for one in chunks) >= 1
    assert len(chunks) == -(-length // rows)
    assert all(one.follows(before) for before, one in zip((None, *chunks), chunks, strict=False))
    seconds = [one.length + square_cost * one.squares for one in chunks]
    if min(one.length for one in chunks) > 1:
        row = 1 + 2 * square_cost * length
        assert max(seconds) - min(seconds) <= 2 * row, "equal but for a row at each edge"


def test_pipelines_wait_less_where_the_time_of_attention_is_known():
    """At the end of a sample a row attends to as many keys as its other work takes."""
    known = StagePace(Line(1.0, 0.1), Line(2.0, 0.2), 0.0, (), 0.1 / 800, 0.2 / 800)
    unknown = replace(known, forward_per_square=0.0, backward_per_square=0.0)
    aware, unaware = (
        simulated(plan_pipeline([course("a", LONG)], rules(pace=pace)), rules(pace=known))
        for pace in (known, unknown)
    )
    assert aware.makespan < 0.95 * unaware.makespan


def test_a_first_round_of_short_samples_has_room_for_microbatches_as_large_as_a_chunk():
    eager = StagePace(Line(0.0, 0.1), Line(0.0, 0.2))
    batches = [[11, 8, 29, 11], [16, 11, 48, 55, 7, 28], [52, 35, 59, 53]]
    check(plan_pipeline([course("a", batches)], rules(3, 18, eager, capacity=60)))


@pytest.mark.slow
def test_a_job_that_is_alone_is_cut_even_if_windows_hand_over():
    """What a window leaves in flight does not count for less waiting: a single job waits for its Step."""
    window, pace = course("a", LONG[:1]), StagePace(Line(2.5, 0.1), Line(5.0, 0.2))
    program = plan_pipeline([window], rules(pace=pace), hands_over=True)
    assert program.has_chunks
    assert not program.hands_over
    eight = [course(name, LONG[:1]) for name in "abcdefgh"]
    assert not plan_pipeline(eight, rules(min_chunk_rows=100, pace=pace), hands_over=True).has_chunks


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.lists(lengths, min_size=1, max_size=3), min_size=1, max_size=3),
    stages=st.integers(2, 4),
    least=st.integers(1, 30),
)
def test_every_window_with_chunks_is_legal(jobs, stages, least):
    """`check` proves that each token is trained once, and that no device waits forever."""
    eager = StagePace(Line(0.0, 0.1), Line(0.0, 0.2))
    made = rules(stages, least, eager, capacity=60)
    program = plan_pipeline([course(str(n), batches) for n, batches in enumerate(jobs)], made)
    check(program)
    whole = plan_pipeline(
        [course(str(n), batches) for n, batches in enumerate(jobs)], replace(made, min_chunk_rows=0)
    )
    assert simulated(program, made).makespan <= simulated(whole, made).makespan
    for device in program.devices:
        assert sum(isinstance(one, Forward) for one in device) == sum(
            isinstance(one, Backward) for one in device
        )
