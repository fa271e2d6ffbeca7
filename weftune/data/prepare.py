"""The public entry of this package: from a job's data keys to samples.

How a row becomes a sample:
1. `tables` opens a path, a Hub id or rows from Python as a `Table`; `json_rows` and `parquet` read its rows.
2. `build` finds the format, checks every row and tokenises chunks of rows, in `workers` if there are many.
3. `formats` checks a row and converts it to its content: a chat, a text, a preference pair, or tokens.
4. `template` renders a chat in a limited process; `chats` finds the characters that are supervised.
5. `tokenise` turns content into tokens and a mask, through the base's tokenizer (`encode`).
6. `cache` stores the samples; `samples` selects those of a job and orders them; `collate` makes microbatches.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weftune.data.build import build_store, check_all_rows, find_format, store_key
from weftune.data.cache import META, SampleStore
from weftune.data.encode import Encoder
from weftune.data.formats import check_columns
from weftune.data.row import Table
from weftune.data.samples import SampleOrder, Samples, StoreRows
from weftune.data.spec import DataSpec, EvalSpec, RowKind, Source
from weftune.data.tables import open_path, open_rows
from weftune.data.template import Template, template_source
from weftune.data.tokenise import Rules
from weftune.errors import DataError, Mistake

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    train: Samples
    evaluation: Samples | None
    notes: tuple[str, ...]
    """Sentences for the user, for example about skipped rows."""
    evaluates_training_rows: bool = False
    """Whether every evaluation row is also a training row."""

    def supervise_prompts(self) -> Prepared:
        """Return a copy in which the prompts of chosen samples are supervised too, as ORPO requires."""
        held_out = None if self.evaluation is None else self.evaluation.supervise_prompts()
        return replace(self, train=self.train.supervise_prompts(), evaluation=held_out)

    def remove_targets(self) -> Prepared:
        """Return a copy without supervised tokens, as reward models require."""
        held_out = None if self.evaluation is None else self.evaluation.remove_targets()
        return replace(self, train=self.train.remove_targets(), evaluation=held_out)

    def add_mismatched_samples(self, batch_size: int, seed: int, max_tokens: int) -> Prepared:
        """Return the samples together with mismatched ones for KTO, which are prompts with the answers of
        other samples in the same batch. For training rows, the batches are those of the first epoch; held-out
        rows are taken in their own order."""
        rows = SampleOrder(len(self.train), batch_size, seed).rows_of_epoch(0)
        held_out = self.evaluation
        if held_out is not None:
            held_out = held_out.add_mismatched_samples(np.arange(len(held_out)), batch_size, max_tokens)
        train = self.train.add_mismatched_samples(rows, batch_size, max_tokens)
        return replace(self, train=train, evaluation=held_out)

    def add_prefix(self, rows: int, keys: int) -> Prepared:
        """Return the samples, each preceded by `rows` virtual tokens or `keys` prefix keys of the adapter."""
        held_out = None if self.evaluation is None else self.evaluation.add_prefix(rows, keys)
        return replace(self, train=self.train.add_prefix(rows, keys), evaluation=held_out)

    @property
    def parts(self) -> tuple[Samples, ...]:
        """The sets of samples, in this order: training samples, mismatched training samples, held-out
        samples, mismatched held-out samples. Mismatched samples are prompts with the answers to other
        prompts. Sets that the job lacks are left out."""
        return (*self.train.parts, *(() if self.evaluation is None else self.evaluation.parts))

    def with_references(self, references: NDArray[np.float64]) -> Prepared:
        """Return the samples with their log-probabilities under the reference policy. In `references`,
        training samples come first."""
        held_out, border = self.evaluation, sum(map(len, self.train.parts))
        return replace(
            self,
            train=self.train.with_references(references[:border]),
            evaluation=None if held_out is None else held_out.with_references(references[border:]),
        )


class SharedData:
    """The data of many jobs. Data that several jobs share is tokenised, read and kept in memory once.

    The tokenizer's fingerprint and the chat templates are computed once for all jobs.
    """

    def __init__(self, tokenizer: Any, cache: Path, context: int | None = None) -> None:
        """Create the data of many jobs, none of which is read yet. `tokenizer` is a transformers tokenizer or
        an `Encoder`."""
        self.encoder = tokenizer if isinstance(tokenizer, Encoder) else Encoder(tokenizer)
        self._cache, self._context = cache, context
        self._templates: dict[str | None, tuple[Template | None, Template | None]] = {}
        """Maps the value of `data.chat_template` to a pair of templates: one for rows without tools, and one
        for rows with tools. A template is None if there is no such template."""
        self._results: dict[Hashable, tuple[DataSpec, Prepared | DataError]] = {}
        """Maps the key that `data_identity` returns to a spec and the samples (or the error) that followed
        from it. The spec is kept because it keeps rows from Python alive, which are identified by their
        address."""

    def prepare(
        self,
        data: DataSpec,
        evaluation: EvalSpec | None,
        progress: Progress | None = None,
        row_kind: RowKind = "answers",
    ) -> Prepared:
        """Return a job's tokenised samples, and cache them on disk for later runs. A preference pair becomes
        two consecutive samples, the chosen one first."""
        key = data_identity(data, evaluation, row_kind)
        if key not in self._results:
            try:
                self._results[key] = data, self._prepare(data, evaluation, progress, row_kind)
            except DataError as error:
                self._results[key] = data, error
        found = self._results[key][1]
        if isinstance(found, DataError):
            raise DataError(found.mistakes)
        return found

    def is_prepared(self, data: DataSpec, evaluation: EvalSpec | None, row_kind: RowKind = "answers") -> bool:
        """Return whether all samples of a job are in the cache."""
        _check_data(data, evaluation)
        rules = self.rules(data, row_kind)
        tables = [*_open_training(data), *_open_evaluation(data, evaluation)]
        folders = (
            self._cache / store_key(table, find_format(table, data, row_kind), rules) for table in tables
        )
        return all((folder / META).is_file() for folder in folders)

    def _prepare(
        self, data: DataSpec, evaluation: EvalSpec | None, progress: Progress | None, row_kind: RowKind
    ) -> Prepared:
        _check_data(data, evaluation)
        rules = self.rules(data, row_kind)
        training = _open_training(data)
        tables = [*training, *_open_evaluation(data, evaluation)]
        stores = _build_stores(tables, rules, self._cache, progress)
        notes = tuple(
            note
            for table, store in zip(tables, stores, strict=True)
            for note in store.tally.notes(table.label if len(stores) > 1 else None, rules.max_tokens)
        )
        trained, held_out = stores[: len(training)], stores[len(training) :]
        weights = [table.weight for table in training]
        if evaluation is not None and evaluation.fraction is not None:
            return Prepared(*_split_rows(trained, weights, evaluation.fraction, row_kind), notes)
        train = _select_all_rows(trained, weights, row_kind)
        if not held_out:
            return Prepared(train, None, notes)
        rows = np.concatenate([store.rows for store in trained])
        evaluates_training_rows = all(bool(np.isin(store.rows, rows).all()) for store in held_out)
        evaluated = _select_all_rows(held_out, [1.0] * len(held_out), row_kind)
        return Prepared(train, evaluated, notes, evaluates_training_rows)

    def rules(self, data: DataSpec, row_kind: RowKind = "answers") -> Rules:
        """Return the settings by which a job's rows are converted to samples, such as the maximum length."""
        encoder, context, chosen = self.encoder, self._context, data.chat_template
        if chosen not in self._templates:
            plain, for_tools = (
                None if source is None else Template(source, encoder.tokenizer.special_tokens_map)
                for source in (template_source(encoder.tokenizer, chosen, tools=one) for one in (False, True))
            )
            self._templates[chosen] = plain, for_tools
        return Rules(
            data, encoder, *self._templates[chosen], data.max_sample_tokens(context), context, row_kind
        )


def prepare(
    data: DataSpec,
    evaluation: EvalSpec | None,
    tokenizer: Any,
    cache: Path,
    *,
    context: int | None = None,
    progress: Progress | None = None,
    row_kind: RowKind = "answers",
) -> Prepared:
    """Return the samples of one job; `tokenizer` may be an `Encoder`. `SharedData` does the same for several
    jobs and reads shared data only once."""
    return SharedData(tokenizer, cache, context).prepare(data, evaluation, progress, row_kind)


def check_rows(
    data: DataSpec, evaluation: EvalSpec | None, max_bytes: int, row_kind: RowKind = "answers"
) -> None:
    """Check the rows of local files of at most `max_bytes`, as far as possible without a tokenizer. Raise
    DataError with all problems that are found."""
    _check_data(data, evaluation)
    paths = [] if data.rows is not None else [Path(source.path) for source in data.sources]
    paths += [] if evaluation is None or evaluation.path is None else [Path(evaluation.path)]
    names = Counter(path.name for path in paths)
    mistakes: list[Mistake] = []
    for path in paths:
        if not path.is_file() or path.stat().st_size > max_bytes:
            continue
        try:
            table = open_path(str(path), None, _source_label(Source(path=str(path)), names))
            format = find_format(table, data, row_kind)
            if not data.skip_bad_rows:
                check_all_rows(table, format, data)
        except DataError as error:
            mistakes += error.mistakes
    if mistakes:
        raise DataError(dict.fromkeys(mistakes))


def _check_data(data: DataSpec, evaluation: EvalSpec | None) -> None:
    check_columns(data.columns)
    if (data.rows is None) == (not data.path):
        raise DataError(Mistake("data", "give either a path or rows"))
    if data.limit is not None and data.limit < 1:
        raise DataError(Mistake("data.limit", f"must be at least 1, got {data.limit}"))
    if data.max_length is not None and data.max_length < 2:
        raise DataError(Mistake("data.max_length", f"must be at least 2, got {data.max_length}"))
    for source in data.sources if data.rows is None else ():
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise DataError(
                Mistake(source.path, f"its weight must be above 0 and finite, got {source.weight}")
            )
    if data.split is not None and (
        data.rows is not None or all(Path(source.path).is_file() for source in data.sources)
    ):
        raise DataError(
            Mistake("data.split", "a single file or rows from Python have no splits; leave it out")
        )
    if evaluation is None:
        return
    if (evaluation.path is None) == (evaluation.fraction is None):
        raise DataError(Mistake("eval", "give either a path or a fraction"))
    if evaluation.fraction is not None and not 0 < evaluation.fraction < 1:
        raise DataError(Mistake("eval.fraction", f"must lie between 0 and 1, got {evaluation.fraction}"))


def data_identity(data: DataSpec, evaluation: EvalSpec | None, row_kind: RowKind = "answers") -> Hashable:
    """Return a key that is equal for jobs for which `prepare` returns the same samples."""
    plain = [getattr(data, item.name) for item in fields(DataSpec) if item.name not in ("rows", "columns")]
    held_out = None if evaluation is None else (evaluation.path, evaluation.fraction)
    rows = None if data.rows is None else id(data.rows)
    return (*plain, rows, tuple(sorted(data.columns.items())), held_out, row_kind)


def open_held_out(data: DataSpec, evaluation: EvalSpec) -> list[Table]:
    """Return the tables that contain a job's held-out rows. If a fraction of the training rows is held out,
    these are the tables of the training rows."""
    return _open_evaluation(data, evaluation) or _open_training(data)


def _open_training(data: DataSpec) -> list[Table]:
    if data.rows is not None:
        return [open_rows(data.rows)]
    names = Counter(Path(source.path).name for source in data.sources)
    return [
        replace(open_path(source.path, data.split, _source_label(source, names)), weight=source.weight)
        for source in data.sources
    ]


def _source_label(source: Source, names: Counter[str]) -> str:
    """Return the label of a source of rows for messages: its file name, or its whole path if another file has
    the same name."""
    path = Path(source.path)
    return path.name if path.exists() and names[path.name] == 1 else source.path


def _open_evaluation(data: DataSpec, evaluation: EvalSpec | None) -> list[Table]:
    if evaluation is None or evaluation.path is None:
        return []
    source = Source(path=evaluation.path)
    taken = [] if data.rows is not None else [Path(other.path).name for other in data.sources]
    names = Counter([*taken, Path(source.path).name])
    return [open_path(source.path, data.split, _source_label(source, names))]


def _build_stores(
    tables: Sequence[Table], rules: Rules, cache: Path, progress: Progress | None
) -> list[SampleStore]:
    """Build the store of every table, or raise one error with the problems of all tables."""
    stores: list[SampleStore] = []
    mistakes: list[Mistake] = []
    for table in tables:
        before = sum(store.tally.rows for store in stores)
        counted = None if progress is None else (lambda rows, before=before: progress(before + rows))
        try:
            stores.append(build_store(table, rules, cache, counted))
        except DataError as problem:
            mistakes += problem.mistakes
    if mistakes:
        raise DataError(dict.fromkeys(mistakes))
    return stores


def _fingerprint(*identity: object) -> str:
    return hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()


def _select_all_rows(
    sample_stores: Sequence[SampleStore], weights: Sequence[float], row_kind: RowKind
) -> Samples:
    selections = [
        StoreRows(store, np.arange(len(store.lengths)), weight)
        for store, weight in zip(sample_stores, weights, strict=True)
    ]
    return _make_samples(
        selections, _fingerprint([store.key for store in sample_stores], list(weights)), row_kind
    )


def _make_samples(selections: Sequence[StoreRows], fingerprint: str, row_kind: RowKind) -> Samples:
    return Samples(selections, fingerprint, 2 if row_kind == "pairs" else 1, row_kind == "labelled")


def _split_rows(
    sample_stores: Sequence[SampleStore], weights: Sequence[float], fraction: float, row_kind: RowKind
) -> tuple[Samples, Samples]:
    """Split the samples by the hash of each row into training and held-out ones. Jobs with the same file hold
    out the same rows, whatever their seeds."""
    border = _hash_threshold(np.concatenate([store.rows for store in sample_stores]), fraction)
    identity = [[store.key for store in sample_stores], list(weights), fraction]

    def select_rows(held_out: bool, name: str) -> Samples:
        selections = []
        for store, weight in zip(sample_stores, weights, strict=True):
            chosen = np.flatnonzero((store.rows <= border) == held_out)
            selections.append(StoreRows(store, chosen, 1.0 if held_out else weight))
        return _make_samples(selections, _fingerprint(*identity, name), row_kind)

    return select_rows(False, "train"), select_rows(True, "evaluation")


def _hash_threshold(rows: NDArray[np.uint64], fraction: float) -> np.uint64:
    """Return the largest hash for which a row is held out. The threshold is chosen so that at least one row
    is held out, but never all."""
    distinct = np.unique(rows)
    if len(distinct) < 2:
        raise DataError(
            Mistake("eval.fraction", "one row cannot be split; at least two different rows are needed")
        )
    border = np.uint64(int(fraction * 2.0**64))
    return np.clip(border, distinct[0], distinct[-2])
