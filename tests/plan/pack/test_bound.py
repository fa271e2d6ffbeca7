"""The bound never exceeds what can be reached, and sees what a count of tokens does not."""

from hypothesis import given, settings

from tests.plan.packings import fewest, instances
from weftune.plan.pack.bound import bound, bound_of


@settings(max_examples=150, deadline=None)
@given(instances(most=7))
def test_no_packing_needs_fewer_microbatches_than_the_bound(case):
    assert bound_of(case) <= fewest(case)
    assert bound_of(case) >= -(-sum(case.lengths) // case.capacity)


def test_samples_longer_than_half_need_a_microbatch_each():
    assert bound([51, 51, 51], 100) == 3


def test_room_beside_a_long_sample_counts_only_where_a_short_one_fits():
    # 260 tokens would fit into three of 100, but no 40 fits beside a 70: the three of 40 need two more.
    assert bound([70, 70, 40, 40, 40], 100) == 4
    assert bound([60, 60, 40, 40, 40], 100) == 3


def test_each_job_is_rounded_up_once_and_the_capacity_down():
    assert bound([10] * 10, 100) == 1
    assert bound([10] * 10, 100, multiple=64) == 2
    assert bound([30, 30, 30], 96, multiple=32, jobs=[0, 1, 2]) == 1
    assert bound([33, 30, 30], 96, multiple=32, jobs=[0, 1, 2]) == 2


def test_nothing_needs_no_microbatch():
    assert bound([], 100) == 0
