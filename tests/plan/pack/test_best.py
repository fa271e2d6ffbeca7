"""The best packing is never worse than best fit, is a function of its input, and says how it was found."""

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan_packing import explain, pack_many, packers
from tests.plan.packings import assert_legal, fewest, instances
from weftune.plan.pack.best import Limits, pack_best, pack_instance
from weftune.plan.pack.instance import make_instance, pack_padded
from weftune.plan.pack.swap import least_load

SMALL = Limits(max_exchanges=300, max_repackings=30)


@settings(max_examples=100, deadline=None)
@given(instances(most=16), st.booleans())
def test_the_best_packing_is_legal_and_never_worse_than_best_fit(case, leaves_room):
    packing, greedy = pack_instance(case, leaves_room, SMALL), pack_padded(case)
    assert_legal(case, [list(chosen) for chosen in packing.bins])
    assert packing.lower_bound <= packing.count <= packing.greedy_bin_count == len(greedy)
    if leaves_room and packing.count == len(greedy):
        assert packing.least_rows <= least_load(case, greedy)
    loads = [case.load(chosen) for chosen in packing.bins]
    assert loads == sorted(loads, reverse=True)
    assert packing.least_rows == loads[-1]


@settings(max_examples=60, deadline=None)
@given(instances(most=8))
def test_what_is_called_proven_cannot_be_done_with_fewer(case):
    packing = pack_instance(case)
    assert packing.count == fewest(case) or not packing.is_optimal


def test_a_packing_depends_on_nothing_but_its_input():
    lengths = [random.Random(1).randint(100, 1000) for _ in range(60)]
    assert pack_best(lengths, 2048, leaves_room=True) == pack_best(lengths, 2048, leaves_room=True)


def test_room_is_left_in_the_last_microbatch_where_it_is_asked_for():
    lengths = [45, 40, 40, 35, 25, 25, 10]
    assert pack_best(lengths, 90, leaves_room=True).least_rows == sum(lengths) - 2 * 90
    assert pack_best(lengths, 90).least_rows > sum(lengths) - 2 * 90


@pytest.mark.parametrize("count", [1, 2])
def test_any_number_of_processes_packs_alike(count):
    random_lengths, pack = random.Random(2), partial(pack_instance, leaves_room=True, limits=SMALL)
    cases = [make_instance([random_lengths.randint(50, 900) for _ in range(12)], 2048) for _ in range(12)]
    with packers(count) as pool:
        first, second = (pack_many(cases, pack, pool) for _ in range(2))
    assert first == second == pack_many(cases, pack)


def test_a_packing_explains_itself():
    packing = pack_best([6, 6, 5, 5, 4, 4], 15)
    assert explain(packing) == (
        "2 microbatches, found by exchanging samples between microbatches; "
        "best fit alone needs 3, and fewer cannot do"
    )
