from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import is_within, slow_but
from tests.plan.streams import HOSTS, bases, every_partition, partitions
from weftune.errors import PlanError
from weftune.plan.cost.estimate import LayerCost
from weftune.plan.layout.mobius_partition import Bounds, largest_stages, search_partition, smallest_stages
from weftune.plan.layout.mobius_step import Host, step_seconds

BLOCK = LayerCost("block", 0.03, 0.06, 400, 8, 8, 4, 60)


def model(blocks: int) -> list[LayerCost]:
    head = LayerCost("head", 0.05, 0.05, 900, 0, 8, 0, 80)
    return [LayerCost("embedding", 0.001, 0.0, 900, 8), *[BLOCK] * blocks, head]


@settings(max_examples=60, deadline=None)
@given(bases(7), HOSTS, st.integers(1, 6))
def test_the_search_equals_brute_force_on_small_bases(
    layers: list[LayerCost], host: Host, microbatches: int
) -> None:
    least = min(step_seconds(chosen, layers, host, microbatches) for chosen in every_partition(len(layers)))
    if least == math.inf:
        with pytest.raises(PlanError):
            search_partition(layers, host, microbatches)
        return
    found = search_partition(layers, host, microbatches)
    assert found.seconds == pytest.approx(least, rel=1e-8)
    assert found.seconds == step_seconds(found.partition, layers, host, microbatches)
    assert found.is_optimal


@pytest.mark.parametrize(
    ("gpus", "memory", "bandwidth"),
    slow_but([(1, 2000, 4000.0), (4, 1600, 9000.0)], [(4, 1600, 9000.0)]),
)
def test_the_search_equals_brute_force_on_ten_layers(gpus: int, memory: int, bandwidth: float) -> None:
    layers, host = model(8), Host(gpus, memory, bandwidth)
    least = min(step_seconds(chosen, layers, host, 4) for chosen in every_partition(10))
    found = search_partition(layers, host, 4)
    assert found.seconds == pytest.approx(least, rel=1e-8)
    assert found.is_optimal


@given(st.data(), bases(8), HOSTS, st.integers(1, 6))
def test_no_partition_is_faster_than_the_bound_of_any_of_its_prefixes(
    data: st.DataObject, layers: list[LayerCost], host: Host, microbatches: int
) -> None:
    chosen = data.draw(partitions(len(layers)))
    seconds = step_seconds(chosen, layers, host, microbatches)
    bounds = Bounds(layers, host, microbatches)
    prefix = bounds.empty_prefix()
    assert prefix.seconds <= seconds * (1 + 1e-9)
    for stage, resident in zip(chosen.costs(layers), chosen.resident_stages, strict=True):
        longer = bounds.extend(prefix, stage, resident)
        if longer is None:
            assert seconds == math.inf
            return
        assert longer.seconds <= seconds * (1 + 1e-9)
        prefix = longer


@settings(max_examples=25, deadline=None)
@given(bases(16), HOSTS, st.integers(1, 6))
def test_the_search_is_never_slower_than_the_largest_or_the_smallest_stages(
    layers: list[LayerCost], host: Host, microbatches: int
) -> None:
    plain = []
    for partition in (largest_stages, smallest_stages):
        try:
            plain.append(step_seconds(partition(layers, host), layers, host, microbatches))
        except PlanError:
            continue
    if plain:
        assert search_partition(layers, host, microbatches, prefixes=500).seconds <= min(plain) * (1 + 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "bandwidth"), [(1, 2500.0), (1, 9000.0), (4, 2500.0)])
def test_64_layers_take_under_ten_seconds(gpus: int, bandwidth: float) -> None:
    layers, host = model(62), Host(gpus, 4000, bandwidth)
    began = time.process_time()
    found = search_partition(layers, host, 4)
    assert is_within(time.process_time() - began, 10)
    largest = step_seconds(largest_stages(layers, host), layers, host, 4)
    smallest = step_seconds(smallest_stages(layers, host), layers, host, 4)
    assert found.bound <= found.seconds < min(largest, smallest)


def test_a_cut_search_says_that_it_proved_nothing() -> None:
    layers, host = model(30), Host(4, 4000, 2500.0)
    found = search_partition(layers, host, 4, prefixes=2000)
    assert not found.is_optimal
    assert 0 < found.bound < found.seconds


def test_the_same_question_has_the_same_answer() -> None:
    layers, host = model(20), Host(2, 3000, 2500.0)
    assert search_partition(layers, host, 4, 5000) == search_partition(layers, host, 4, 5000)


def test_a_layer_that_does_not_fit_is_named_with_its_number() -> None:
    layers = [BLOCK, LayerCost("block", 1.0, 1.0, 5 << 30, state_bytes=1 << 30), BLOCK]
    with pytest.raises(PlanError, match=r"layer 1 \(block\) needs 5\.00 GiB and 1\.00 GiB of adapter state"):
        search_partition(layers, Host(1, 4 << 30, 1e9), 2)
