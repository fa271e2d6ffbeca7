"""Open a path, a Hub id or rows from Python as a `Table`: streamed rows and the hash of their content."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from weftune.core.hub import why_absent
from weftune.data.row import Row, Table, canonical
from weftune.data.tables.json_rows import read_json, read_lines
from weftune.data.tables.table_rows import read_csv, read_given, read_parquet
from weftune.errors import DataError, Mistake

Reader = Callable[[Path, str], Iterator[Row]]

READERS: dict[str, Reader] = {
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
    ".parquet": read_parquet,
}
KNOWN = ", ".join(READERS)
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def open_path(path: str, split: str | None, label: str) -> Table:
    """Open a local file or folder if there is one of that name, else a dataset of the Hub."""
    local = Path(path)
    if local.is_dir():
        return _open_files(_files_of(local, split, label), label)
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
    for row in read_given(rows, label):
        digest.update(row.problem.encode() if row.problem else canonical(row.value))
        digest.update(b"\n")
    return Table(label, digest.hexdigest(), partial(read_given, rows, label))


def _open_files(files: list[Path], label: str) -> Table:
    digest = hashlib.blake2b(digest_size=16)
    readers: list[Callable[[], Iterator[Row]]] = []
    for file in files:
        reader = READERS.get(file.suffix.lower())
        if reader is None:
            raise DataError(
                Mistake(label, f"Weftune reads {KNOWN}, not {file.suffix or 'files without an ending'}")
            )
        digest.update(_digest(file, label) + file.suffix.lower().encode())
        name = label if len(files) == 1 else f"{label}/{file.name}"
        readers.append(partial(reader, file, name))
    return Table(label, digest.hexdigest(), partial(_chain, readers))


def _chain(readers: list[Callable[[], Iterator[Row]]]) -> Iterator[Row]:
    for reader in readers:
        yield from reader()


def _digest(file: Path, label: str) -> bytes:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").digest()
    except OSError as problem:
        raise DataError(Mistake(label, f"the file cannot be read: {problem.strerror}")) from problem


def _files_of(folder: Path, split: str | None, label: str) -> list[Path]:
    """Return the data files of a folder; with a split, only those named after it (`train.jsonl`,
    `train-00000.parquet`)."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in READERS)
    if split is not None:
        files = [file for file in files if re.split(r"[-_.]", file.name)[0] == split]
    if not files:
        wanted = f" of the split {split}" if split is not None else ""
        raise DataError(Mistake(label, f"the folder holds no {KNOWN} file{wanted}"))
    return files


def _open_hub(name: str, split: str) -> Table:
    if sentence := why_absent(name, "dataset"):
        raise DataError(Mistake("data", sentence))
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as problem:  # the Hub's client has no common error
        reason = str(problem).strip().split("\n")[0]
        sentence = f"is neither a file here nor a dataset that the Hub gives us (split {split}): {reason}"
        raise DataError(Mistake(name, sentence)) from problem
    return open_rows(rows, name)
