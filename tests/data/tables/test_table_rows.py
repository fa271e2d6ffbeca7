"""Rows of tables: the lines of CSV, the rows of Parquet and of what is given from Python."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from weftune.data.row import Row
from weftune.data.tables import table_rows
from weftune.data.tables.table_rows import read_csv, read_given, read_parquet
from weftune.errors import DataError


def rows_of(tmp_path: Path, text: str) -> list[Row]:
    path = tmp_path / "rows.csv"
    path.write_text(text, newline="")
    return list(read_csv(path, "rows"))


def test_a_torn_line_is_a_bad_row_and_those_behind_it_are_read(tmp_path):
    first, torn, last = rows_of(tmp_path, 'text,b\na,b\n"a"c,b\nd,e\n')
    assert (first.value, last.value) == ({"text": "a", "b": "b"}, {"text": "d", "b": "e"})
    assert (torn.place, torn.problem[:15], last.place) == ("rows:3", "not valid CSV: ", "rows:4")


def test_a_line_is_as_long_as_it_may_be_and_one_longer_is_passed_over_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(table_rows, "LONGEST_LINE", 10)
    text = "text\n" + "x" * 9 + "\n" + "y" * 10 + "\n" + "z" * 35 + "\n\nb\n" + "c" * 9
    rows = rows_of(tmp_path, text)
    assert [row.value.get("text") for row in rows] == ["x" * 9, None, None, "b", "c" * 9]
    assert [row.place for row in rows] == ["rows:2", "rows:3", "rows:4", "rows:6", "rows:7"]
    assert rows[2].problem == "not valid CSV: the line is longer than 0 Mi characters"
    with pytest.raises(DataError, match="rows:1: the header is not valid CSV: the line is longer"):
        rows_of(tmp_path, "h" * 30)


def test_a_field_may_be_longer_than_the_csv_module_takes_by_itself(tmp_path):
    (row,) = rows_of(tmp_path, "text\n" + "x" * 200_000)
    assert len(row.value["text"]) == 200_000
    assert rows_of(tmp_path, "") == rows_of(tmp_path, "text\n") == []


def test_rows_of_parquet_are_counted_from_one_and_empty_cells_are_absent(tmp_path):
    table = pyarrow.table({"text": ["a", None, "c"], "n": [1.0, 2.0, math.nan]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    rows = list(read_parquet(tmp_path / "rows.parquet", "rows"))
    assert [row.place for row in rows] == ["rows:1", "rows:2", "rows:3"]
    assert [row.value for row in rows] == [{"text": "a", "n": 1.0}, {"n": 2.0}, {"text": "c"}]


def test_a_parquet_file_that_breaks_while_it_is_read_is_a_sentence(tmp_path, monkeypatch):
    def torn(_: Path) -> None:
        raise OSError("torn\nat 5")

    monkeypatch.setattr(table_rows, "refuse_swelling", lambda *_: None)
    monkeypatch.setattr(table_rows, "batches", torn)
    with pytest.raises(DataError, match=r"^rows: not a Parquet file that can be read: torn$"):
        list(read_parquet(tmp_path / "rows.parquet", "rows"))


def test_given_rows_that_are_too_deep_or_no_rows_are_bad_by_their_number():
    deep: list = []
    for _ in range(80):
        deep = [deep]
    good, bad, none = read_given([{"a": 1, "b": None}, {"a": deep}, 5], "rows")
    assert (good.place, good.value) == ("rows:1", {"a": 1})
    assert (bad.place, bad.problem) == ("rows:2", "the row is nested more than 64 levels deep")
    assert (none.place, none.problem) == (
        "rows:3",
        "a row must be an object with named columns, not a number",
    )


def test_a_dataset_is_read_through_all_of_its_batches():
    from datasets import Dataset

    rows = [{"n": n, "text": str(n)} for n in range(600)]
    assert [dict(row.value) for row in read_given(Dataset.from_list(rows), "rows")] == rows
