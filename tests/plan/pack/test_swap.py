"""Exchanges between microbatches never make a packing worse, and find what best fit misses."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.packings import assert_legal, fewest, instances
from weftune.plan.pack.instance import lower_bound, make_instance, pack_padded
from weftune.plan.pack.swap import (
    exchange_samples,
    find_best_fill,
    least_load,
    least_possible_load,
    repack_randomly,
)


@settings(max_examples=200, deadline=None)
@given(instances())
def test_exchanging_keeps_every_sample_and_is_never_worse(case):
    greedy = pack_padded(case)
    found = exchange_samples(case, greedy, lower_bound(case), max_exchanges=500)
    assert_legal(case, found)
    assert len(found) <= len(greedy)
    assert len(found) < len(greedy) or least_load(case, found) <= least_load(case, greedy)


@settings(max_examples=100, deadline=None)
@given(instances())
def test_shaking_keeps_every_sample_and_never_needs_more_bins(case):
    greedy = pack_padded(case)
    found = repack_randomly(case, greedy, lower_bound(case), max_repackings=20, max_exchanges=100)
    assert_legal(case, found)
    assert len(found) <= len(greedy)


@settings(max_examples=60, deadline=None)
@given(instances(most=8))
def test_the_emptiest_bin_cannot_hold_less_than_what_the_others_leave(case):
    found = exchange_samples(case, pack_padded(case), fewest(case), max_exchanges=500)
    assert least_load(case, found) >= least_possible_load(case, len(found))


def test_an_exchange_saves_a_microbatch_that_best_fit_needs():
    case = make_instance([6, 6, 5, 5, 4, 4], 15)
    greedy = pack_padded(case)
    assert (len(greedy), len(exchange_samples(case, greedy, 2, max_exchanges=100))) == (3, 2)


def test_shaking_finds_what_exchanges_between_two_do_not():
    case = make_instance([28, 25, 25, 24, 22, 18, 17, 16, 16, 15, 14, 14, 12, 12, 11, 8], 40)
    stuck = exchange_samples(case, pack_padded(case), 7, max_exchanges=4000)
    assert (len(stuck), len(repack_randomly(case, stuck, 7, max_repackings=400, max_exchanges=4000))) == (
        8,
        7,
    )


def test_without_tries_nothing_changes():
    case = make_instance([6, 6, 5, 5, 4, 4], 15)
    assert exchange_samples(case, pack_padded(case), 2, max_exchanges=0) == pack_padded(case)


@settings(max_examples=200, deadline=None)
@given(instances(most=8), st.integers(0, 60))
def test_no_other_choice_of_samples_puts_more_tokens_into_the_room(case, room):
    pool = range(len(case.lengths))
    chosen = find_best_fill(case, pool, room)
    subsets = [subset for size in range(len(pool) + 1) for subset in combinations(pool, size)]
    assert len(set(chosen)) == len(chosen)
    assert case.load(chosen) <= room
    assert case.tokens(chosen) == max(case.tokens(one) for one in subsets if case.load(one) <= room)


def test_of_equal_fillings_the_one_with_longer_samples_is_taken():
    assert find_best_fill(make_instance([2, 3, 5], 5), range(3), 5) == [2]
