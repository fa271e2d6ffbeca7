"""A job that is ready to train: its data are tokenised and its numbers of steps are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weftune.adapters.registry import get_kind
from weftune.core.batch import Microbatch
from weftune.core.shapes import JobShape, ModelShape
from weftune.data.collate import Part, collate
from weftune.data.prepare import Prepared, SharedData
from weftune.data.samples import SampleOrder, Samples
from weftune.errors import AdapterError, DataError, Mistake
from weftune.jobs.courses import Curriculum, curriculum, job_shape, truncate_data
from weftune.jobs.spec.spec import JobSpec, in_steps
from weftune.plan.program.program import MicrobatchPlan
from weftune.plan.window.rounds import JobWindow
from weftune.run.training.schedule import Recipe


@dataclass(frozen=True, slots=True)
class PreparedJob:
    spec: JobSpec
    data: Prepared
    order: SampleOrder
    recipe: Recipe
    shape: JobShape
    evaluate_at: frozenset[int]
    save_at: frozenset[int]
    limit: int | None = None
    """Step up to which a trial of a sweep may train for now. None means its last step."""
    start_tokens: tuple[int, ...] = ()
    """Tokens of the text that initialises the job's virtual tokens."""
    requested_evaluations: frozenset[int] | None = None
    """Steps of `evaluate_at` that the job itself requests, if a sweep adds others. None means all of them."""
    base_samples: Samples | None = None
    """The held-out samples for the base alone, without virtual tokens. None if there are none, or if the
    job's first evaluation equals that of the base, since its adapter changes nothing at its start."""

    @property
    def name(self) -> str:
        return self.spec.name

    def job_window(self, step: int, rounds: int, begins: bool) -> JobWindow:
        """Return the job's part of a window that starts after `step`."""
        return self.curriculum.job_window(step, rounds, begins, self.limit)

    def base_window(self, step: int) -> JobWindow:
        """Return a part of a window: the base without adapters, evaluated on the held-out samples."""
        data = replace(self.data, evaluation=self.base_samples)
        planned = replace(self.curriculum, data=data, evaluate_at=frozenset(), save_at=frozenset())
        return planned.job_window(step, 0, begins=True)

    @property
    def last_step(self) -> int:
        """Last step that the job may make for now."""
        return self.recipe.steps if self.limit is None else self.limit

    def is_requested_evaluation(self, step: int) -> bool:
        """Whether an evaluation at this step counts for the job's best weights and its early stop."""
        return self.requested_evaluations is None or step in self.requested_evaluations

    @property
    def curriculum(self) -> Curriculum:
        return Curriculum(self.name, self.data, self.order, self.recipe.steps, self.evaluate_at, self.save_at)


def prepare_job(
    spec: JobSpec,
    order: int,
    tokenizer: Any,
    shape: ModelShape,
    cache: Path,
    max_steps: int | None = None,
    shared_data: SharedData | None = None,
) -> PreparedJob:
    """Tokenise a job's data and compute its numbers of steps; `order` is its position in the jobs file.

    `shared_data` holds data that several jobs use; it must have the same tokenizer and cache.
    """
    shared_data = shared_data or SharedData(tokenizer, cache, shape.context)
    try:
        get_kind(spec.adapter.kind).check_start(spec.adapter, shape.sites)
    except AdapterError as error:
        raise AdapterError(Mistake("adapter.init_from", str(error)).of_job(spec.name)) from None
    try:
        prepared = shared_data.prepare(truncate_data(spec, shape.context), spec.eval)
    except DataError as error:
        raise DataError(mistake.of_job(spec.name) for mistake in error.mistakes) from None
    data = prepared.with_prefix(spec.adapter.rows_before, spec.adapter.keys_before)
    planned = curriculum(spec, data, max_steps)
    return PreparedJob(
        spec=spec,
        data=data,
        order=planned.order,
        recipe=Recipe(
            steps=planned.steps,
            learning_rate=spec.learning_rate,
            schedule=spec.schedule,
            warmup=in_steps(spec.warmup, planned.steps),
            weight_decay=spec.weight_decay,
            betas=spec.betas,
            eps=spec.eps,
            clip=spec.clip,
            seed=spec.seed,
        ),
        shape=job_shape(spec, order, data, shape),
        evaluate_at=planned.evaluate_at,
        save_at=planned.save_at,
        start_tokens=_start_tokens(spec, tokenizer, shape),
        base_samples=None if spec.adapter.starts_as_base else prepared.evaluation,
    )


def _start_tokens(spec: JobSpec, tokenizer: Any, shape: ModelShape) -> tuple[int, ...]:
    """Return the tokens of the initial text, with the special tokens that the tokenizer adds, as in PEFT."""
    if not (text := spec.adapter.start_text):
        return ()
    tokens = tuple(map(int, tokenizer(text)["input_ids"]))
    if not tokens or max(tokens) >= shape.vocabulary:
        sentence = "the tokenizer makes no tokens of it that the base has; write another text"
        raise AdapterError(Mistake("adapter.init_text", sentence).of_job(spec.name))
    return tokens


def collate_plan(
    plan: MicrobatchPlan, held_out: bool, jobs: Mapping[str, PreparedJob], *, base_alone: bool = False
) -> Microbatch:
    """Return the planned samples as tensors. With `base_alone`, held-out samples skip all adapters."""
    parts = []
    for segment in plan.segments:
        job = jobs[segment.job]
        evaluated = job.base_samples if base_alone else job.data.evaluation
        samples = evaluated if held_out else job.data.train
        assert samples is not None, f"{segment.job} has no such samples"
        before = samples.before, samples.first_position
        parts += [
            Part(segment.job, segment.step, samples, placed.sample, placed.offset, *before)
            for placed in segment.samples
        ]
    microbatch = collate(parts)
    if not base_alone:
        return microbatch
    segments = tuple(replace(segment, adapter=None) for segment in microbatch.segments)
    return replace(microbatch, segments=segments)
