"""Samples move into the round before theirs where a pipeline may run them, and it never costs a place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftune.plan.pack.best import Limits
from weftune.plan.pack.merge import (
    NO_OP,
    BatchSample,
    JobLengths,
    MergeRules,
    earliest_microbatch,
    group_jobs,
    head_tail_groups,
    merge,
    no_ops_per_round,
    verify_microbatches,
)
from weftune.plan.program.program import IllegalProgram

SMALL = Limits(max_exchanges=100, max_repackings=0)


def batch(job, number, *lengths):
    return [BatchSample(job, number, place, length) for place, length in enumerate(lengths)]


@st.composite
def schedules(draw):
    """Rounds of one or two groups of jobs taking turns."""
    groups = draw(st.sampled_from([("a",), ("ab",), ("abc",), ("a", "b"), ("ab", "c")]))
    lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6)
    return [
        [sample for job in members for sample in batch(job, number, *draw(lengths))]
        for number in range(draw(st.integers(1, 4)))
        for members in groups
    ]


@settings(max_examples=150, deadline=None)
@given(schedules(), st.integers(1, 5), st.sampled_from([1, 8]))
def test_whatever_is_merged_is_legal_and_takes_no_more_places(rounds, stages, multiple):
    rules = MergeRules(64, stages, multiple, SMALL)
    merged, plain = merge(rounds, rules), merge(rounds, rules, moves_samples=False)
    verify_microbatches(rounds, merged.microbatches, rules)
    assert len(merged.microbatches) <= len(plain.microbatches)
    assert plain.moved_samples == 0
    if stages == 1:
        assert merged.no_ops == 0


def test_on_one_device_a_job_absent_from_the_last_microbatch_moves_in():
    rounds = [batch("a", 0, 60) + batch("b", 0, 50), batch("a", 1, 50) + batch("b", 1, 10)]
    merged = merge(rounds, MergeRules(64))
    assert (
        merged.moved_samples == 0
    )  # b's last batch is in the last microbatch, and 50 of a have no room in it
    rounds = [batch("a", 0, 60) + batch("b", 0, 50), batch("a", 1, 14) + batch("b", 1, 60)]
    merged = merge(rounds, MergeRules(64))
    assert (len(merged.microbatches), merged.moved_samples, merged.separate_count) == (3, 1, 4)


def test_a_job_never_meets_its_own_next_batch_in_one_microbatch():
    merged = merge([batch("a", 0, 10), batch("a", 1, 10)], MergeRules(64))
    assert len(merged.microbatches) == 2


def test_another_group_fills_the_end_of_a_round_in_a_pipeline():
    rounds = [batch("a", 0, 60, 30), batch("b", 0, 60, 30)]
    merged = merge(rounds, MergeRules(64, stages=4))
    assert (len(merged.microbatches), merged.no_ops) == (3, 0)


@pytest.mark.parametrize(("stages", "no_ops"), [(1, 0), (2, 1), (4, 3)])
def test_a_job_alone_waits_with_no_ops_for_its_own_step(stages, no_ops):
    merged = merge([batch("a", 0, 60), batch("a", 1, 60)], MergeRules(64, stages))
    assert merged.microbatches[1:-1] == (NO_OP,) * no_ops


def test_the_window_before_is_kept_at_its_distance():
    before = [tuple(batch("a", 0, 60)), tuple(batch("b", 0, 60))]
    rounds = [batch("a", 1, 60) + batch("b", 1, 60)]
    merged = merge(rounds, MergeRules(64, stages=3), before)
    assert [[one.job for one in microbatch] for microbatch in merged.microbatches] == [[], ["a"], ["b"]]


def test_a_no_op_takes_the_place_of_what_stood_between_two_batches_of_a_job():
    rounds = [batch("a", 0, 60), batch("b", 0, 4), batch("a", 1, 60)]
    merged = merge(rounds, MergeRules(64, stages=2))
    assert [len(microbatch) for microbatch in merged.microbatches] == [2, 0, 1]


@pytest.mark.parametrize(
    ("microbatches", "sentence"),
    [
        ([batch("a", 0, 40), batch("b", 0, 40), batch("a", 1, 40)], "too early"),
        ([batch("a", 0, 40), NO_OP, NO_OP, batch("b", 0, 40)], "exactly once"),
        ([batch("a", 1, 40), batch("b", 0, 40), batch("a", 0, 40)], "after a later one"),
        ([batch("a", 0, 40) + batch("b", 0, 40), NO_OP, NO_OP, batch("a", 1, 40)], "over the capacity"),
    ],
)
def test_an_illegal_order_is_refused_with_the_reason(microbatches, sentence):
    rounds = [batch("a", 0, 40), batch("b", 0, 40), batch("a", 1, 40)]
    with pytest.raises(IllegalProgram, match=sentence):
        verify_microbatches(rounds, [tuple(one) for one in microbatches], MergeRules(64, stages=3))


def test_places_are_counted_from_the_first_of_this_window():
    before = [tuple(batch("c", 0, 40)), tuple(batch("c", 1, 40))]
    rounds = [batch("a", 0, 40), batch("b", 0, 40) + batch("d", 0, 40)]
    with pytest.raises(IllegalProgram, match="microbatch 1 is over the capacity of 64"):
        verify_microbatches(rounds, [tuple(one) for one in rounds], MergeRules(64), before)


def test_a_merge_counts_what_it_moved_and_what_it_waits_for():
    rounds = [batch("a", 0, 60, 30), batch("b", 0, 60, 30)]
    merged = merge(rounds, MergeRules(64))
    assert (len(merged.microbatches), merged.no_ops, merged.separate_count, merged.moved_samples) == (
        3,
        0,
        4,
        1,
    )
    alone = merge([batch("a", 0, 60), batch("a", 1, 60)], MergeRules(64, stages=2))
    assert (len(alone.microbatches) - alone.no_ops, alone.no_ops) == (2, 1)


def test_each_job_is_padded_by_itself():
    rounds = [batch("a", 0, 1) + batch("b", 0, 1)]
    assert len(merge(rounds, MergeRules(2, multiple=2)).microbatches) == 2
    assert len(merge(rounds, MergeRules(2, multiple=1)).microbatches) == 1


def jobs(*means, samples=32):
    return [JobLengths(f"job{place}", mean, mean * samples) for place, mean in enumerate(means)]


def test_the_shortest_is_paired_with_the_longest():
    groups = head_tail_groups(jobs(300, 100, 400, 200), 2)
    assert [[job.mean for job in members] for members in groups] == [[100, 400], [200, 300]]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.data())
def test_every_job_is_in_one_group_and_no_group_is_empty(means, data):
    members = jobs(*means)
    groups = head_tail_groups(members, data.draw(st.integers(1, len(means))))
    assert all(groups)
    assert sorted(job.job for one in groups for job in one) == sorted(job.job for job in members)
    assert max(map(len, groups)) - min(map(len, groups)) <= 2


def test_the_next_batch_starts_as_many_microbatches_later_as_there_are_stages():
    assert earliest_microbatch(7, stages=4) == 11
    assert earliest_microbatch(7, stages=1) == 8


@given(st.integers(1, 8), st.integers(0, 20))
def test_in_plain_1f1b_the_lemma_is_exact(stages, last):
    count = last + stages + 1
    for stage in range(stages):
        ahead = stages - stage  # forwards before the first backward
        order = [("forward", k) for k in range(ahead)]
        for k in range(count):
            order += [("backward", k), ("forward", k + ahead)]
        stepped = order.index(("backward", last))
        assert order.index(("forward", earliest_microbatch(last, stages))) > stepped
        if stage == 0:
            assert order.index(("forward", earliest_microbatch(last, stages) - 1)) < stepped


def test_a_group_alone_waits_for_its_own_last_microbatch():
    assert no_ops_per_round([5], stages=4) == 3
    assert no_ops_per_round([5, 2], stages=4) == 1
    assert no_ops_per_round([5, 3], stages=4) == 0
    assert no_ops_per_round([5], stages=1) == 0


def test_as_many_groups_as_jobs_and_no_more():
    assert [len(members) for members in head_tail_groups(jobs(100, 200), 2)] == [1, 1]
    for count in (0, 3):
        with pytest.raises(AssertionError, match="every group has a job"):
            head_tail_groups(jobs(100, 200), count)


def test_each_job_is_a_group_of_its_own_where_that_leaves_nothing_to_wait_for():
    chosen = group_jobs(jobs(256, 256), 8192, stages=2)
    assert (chosen.groups, chosen.microbatches, chosen.no_ops) == ((("job1",), ("job0",)), (1, 1), 0)


def test_on_one_stage_all_jobs_form_one_group():
    assert len(group_jobs(jobs(100, 200, 300, 400), 8192, stages=1).groups) == 1


def test_in_a_pipeline_groups_take_turns_where_one_would_have_to_wait():
    chosen = group_jobs(jobs(500, 600, 700, 800), 8192, stages=4)
    assert len(chosen.groups) > 1
    assert chosen.no_ops == 0
    assert sum(chosen.microbatches) == 12
