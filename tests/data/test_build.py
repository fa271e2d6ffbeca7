"""A table becomes a store: its format is found, its bad rows are told, its rows come in bounded chunks."""

from __future__ import annotations

import pytest

from weftune.data import build
from weftune.data.build import _BadRowReport, _split_rows, check_all_rows, find_format
from weftune.data.row import BadRow, CommonBadRow, Row
from weftune.data.spec import DataSpec
from weftune.data.tables import open_rows
from weftune.errors import DataError


def test_the_format_is_that_of_the_first_row_that_has_one():
    rows = [5, {"other": 1}, {"text": "a"}, {"messages": []}]
    assert find_format(open_rows(rows), DataSpec(rows=rows)) == "text"
    assert find_format(open_rows(rows), DataSpec(rows=rows, format="alpaca")) == "alpaca"
    with pytest.raises(DataError, match="rows:2: no row format has these columns: other; say which is which"):
        find_format(open_rows(rows), DataSpec(rows=rows, limit=2))
    for format in ("preference", "kto"):
        with pytest.raises(DataError, match=r"rows: these rows are "):
            find_format(open_rows(rows), DataSpec(rows=rows, format=format))


def test_rows_of_no_format_are_told_by_the_first_and_those_that_cannot_be_read_by_each():
    with pytest.raises(DataError) as error:
        find_format(open_rows([{}, {"a" * 400: 1}, {"b": 1}]), DataSpec())
    assert str(error.value).startswith("rows:2: no row format has these columns: " + "a" * 300 + "; say")
    with pytest.raises(DataError) as error:
        find_format(open_rows([5, "a", {}]), DataSpec())
    assert [mistake.location for mistake in error.value.mistakes] == ["rows:1", "rows:2"]
    with pytest.raises(DataError, match=r"^rows: the dataset is empty$"):
        find_format(open_rows([{}]), DataSpec())


def test_a_check_tells_every_bad_row_up_to_the_limit():
    rows = [{"text": "a"}, {"text": 1}, 5, {"text": ""}, {"text": 2}]
    with pytest.raises(DataError) as error:
        check_all_rows(open_rows(rows), "text", DataSpec(limit=4))
    assert [mistake.location for mistake in error.value.mistakes] == ["rows:2", "rows:3", "rows:4"]
    check_all_rows(open_rows(rows), "text", DataSpec(limit=1))


def told(bad: _BadRowReport, rest: str = "") -> list[str]:
    with pytest.raises(DataError) as error:
        bad.raise_bad_rows(rest)
    return [str(mistake) for mistake in error.value.mistakes]


def test_bad_rows_are_told_each_and_those_with_a_common_reason_once():
    bad = _BadRowReport()
    bad.raise_bad_rows("nothing to refuse")
    for number, needed in enumerate((5, 9, 7), start=1):
        remedy = "raise it to {needed_tokens}"
        bad.add(f"a:{number}", CommonBadRow("long", kind="length", remedy=remedy, needed_tokens=needed))
    bad.add("a:4", BadRow("torn"))
    bad.add("a:5", BadRow("torn"))
    bad.add("a:6", CommonBadRow("odd", kind="oddity", remedy="mend it"))
    assert told(bad) == [
        "a:1: long (3 such rows: a:1, a:2, a:3); raise it to 9",
        *("a:4: torn", "a:5: torn", "a:6: odd; mend it"),
    ]
    assert told(bad, "and so on")[-1].endswith("and so on")
    assert bad.reasons(2) == (["a:1: long (3 such rows: a:1, a:2, a:3)", "a:4: torn"], 4)
    bad.add("a:7", CommonBadRow("long", kind="length", remedy="", needed_tokens=1))
    assert told(bad)[0] == "a:1: long (4 such rows: a:1, a:2, a:3, …); raise it to 9"


def test_twenty_single_mistakes_are_told_and_the_rest_counted():
    bad = _BadRowReport()
    bad.add("a:0", CommonBadRow("long", kind="length", remedy="cut it"))
    for number in range(1, 20):
        bad.add(f"a:{number}", BadRow("torn"))
    assert not bad.is_full
    bad.add("a:20", BadRow("torn"))
    assert bad.is_full
    bad.add("a:21", CommonBadRow("odd", kind="oddity", remedy="mend it"))
    assert len(told(bad)) == 22
    bad.add("a:22", BadRow("torn"))
    bad.add("a:23", BadRow("torn"))
    assert told(bad, "and so on")[-1].endswith("and 2 more")
    assert len(told(bad)) == 23


def sizes(*values: dict) -> list[int]:
    return [len(chunk) for chunk in _split_rows(iter([Row("a", value) for value in values]))]


def test_chunks_are_bounded_in_rows_and_in_characters(monkeypatch):
    monkeypatch.setattr(build, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(build, "CHARACTERS_AT_ONCE", 100)
    assert sizes() == []
    assert sizes(*[{"a": "x"}] * 7) == [3, 3, 1]
    assert sizes(*[{"a": "x" * 50}] * 6) == [3, 3]
    assert sizes(*[{"a": "x" * 51}] * 5) == [2, 2, 1]
    nested = {"a": [{"b": "x" * 40}, "x" * 11], "c": "x" * 42, "d": 5}
    assert sizes(nested, {"a": "x"}, nested) == [1, 2]
    assert sizes({"a": [1] * 12, "b": 0.5}, {}, {}) == [1, 2]
