"""Rows from tables: CSV, Parquet, and what is given from Python."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weftune.data.row import Row, as_row
from weftune.errors import DataError, Mistake

ROWS_AT_ONCE = 256
LONGEST_FIELD = 64 * 2**20


def read_csv(path: Path, label: str, delimiter: str = ",") -> Iterator[Row]:
    """The first line names the columns. A row's place is the line on which it starts."""
    csv.field_size_limit(
        LONGEST_FIELD
    )  # the csv module keeps this for the whole process, and its 128 KiB is short
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        names = next(reader, None)
        if names is None:
            return
        if len(set(names)) < len(names):
            raise DataError(Mistake(f"{label}:1", "two columns have the same name"))
        while True:
            place = f"{label}:{reader.line_num + 1}"
            try:
                fields = next(reader, None)
            except csv.Error as problem:
                yield Row(place, {}, f"not valid CSV: {problem}")
                continue
            if fields is None:
                return
            if fields:
                yield _csv_row(place, names, fields)


def _csv_row(place: str, names: list[str], fields: list[str]) -> Row:
    if len(fields) != len(names):
        return Row(
            place, {}, f"the row has {len(fields)} fields, but the first line names {len(names)} columns"
        )
    return Row(place, dict(zip(names, fields, strict=True)))


def read_parquet(path: Path, label: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for value in batch.to_pylist():
                    number += 1
                    yield _present(f"{label}:{number}", value)
    except (pyarrow.ArrowException, OSError) as problem:
        raise DataError(Mistake(label, f"not a Parquet file that can be read: {problem}")) from problem


def read_given(rows: Iterable[Any], label: str) -> Iterator[Row]:
    for number, value in enumerate(_batched(rows), start=1):
        yield _present(f"{label}:{number}", value)


def _batched(rows: Any) -> Iterator[Any]:
    """A `datasets.Dataset` is read in batches: row by row it is ten times slower."""
    if not hasattr(rows, "with_format"):
        yield from rows
        return
    for batch in rows.with_format(None).iter(batch_size=ROWS_AT_ONCE):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(names, values, strict=True))


def _present(place: str, value: object) -> Row:
    """Tables write null, and those from pandas NaN, where a row does not have a column."""
    if isinstance(value, Mapping):
        value = {name: cell for name, cell in value.items() if not _missing(cell)}
    return as_row(place, value)


def _missing(cell: object) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))
