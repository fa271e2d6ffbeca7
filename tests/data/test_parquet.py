"""Parquet files are looked at before they are read: by what they state, or if that is much in a process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from weftune.core.limited import LimitExceeded
from weftune.data import parquet
from weftune.data.parquet import count_bytes, read_batches, refuse_expansion
from weftune.errors import DataError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """600 rows in three row groups of two columns."""
    table = pyarrow.table({"text": [f"text {n:04}" for n in range(600)], "n": list(range(600))})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=200, compression="none")
    return tmp_path / "rows.parquet"


def columns(path: Path) -> list[tuple[int, int]]:
    stated = pyarrow.parquet.ParquetFile(path).metadata
    parts = [stated.row_group(group).column(at) for group in range(3) for at in range(2)]
    return [(part.num_values, part.total_uncompressed_size) for part in parts]


def test_rows_come_in_batches_that_are_smaller_the_longer_a_value_can_be(path, monkeypatch):
    def sizes() -> set[int]:
        return {batch.num_rows for batch in list(read_batches(path))[:-1]}

    assert sum(batch.num_rows for batch in read_batches(path)) == 600
    assert max(sizes()) <= parquet.ROWS_AT_ONCE
    longest = max(size for _, size in columns(path))
    monkeypatch.setattr(parquet, "HARMLESS_BYTES", 10 * longest)
    assert sizes() == {10}
    monkeypatch.setattr(parquet, "HARMLESS_BYTES", 10 * longest - 1)
    assert max(sizes()) == 9
    monkeypatch.setattr(parquet, "HARMLESS_BYTES", 1)
    assert sizes() == {1}


def test_a_file_without_columns_has_no_batches_to_fear(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({}), tmp_path / "rows.parquet")
    assert sum(batch.nbytes for batch in read_batches(tmp_path / "rows.parquet")) == 0


class _Process:
    """Stands for the limited process: notes what is asked of it."""

    def __init__(self, outcome: Exception | None = None) -> None:
        self.asked: list[tuple[str, int, float]] = []
        self._outcome = outcome

    def __call__(self, function: Any, path: str, most: int, *, seconds: float) -> None:
        assert function is count_bytes
        self.asked.append((path, most, seconds))
        if self._outcome is not None:
            raise self._outcome


def test_only_a_file_that_may_become_large_is_read_in_a_limited_process_and_only_once(path, monkeypatch):
    process = _Process()
    monkeypatch.setattr(parquet, "run_limited", process)
    bound = sum(values * (size + parquet.VALUE_BYTES) for values, size in columns(path))
    monkeypatch.setattr(parquet, "HARMLESS_BYTES", bound)
    refuse_expansion(path, "at the bound")
    assert process.asked == []
    monkeypatch.setattr(parquet, "HARMLESS_BYTES", bound - 1)
    for _ in range(3):
        refuse_expansion(path, "beyond the bound")
    (asked,) = process.asked
    assert asked[:2] == (str(path), max(4 * (bound - 1), parquet.MAX_EXPANSION * path.stat().st_size))
    assert asked[2] == parquet.MAX_SECONDS + path.stat().st_size * parquet.SECONDS_PER_BYTE
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataError, match="beyond the bound: not a Parquet file that can be read"):
        refuse_expansion(path, "beyond the bound")


def test_a_small_file_may_become_four_times_what_is_harmless_and_a_large_one_many_times_itself(
    path, monkeypatch
):
    process = _Process()
    monkeypatch.setattr(parquet, "run_limited", process)
    size = path.stat().st_size
    for harmless in (0, 1000 * size):
        monkeypatch.setattr(parquet, "HARMLESS_BYTES", harmless)
        monkeypatch.setattr(parquet, "_max_uncompressed_bytes", lambda _, harmless=harmless: harmless + 1)
        refuse_expansion(path, f"with {harmless} bytes")
    assert [most for _, most, _ in process.asked] == [parquet.MAX_EXPANSION * size, 4000 * size]


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        (
            LimitExceeded("memory", 4.0),
            r"its [\d,]+ bytes cannot be read: that needed more than 256 MiB",
        ),
        (DataError("its bytes become more"), "its bytes become more$"),
    ],
)
def test_what_the_limited_process_meets_is_told_of_the_file(outcome, sentence, path, monkeypatch):
    monkeypatch.setattr(parquet, "run_limited", _Process(outcome))
    monkeypatch.setattr(parquet, "HARMLESS_BYTES", 1)
    with pytest.raises(DataError, match=f"^mine: {sentence}"):
        refuse_expansion(path, "mine")


def test_bytes_are_counted_to_the_end_unless_they_are_too_many(path):
    total = sum(batch.nbytes for batch in read_batches(path))
    assert total > 0
    assert count_bytes(str(path), 2**30) == count_bytes(str(path), total) == total
    with pytest.raises(DataError, match=r"^its [\d,]+ bytes become more than 0 MiB of rows; write it again"):
        count_bytes(str(path), total - 1)


def test_a_file_that_is_torn_or_too_much_for_the_memory_says_so_when_it_is_counted(path, monkeypatch):
    def fails(problem: Exception) -> Any:
        def read(*_: object, **__: object) -> Any:
            raise problem

        return read

    for problem in (pyarrow.ArrowInvalid("torn\nat 5"), OSError("torn\nat 5"), ValueError("torn\nat 5")):
        monkeypatch.setattr(parquet, "read_batches", fails(problem))
        with pytest.raises(DataError, match=r"^not a Parquet file that can be read: torn$"):
            count_bytes(str(path), 1)
        monkeypatch.setattr(pyarrow.parquet, "ParquetFile", fails(problem))
        with pytest.raises(DataError, match=r"^mine: not a Parquet file that can be read: torn$"):
            refuse_expansion(path, "mine")
    monkeypatch.setattr(parquet, "read_batches", fails(pyarrow.ArrowMemoryError("full")))
    with pytest.raises(MemoryError):
        count_bytes(str(path), 1)


def test_a_column_that_states_less_than_nothing_takes_nothing_from_the_others():
    stated = [(5, 70), (-3, 20), (4, -9)]
    parts = [SimpleNamespace(num_values=count, total_uncompressed_size=size) for count, size in stated]
    group = SimpleNamespace(num_columns=3, column=parts.__getitem__)
    metadata = SimpleNamespace(num_row_groups=1, row_group=lambda _: group)
    assert list(parquet._column_chunks(metadata)) == [(5, 70), (0, 20), (4, 0)]
