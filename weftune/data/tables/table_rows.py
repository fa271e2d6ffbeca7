"""Rows from tables: CSV, Parquet, and rows given from Python."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from weftune.data.row import TOO_DEEP, Row, as_row, is_deep
from weftune.data.tables.parquet import batches, refuse_swelling
from weftune.errors import DataError, Mistake

ROWS_AT_ONCE = 256
LONGEST_LINE = 16 * 2**20
"""Maximum number of characters in a line or a field of CSV."""


def read_csv(path: Path, label: str, delimiter: str = ",") -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first line names the columns. A row's place is the line on which it
    starts."""
    # The csv module keeps this limit for the whole process, and its default of 128 KiB is too small.
    csv.field_size_limit(LONGEST_LINE)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = _Lines(file)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            names = next(reader, None)
        except csv.Error as problem:
            raise DataError(Mistake(f"{label}:1", f"the header is not valid CSV: {problem}")) from None
        if names is None:
            return
        if len(set(names)) < len(names):
            raise DataError(Mistake(f"{label}:1", "two columns have the same name"))
        while True:
            place = f"{label}:{lines.number + 1}"
            try:
                fields = next(reader, None)
            except csv.Error as problem:
                yield Row(place, {}, f"not valid CSV: {problem}")
                continue
            if fields is None:
                return
            if fields:
                yield _csv_row(place, names, fields)


class _Lines:
    """The lines of a file, each read up to the maximum length only."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.number = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._file.readline(LONGEST_LINE)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) == LONGEST_LINE and not line.endswith("\n"):
            while (rest := self._file.readline(LONGEST_LINE)) and not rest.endswith("\n"):
                pass
            raise csv.Error(f"the line is longer than {LONGEST_LINE // 2**20} Mi characters")
        return line


def _csv_row(place: str, names: list[str], fields: list[str]) -> Row:
    if len(fields) != len(names):
        return Row(
            place, {}, f"the row has {len(fields)} fields, but the first line names {len(names)} columns"
        )
    return Row(place, dict(zip(names, fields, strict=True)))


def read_parquet(path: Path, label: str) -> Iterator[Row]:
    import pyarrow

    number = 0
    refuse_swelling(path, label)
    try:
        for batch in batches(path):
            for value in batch.to_pylist():
                number += 1
                yield _present(f"{label}:{number}", value)
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        first_line = str(problem).partition("\n")[0]
        raise DataError(Mistake(label, f"not a Parquet file that can be read: {first_line}")) from problem


def read_given(rows: Iterable[Any], label: str) -> Iterator[Row]:
    for number, value in enumerate(_batched(rows), start=1):
        place = f"{label}:{number}"
        yield Row(place, {}, f"the row is {TOO_DEEP}") if is_deep(value) else _present(place, value)


def _batched(rows: Any) -> Iterator[Any]:
    """Yield the rows. A `datasets.Dataset` is read in batches: row by row it is ten times slower."""
    if not hasattr(rows, "with_format"):
        yield from rows
        return
    for batch in rows.with_format(None).iter(batch_size=ROWS_AT_ONCE):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(names, values, strict=True))


def _present(place: str, value: object) -> Row:
    """Return the row without missing columns, which tables write as null and pandas as NaN."""
    if isinstance(value, Mapping):
        value = {name: cell for name, cell in value.items() if not _missing(cell)}
    return as_row(place, value)


def _missing(cell: object) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))
