from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftune.plan.layout.mapping import (
    EXACT_GPUS,
    Topology,
    contention,
    least_contention_order,
    sequential_order,
)

TOPOLOGIES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple).map(Topology)


@settings(max_examples=25, deadline=None)
@given(TOPOLOGIES.filter(lambda topology: topology.gpus <= 6), st.integers(1, 20))
def test_no_order_of_the_gpus_has_less_contention(topology: Topology, stages: int) -> None:
    found = least_contention_order(topology, stages)
    assert sorted(found) == list(range(topology.gpus))
    least = min(contention(order, topology, stages) for order in permutations(range(topology.gpus)))
    assert contention(found, topology, stages) == pytest.approx(least)


def test_neighbouring_stages_go_to_different_roots_where_there_are_two_of_a_size() -> None:
    assert least_contention_order(Topology((2, 2)), 8) == (0, 2, 1, 3)
    assert least_contention_order(Topology((4, 4)), 32) == (0, 4, 1, 5, 2, 6, 3, 7)


def test_stages_on_one_gpu_do_not_contend() -> None:
    assert contention((0,), Topology((1,)), 10) == 0
    assert contention((0, 1), Topology((1, 1)), 10) == 0


def test_contention_is_the_roots_size_over_the_distance() -> None:
    assert contention((0, 1, 2), Topology((2, 1)), 4) == pytest.approx(2 / 1 + 2 / 2)


def test_with_one_gpu_apart_every_order_is_a_rotation_of_the_sequential_one() -> None:
    topology = Topology((1, 3))
    sequential = contention(sequential_order(topology), topology, 40)
    for order in permutations(range(4)):
        assert contention(order, topology, 40) == pytest.approx(sequential, rel=0.03)


def test_above_the_exact_size_the_search_is_deterministic_and_beats_the_sequential_order() -> None:
    topology = Topology((4, 8, 4))
    assert topology.gpus > EXACT_GPUS
    found = least_contention_order(topology, 48)
    assert found == least_contention_order(topology, 48)
    assert sorted(found) == list(range(16))
    assert contention(found, topology, 48) < 0.9 * contention(sequential_order(topology), topology, 48)
