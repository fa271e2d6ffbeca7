"""Pairs of microbatches take turns at half layers, and everything else stays as it was planned."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.program.test_check import course, lengths
from tests.plan.works import work
from weftune.core.shapes import LayerRange
from weftune.plan.cost.time import Line
from weftune.plan.program.check import check
from weftune.plan.program.handover import FINISHED, unfinished_work
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.program.program import (
    Backward,
    BackwardHalf,
    Forward,
    ForwardHalf,
    HalfPass,
    Recompute,
    Step,
    cut_sample,
)
from weftune.plan.window.orders import one_forward_one_backward
from weftune.plan.window.overlap import overlap_microbatches
from weftune.plan.window.pace import StagePace
from weftune.plan.window.window import Pacing, plan_window

LAYERS = 2
LAYOUT = replace(pipeline_layout([LayerRange(0, LAYERS, LAYERS)], shards=2), overlaps=True)
PACING = Pacing((StagePace(Line(0.0, 1.0), Line(0.0, 2.0)),))


def alternating(jobs, steps, microbatches):
    return one_forward_one_backward(work(jobs, steps, microbatches), 1)


def test_two_microbatches_advance_in_turns_and_their_steps_follow_both():
    program = overlap_microbatches(alternating(jobs=2, steps=1, microbatches=1), layers=1)
    assert program.actions == (
        *(ForwardHalf(0, 0, 0), ForwardHalf(1, 0, 0), ForwardHalf(0, 0, 1), ForwardHalf(1, 0, 1)),
        *(Forward(0), Forward(1)),
        *(BackwardHalf(0, 0, 1), BackwardHalf(1, 0, 1), BackwardHalf(0, 0, 0), BackwardHalf(1, 0, 0)),
        *(Backward(0), Backward(1)),
        *(Step("job0", 1), Step("job1", 1)),
    )
    assert program.half_layer_count == 2
    check(program)


def test_a_microbatch_that_needs_the_step_of_its_neighbour_does_not_overlap_with_it():
    program = alternating(jobs=1, steps=3, microbatches=1)
    assert overlap_microbatches(program, LAYERS) == program


def test_a_microbatch_without_a_neighbour_stays_whole():
    program = overlap_microbatches(alternating(jobs=1, steps=1, microbatches=3), LAYERS)
    assert program.overlapped_microbatches == {0, 1}
    assert program.actions[-3:] == (Forward(2), Backward(2), Step("job0", 1))
    check(program)


def test_chunks_do_not_overlap():
    program = alternating(jobs=1, steps=1, microbatches=2)
    microbatch = program.microbatches[1]
    (segment,) = microbatch.segments
    (chunk,) = cut_sample(segment.samples[0], 1)
    chunked = replace(microbatch, segments=(replace(segment, samples=(chunk,)),))
    program = replace(program, microbatches=(program.microbatches[0], chunked))
    assert overlap_microbatches(program, LAYERS) == program


@settings(max_examples=40, deadline=None)
@given(jobs=st.lists(st.lists(lengths, min_size=1, max_size=3), min_size=1, max_size=4))
def test_every_window_is_legal_and_trains_the_same_microbatches_as_without_overlap(jobs):
    """Also in windows that hand over, of which the last backward belongs to the next window."""
    rest, plain_rest, step = FINISHED, FINISHED, 0
    for hands_over in (True, False):
        courses = [course(str(number), batches, step) for number, batches in enumerate(jobs)]
        pacing = replace(PACING, hands_over=hands_over)
        program = plan_window(courses, LAYOUT, 64, pacing=pacing, inherited=rest)
        plain = plan_window(courses, replace(LAYOUT, overlaps=False), 64, pacing=pacing, inherited=plain_rest)
        assert program.microbatches == plain.microbatches
        whole = [one for one in program.actions if not isinstance(one, HalfPass)]
        assert sorted(map(str, whole)) == sorted(map(str, plain.actions))
        rest, plain_rest = unfinished_work(program), unfinished_work(plain)
        assert rest == plain_rest
        if any(len(batches) != len(jobs[0]) for batches in jobs):
            return
        step += len(jobs[0])


def test_recomputed_layers_do_not_overlap():
    courses = [course(name, [[30, 30]]) for name in "ab"]
    assert plan_window(courses, LAYOUT, 32, pacing=PACING).overlapped_microbatches
    again = plan_window(courses, LAYOUT, 32, recompute=Recompute(recomputed_layers=1), pacing=PACING)
    assert not again.overlapped_microbatches


def test_only_shards_of_one_stage_and_one_replica_overlap():
    halves = [LayerRange(0, 1, 2), LayerRange(1, 2, 2)]
    whole = [LayerRange(0, 2, 2)]
    for layout in (
        pipeline_layout(whole),
        pipeline_layout(halves, shards=2),
        pipeline_layout(whole, replicas=2, shards=2),
    ):
        with pytest.raises(AssertionError, match="only shards of one resident stage can overlap"):
            replace(layout, overlaps=True)
