"""The solver finds the fewest microbatches and the emptiest one, and says whether it has proven it."""

from itertools import product

import pytest
from hypothesis import given, settings

from benchmarks.studies.milp import minimise_bins, minimise_last_bin, pack_with_solver
from tests.plan.packings import assert_legal, fewest, instances
from weftune.plan.pack.best import pack_instance
from weftune.plan.pack.instance import lower_bound, make_instance, pack_padded
from weftune.plan.pack.swap import least_load

pytest.importorskip("highspy")


@settings(max_examples=40, deadline=None)
@given(instances(most=8))
def test_the_solver_needs_as_few_bins_as_trying_everything(case):
    bins, proven = minimise_bins(case, pack_padded(case), lower_bound(case), max_nodes=10_000)
    assert_legal(case, bins)
    assert proven
    assert len(bins) == fewest(case)


@settings(max_examples=40, deadline=None)
@given(instances(most=6, longest=40))
def test_the_emptiest_bin_is_as_empty_as_trying_everything_makes_it(case):
    start = pack_padded(case)
    found, _ = minimise_last_bin(case, start, max_nodes=10_000)
    assert_legal(case, found)
    loads = [0] if len(found) < len(start) else [least_load(case, found)]
    every = product(range(len(start)), repeat=len(case.lengths))
    packings = (
        [[i for i, at in enumerate(places) if at == b] for b in range(len(start))] for places in every
    )
    legal = (bins for bins in packings if all(case.load(chosen) <= case.capacity for chosen in bins))
    assert loads[0] == min(least_load(case, bins) for bins in legal)


def test_a_search_cut_short_returns_what_it_began_with_or_better_and_claims_nothing():
    lengths = [17 + (37 * i) % 29 for i in range(40)]
    case = make_instance(lengths, 101)
    start = pack_padded(case)
    bins, proven = minimise_bins(case, start, lower_bound(case) - 1, max_nodes=0)
    assert_legal(case, bins)
    assert len(bins) <= len(start)
    assert not proven


def test_solving_twice_gives_the_same_bins():
    case = make_instance([17 + (37 * i) % 29 for i in range(24)], 101)
    first, second = (minimise_bins(case, pack_padded(case), 1, max_nodes=20) for _ in range(2))
    assert first == second


@settings(max_examples=20, deadline=None)
@given(instances(most=8))
def test_the_solver_never_makes_a_packing_worse_and_proves_the_fewest_bins(case):
    plain, solved = (pack(case, leaves_room=True) for pack in (pack_instance, pack_with_solver))
    assert_legal(case, [list(chosen) for chosen in solved.bins])
    assert (solved.count, solved.least_rows) <= (plain.count, plain.least_rows)
    assert solved.is_optimal
    assert solved.count == fewest(case)
