from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.contention import Root, contended_seconds, fastest_order
from tests.plan.streams import HOSTS, bases, partition, partitions
from weftune.plan.cost.estimate import LayerCost
from weftune.plan.layout.mapping import Topology, least_contention_order, sequential_order
from weftune.plan.layout.mobius_step import Host, StreamPartition, step_seconds, visits

BLOCK = LayerCost("block", 1.0, 2.0, 40)


def seconds(
    chosen: StreamPartition, layers: list[LayerCost], host: Host, topology: Topology, order: tuple[int, ...]
) -> float:
    root = Root(host.bandwidth)
    return contended_seconds(visits(chosen, layers, host), order, topology, host, host.gpus, root)


@given(st.data(), bases(9), HOSTS, st.integers(1, 6), st.booleans())
def test_without_shared_roots_the_simulation_agrees_with_the_recurrence(
    data: st.DataObject, layers: list[LayerCost], host: Host, microbatches: int, ordered: bool
) -> None:
    chosen = data.draw(partitions(len(layers)))
    expected = step_seconds(chosen, layers, host, microbatches)
    assume(expected < math.inf)
    apart = Topology((1,) * host.gpus)
    moved, root = visits(chosen, layers, host), Root(host.bandwidth, ordered)
    order = sequential_order(apart)
    assert contended_seconds(moved, order, apart, host, microbatches, root) == pytest.approx(expected)


@given(st.data(), bases(9), HOSTS)
def test_a_shared_root_never_makes_a_step_faster(
    data: st.DataObject, layers: list[LayerCost], host: Host
) -> None:
    chosen = data.draw(partitions(len(layers)))
    assume(step_seconds(chosen, layers, host, host.gpus) < math.inf)
    shared, order = Topology((host.gpus,)), tuple(range(host.gpus))
    apart = step_seconds(chosen, layers, host, host.gpus)
    assert seconds(chosen, layers, host, shared, order) >= apart * (1 - 1e-9)


def test_two_uploads_under_one_root_take_twice_as_long() -> None:
    layers = [LayerCost("block", 0.0, 0.0, 40)] * 4
    chosen, host = partition(range(5), [False] * 4), Host(2, 40, 10.0)
    apart = seconds(chosen, layers, host, Topology((1, 1)), (0, 1))
    shared = seconds(chosen, layers, host, Topology((2,)), (0, 1))
    assert shared == pytest.approx(2 * apart)


@given(st.data(), bases(7), HOSTS.filter(lambda host: host.gpus == 4), st.sampled_from([(2, 2), (1, 3)]))
def test_no_order_of_the_gpus_is_faster_than_the_fastest(
    data: st.DataObject, layers: list[LayerCost], host: Host, roots: tuple[int, ...]
) -> None:
    chosen, topology = data.draw(partitions(len(layers))), Topology(roots)
    assume(step_seconds(chosen, layers, host, 4) < math.inf)
    found = fastest_order(visits(chosen, layers, host), topology, host, 4, Root(host.bandwidth))
    least = min(seconds(chosen, layers, host, topology, order) for order in permutations(range(4)))
    assert seconds(chosen, layers, host, topology, found) == pytest.approx(least)


@pytest.mark.parametrize("roots", [(2, 2), (4, 4)])
def test_cross_mapping_beats_sequential_mapping_where_uploads_decide(roots: tuple[int, ...]) -> None:
    topology = Topology(roots)
    host = Host(topology.gpus, 100, 10.0)
    layers = [BLOCK] * (5 * topology.gpus)
    chosen = partition(range(len(layers) + 1), [False] * len(layers))
    cross = seconds(chosen, layers, host, topology, least_contention_order(topology, len(layers)))
    sequential = seconds(chosen, layers, host, topology, sequential_order(topology))
    assert cross < 0.99 * sequential
