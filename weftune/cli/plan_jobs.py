"""Outlines of the jobs of a jobs file for the outlook, made without weights and without torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weftune.adapters.start import source_of
from weftune.core.files import cache_folder
from weftune.core.shapes import JobShape, ModelShape, layer_sums
from weftune.data.order import SampleOrder
from weftune.data.prepare import Prepared, SharedData, data_identity
from weftune.data.spec import DataSpec, EvalSpec
from weftune.errors import DataError, Mistake
from weftune.jobs.courses import Curriculum, curriculum, cut_data, longest_sample
from weftune.jobs.spec.spec import JobSpec, in_steps
from weftune.plan.cost.estimate import JobOutline
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.outlook.whole_run import JobTotal, tokens_of

OUTLOOK_ROUNDS = 4
"""Global batches of each job that the outlook inspects, as many as a window has."""
FEW_ROUNDS, MANY_JOBS = 2, 12
"""With more than `MANY_JOBS` jobs, `FEW_ROUNDS` global batches of each suffice: their samples are many, and a
plan may take only seconds."""
SAMPLED_ROWS, FEWEST_ROWS, ALL_ROWS = 2000, 100, 4000
"""Rows that are read of a dataset that is not tokenised yet: at most, at least, and of all jobs together.
With many jobs fewer are read of each, since all are tokenised in the seconds that a plan may take."""

LINE_FILES = (".jsonl", ".ndjson", ".csv", ".tsv")


@dataclass(frozen=True, slots=True)
class Outlined:
    job: JobOutline
    curriculum: Curriculum
    """Samples and steps of the job, the same as in a run."""
    sampled: bool
    """Whether its lengths are those of the first rows only."""
    total: JobTotal

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def shape(self) -> JobShape:
        return self.job.shape


def outline_jobs(
    jobs: Sequence[JobSpec],
    tokenizer: Any,
    shape: ModelShape,
    max_steps: int | None = None,
    averaged: Collection[str] = (),
) -> list[Outlined]:
    """Return every job's outline, or raise the mistakes of all jobs at once. Jobs in `averaged` keep the mean
    of their weights."""
    outlined: list[Outlined] = []
    mistakes: list[Mistake] = []
    rounds = OUTLOOK_ROUNDS if len(jobs) <= MANY_JOBS else FEW_ROUNDS
    rows = min(SAMPLED_ROWS, max(FEWEST_ROWS, ALL_ROWS // len(jobs)))
    reader = _JobReader(SharedData(tokenizer, cache_folder() / "tokens", shape.context), rows, shape.context)
    for place, job in enumerate(jobs):
        try:
            read = reader.read(job)
            if not len(read.samples.train):
                raise DataError("it has 0 samples to train on")
            planned = curriculum(job, read.samples, max_steps)
            outline = _outline(job, place, planned, shape, rounds, means=int(job.name in averaged))
            total = _total(job, outline, read, shape, max_steps)
            outlined.append(Outlined(outline, planned, read.sampled, total))
        except DataError as error:
            mistakes += [_named(job.name, mistake) for mistake in error.mistakes]
    if mistakes:
        raise DataError(mistakes)
    return outlined


def _outline(
    job: JobSpec, place: int, planned: Curriculum, shape: ModelShape, most: int, means: int
) -> JobOutline:
    train, adapter = planned.data.train, job.adapter
    sites = [site for site in shape.sites if adapter.adapts(site)]
    counts = list(adapter.counts(shape.sites))
    rounds = range(1, min(most, planned.steps) + 1)
    return JobOutline(
        shape=JobShape(
            name=job.name,
            priority=job.priority,
            order=place,
            trainable=sum(count for _, count in counts),
            longest=longest_sample(planned.data),
            batch_tokens=train.largest_batch(job.batch_size),
            by_layer=layer_sums(counts, shape.layers),
            resting=sum(site.resting(adapter.parameters_at(site)) for site in sites),
            starts_from=source_of(job.adapter),
            scaled=adapter.scaled_outputs(shape.sites),
            means=means,
        ),
        ranks={site.name: adapter.rank_at(site.name) for site in sites},
        batches=tuple(tuple(train.lengths[planned.order.batch(step)].tolist()) for step in rounds),
    )


def _total(
    job: JobSpec, outline: JobOutline, read: _JobRead, shape: ModelShape, max_steps: int | None
) -> JobTotal:
    """Return the totals of the job's whole run, although only the first rows may have been read."""
    scale = read.scale
    order = SampleOrder(len(read.samples.train), job.batch_size, job.seed, read.samples.train.weights)
    steps = job.total_steps(math.ceil(order.steps_per_epoch * (scale or 1.0)))
    steps = steps if max_steps is None else min(steps, max_steps)
    held_out = 0 if read.samples.evaluation is None else int(read.samples.evaluation.lengths.sum())
    return JobTotal(
        steps=steps,
        tokens=tokens_of(outline.batches, held_out, _evaluations(job, steps), steps),
        state_bytes=MemoryModel(shape, 0).state_bytes([outline.shape]),
        at_least=scale is None and job.steps is None,
    )


def _evaluations(job: JobSpec, steps: int) -> int:
    """Return the number of evaluations: at the start, at the interval of the job, and at the end."""
    if job.eval is None:
        return 0
    every = steps if job.eval.every is None else max(1, in_steps(job.eval.every, steps))
    return len(range(0, steps, every)) + 1


@dataclass(frozen=True, slots=True)
class _JobRead:
    samples: Prepared
    sampled: bool
    scale: float | None
    """Number of all rows divided by the number of rows read. None if not known."""


class _JobReader:
    """A reader of jobs' samples: from the token cache if complete, else the first `rows`; equal data once."""

    def __init__(self, shared: SharedData, rows: int, context: int) -> None:
        self._shared, self._rows, self._context = shared, rows, context
        self._known: dict[Hashable, _JobRead] = {}

    def read(self, job: JobSpec) -> _JobRead:
        data = cut_data(job, self._context)
        key = data_identity(data, job.eval)
        if key not in self._known:
            self._known[key] = self._prepare(data, job.eval)
        read = self._known[key]
        before = job.adapter.rows_before, job.adapter.keys_before
        return replace(read, samples=read.samples.behind(*before))

    def _prepare(self, data: DataSpec, evaluation: EvalSpec | None) -> _JobRead:
        sampled = not self._shared.is_prepared(data, evaluation)
        limit = min(data.limit or self._rows, self._rows) if sampled else data.limit
        samples = self._shared.prepare(replace(data, limit=limit), evaluation)
        scale = _scale(data, limit) if sampled and limit is not None else 1.0
        return _JobRead(samples, sampled, scale)


def _scale(data: DataSpec, limit: int) -> float | None:
    """Return all rows divided by the first `limit` of each file; None if the files are not made of lines."""
    if data.rows is not None:
        counts = [len(data.rows)]
    else:
        paths = [Path(source.path) for source in data.sources]
        if not all(path.is_file() and path.suffix.lower() in LINE_FILES for path in paths):
            return None
        counts = [_lines(path) for path in paths]
    read = sum(min(count, limit) for count in counts)
    whole = sum(min(count, data.limit or count) for count in counts)
    return max(1.0, whole / max(1, read))


def _lines(path: Path) -> int:
    with path.open("rb") as content:
        return sum(part.count(b"\n") for part in iter(lambda: content.read(1 << 20), b""))


def _named(job: str, mistake: Mistake) -> Mistake:
    return replace(mistake, place=f"job {job}: {mistake.place}" if mistake.place else f"job {job}")
