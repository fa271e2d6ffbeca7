"""Exchanges between microbatches never make a packing worse, and find what best fit misses."""

from hypothesis import given, settings

from tests.plan.packings import assert_legal, fewest, instances
from weftune.plan.pack.bound import bound_of
from weftune.plan.pack.instance import instance
from weftune.plan.pack.pack import pack_padded
from weftune.plan.pack.swap import emptiest, least_possible, shake, swap


@settings(max_examples=200, deadline=None)
@given(instances())
def test_exchanging_keeps_every_sample_and_is_never_worse(case):
    greedy = pack_padded(case)
    found = swap(case, greedy, bound_of(case), tries=500)
    assert_legal(case, found)
    assert len(found) <= len(greedy)
    assert len(found) < len(greedy) or emptiest(case, found) <= emptiest(case, greedy)


@settings(max_examples=100, deadline=None)
@given(instances())
def test_shaking_keeps_every_sample_and_never_needs_more_bins(case):
    greedy = pack_padded(case)
    found = shake(case, greedy, bound_of(case), kicks=20, tries=100)
    assert_legal(case, found)
    assert len(found) <= len(greedy)


@settings(max_examples=60, deadline=None)
@given(instances(most=8))
def test_the_emptiest_bin_cannot_hold_less_than_what_the_others_leave(case):
    found = swap(case, pack_padded(case), fewest(case), tries=500)
    assert emptiest(case, found) >= least_possible(case, len(found))


def test_an_exchange_saves_a_microbatch_that_best_fit_needs():
    case = instance([6, 6, 5, 5, 4, 4], 15)
    greedy = pack_padded(case)
    assert (len(greedy), len(swap(case, greedy, 2, tries=100))) == (3, 2)


def test_shaking_finds_what_exchanges_between_two_do_not():
    case = instance([28, 25, 25, 24, 22, 18, 17, 16, 16, 15, 14, 14, 12, 12, 11, 8], 40)
    stuck = swap(case, pack_padded(case), 7, tries=4000)
    assert (len(stuck), len(shake(case, stuck, 7, kicks=400, tries=4000))) == (8, 7)


def test_without_tries_nothing_changes():
    case = instance([6, 6, 5, 5, 4, 4], 15)
    assert swap(case, pack_padded(case), 2, tries=0) == pack_padded(case)
