"""The public entry of this package: from a job's data keys to samples."""

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

from weftune.data.build import Built, Rules, build, check, find_format
from weftune.data.cache import META
from weftune.data.encode import Encoder
from weftune.data.formats import check_columns
from weftune.data.row import Table
from weftune.data.samples import Samples, Share
from weftune.data.spec import DataSpec, EvalSpec, Source
from weftune.data.tables.read import open_path, open_rows
from weftune.data.template import Template, template_source
from weftune.errors import DataError, Mistake

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    train: Samples
    evaluation: Samples | None
    notes: tuple[str, ...]
    """Sentences for the report."""
    evaluates_trained: bool = False
    """Whether every evaluation row is also a training row."""

    def behind(self, rows: int, keys: int) -> Prepared:
        """Return the samples, each preceded by `rows` rows or `keys` keys of an adapter."""
        held_out = None if self.evaluation is None else self.evaluation.behind(rows, keys)
        return replace(self, train=self.train.behind(rows, keys), evaluation=held_out)


@dataclass(frozen=True, slots=True)
class _TablePart:
    table: Table
    weight: float


class SharedData:
    """The data of many jobs. Data that several jobs share is tokenised, read and held once.

    The tokenizer's fingerprint and the chat templates are computed once for all of them.
    """

    def __init__(self, tokenizer: Any, cache: Path, context: int | None = None) -> None:
        """`tokenizer` may be an `Encoder` around one."""
        self._encoder = tokenizer if isinstance(tokenizer, Encoder) else Encoder(tokenizer)
        self._cache, self._context = cache, context
        self._templates: dict[str | None, _Templates] = {}
        self._known: dict[Hashable, tuple[DataSpec, Prepared | DataError]] = {}
        """Maps `data_identity` to the spec and its result. The spec is held to keep rows from Python alive,
        which are identified by their address."""

    def prepare(
        self, data: DataSpec, evaluation: EvalSpec | None, progress: Progress | None = None
    ) -> Prepared:
        """Return a job's samples. They are also cached on disk, so that a later run reads them."""
        key = data_identity(data, evaluation)
        if key not in self._known:
            self._known[key] = data, self._made_or_refused(data, evaluation, progress)
        found = self._known[key][1]
        if isinstance(found, DataError):
            raise DataError(found.mistakes)
        return found

    def is_prepared(self, data: DataSpec, evaluation: EvalSpec | None) -> bool:
        """Return whether everything is in the cache."""
        _check(data, evaluation)
        rules = self.rules(data)
        tables = [part.table for part in [*_open_training(data), *_open_evaluation(data, evaluation)]]
        folders = (self._cache / rules.key(table, find_format(table, data)) for table in tables)
        return all((folder / META).is_file() for folder in folders)

    def _made_or_refused(
        self, data: DataSpec, evaluation: EvalSpec | None, progress: Progress | None
    ) -> Prepared | DataError:
        try:
            return self._made(data, evaluation, progress)
        except DataError as error:
            return error

    def _made(self, data: DataSpec, evaluation: EvalSpec | None, progress: Progress | None) -> Prepared:
        _check(data, evaluation)
        rules = self.rules(data)
        parts = _open_training(data)
        held_out = _open_evaluation(data, evaluation)
        built = _build_all([*parts, *held_out], rules, self._cache, progress)
        trained, held = built[: len(parts)], built[len(parts) :]
        notes = tuple(
            note
            for part, made in zip([*parts, *held_out], built, strict=True)
            for note in made.store.tally.notes(part.table.label if len(built) > 1 else None, rules.longest)
        )
        weights = [part.weight for part in parts]
        if evaluation is not None and evaluation.fraction is not None:
            train, measure = _split(trained, weights, evaluation.fraction)
            return Prepared(train, measure, notes)
        measured = _everything(held, [part.weight for part in held_out]) if held else None
        return Prepared(_everything(trained, weights), measured, notes, _are_among(held, trained))

    def rules(self, data: DataSpec) -> Rules:
        """Return the rules by which the rows of a job become samples."""
        encoder, context, chosen = self._encoder, self._context, data.chat_template
        if chosen not in self._templates:
            self._templates[chosen] = _templates(encoder.tokenizer, chosen)
        templates = self._templates[chosen]
        longest = data.max_length if context is None else min(data.max_length, context)
        return Rules(
            data, encoder, encoder.fingerprint, templates.plain, templates.for_tools, longest, context
        )


def prepare(
    data: DataSpec,
    evaluation: EvalSpec | None,
    tokenizer: Any,
    cache: Path,
    *,
    context: int | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Return the samples of one job; `tokenizer` may be an `Encoder` around one. For several jobs see
    `SharedData`."""
    return SharedData(tokenizer, cache, context).prepare(data, evaluation, progress)


def check_rows(data: DataSpec, evaluation: EvalSpec | None, max_bytes: int) -> None:
    """Check the rows of local files of at most `max_bytes` as far as possible without a tokenizer."""
    _check(data, evaluation)
    paths = [] if data.rows is not None else [Path(source.path) for source in data.sources]
    paths += [] if evaluation is None or evaluation.path is None else [Path(evaluation.path)]
    names = Counter(path.name for path in paths)
    mistakes: list[Mistake] = []
    for path in paths:
        if not path.is_file() or path.stat().st_size > max_bytes:
            continue
        try:
            table = open_path(str(path), None, _label(Source(path=str(path)), names))
            format = find_format(table, data)
            if not data.skip_bad_rows:
                check(table, format, data)
        except DataError as error:
            mistakes += error.mistakes
    if mistakes:
        raise DataError(dict.fromkeys(mistakes))


def _check(data: DataSpec, evaluation: EvalSpec | None) -> None:
    check_columns(data.columns)
    if (data.rows is None) == (not data.path):
        raise DataError(Mistake("data", "give either a path or rows"))
    if data.limit is not None and data.limit < 1:
        raise DataError(Mistake("data.limit", f"must be at least 1, got {data.limit}"))
    if data.max_length < 2:
        raise DataError(Mistake("data.max_length", f"must be at least 2, got {data.max_length}"))
    for source in data.sources if data.rows is None else ():
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise DataError(
                Mistake(source.path, f"its weight must be above 0 and finite, got {source.weight}")
            )
    _check_split(data)
    if evaluation is None:
        return
    if (evaluation.path is None) == (evaluation.fraction is None):
        raise DataError(Mistake("eval", "give either a path or a fraction"))
    if evaluation.fraction is not None and not 0 < evaluation.fraction < 1:
        raise DataError(Mistake("eval.fraction", f"must lie between 0 and 1, got {evaluation.fraction}"))


def _check_split(data: DataSpec) -> None:
    if data.split is None:
        return
    single = data.rows is not None or all(Path(source.path).is_file() for source in data.sources)
    if single:
        raise DataError(
            Mistake("data.split", "a single file or rows from Python have no splits; leave it out")
        )


@dataclass(frozen=True, slots=True)
class _Templates:
    """The chat template of a job, and the one for rows with tools."""

    plain: Template | None
    for_tools: Template | None


def _templates(tokenizer: Any, chosen: str | None) -> _Templates:
    sources = [template_source(tokenizer, chosen, tools=tools) for tools in (False, True)]
    special = tokenizer.special_tokens_map
    return _Templates(*(None if source is None else Template(source, special) for source in sources))


def data_identity(data: DataSpec, evaluation: EvalSpec | None) -> Hashable:
    """Return a key that is equal for jobs for which `prepare` gives the same result. The evaluation interval
    is not part of it."""
    plain = [getattr(data, item.name) for item in fields(DataSpec) if item.name not in ("rows", "columns")]
    held_out = None if evaluation is None else (evaluation.path, evaluation.fraction)
    rows = None if data.rows is None else id(data.rows)
    return (*plain, rows, tuple(sorted(data.columns.items())), held_out)


def _open_training(data: DataSpec) -> list[_TablePart]:
    if data.rows is not None:
        return [_TablePart(open_rows(data.rows), 1.0)]
    names = Counter(Path(source.path).name for source in data.sources)
    return [
        _TablePart(open_path(source.path, data.split, _label(source, names)), source.weight)
        for source in data.sources
    ]


def _label(source: Source, names: Counter[str]) -> str:
    """Return the label of a source: its file name, or its whole path if another file has the same name."""
    path = Path(source.path)
    return path.name if path.exists() and names[path.name] == 1 else source.path


def _open_evaluation(data: DataSpec, evaluation: EvalSpec | None) -> list[_TablePart]:
    if evaluation is None or evaluation.path is None:
        return []
    source = Source(path=evaluation.path)
    taken = [] if data.rows is not None else [Path(other.path).name for other in data.sources]
    names = Counter([*taken, Path(source.path).name])
    return [_TablePart(open_path(source.path, data.split, _label(source, names)), 1.0)]


def _build_all(
    parts: Sequence[_TablePart], rules: Rules, cache: Path, progress: Progress | None
) -> list[Built]:
    """Build every table, or raise the mistakes of all of them together."""
    built: list[Built] = []
    mistakes: list[Mistake] = []
    done = 0
    for part in parts:
        before = done
        counted = None if progress is None else (lambda rows, before=before: progress(before + rows))
        try:
            made = build(part.table, rules, cache, counted)
        except DataError as problem:
            mistakes += problem.mistakes
            continue
        done += made.store.tally.rows
        built.append(made)
    if mistakes:
        raise DataError(dict.fromkeys(mistakes))
    return built


def _fingerprint(*identity: object) -> str:
    return hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()


def _are_among(held: Sequence[Built], trained: Sequence[Built]) -> bool:
    """Return whether all rows of the held-out tables are trained on; False if there are no such tables."""
    if not held:
        return False
    rows = np.concatenate([made.store.rows for made in trained])
    return all(bool(np.isin(made.store.rows, rows).all()) for made in held)


def _everything(built: Sequence[Built], weights: Sequence[float]) -> Samples:
    shares = [
        Share(made.store, np.arange(len(made.store.lengths)), weight)
        for made, weight in zip(built, weights, strict=True)
    ]
    return Samples(shares, _fingerprint([made.key for made in built], list(weights)))


def _split(built: Sequence[Built], weights: Sequence[float], fraction: float) -> tuple[Samples, Samples]:
    """Split by the hash of the row: every job on a file holds out the same rows, whatever its seed."""
    rows = np.concatenate([made.store.rows for made in built])
    border = _border(rows, fraction)
    identity = [[made.key for made in built], list(weights), fraction]

    def side(held: bool, name: str) -> Samples:
        shares = []
        for made, weight in zip(built, weights, strict=True):
            chosen = np.flatnonzero((made.store.rows <= border) == held)
            shares.append(Share(made.store, chosen, 1.0 if held else weight))
        return Samples(shares, _fingerprint(*identity, name))

    return side(False, "train"), side(True, "evaluation")


def _border(rows: NDArray[np.uint64], fraction: float) -> np.uint64:
    """Return the largest hash of held-out rows: at least one row is held out, and never all of them."""
    distinct = np.unique(rows)
    if len(distinct) < 2:
        raise DataError(
            Mistake("eval.fraction", "one row cannot be split; at least two different rows are needed")
        )
    border = np.uint64(int(fraction * 2.0**64))
    return np.clip(border, distinct[0], distinct[-2])
