"""Samples of several stores behind one index, rows as they hash, and what is told of them."""

import numpy as np
import pytest

from weftune.data.cache import SampleStore
from weftune.data.row import as_row, canonical, kind_name, row_hash
from weftune.data.samples import Samples, Share
from weftune.data.tally import Tally


def store(*rows):
    """Of samples given by their tokens; every second token is supervised."""
    tokens = np.concatenate([np.array(row, dtype=np.int32) for row in rows])
    mask = np.concatenate([np.arange(len(row)) % 2 == 1 for row in rows])
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    return SampleStore(tokens, mask, lengths, lengths // 2, np.arange(len(rows), dtype=np.uint64), Tally())


def two_shares(weight=1.0):
    first, second = store([1], [2, 3], [4, 5, 6]), store([7, 8, 9, 10], [11])
    chosen = np.array([2, 0]), np.array([0, 1])
    return Samples([Share(first, chosen[0]), Share(second, chosen[1], weight)], "mark")


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
    assert [two_shares().largest_batch(size) for size in (1, 2, 3, 9)] == [4, 7, 8, 9]
    assert two_shares(0.5).largest_batch(3) == 12


def test_a_row_hashes_alike_whatever_the_order_of_its_columns_and_never_changes():
    assert canonical({"b": 1, "a": "ä"}) == b'{"a":"\\u00e4","b":1}'
    assert row_hash({"b": 1, "a": "x"}) == row_hash({"a": "x", "b": 1}) == 12949928158578775435
    assert row_hash({"a": "x"}) != row_hash({"a": "y"})
    assert canonical({("a",): 1}) == b"{('a',): 1}"
    endless = {}
    endless["self"] = endless
    assert canonical(endless) == b"{'self': {...}}"


def test_what_is_no_row_says_what_it_is():
    assert as_row("f:1", {"a": 1}).problem is None
    assert as_row("f:1", [1]).problem == "a row must be an object with named columns, not a list"
    assert as_row("f:1", {1: 2}).problem == "the names of the columns must be text"
    values = [None, True, 1, 1.5, "a", {}, (), b""]
    kinds = ["null", "true or false", "a number", "a number", "text", "an object", "a list", "a bytes"]
    assert [kind_name(value) for value in values] == kinds


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
