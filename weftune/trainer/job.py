"""Jobs that are ready to train: their data has been tokenised and their numbers of steps are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weftune.adapters.registry import get_kind
from weftune.core.batch import OWN_ADAPTER, Microbatch, Segment
from weftune.core.shapes import JobShape, ModelShape
from weftune.data.collate import Part, collate
from weftune.data.prepare import Prepared, SharedData
from weftune.data.samples import SampleOrder, Samples
from weftune.errors import AdapterError, DataError, Mistake, UserError
from weftune.generate.held_out import HeldOutPrompts, read_held_out
from weftune.jobs.courses import (
    Curriculum,
    adapt_to_objective,
    curriculum,
    job_shape,
    reference_data,
    truncate_data,
)
from weftune.jobs.spec.spec import JobSpec, to_steps
from weftune.plan.program.program import Evaluate, ForwardPass, MicrobatchPlan, Score, SegmentPlan
from weftune.plan.window.rounds import JobWindow
from weftune.run.training.schedule import Recipe


@dataclass(frozen=True, slots=True)
class PreparedJob:
    spec: JobSpec
    data: Prepared
    sample_order: SampleOrder
    recipe: Recipe
    shape: JobShape
    evaluate_at: frozenset[int]
    save_at: frozenset[int]
    step_limit: int | None = None
    """Last step up to which a trial (a job of a sweep) may train before the next comparison of trials. None
    means the last step of the job."""
    start_tokens: tuple[int, ...] = ()
    """Tokens of the text from which the job's virtual tokens are initialised. Empty if there is no such
    text."""
    requested_evaluations: frozenset[int] | None = None
    """Steps at which the job itself requests an evaluation, if its sweep adds evaluations at other steps.
    None means all steps with an evaluation."""
    base_samples: Samples | None = None
    """Held-out samples on which the base alone is evaluated, without virtual tokens. None if the job has no
    held-out samples, or if its adapter does not change the base at the start, so that the first evaluation is
    the evaluation of the base."""

    reference_data: Prepared | None = None
    """Samples for the reference policy. The samples have no virtual tokens unless the job starts from an
    adapter. None if the objective needs no reference policy."""
    prompts: HeldOutPrompts | None = None
    """Held-out prompts that the job answers at each evaluation. None if it generates no answers."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def reference_adapter(self) -> str | None:
        """Return the adapter of passes of the reference policy (as in `Segment.adapter`). This is the job's
        own adapter, still untrained, if the job starts from an existing adapter; otherwise None, the base
        alone."""
        return None if self.spec.adapter.init_from is None else OWN_ADAPTER

    def score_window(self, step: int, indices: np.ndarray) -> JobWindow:
        """Return the job's part of a window (a plan of a few global batches) in which the reference policy
        scores samples of `reference_data` and nothing is trained. `indices` count the samples in the order of
        `reference_data.parts`."""
        assert self.reference_data is not None
        return self.curriculum.score_window(step, self.reference_data, indices)

    def with_references(self, references: NDArray[np.float64]) -> PreparedJob:
        """Return the job with the given reference log-probabilities, those of the training samples first."""
        data, held_out = self.data.with_references(references), self.base_samples
        if held_out is not None:
            held_out = held_out.with_references(references[sum(map(len, data.train.parts)) :])
        return replace(self, data=data, base_samples=held_out)

    def job_window(self, step: int, rounds: int, is_first_window: bool) -> JobWindow:
        """Return the job's part of a window (a plan of a few global batches of every job): its next `rounds`
        global batches after `step`, with their evaluations and saves."""
        return self.curriculum.job_window(step, rounds, is_first_window, self.step_limit)

    def base_window(self, step: int) -> JobWindow:
        """Return the job's part of a window (the plan that is run next) in which only the base without
        adapters is evaluated, on the job's held-out samples."""
        data = replace(self.data, evaluation=self.base_samples)
        planned = replace(self.curriculum, data=data, evaluate_at=frozenset(), save_at=frozenset())
        return planned.job_window(step, 0, is_first_window=True)

    @property
    def metric_name(self) -> str | None:
        """Name of the metric by which the job's evaluations are compared. None if they are compared by
        validation loss."""
        return None if self.prompts is None else self.prompts.metric_name

    @property
    def last_step(self) -> int:
        """Last step up to which the job may currently train."""
        return self.recipe.steps if self.step_limit is None else self.step_limit

    def is_requested_evaluation(self, step: int) -> bool:
        """Return whether the job itself, and not only its sweep, requests an evaluation at this step. Only
        such evaluations count for the job's best weights and its early stopping."""
        return self.requested_evaluations is None or step in self.requested_evaluations

    @property
    def curriculum(self) -> Curriculum:
        return Curriculum(
            self.name, self.data, self.sample_order, self.recipe.steps, self.evaluate_at, self.save_at
        )


def prepare_job(
    spec: JobSpec,
    job_number: int,
    tokenizer: Any,
    shape: ModelShape,
    cache: Path,
    max_steps: int | None = None,
    shared_data: SharedData | None = None,
) -> PreparedJob:
    """Tokenise a job's data and compute its numbers of steps; `job_number` is the job's position in the jobs
    file.

    `shared_data` has the data that several jobs use. It must have been made with the same tokenizer and
    cache.
    """
    shared_data = shared_data or SharedData(tokenizer, cache, shape.context)
    try:
        get_kind(spec.adapter.kind).check_start(spec.adapter, shape.sites)
    except AdapterError as error:
        raise AdapterError(Mistake("adapter.init_from", str(error)).with_job_name(spec.name)) from None
    try:
        prepared = shared_data.prepare(
            truncate_data(spec, shape.context), spec.eval, row_kind=spec.objective.row_kind
        )
        prompts = read_held_out(spec, prepared, shared_data.encoder, shape.context)
    except UserError as error:
        raise DataError(mistake.with_job_name(spec.name) for mistake in error.mistakes) from None
    prepared = adapt_to_objective(spec, prepared, shape.context)
    data = prepared.add_prefix(spec.adapter.rows_before, spec.adapter.keys_before)
    planned = curriculum(spec, data, max_steps)
    return PreparedJob(
        spec=spec,
        data=data,
        sample_order=planned.sample_order,
        recipe=Recipe(
            steps=planned.steps,
            learning_rate=spec.learning_rate,
            schedule=spec.schedule,
            warmup=to_steps(spec.warmup, planned.steps),
            weight_decay=spec.weight_decay,
            betas=spec.betas,
            eps=spec.eps,
            clip=spec.clip,
            seed=spec.seed,
            objective=spec.objective,
        ),
        shape=job_shape(spec, job_number, data, shape),
        evaluate_at=planned.evaluate_at,
        save_at=planned.save_at,
        start_tokens=_start_tokens(spec, tokenizer, shape),
        base_samples=None if spec.adapter.starts_as_base else prepared.evaluation,
        reference_data=reference_data(spec, prepared, data),
        prompts=prompts,
    )


def _start_tokens(spec: JobSpec, tokenizer: Any, shape: ModelShape) -> tuple[int, ...]:
    """Return the tokens of the text that initialises the job's virtual tokens, with the special tokens that
    the tokenizer adds, as in PEFT."""
    if not (text := spec.adapter.start_text):
        return ()
    tokens = tuple(map(int, tokenizer(text)["input_ids"]))
    if not tokens or max(tokens) >= shape.vocabulary:
        sentence = "the tokenizer makes no tokens of it that the base has; write another text"
        raise AdapterError(Mistake("adapter.init_text", sentence).with_job_name(spec.name))
    return tokens


def collate_plan(
    plan: MicrobatchPlan,
    kind: type[ForwardPass],
    jobs: Mapping[str, PreparedJob],
    *,
    without_adapter: bool = False,
) -> Microbatch:
    """Return a planned microbatch as tensors: with training samples for a Forward pass, held-out samples for
    an Evaluate pass, and either kind for a Score pass (log-probabilities for a reference policy). Samples of
    a Score pass through the adapter of the reference policy. With `without_adapter`, all samples skip the
    adapters."""
    parts = []
    for segment in plan.segments:
        job = jobs[segment.job]
        for placed in segment.samples:
            samples, index = _sample_of_pass(job, kind, placed.sample, without_adapter)
            before = samples.rows_before, samples.first_position
            where = placed.sample_offset, *before, placed.chunk_rows
            parts.append(Part(segment.job, segment.step, samples, index, *where))
    microbatch = collate(parts)
    if not without_adapter and kind is not Score:
        return microbatch
    segments = [
        _sample_route(segment, jobs[segment.job], planned, kind, without_adapter)
        for segment, planned in zip(microbatch.segments, plan.segments, strict=True)
    ]
    return replace(microbatch, segments=tuple(segments))


def _sample_route(
    segment: Segment,
    job: PreparedJob,
    planned_segment: SegmentPlan,
    kind: type[ForwardPass],
    without_adapter: bool,
) -> Segment:
    """Return a segment with two fields set: the adapter that its rows pass through and, for KTO's mismatched
    samples, whether their KL term belongs to a training batch or to an evaluation."""
    scores_reference = kind is Score and job.data.train.references is None
    adapter = None if without_adapter else job.reference_adapter if scores_reference else OWN_ADAPTER
    if kind is not Score or scores_reference:
        return replace(segment, adapter=adapter)
    in_batch = planned_segment.samples[0].sample < sum(map(len, job.data.train.parts))
    return replace(segment, adapter=adapter, kl_purpose="batch" if in_batch else "held_out")


def _sample_of_pass(
    job: PreparedJob, kind: type[ForwardPass], index: int, without_adapter: bool
) -> tuple[Samples, int]:
    """Return the set of samples that a kind of pass (such as Forward) reads, and the index in this set of the
    sample that the plan calls `index`."""
    data = replace(job.data, evaluation=job.base_samples) if without_adapter else job.data
    if kind is not Score:
        samples = data.evaluation if kind is Evaluate else data.train
        assert samples is not None, f"{job.name} has no such samples"
        return samples, index
    if data.train.references is None:
        assert job.reference_data is not None, f"{job.name} has no reference policy"
        data = job.reference_data
    for samples in data.parts:
        if index < len(samples):
            return samples, index
        index -= len(samples)
    raise AssertionError(f"{job.name} has no such samples")
