"""Buckets are as even as brute force makes them for few latencies, and nearly so for many."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import is_within
from weftune.plan.layout.balanced import (
    EXACT,
    assign_longest_first,
    balance_latencies,
    bucket_sums,
    improve_by_moves,
    variance,
)


def partitions(indices, count):
    """Every way to put the indices into `count` buckets, none empty."""
    if not indices:
        if count == 0:
            yield ()
        return
    first, rest = indices[0], indices[1:]
    for others in partitions(rest, count - 1) if count else ():
        yield ((first,), *others)
    for others in partitions(rest, count):
        for place in range(len(others)):
            yield (*others[:place], (first, *others[place]), *others[place + 1 :])


def test_the_oracle_counts_as_many_partitions_as_there_are():
    assert [sum(1 for _ in partitions(tuple(range(5)), count)) for count in range(1, 6)] == [1, 15, 25, 10, 1]


@settings(max_examples=120, deadline=None)
@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=7), st.data())
def test_few_latencies_are_balanced_as_well_as_brute_force_does_it(latencies, data):
    count = data.draw(st.integers(1, len(latencies)))
    expected = min(variance(found, latencies) for found in partitions(tuple(range(len(latencies))), count))
    assert variance(balance_latencies(latencies, count), latencies) == pytest.approx(
        expected, rel=1e-9, abs=1e-9
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=40), st.data())
def test_every_latency_is_in_one_bucket_and_none_is_empty(latencies, data):
    buckets = balance_latencies(latencies, data.draw(st.integers(1, len(latencies))))
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(latencies)))
    assert all(buckets)


def test_moves_and_swaps_mend_what_longest_first_leaves_uneven():
    latencies = [3, 3, 2, 2, 2]
    greedy = assign_longest_first(latencies, 2)
    assert sorted(bucket_sums(greedy, latencies)) == [5, 7]
    assert bucket_sums(improve_by_moves(greedy, latencies), latencies) == [6, 6]
    everything_but_one = ((0, 1, 2, 3), (4,))
    assert bucket_sums(improve_by_moves(everything_but_one, latencies), latencies) == [6, 6]


def test_the_heuristic_is_near_the_exact_answer_where_both_can_be_had():
    draw = random.Random(7)
    worse = []
    for _ in range(60):
        latencies = [draw.lognormvariate(0, 1) for _ in range(EXACT)]
        count = draw.randint(2, EXACT - 1)
        exact = max(bucket_sums(balance_latencies(latencies, count), latencies))
        near = max(
            bucket_sums(improve_by_moves(assign_longest_first(latencies, count), latencies), latencies)
        )
        worse.append(near / exact - 1)
    assert min(worse) > -0.1  # the exact one has the least variance, not always the least maximum
    assert sum(worse) / len(worse) < 0.02
    assert max(worse) < 0.15


def test_128_latencies_are_balanced_for_every_count_in_under_four_seconds():
    draw = random.Random(3)
    latencies = [draw.lognormvariate(0, 1) for _ in range(128)]
    began = time.process_time()
    for count in range(1, 129):
        assert variance(balance_latencies(latencies, count), latencies) <= variance(
            assign_longest_first(latencies, count), latencies
        ) * (1 + 1e-9)
    assert is_within(time.process_time() - began, 4.0)
