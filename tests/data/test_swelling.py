"""Files that swell or go on without end are refused before they fill the memory."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest

from weftune.data.parquet import _max_uncompressed_bytes, count_bytes
from weftune.data.tables import open_path
from weftune.errors import DataError

MEGABYTE = 2**20


def write_parquet(path: Path, table: pyarrow.Table) -> Path:
    pyarrow.parquet.write_table(
        table,
        path,
        compression="zstd",
        write_statistics=False,
        store_schema=False,
        dictionary_pagesize_limit=2**30,
    )
    return path


def repeated_text(path: Path) -> Path:
    """A text of 4 MiB in 1024 rows: 4 GiB."""
    indices = pyarrow.array([0] * 1024, pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["a" * (4 * MEGABYTE)]))
    return write_parquet(path, pyarrow.table({"text": column}))


def endless_list(path: Path) -> Path:
    """One row of forty million numbers."""
    count = 40_000_000
    numbers = pyarrow.array([0], pyarrow.int8()).take(pyarrow.array(bytes(count), pyarrow.int8()))
    column = pyarrow.ListArray.from_arrays(pyarrow.array([0, count], pyarrow.int32()), numbers)
    return write_parquet(path, pyarrow.table({"input_ids": column}))


@pytest.mark.timed
@pytest.mark.parametrize("write", [repeated_text, pytest.param(endless_list, marks=pytest.mark.slow)])
def test_a_few_bytes_of_parquet_do_not_become_gigabytes(write: object, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet")  # type: ignore[operator]
    assert path.stat().st_size < 2000
    before, started = psutil.Process().memory_info().rss, time.monotonic()
    with pytest.raises(DataError, match=r"rows: its [\d,]+ bytes (become more than|cannot be read)"):
        list(open_path(str(path), None, "rows").rows())
    assert time.monotonic() - started < 10
    assert psutil.Process().memory_info().rss - before < 100 * MEGABYTE


def test_an_honest_parquet_file_is_read_whole(tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": f"{n} " * 200}]} for n in range(2000)]
    path = write_parquet(tmp_path / "rows.parquet", pyarrow.Table.from_pylist(chats))
    assert _max_uncompressed_bytes(path) > 64 * MEGABYTE
    rows = [dict(row.value) for row in open_path(str(path), None, "rows").rows()]
    assert rows == chats


@pytest.mark.parametrize("cut", [1, 8, 30, 200])
def test_a_torn_parquet_file_is_a_sentence(cut: int, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", pyarrow.table({"text": ["a", "b"]}))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match="rows: not a Parquet file that can be read"):
        list(open_path(str(path), None, "rows").rows())


def test_a_line_of_csv_without_end_is_one_bad_row_and_the_next_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w") as file:
        file.write("text\na\n")
        for _ in range(40):
            file.write("x" * MEGABYTE)
        file.write("\nb\n")
    before = psutil.Process().memory_info().rss
    first, long, last = open_path(str(path), None, "rows").rows()
    assert (first.value, last.value) == ({"text": "a"}, {"text": "b"})
    assert long.location == "rows:3"
    assert long.problem == "not valid CSV: the line is longer than 16 Mi characters"
    assert last.location == "rows:4"
    assert psutil.Process().memory_info().rss - before < 200 * MEGABYTE


@pytest.mark.slow
def test_a_line_of_400_megabytes_is_refused_in_every_format(tmp_path: Path) -> None:
    for name, head in (("rows.csv", "text\n"), ("rows.jsonl", '{"text": "'), ("rows.json", '[{"text": "')):
        with (tmp_path / name).open("w") as file:
            file.write(head)
            for _ in range(400):
                file.write("x" * MEGABYTE)
        before, started = psutil.Process().memory_info().rss, time.monotonic()
        try:
            problems = [row.problem for row in open_path(str(tmp_path / name), None, "rows").rows()]
        except DataError as error:
            problems = [str(error)]
        assert "longer than 16 Mi" in problems[0]
        assert time.monotonic() - started < 10
        assert psutil.Process().memory_info().rss - before < 300 * MEGABYTE


def test_bytes_are_counted_once_they_are_unpacked_up_to_the_most_that_is_allowed(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", pyarrow.table({"text": ["a" * 50_000] * 64}))
    whole = count_bytes(str(path), 2**30)
    assert 64 * 50_000 <= whole < 4 * MEGABYTE
    assert count_bytes(str(path), whole) == whole
    size = f"{path.stat().st_size:,}"
    with pytest.raises(DataError, match=f"its {size} bytes become more than 3 MiB of rows; write it again"):
        count_bytes(str(path), whole - 1)
