"""Samples of several stores behind one index, rows as they hash, and what is told of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftune.data.cache import SampleStore, Tally
from weftune.data.row import canonical_json, json_type_name, row_hash, to_row
from weftune.data.samples import SampleOrder, Samples, StoreRows


def store(*rows):
    """Of samples given by their tokens; every second token is supervised."""
    tokens = np.concatenate([np.array(row, dtype=np.int32) for row in rows])
    mask = np.concatenate([np.arange(len(row)) % 2 == 1 for row in rows])
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    return SampleStore(tokens, mask, lengths, lengths // 2, np.arange(len(rows), dtype=np.uint64), Tally())


def two_shares(weight=1.0):
    first, second = store([1], [2, 3], [4, 5, 6]), store([7, 8, 9, 10], [11])
    chosen = np.array([2, 0]), np.array([0, 1])
    return Samples([StoreRows(first, chosen[0]), StoreRows(second, chosen[1], weight)], "mark")


def test_a_sample_is_found_in_its_store_behind_one_index():
    samples = two_shares()
    assert len(samples) == 4
    assert samples.fingerprint == "mark"
    assert [samples.tokens(i).tolist() for i in range(4)] == [[4, 5, 6], [1], [7, 8, 9, 10], [11]]
    assert samples.mask(2).tolist() == [False, True, False, True]
    assert samples.lengths.tolist() == [3, 1, 4, 1]
    assert samples.supervised.tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("i", [-1, 4])
def test_a_sample_that_is_not_there_is_an_error(i):
    with pytest.raises(IndexError, match=f"sample {i} of 4"):
        two_shares().tokens(i)


def test_weights_are_there_only_where_one_differs():
    assert two_shares().weights is None
    assert two_shares(0.5).weights.tolist() == [1.0, 1.0, 0.5, 0.5]


def test_the_largest_batch_holds_the_longest_samples_once_or_with_weights_the_longest_again_and_again():
    assert [two_shares().max_batch_tokens(size) for size in (1, 2, 3, 9)] == [4, 7, 8, 9]
    assert two_shares(0.5).max_batch_tokens(3) == 12


def test_a_row_hashes_alike_whatever_the_order_of_its_columns_and_never_changes():
    assert canonical_json({"b": 1, "a": "ä"}) == b'{"a":"\\u00e4","b":1}'
    assert row_hash({"b": 1, "a": "x"}) == row_hash({"a": "x", "b": 1}) == 12949928158578775435
    assert row_hash({"a": "x"}) != row_hash({"a": "y"})
    assert canonical_json({("a",): 1}) == b"{('a',): 1}"
    endless = {}
    endless["self"] = endless
    assert canonical_json(endless) == b"{'self': {...}}"


def test_what_is_no_row_says_what_it_is():
    assert to_row("f:1", {"a": 1}).problem is None
    assert to_row("f:1", [1]).problem == "a row must be an object with named columns, not a list"
    assert to_row("f:1", {1: 2}).problem == "the names of the columns must be text"
    values = [None, True, 1, 1.5, "a", {}, (), b""]
    kinds = ["null", "true or false", "a number", "a number", "text", "an object", "a list", "a bytes"]
    assert [json_type_name(value) for value in values] == kinds


def test_only_what_happened_is_told():
    assert Tally(rows=5).notes(None, 64) == []
    assert Tally(rows=5, skipped=1, reasons=["f:1: torn"], explained=1).notes(None, 64) == [
        "1 of 5 rows were skipped: f:1: torn."
    ]
    assert Tally(rows=5, skipped=3, reasons=["f:1: torn"], explained=1, truncated=2).notes("f", 64) == [
        "3 of 5 rows of f were skipped: f:1: torn; and 2 more.",
        "2 of 5 rows of f were truncated to 64 tokens.",
    ]
    told = Tally(rows=9, split=1, parted=2, endless=3, merged=4, control=5, untold=6).notes(None, 64)
    assert [note.removeprefix("In ")[:11] for note in told] == [f"{n} of 9 rows" for n in range(1, 7)]


def test_nothing_has_happened_to_rows_of_which_nothing_is_told():
    fresh = Tally()
    counts = (fresh.rows, fresh.skipped, fresh.truncated, fresh.split, fresh.parted, fresh.endless)
    assert {*counts, fresh.merged, fresh.control, fresh.untold, fresh.explained} == {0}
    assert fresh.reasons == []


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 200), size=st.integers(1, 33), seed=st.integers(0, 2**31), epoch=st.integers(0, 4)
)
def test_every_epoch_shows_every_sample_once_and_keeps_the_last_partial_batch(count, size, seed, epoch):
    order = SampleOrder(count, size, seed)
    first = epoch * order.steps_per_epoch + 1
    batches = [order.batch(first + step) for step in range(order.steps_per_epoch)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(count))
    assert all(len(batch) == size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= size


def test_a_batch_depends_on_seed_and_step_only():
    forward, backward = SampleOrder(100, 8, seed=7), SampleOrder(100, 8, seed=7)
    steps = range(1, 40)
    assert [forward.batch(s).tolist() for s in steps] == [
        backward.batch(s).tolist() for s in reversed(steps)
    ][::-1]
    assert SampleOrder(100, 8, seed=8).batch(1).tolist() != forward.batch(1).tolist()


def test_every_epoch_has_its_own_permutation():
    order = SampleOrder(64, 64, seed=0)
    assert len({tuple(order.batch(step).tolist()) for step in range(1, 6)}) == 5


def test_the_order_never_changes():
    assert SampleOrder(10, 5, seed=3).batch(1).tolist() == [0, 6, 2, 1, 3]
    assert SampleOrder(10, 5, seed=3).batch(3).tolist() == [3, 8, 6, 2, 9]


def test_the_epoch_counts_samples():
    order = SampleOrder(10, 4, seed=0)
    assert [order.epoch(step) for step in (0, 1, 2, 3, 4, 6)] == pytest.approx([0, 0.4, 0.8, 1, 1.4, 2])


def test_a_weight_of_two_shows_each_sample_twice_an_epoch():
    weights = np.array([2.0] * 5 + [1.0] * 5)
    order = SampleOrder(10, 4, seed=1, weights=weights)
    shown = np.concatenate([order.batch(step) for step in range(1, order.steps_per_epoch + 1)])
    assert np.bincount(shown, minlength=10).tolist() == [2] * 5 + [1] * 5


def test_a_weight_of_a_half_shows_one_half_and_then_the_other():
    weights = np.array([0.5] * 10 + [1.0] * 2)
    order = SampleOrder(12, 12, seed=1, weights=weights)
    assert order.steps_per_epoch == 1
    first, second = set(order.batch(1).tolist()), set(order.batch(2).tolist())
    assert len(first) == len(second) == 7
    assert first & second == {10, 11}
    assert first | second == set(range(12))
    other = SampleOrder(12, 12, seed=2, weights=weights)
    assert set(other.batch(1).tolist()) != first


def test_a_weight_with_a_fraction_is_met_on_average_by_every_sample():
    order = SampleOrder(8, 100, seed=5, weights=np.full(8, 1.25))
    shown = np.concatenate([order.batch(step) for step in range(1, 5)])
    assert np.bincount(shown, minlength=8).tolist() == [5] * 8


def test_the_smallest_weight_still_shows_a_sample():
    order = SampleOrder(3, 2, seed=0, weights=np.full(3, 0.01))
    assert len(order.batch(1)) == 1


def test_the_order_never_changes_where_samples_have_weights():
    """A run that goes on under a later release must see what it would have seen."""
    weights = np.array([1.0, 2.0, 0.5, 0.5, 0.5, 1.25, 1.25, 1.25, 1.25])
    order = SampleOrder(9, 4, seed=2, weights=weights)
    assert [order.batch(step).tolist() for step in range(1, 7)] == [
        *([7, 6, 8, 3], [1, 7, 4, 1], [0, 5]),
        *([2, 0, 1, 6], [7, 8, 5, 8], [4, 1]),
    ]
    assert [order.epoch(step) for step in (1, 2, 3)] == pytest.approx([0.4, 0.8, 1.0])


@pytest.mark.parametrize(("count", "size", "seed"), [(0, 1, 0), (1, 0, 0), (1, 1, -1), (-1, 1, 0)])
def test_an_order_of_nothing_is_a_bug(count, size, seed):
    assert SampleOrder(1, 1, 0).batch(1).tolist() == [0]
    with pytest.raises(AssertionError):
        SampleOrder(count, size, seed)


def test_steps_are_counted_from_one_and_epochs_from_zero():
    order = SampleOrder(3, 2, seed=0)
    assert order.epoch(0) == 0
    for ask in (lambda: order.batch(0), lambda: order.epoch(-1)):
        with pytest.raises(AssertionError):
            ask()
