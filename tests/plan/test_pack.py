"""Greedy packing keeps every sample, keeps to the capacity, and wastes little."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.packings import assert_legal, instances
from weftune.plan.instance import instance
from weftune.plan.pack import pack, pack_padded


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
    case = instance([33, 60, 31], 128, multiple=64, jobs=[0, 1, 0])
    assert pack_padded(case) == [[1, 0, 2]]
