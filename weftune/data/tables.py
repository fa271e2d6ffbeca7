"""Opening of a path, a Hub id or rows from Python as a `Table`, and reading of CSV and Parquet files."""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from weftune.core.hub import absence_reason
from weftune.data.json_rows import read_json, read_lines
from weftune.data.parquet import read_batches, refuse_expansion
from weftune.data.row import TOO_DEEP, Row, Table, canonical_json, is_nested_deeply, to_row
from weftune.errors import DataError, Mistake

ROWS_AT_ONCE = 256
MAX_LINE_LENGTH = 16 * 2**20
"""Maximum number of characters in a line or a field of CSV."""
SKIPPED_AT_ONCE = 2**16
"""Number of characters per read while the rest of a line that is too long is skipped."""
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def read_csv(path: Path, label: str, delimiter: str = ",") -> Iterator[Row]:
    """Yield the rows of a CSV file; the location of a row is the line on which it starts."""
    # The csv module keeps this limit for the whole process, and its default of 128 KiB is too small.
    csv.field_size_limit(MAX_LINE_LENGTH)
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
            location = f"{label}:{lines.number + 1}"
            try:
                fields = next(reader, None)
            except csv.Error as problem:
                yield Row(location, {}, f"not valid CSV: {problem}")
                continue
            if fields is None:
                return
            if fields and len(fields) != len(names):
                yield Row(
                    location,
                    {},
                    f"the row has {len(fields)} fields, but the first line names {len(names)} columns",
                )
            elif fields:
                yield Row(location, dict(zip(names, fields, strict=True)))


class _Lines:
    """An iterator over the lines of a CSV file. A line with `MAX_LINE_LENGTH` characters or more is an error,
    and is never in memory as a whole."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.number = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._file.readline(MAX_LINE_LENGTH)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) == MAX_LINE_LENGTH and not line.endswith("\n"):
            # The rest is skipped in short pieces: long ones would take three times a line's memory.
            del line
            while (rest := self._file.readline(SKIPPED_AT_ONCE)) and not rest.endswith("\n"):
                pass
            raise csv.Error(f"the line is longer than {MAX_LINE_LENGTH // 2**20} Mi characters")
        return line


def read_parquet(path: Path, label: str) -> Iterator[Row]:
    import pyarrow

    number = 0
    refuse_expansion(path, label)
    try:
        for batch in read_batches(path):
            for value in batch.to_pylist():
                number += 1
                yield _drop_missing_values(f"{label}:{number}", value)
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        first_line = str(problem).partition("\n")[0]
        raise DataError(Mistake(label, f"not a Parquet file that can be read: {first_line}")) from problem


def read_python_rows(rows: Iterable[Any], label: str) -> Iterator[Row]:
    for number, value in enumerate(_iterate_rows(rows), start=1):
        location = f"{label}:{number}"
        yield (
            Row(location, {}, f"the row is {TOO_DEEP}")
            if is_nested_deeply(value)
            else _drop_missing_values(location, value)
        )


def _iterate_rows(rows: Any) -> Iterator[Any]:
    """Yield rows that were passed from Python. A `datasets.Dataset` is read in batches, which is ten times as
    fast as row by row."""
    if not hasattr(rows, "with_format"):
        yield from rows
        return
    for batch in rows.with_format(None).iter(batch_size=ROWS_AT_ONCE):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(names, values, strict=True))


def _drop_missing_values(location: str, value: object) -> Row:
    """Return a row without its missing values, which are null in tables and NaN in pandas."""
    if isinstance(value, Mapping):
        value = {
            name: cell
            for name, cell in value.items()
            if cell is not None and not (isinstance(cell, float) and math.isnan(cell))
        }
    return to_row(location, value)


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
    ".parquet": read_parquet,
}
KNOWN = ", ".join(READERS)


def open_path(path: str, split: str | None, label: str) -> Table:
    """Open a local file or folder if it exists, else a dataset on the Hub."""
    local = Path(path)
    if local.is_dir():
        return _open_files(_data_files(local, split, label), label)
    if local.exists():
        return _open_files([local], label)
    if local.suffix.lower() in READERS or not HUB_ID.fullmatch(path):
        raise DataError(Mistake(label, f"there is no file {path}"))
    return _open_hub(path, split or "train")


def open_rows(rows: Any, label: str = "rows") -> Table:
    once = hasattr(rows, "__next__")
    if isinstance(rows, str | bytes | Mapping) or not hasattr(rows, "__iter__") or once:
        raise DataError(Mistake(label, "data.rows must be a list of dicts or a datasets.Dataset"))
    digest = hashlib.blake2b(digest_size=16)
    for row in read_python_rows(rows, label):
        digest.update(row.problem.encode() if row.problem else canonical_json(row.value))
        digest.update(b"\n")
    return Table(label, digest.hexdigest(), partial(read_python_rows, rows, label))


def _open_files(files: list[Path], label: str) -> Table:
    digest = hashlib.blake2b(digest_size=16)
    readers: list[Callable[[], Iterator[Row]]] = []
    for file in files:
        reader = READERS.get(file.suffix.lower())
        if reader is None:
            raise DataError(
                Mistake(label, f"Weftune reads {KNOWN}, not {file.suffix or 'files without an ending'}")
            )
        try:
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest() + file.suffix.lower().encode())
        except OSError as problem:
            raise DataError(Mistake(label, f"the file cannot be read: {problem.strerror}")) from problem
        name = label if len(files) == 1 else f"{label}/{file.name}"
        readers.append(partial(reader, file, name))
    return Table(label, digest.hexdigest(), lambda: chain.from_iterable(reader() for reader in readers))


def _data_files(folder: Path, split: str | None, label: str) -> list[Path]:
    """Return the data files of a folder or, with a split, those named after it (`train-00000.parquet`)."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in READERS)
    if split is not None:
        files = [file for file in files if re.split(r"[-_.]", file.name)[0] == split]
    if not files:
        of_split = f" of the split {split}" if split is not None else ""
        raise DataError(Mistake(label, f"the folder holds no {KNOWN} file{of_split}"))
    return files


def _open_hub(name: str, split: str) -> Table:
    if sentence := absence_reason(name, "dataset"):
        raise DataError(Mistake("data", sentence))
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as problem:  # the Hub's client has no common error
        reason = str(problem).strip().split("\n")[0]
        sentence = f"is neither a file here nor a dataset that the Hub gives us (split {split}): {reason}"
        raise DataError(Mistake(name, sentence)) from problem
    return open_rows(rows, name)
