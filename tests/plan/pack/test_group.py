"""Jobs are grouped short with long, and in enough groups for the bubble lemma where that pays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftune.plan.pack.group import JobLengths, earliest, group, head_tail, waits


def jobs(*means, samples=32):
    return [JobLengths(f"job{place}", mean, mean * samples) for place, mean in enumerate(means)]


def test_the_shortest_is_paired_with_the_longest():
    groups = head_tail(jobs(300, 100, 400, 200), 2)
    assert [[job.mean for job in members] for members in groups] == [[100, 400], [200, 300]]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.data())
def test_every_job_is_in_one_group_and_no_group_is_empty(means, data):
    members = jobs(*means)
    groups = head_tail(members, data.draw(st.integers(1, len(means))))
    assert all(groups)
    assert sorted(job.job for one in groups for job in one) == sorted(job.job for job in members)
    assert max(map(len, groups)) - min(map(len, groups)) <= 2


def test_the_next_batch_starts_as_many_microbatches_later_as_there_are_stages():
    assert earliest(7, stages=4) == 11
    assert earliest(7, stages=1) == 8


@given(st.integers(1, 8), st.integers(0, 20))
def test_in_plain_1f1b_the_lemma_is_exact(stages, last):
    count = last + stages + 1
    for stage in range(stages):
        ahead = stages - stage  # forwards before the first backward
        order = [("forward", k) for k in range(ahead)]
        for k in range(count):
            order += [("backward", k), ("forward", k + ahead)]
        stepped = order.index(("backward", last))
        assert order.index(("forward", earliest(last, stages))) > stepped
        if stage == 0:
            assert order.index(("forward", earliest(last, stages) - 1)) < stepped


def test_a_group_alone_waits_for_its_own_last_microbatch():
    assert waits([5], stages=4) == 3
    assert waits([5, 2], stages=4) == 1
    assert waits([5, 3], stages=4) == 0
    assert waits([5], stages=1) == 0


def test_as_many_groups_as_jobs_and_no_more():
    assert [len(members) for members in head_tail(jobs(100, 200), 2)] == [1, 1]
    for count in (0, 3):
        with pytest.raises(AssertionError, match="every group has a job"):
            head_tail(jobs(100, 200), count)


def test_each_job_is_a_group_of_its_own_where_that_leaves_nothing_to_wait_for():
    chosen = group(jobs(256, 256), 8192, stages=2)
    assert (chosen.groups, chosen.microbatches, chosen.waits) == ((("job1",), ("job0",)), (1, 1), 0)


def test_on_one_stage_all_jobs_form_one_group():
    assert len(group(jobs(100, 200, 300, 400), 8192, stages=1).groups) == 1


def test_in_a_pipeline_groups_take_turns_where_one_would_have_to_wait():
    chosen = group(jobs(500, 600, 700, 800), 8192, stages=4)
    assert len(chosen.groups) > 1
    assert chosen.waits == 0
    assert chosen.why(4) == "2 groups take turns on 4 stages: a round of all is 12 microbatches and 0 no-ops"
