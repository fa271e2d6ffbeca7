"""Rows tokenised by several processes become the same samples, and mistakes the same sentences."""

import json
import os
import time
from itertools import count

import pytest

from tests import bench
from tests.data.doubled import doubled
from weftune.data import build as building
from weftune.data import workers
from weftune.data.prepare import prepare
from weftune.data.spec import DataSpec
from weftune.data.workers import Workers, end_workers
from weftune.errors import DataError


@pytest.fixture
def many(monkeypatch):
    """Two workers, who are there when two chunks of four rows have been made."""
    asked = count()
    monkeypatch.setattr(building, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(building, "CHUNKS_BEFORE_WORKERS", 1)
    monkeypatch.setattr(building, "worker_count", lambda: 2)
    monkeypatch.setattr(building, "have_workers_answered", lambda: next(asked) >= 2)
    yield
    end_workers()


def chats(count):
    return [
        {"messages": [{"role": "user", "content": f"w{at} w9"}, {"role": "assistant", "content": "w7 w8"}]}
        for at in range(10, 10 + count)
    ]


def files(folder):
    (store,) = folder.iterdir()
    return {path.name: path.read_bytes() for path in store.iterdir()}


def spec(path, rows, **keys):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSpec(path=str(path), chat_template="chatml", **keys)


def test_the_store_is_the_same_to_the_byte(tmp_path, many, monkeypatch):
    rows = [*chats(22), {"messages": [{"role": "user", "content": "w3"}]}, *chats(3), {"messages": "w4"}]
    data = spec(tmp_path / "rows.jsonl", rows, skip_bad_rows=True)
    beside = prepare(data, None, bench.tokenizer(), tmp_path / "beside")
    assert workers._WORKERS
    monkeypatch.setattr(building, "worker_count", lambda: 0)
    here = prepare(data, None, bench.tokenizer(), tmp_path / "here")
    assert files(tmp_path / "beside") == files(tmp_path / "here")
    assert beside.notes == here.notes
    assert len(here.train) == 25


def test_mistakes_are_told_in_the_same_words(tmp_path, many, monkeypatch):
    # Nothing of them is supervised, which only the tokens tell.
    rows = [*chats(9), *({"input_ids": [5, 6], "labels": [-100, -100]} for _ in range(2)), *chats(2)]
    data = spec(tmp_path / "rows.jsonl", [{"input_ids": [5, 6], "labels": [5, 6]}] * 9 + rows[9:11])
    told = []
    for get_workers in (2, 0):
        monkeypatch.setattr(building, "worker_count", lambda count=get_workers: count)
        with pytest.raises(DataError) as refusal:
            prepare(data, None, bench.tokenizer(), tmp_path / "cache")
        told.append(str(refusal.value))
    assert told[0] == told[1]
    assert "rows.jsonl:10" in told[0]


def test_started_ahead_workers_are_there_without_having_made_anything():
    pool = Workers(1)
    try:
        assert not pool.has_answered
        pool.start(doubled, os.getpid())
        until = time.monotonic() + 60
        while not pool.has_answered and time.monotonic() < until:
            time.sleep(0.01)
        assert pool.has_answered
        assert [made for _, made in pool.map_items(doubled, os.getpid(), [3])] == [6]
    finally:
        pool.shutdown()


def test_what_a_lost_worker_was_at_is_made_here_and_the_others_go_on():
    pool = Workers(2)
    try:
        found = list(pool.map_items(doubled, os.getpid(), [1, 2, "lost", 3, 4, "lost", 5]))
    finally:
        pool.shutdown()
    assert [made for _, made in found] == [2, 4, "here", 6, 8, "here", 10]


def test_an_error_is_raised_here_and_an_item_that_cannot_be_sent_is_made_here():
    pool = Workers(1)
    try:
        with pytest.raises(ValueError, match="bad"):
            list(pool.map_items(doubled, 0, [1, "bad", 2]))
        unsendable = lambda: None  # noqa: E731
        ((_, made),) = pool.map_items(lambda shared, item: "here", 0, [unsendable])
    finally:
        pool.shutdown()
    assert made == "here"
