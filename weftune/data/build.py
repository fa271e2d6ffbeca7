"""Building of the store (a folder of arrays in the cache) with a table's tokenised samples: the format of the
rows is detected, every row is checked, and the samples are tokenised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weftune.data.cache import SampleStore, StoreWriter, Tally, open_store
from weftune.data.formats import (
    Content,
    Sample,
    check_trainable,
    detect_format,
    normalise_row,
    rename_columns,
)
from weftune.data.row import BadRow, CommonBadRow, Row, Table, bad_row_from_json, row_hash
from weftune.data.spec import DataSpec, Format, RowKind
from weftune.data.tokenise import Rules, Tokeniser
from weftune.data.workers import get_workers, have_workers_answered, worker_count
from weftune.errors import DataError, Mistake

VERSION = 2
"""Version of the cached samples. The number must be increased when equal rows produce different samples than
before."""
MAX_SHOWN_ROWS = 20
MAX_SHOWN_LOCATIONS = 3
MAX_KEPT_REASONS = 5
ROWS_AT_ONCE = 128
CHARACTERS_AT_ONCE = 1_000_000
CHUNKS_BEFORE_WORKERS = 4
"""Number of chunks that this process tokenises before it starts workers, which small tables do not need."""


def store_key(table: Table, format: Format, rules: Rules) -> str:
    """Return the hash of everything that determines the tokenised samples of a table. The hash names the
    folder of these samples in the cache."""
    spec = rules.spec
    choices = [
        VERSION,
        table.digest,
        rules.encoder.fingerprint,
        rules.template and rules.template.source,
        rules.tool_template and rules.tool_template.source,
        rules.max_tokens,
        format,
        sorted(spec.columns.items()),
        spec.limit,
        spec.train_on,
        spec.skip_bad_rows,
    ]
    return hashlib.blake2b(json.dumps(choices).encode(), digest_size=16).hexdigest()


def build_store(
    table: Table, rules: Rules, cache: Path, progress: Callable[[int], None] | None
) -> SampleStore:
    """Return the store of a table's tokenised samples. It is read from the cache if it is complete there;
    otherwise the rows are tokenised."""
    format = find_format(table, rules.spec, rules.row_kind)
    key = store_key(table, format, rules)
    store = open_store(cache / key)
    if store is None:
        if not rules.spec.skip_bad_rows:
            check_all_rows(table, format, rules.spec)
        _write_store(table, format, rules, cache / key, progress)
        store = open_store(cache / key)
        if store is None:
            raise DataError(
                Mistake(table.label, f"the cache in {cache} cannot be read back; is the disk sound?")
            )
    if len(store.lengths) == 0:
        reasons = "; ".join(store.tally.reasons)
        raise DataError(Mistake(table.label, f"none of its {store.tally.rows} rows can be used: {reasons}"))
    return store


def find_format(table: Table, spec: DataSpec, row_kind: RowKind = "answers") -> Format:
    """Return the format that the spec names or, if it names none, the format detected from the table's
    columns. `row_kind` is the kind of rows that the job's objective needs, such as preference pairs."""
    if spec.format != "auto":
        check_trainable(spec.format, table.label, row_kind)
        return spec.format
    seen = Row(table.label, {})
    bad = _BadRowReport()
    for row in _rows_within_limit(table, spec):
        if row.problem is not None:
            bad.add(row.location, BadRow(row.problem))
            continue
        format = detect_format(rename_columns(row.value, spec.columns), row_kind)
        if format is not None:
            check_trainable(format, table.label, row_kind)
            return format
        seen = seen if seen.value else row
    if seen.value:
        found = ", ".join(seen.value)[:300]
        hint = "say which is which, as in `columns: {prompt: question}`"
        sentence = f"no row format has these columns: {found}; {hint}"
        raise DataError(Mistake(seen.location, sentence))
    bad.raise_bad_rows()
    raise DataError(Mistake(table.label, "the dataset is empty"))


def check_all_rows(table: Table, format: Format, spec: DataSpec) -> None:
    """Check every row of a table before the first row is tokenised. Raise DataError if there are invalid
    rows."""
    bad = _BadRowReport()
    for row in _rows_within_limit(table, spec):
        try:
            _read_content(row, format, spec)
        except BadRow as problem:
            bad.add(row.location, problem)
    bad.raise_bad_rows()


def _rows_within_limit(table: Table, spec: DataSpec) -> Iterator[Row]:
    return islice(table.rows(), spec.limit)


def _read_content(row: Row, format: Format, spec: DataSpec) -> Content:
    if row.problem is not None:
        raise BadRow(row.problem)
    return normalise_row(row.value, format, spec)


class _SimilarRows:
    """Rows that are invalid for the same reason: the first of them, and their number."""

    def __init__(self, problem: BadRow) -> None:
        self._first = problem
        self._locations: list[str] = []
        self._needed_tokens = 0
        self.count = 0

    def add(self, location: str, problem: BadRow) -> None:
        self.count += 1
        if len(self._locations) < MAX_SHOWN_LOCATIONS:
            self._locations.append(location)
        if isinstance(problem, CommonBadRow):
            self._needed_tokens = max(self._needed_tokens, problem.needed_tokens)

    def message(self, includes_remedy: bool) -> Mistake:
        sentence = str(self._first)
        if self.count > 1:
            more = ", …" if self.count > len(self._locations) else ""
            sentence += f" ({self.count} such rows: {', '.join(self._locations)}{more})"
        if includes_remedy and isinstance(self._first, CommonBadRow):
            sentence += "; " + self._first.remedy.format(needed_tokens=self._needed_tokens)
        return Mistake(self._locations[0], sentence)


class _BadRowReport:
    """A report of invalid rows. The report lists the first ones, with a single entry for all rows that are
    invalid for the same reason, and counts the others."""

    def __init__(self) -> None:
        self._problems: list[_SimilarRows] = []
        self._common_problems: dict[str, _SimilarRows] = {}
        self.more = 0

    @property
    def is_full(self) -> bool:
        return len(self._problems) - len(self._common_problems) == MAX_SHOWN_ROWS

    def add(self, location: str, problem: BadRow) -> None:
        is_common = isinstance(problem, CommonBadRow)
        alike = self._common_problems.get(problem.kind) if isinstance(problem, CommonBadRow) else None
        if alike is None:
            if not is_common and self.is_full:
                self.more += 1
                return
            alike = _SimilarRows(problem)
            self._problems.append(alike)
            if isinstance(problem, CommonBadRow):
                self._common_problems[problem.kind] = alike
        alike.add(location, problem)

    def raise_bad_rows(self, remainder: str = "") -> None:
        """Raise DataError if there are invalid rows."""
        if not self._problems:
            return
        remainder = f"and {self.more} more" if self.more else remainder
        mistakes = [alike.message(includes_remedy=True) for alike in self._problems]
        raise DataError([*mistakes, *([Mistake("", remainder)] if remainder else [])])

    def reasons(self, count: int) -> tuple[list[str], int]:
        """Return at most `count` sentences about invalid rows, and the number of rows that these sentences
        cover."""
        first = self._problems[:count]
        return [str(alike.message(includes_remedy=False)) for alike in first], sum(a.count for a in first)


def _write_store(
    table: Table, format: Format, rules: Rules, folder: Path, progress: Callable[[int], None] | None
) -> None:
    tally = Tally()
    bad = _BadRowReport()
    spec = rules.spec
    with StoreWriter(folder) as writer:
        for rows, chunk in _tokenise_chunks(_split_rows(_rows_within_limit(table, spec)), format, rules):
            for at, problem in chunk.bad_rows:
                bad.add(rows[at].location, bad_row_from_json(problem))
            if not spec.skip_bad_rows and bad.is_full:
                bad.raise_bad_rows("reading stopped here; there may be more")
            writer.extend(chunk.arrays)
            tally.add(chunk.tally)
            if progress is not None:
                progress(tally.rows)
        if not spec.skip_bad_rows:
            bad.raise_bad_rows()
        tally.reasons, tally.explained = bad.reasons(MAX_KEPT_REASONS)
        writer.commit(tally)


def _tokenise_chunks(
    chunks: Iterator[list[Row]], format: Format, rules: Rules
) -> Iterator[tuple[list[Row], TokenisedChunk]]:
    """Tokenise chunks of rows, and yield each chunk with its samples, in order. This process tokenises chunks
    until worker processes have started."""
    # Workers get the rows of each chunk, so all rows from Python need not be sent.
    shared = replace(rules, spec=replace(rules.spec, rows=None)), format
    count = worker_count()
    for at, rows in enumerate(chunks):
        if count and have_workers_answered():
            yield from get_workers(count).map_items(tokenise_chunk, shared, chain([rows], chunks))
            return
        if count and at == CHUNKS_BEFORE_WORKERS:
            get_workers(count).start(tokenise_chunk, shared)
        yield rows, tokenise_chunk(shared, rows)


def _split_rows(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield the rows in chunks, each with a limited number of rows and, approximately, of characters, to
    bound memory use."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += _character_count(row.value)
        if len(chunk) == ROWS_AT_ONCE or size > CHARACTERS_AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _character_count(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_character_count(inner) for inner in value.values())
    if isinstance(value, list):
        return sum(_character_count(inner) for inner in value)
    return 8


@dataclass(frozen=True, slots=True)
class TokenisedChunk:
    """The samples of a chunk of rows, in the layout of a store, and the counts and problems of the rows."""

    arrays: dict[str, NDArray[Any]]
    bad_rows: list[tuple[int, dict[str, Any]]]
    """Index and reason of every row that cannot be used."""
    tally: Tally


def tokenise_chunk(shared: tuple[Rules, Format], rows: list[Row]) -> TokenisedChunk:
    """Tokenise one chunk of rows. The function is called in the main process or in a worker process."""
    rules, format = shared
    tally = Tally(rows=len(rows))
    valid_rows: list[tuple[int, Content]] = []
    bad_rows: list[tuple[int, dict[str, Any]]] = []
    for at, row in enumerate(rows):
        try:
            valid_rows.append((at, _read_content(row, format, rules.spec)))
        except BadRow as problem:
            bad_rows.append((at, problem.to_json()))
    samples: list[Sample] = []
    hashes: list[int] = []
    outcomes = Tokeniser(rules, tally).outcomes([content for _, content in valid_rows])
    for (at, _), outcome in zip(valid_rows, outcomes, strict=True):
        if isinstance(outcome, BadRow):
            bad_rows.append((at, outcome.to_json()))
            continue
        hashes += [row_hash(rows[at].value)] * len(outcome)
        samples += outcome
    tally.skipped = len(bad_rows)
    return TokenisedChunk(_to_arrays(samples, hashes), bad_rows, tally)


def _to_arrays(samples: list[Sample], hashes: list[int]) -> dict[str, NDArray[Any]]:
    nothing = np.empty(0)
    return {
        "tokens": np.concatenate([nothing.astype(np.int32), *(one.tokens for one in samples)]),
        "mask": np.concatenate([nothing.astype(bool), *(one.mask for one in samples)]),
        "lengths": np.array([len(one.tokens) for one in samples], dtype=np.int32),
        "supervised": np.array([int(one.mask[1:].sum()) for one in samples], dtype=np.int32),
        "rows": np.array(hashes, dtype=np.uint64),
        "desirable": np.array([one.desirable for one in samples], dtype=bool),
    }
