"""Samples that must share a microbatch, pairs say, are packed as one, on one device and in pipelines."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.program.test_check import course
from tests.plan.window.test_pipeline import rules
from weftune.plan.program.check import check
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import IllegalProgram, MicrobatchPlan, group_samples, sample_groups
from weftune.plan.window.pipeline import plan_pipeline
from weftune.plan.window.window import plan_window


def grouped(made, size):
    """The course with every so many neighbours in a group."""
    batches = tuple(replace(batch, samples=group_samples(batch.samples, size)) for batch in made.batches)
    return replace(made, batches=batches, evaluation=group_samples(made.evaluation, size))


def parted(program):
    """Groups whose samples are in two microbatches or more."""
    where = {}
    for action, microbatch in program.forward_passes():
        for segment in microbatch.segments:
            for placed in segment.samples:
                key = placed.group_number, type(action), segment.job, segment.step
                where.setdefault(key, set()).add(action.microbatch)
    return [key for key, found in where.items() if len(found) > 1 and key[0] is not None]


@settings(max_examples=60)
@given(
    pairs=st.lists(st.integers(1, 20), min_size=2, max_size=12).filter(lambda drawn: len(drawn) % 2 == 0),
    alone=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    stages=st.integers(1, 3),
)
def test_pairs_share_a_microbatch_and_others_go_where_they_fit(pairs, alone, stages):
    courses = [grouped(course("pairs", [pairs, pairs]), 2), course("alone", [alone, alone])]
    for program in (plan_window(courses, one_device_layout(), 40), plan_pipeline(courses, rules(stages, 40))):
        check(program, {"pairs": 0, "alone": 0})
        assert not parted(program)


def test_held_out_pairs_share_a_microbatch_too():
    made = grouped(course("a", [[20, 20]], evaluation=[15, 15, 20, 20, 9, 9], evaluate_at={1}), 2)
    assert not parted(plan_window([made], one_device_layout(), 40))


def test_a_program_that_parts_a_pair_is_refused():
    program = plan_window([grouped(course("a", [[10, 10, 10, 10]]), 2)], one_device_layout(), 20)
    first, second = program.microbatches
    ((a, b), (c, d)) = (one.segments[0].samples for one in (first, second))
    swapped = [
        MicrobatchPlan((replace(one.segments[0], samples=samples),))
        for one, samples in ((first, (a, c)), (second, (b, d)))
    ]
    with pytest.raises(IllegalProgram, match="group 0 of a is parted"):
        check(replace(program, microbatches=tuple(swapped)))


def test_a_batch_is_a_whole_number_of_groups():
    samples = course("a", [[3, 4, 5]]).batches[0].samples
    assert group_samples(samples, 1) == samples
    assert [one.group_number for one in group_samples(samples, 3)] == [0, 0, 0]
    with pytest.raises(AssertionError, match="no number of groups of 2"):
        group_samples(samples, 2)


def test_samples_without_a_group_are_each_by_themselves():
    samples = course("a", [[3, 4, 5, 6]]).batches[0].samples
    assert sample_groups(samples) == [(one,) for one in samples]
    b, c, d = (replace(one, group_number=7) for one in samples[1:])
    assert sample_groups([samples[0], b, c, replace(d, group_number=8)]) == [
        (samples[0],),
        (b, c),
        (replace(d, group_number=8),),
    ]
