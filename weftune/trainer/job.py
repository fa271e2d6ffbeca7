"""A job made ready to train: its data tokenised, its shares of a run turned into steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weftune.adapters.registry import kind_named
from weftune.core.batch import Microbatch
from weftune.core.shapes import JobShape, ModelShape
from weftune.data.collate import Part, collate
from weftune.data.order import SampleOrder
from weftune.data.prepare import Prepared, prepare
from weftune.data.samples import Samples
from weftune.errors import AdapterError, DataError, Mistake
from weftune.jobs.spec.spec import JobSpec, in_steps
from weftune.plan.program.program import GlobalBatch, MicrobatchPlan, PlacedSample
from weftune.plan.window.rounds import Course
from weftune.run.training.schedule import Recipe

DEFAULT_SAVE_EVERY = 0.1
LEAST_SAVE_EVERY = 25
"""Between two checkpoints of a job that does not say: a share of the run, but not fewer steps than these."""


@dataclass(frozen=True, slots=True)
class Ready:
    spec: JobSpec
    data: Prepared
    order: SampleOrder
    recipe: Recipe
    shape: JobShape
    evaluate_at: frozenset[int]
    save_at: frozenset[int]

    @property
    def name(self) -> str:
        return self.spec.name

    def course(self, step: int, rounds: int, begins: bool) -> Course:
        """The job's part of a window that starts after `step`."""
        last = min(step + rounds, self.recipe.steps)
        return Course(
            job=self.name,
            step=step,
            batches=tuple(self._batch(number) for number in range(step + 1, last + 1)),
            evaluation=self._held_out(),
            evaluate_at=self.evaluate_at,
            save_at=self.save_at,
            begins=begins,
        )

    def _batch(self, step: int) -> GlobalBatch:
        chosen = self.order.batch(step)
        return GlobalBatch(
            self.name, step, _placed(self.data.train, chosen), int(self.data.train.supervised[chosen].sum())
        )

    def _held_out(self) -> tuple[PlacedSample, ...]:
        held_out = self.data.evaluation
        return () if held_out is None else _placed(held_out, np.arange(len(held_out)))


def make_ready(
    spec: JobSpec,
    place: int,
    tokenizer: Any,
    shape: ModelShape,
    cache: Path,
    max_steps: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Ready:
    """Tokenise a job's data and fix its numbers; `place` is its place in the file."""
    kind = kind_named(spec.adapter.kind)
    try:
        kind.check_start(spec.adapter, shape.sites)
    except AdapterError as error:
        raise AdapterError(_named(spec.name, Mistake("adapter.init_from", str(error)))) from None
    try:
        data = prepare(spec.data, spec.eval, tokenizer, cache, context=shape.context, progress=progress)
    except DataError as error:
        raise DataError(_named(spec.name, mistake) for mistake in error.mistakes) from None
    order = SampleOrder(len(data.train), spec.batch_size, spec.seed, data.train.weights)
    steps = spec.total_steps(order.steps_per_epoch)
    steps = steps if max_steps is None else min(steps, max_steps)
    lengths = [samples.lengths.max() for samples in (data.train, data.evaluation) if samples is not None]
    return Ready(
        spec=spec,
        data=data,
        order=order,
        recipe=Recipe(
            steps=steps,
            learning_rate=spec.learning_rate,
            schedule=spec.schedule,
            warmup=in_steps(spec.warmup, steps),
            weight_decay=spec.weight_decay,
            betas=spec.betas,
            eps=spec.eps,
            clip=spec.clip,
            seed=spec.seed,
        ),
        shape=JobShape(
            name=spec.name,
            priority=spec.priority,
            order=place,
            trainable=kind.layout(spec.adapter, shape.sites).size,
            longest=int(max(lengths)),
            batch_tokens=data.train.largest_batch(spec.batch_size),
        ),
        evaluate_at=_every(spec.eval.every if spec.eval else None, steps),
        save_at=_saves(spec, steps),
    )


def lay_out(plan: MicrobatchPlan, held_out: bool, jobs: Mapping[str, Ready]) -> Microbatch:
    """The planned samples as tensors."""
    parts = []
    for segment in plan.segments:
        data = jobs[segment.job].data
        samples = data.evaluation if held_out else data.train
        assert samples is not None
        parts += [
            Part(segment.job, segment.step, samples, placed.sample, placed.offset)
            for placed in segment.samples
        ]
    return collate(parts)


def _placed(samples: Samples, chosen: np.ndarray) -> tuple[PlacedSample, ...]:
    lengths = samples.lengths[chosen].tolist()
    offsets = np.cumsum([0, *lengths[:-1]]).tolist()
    supervised = samples.supervised[chosen].tolist()
    return tuple(
        PlacedSample(*item) for item in zip(chosen.tolist(), lengths, offsets, supervised, strict=True)
    )


def _saves(spec: JobSpec, steps: int) -> frozenset[int]:
    """The steps after which a job is saved: not after the last, where its adapter is written, and at its
    start only where that is another's adapter, which may be gone when the job is to go on."""
    every = spec.save_every or max(in_steps(DEFAULT_SAVE_EVERY, steps), LEAST_SAVE_EVERY)
    first = {0} if spec.adapter.init_from is not None else set()
    return _every(every, steps) - {0, steps} | first


def _every(every: float | None, steps: int) -> frozenset[int]:
    """Step 0, every so many steps, and the last."""
    if every is None:
        return frozenset({0, steps})
    return frozenset({*range(0, steps, max(1, in_steps(every, steps))), steps})


def _named(job: str, mistake: Mistake) -> Mistake:
    return replace(mistake, place=f"job {job}: {mistake.place}" if mistake.place else f"job {job}")
