"""From a jobs file's jobs to what the outlook must know of them, without weights and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from weftune.data.encode import Encoder
from weftune.data.order import Order
from weftune.data.prepare import Prepared, is_prepared, prepare
from weftune.data.spec import DataSpec, EvalSpec
from weftune.errors import DataError, Mistake
from weftune.jobs.spec import JobSpec
from weftune.paths import cache_folder
from weftune.plan.estimate import JobOutline
from weftune.shapes import JobShape, ModelShape

ROUNDS = 4
"""Global batches of each job that the outlook looks at, as many as a window has."""
FEW_ROUNDS, MANY_JOBS = 2, 12
"""With more jobs than these fewer global batches do: their samples are many, and seconds must suffice."""
SAMPLED_ROWS, FEWEST_ROWS, ALL_ROWS = 2000, 100, 4000
"""Of a dataset that is not tokenised yet, so many rows stand for all: with many jobs fewer of each, since all
are tokenised in the seconds that a plan may take."""


@dataclass(frozen=True, slots=True)
class Outlined:
    job: JobOutline
    sampled: bool
    """Whether its lengths are those of the first rows only."""
    steps: int
    """Of its whole run, or of one over the first rows."""


def outline_jobs(jobs: Sequence[JobSpec], tokenizer: Any, shape: ModelShape) -> list[Outlined]:
    """Every job's outline, or the mistakes of all of them at once."""
    outlined: list[Outlined] = []
    mistakes: list[Mistake] = []
    rounds = ROUNDS if len(jobs) <= MANY_JOBS else FEW_ROUNDS
    rows = min(SAMPLED_ROWS, max(FEWEST_ROWS, ALL_ROWS // len(jobs)))
    reader = _Reader(Encoder(tokenizer), shape.context, rows)
    for place, job in enumerate(jobs):
        try:
            read = reader.read(job)
            outline = _outline(job, place, read.samples, shape, rounds)
            steps = job.total_steps(_order(job, read.samples).steps_per_epoch)
            outlined.append(Outlined(outline, read.sampled, steps))
        except DataError as error:
            mistakes += [_named(job.name, mistake) for mistake in error.mistakes]
    if mistakes:
        raise DataError(mistakes)
    return outlined


def _outline(job: JobSpec, place: int, data: Prepared, shape: ModelShape, most: int) -> JobOutline:
    train = data.train
    if not len(train):
        raise DataError("it has 0 samples to train on")
    order = _order(job, data)
    rounds = min(most, job.total_steps(order.steps_per_epoch))
    held_out = 0 if data.evaluation is None else int(data.evaluation.lengths.max())
    adapter = job.adapter
    sites = [site for site in shape.sites if adapter.targets_site(site.name)]
    return JobOutline(
        shape=JobShape(
            name=job.name,
            priority=job.priority,
            order=place,
            trainable=sum(adapter.parameters_at(site) for site in sites),
            longest=max(int(train.lengths.max()), held_out),
            batch_tokens=train.largest_batch(job.batch_size),
        ),
        ranks={site.name: adapter.rank_at(site.name) for site in sites},
        batches=tuple(tuple(train.lengths[order.batch(step)].tolist()) for step in range(1, rounds + 1)),
    )


def _order(job: JobSpec, data: Prepared) -> Order:
    return Order(len(data.train), job.batch_size, job.seed, data.train.weights)


@dataclass(frozen=True, slots=True)
class _Read:
    data: DataSpec
    evaluation: EvalSpec | None
    samples: Prepared
    sampled: bool


class _Reader:
    """Jobs' samples, from the token cache if all is there, else from the first `rows`; equal data once."""

    def __init__(self, encoder: Encoder, context: int, rows: int) -> None:
        self._encoder, self._context, self._rows = encoder, context, rows
        self._known: list[_Read] = []

    def read(self, job: JobSpec) -> _Read:
        for known in self._known:
            if (known.data, known.evaluation) == (job.data, job.eval):
                return known
        self._known.append(self._prepare(job.data, job.eval))
        return self._known[-1]

    def _prepare(self, data: DataSpec, evaluation: EvalSpec | None) -> _Read:
        cache = cache_folder() / "tokens"
        sampled = not is_prepared(data, evaluation, self._encoder, cache, context=self._context)
        limit = min(data.limit or self._rows, self._rows) if sampled else data.limit
        cut = replace(data, limit=limit)
        samples = prepare(cut, evaluation, self._encoder, cache, context=self._context)
        return _Read(data, evaluation, samples, sampled)


def _named(job: str, mistake: Mistake) -> Mistake:
    return replace(mistake, place=f"job {job}: {mistake.place}" if mistake.place else f"job {job}")
