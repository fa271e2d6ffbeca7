"""Greedy packing keeps every sample, keeps to the capacity, and wastes little."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.packings import assert_legal, fewest, instances
from weftune.plan.pack.instance import lower_bound, make_instance, pack, pack_padded


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 200))
def test_every_sample_is_packed_once_within_the_capacity(lengths, capacity):
    bins = pack(lengths, capacity)
    assert sorted(i for chosen in bins for i in chosen) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in chosen) <= capacity for chosen in bins)
    # Any two bins together hold more than one bin could: fewer than twice the fewest possible.
    fill = sorted(sum(lengths[i] for i in chosen) for chosen in bins)
    assert len(fill) < 2 or fill[0] + fill[1] > capacity


def test_packing_does_not_depend_on_anything_but_the_lengths():
    assert pack([4, 4, 2, 6, 1], 8) == pack([4, 4, 2, 6, 1], 8) == [[3, 2], [0, 1], [4]]


@settings(max_examples=100, deadline=None)
@given(instances())
def test_padding_counts_against_the_capacity(case):
    assert_legal(case, pack_padded(case))


def test_a_sample_joins_its_own_job_where_it_fits_into_the_padding():
    case = make_instance([33, 60, 31], 128, multiple=64, jobs=[0, 1, 0])
    assert pack_padded(case) == [[1, 0, 2]]


def test_each_sample_goes_where_it_leaves_the_least_room_and_of_equals_into_the_first():
    assert pack([5, 5, 3, 3], 8) == [[0, 2], [1, 3]], "both are full to the last token"
    assert pack([6, 5, 2, 1], 8) == [[0, 2], [1, 3]]
    assert pack([6, 7, 1, 2], 8) == [[1, 2], [0, 3]]
    assert pack([], 8) == []


def test_a_sample_may_be_as_long_as_the_capacity_and_no_longer():
    assert pack([8], 8) == [[0]]
    with pytest.raises(AssertionError, match="a sample is longer than the capacity"):
        pack([9], 8)


def test_with_padding_the_longest_come_first_and_each_goes_where_it_fills_most():
    # Padded to tens: 60 and 40 of job 0 make a hundred; 35 of job 1 takes 40, and 31 of job 0 fits beside it.
    case = make_instance([31, 60, 40, 35], 100, multiple=10, jobs=[0, 0, 0, 1])
    assert pack_padded(case) == [[1, 2], [3, 0]]


def test_of_bins_that_are_as_full_afterwards_the_one_that_grows_least_takes_a_sample():
    # 41 of job 0 and 50 of job 1 both take 50 rows; 9 more of job 0 lie in its padding.
    case = make_instance([41, 50, 9], 50, multiple=10, jobs=[0, 1, 0])
    assert pack_padded(case) == [[1], [0, 2]]
    # 51 of job 0 is 60; 49 of job 1 is 50: five more of job 1 make either 60 and five, or 60, which is full.
    case = make_instance([51, 49, 10], 60, multiple=10, jobs=[0, 1, 1])
    assert pack_padded(case) == [[0], [1, 2]]


def test_a_bin_takes_rows_up_to_its_capacity_and_no_more():
    case = make_instance([30, 30, 1], 60, multiple=10, jobs=[0, 1, 2])
    assert pack_padded(case) == [[0, 1], [2]]
    assert pack_padded(make_instance([30, 20, 10], 60, multiple=10, jobs=[0, 1, 2])) == [[0, 1, 2]]


def test_even_the_smallest_padding_counts():
    # 3, 3 and 1 are seven tokens, but ten rows.
    assert pack_padded(make_instance([3, 3, 1], 8, multiple=2, jobs=[0, 1, 2])) == [[0, 1], [2]]


def test_of_bins_that_are_alike_the_first_takes_a_sample():
    assert pack_padded(make_instance([40, 40, 10], 50, multiple=10, jobs=[0, 1, 2])) == [[0, 2], [1]]


def bound(lengths, capacity, **padding):
    return lower_bound(make_instance(lengths, capacity, **padding))


@settings(max_examples=150, deadline=None)
@given(instances(most=7))
def test_no_packing_needs_fewer_microbatches_than_the_bound(case):
    assert lower_bound(case) <= fewest(case)
    assert lower_bound(case) >= -(-sum(case.lengths) // case.capacity)


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
