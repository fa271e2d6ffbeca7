"""Curricula of jobs: the global batches, evaluations and saves that follow from a job's spec and samples. A
curriculum also yields the job's part of a window (the few global batches of every job that are planned
together). This module does not import torch, so that `weftune plan` plans the same batches as a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from weftune.adapters.kinds import AdapterSpec
from weftune.adapters.target import source_job
from weftune.core.shapes import JobShape, ModelShape, SiteShape, sum_parameters_by_layer
from weftune.data.prepare import Prepared
from weftune.data.samples import SampleOrder, Samples
from weftune.data.spec import DataSpec
from weftune.jobs.spec.spec import JobSpec, to_steps
from weftune.plan.program.program import GlobalBatch, PlacedSample, group_samples
from weftune.plan.window.rounds import JobWindow

DEFAULT_SAVE_EVERY = 0.1
MIN_SAVE_STEPS = 25
MIN_SAVE_SECONDS = 30.0
"""Default interval between checkpoints: a fraction of the job's steps, but at least `MIN_SAVE_STEPS` steps
and `MIN_SAVE_SECONDS` seconds of training."""


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The whole training of a job: its samples in order, and the steps of its evaluations and checkpoints."""

    job: str
    data: Prepared
    sample_order: SampleOrder
    steps: int
    evaluate_at: frozenset[int]
    save_at: frozenset[int]

    def job_window(
        self, step: int, rounds: int, is_first_window: bool, limit: int | None = None
    ) -> JobWindow:
        """Return the job's part of a window, which is planned together with the parts of other jobs. The part
        has the next `rounds` global batches after `step`, but none after step `limit`. With
        `is_first_window`, the job is first evaluated at its current step."""
        last = min(step + rounds, self.steps if limit is None else limit)
        return JobWindow(
            job=self.job,
            step=step,
            batches=tuple(self._batch(number) for number in range(step + 1, last + 1)),
            evaluation=self._held_out_samples(),
            evaluation_steps=self.evaluate_at | {step} if is_first_window else self.evaluate_at,
            save_steps=self.save_at,
            begins_run=is_first_window,
            mismatched=self._held_out_mismatched_samples(),
        )

    def score_window(self, step: int, data: Prepared, indices: np.ndarray) -> JobWindow:
        """Return a job's part of a window (a plan of a few global batches of every job) in which samples of
        `data` are only scored (by their log-probabilities), not trained on. `indices` are numbers of samples,
        counted through all parts of `data`."""
        return JobWindow(
            self.job,
            step,
            (),
            (),
            frozenset(),
            frozenset(),
            scored_samples=_place_samples(data.parts, indices),
        )

    def _batch(self, step: int) -> GlobalBatch:
        placed = _place_rows(self.data.train, self.sample_order.batch(step))
        supervised, before = (
            sum(one.supervised_tokens for one in placed),
            len(placed) * self.data.train.rows_before,
        )
        return GlobalBatch(self.job, step, placed, supervised, before, self._mismatched_samples(step))

    def _mismatched_samples(self, step: int) -> tuple[PlacedSample, ...]:
        """Return the mismatched samples of a global batch: its prompts, each with the answer of another
        sample. Empty if the objective needs none."""
        if (train := self.data.train).mismatched_samples is None:
            return ()
        return _place_samples(train.parts, len(train) + self.sample_order.batch(step))

    def _held_out_mismatched_samples(self) -> tuple[PlacedSample, ...]:
        if (held_out := self.data.evaluation) is None or held_out.mismatched_samples is None:
            return ()
        parts = self.data.parts
        return _place_samples(parts, sum(map(len, parts[:-1])) + np.arange(len(held_out)))

    def _held_out_samples(self) -> tuple[PlacedSample, ...]:
        held_out = self.data.evaluation
        return () if held_out is None else _place_rows(held_out, np.arange(len(held_out)))


def curriculum(spec: JobSpec, data: Prepared, max_steps: int | None = None) -> Curriculum:
    order = data.train.sample_order(spec.batch_size, spec.seed)
    steps = spec.total_steps(order.steps_per_epoch)
    steps = steps if max_steps is None else min(steps, max_steps)
    evaluations = _evaluation_steps(spec.eval.every if spec.eval else None, steps)
    return Curriculum(spec.name, data, order, steps, evaluations, _save_steps(spec, steps))


def reference_data(spec: JobSpec, unprefixed_data: Prepared, data: Prepared) -> Prepared | None:
    """Return the samples as the job's reference policy reads them, or None if the objective needs no
    reference policy. The samples contain the virtual tokens of the job's adapter only if the reference policy
    is the adapter from which the job starts."""
    if not spec.objective.needs_reference:
        return None
    return unprefixed_data if spec.adapter.init_from is None else data


def adapt_to_objective(spec: JobSpec, data: Prepared, context: int) -> Prepared:
    """Return the samples in the form that the job's objective needs: with loss on the prompts as well,
    without target tokens, or with additional samples that pair prompts with answers of other samples."""
    if spec.objective.supervises_prompts:
        data = data.supervise_prompts()
    if spec.objective.scalar_head:
        data = data.remove_targets()
    if spec.objective.mismatched_samples:
        max_tokens = truncate_data(spec, context).max_sample_tokens(context)
        data = data.add_mismatched_samples(spec.batch_size, spec.seed, max_tokens)
    return data


def truncate_data(spec: JobSpec, context: int) -> DataSpec:
    """Return the job's data specification with a `max_length` at which samples, after the adapter's virtual
    tokens, fit into the base model's context."""
    if not (before := spec.adapter.positions_before):
        return spec.data
    return replace(spec.data, max_length=spec.data.max_sample_tokens(context - before))


_ADAPTER_SIZES: deque[tuple[AdapterSpec, Sequence[SiteShape], JobShape]] = deque(maxlen=16)
"""Cache of the sizes that were computed for recent adapter specs, since thousands of jobs may have equal
adapter specs."""


def job_shape(
    spec: JobSpec, job_number: int, data: Prepared, base: ModelShape, mean_weight_count: int = 0
) -> JobShape:
    """Return the sizes of a job, from which its memory and time are predicted. `mean_weight_count` is the
    number of running means of its weights that the job keeps."""
    return replace(
        adapter_sizes(spec.adapter, base),
        name=spec.name,
        priority=spec.priority,
        file_position=job_number,
        max_sample_tokens=max(part.longest_row_tokens for part in data.parts),
        batch_tokens=data.train.max_batch_tokens(spec.batch_size),
        source_job=source_job(spec.adapter),
        mean_weight_count=mean_weight_count,
        answer_positions=_answer_positions(spec, data, base.context),
    )


PROMPT_SLACK = 32
"""Number of tokens by which a prompt may be longer than the longest held-out sample, since a chat template
may add tokens before an answer."""
PAGE_SLACK = 32
"""Number of token positions that are added to every sequence when its KV cache is sized, since the last page
may be partly unused."""


def longest_prompt(data: Prepared) -> int:
    """Return an upper bound of the number of tokens of a held-out prompt that is answered, including virtual
    tokens."""
    assert data.evaluation is not None, "answers are generated for held-out rows"
    return int(data.evaluation.lengths.max()) + PROMPT_SLACK


def _answer_positions(spec: JobSpec, data: Prepared, context: int) -> int:
    """Return the number of token positions that the KV cache must hold for all answers of a job at an
    evaluation."""
    request = spec.eval.generate if spec.eval else None
    if request is None or data.evaluation is None:
        return 0
    each = longest_prompt(data) + spec.adapter.keys_before + request.max_new_tokens
    return request.prompts * (min(each, context) + PAGE_SLACK)


def adapter_sizes(adapter: AdapterSpec, base: ModelShape) -> JobShape:
    for known, sites, sizes in tuple(_ADAPTER_SIZES):
        if sites is base.sites and known == adapter:
            return sizes
    counts = list(adapter.parameter_counts(base.sites))
    adapted = [site for site in base.sites if adapter.adapts(site)]
    sizes = JobShape(
        "",
        priority=0,
        file_position=0,
        trainable_parameters=sum(count for _, count in counts),
        max_sample_tokens=0,
        parameters_by_layer=sum_parameters_by_layer(counts, base.layers),
        inactive_parameters=sum(site.inactive_parameters(adapter.parameters_at(site)) for site in adapted),
        scaled_outputs=adapter.scaled_outputs(base.sites),
        copied_values=adapter.copied_values(base.sites),
    )
    _ADAPTER_SIZES.append((adapter, base.sites, sizes))
    return sizes


def _place_rows(samples: Samples, indices: np.ndarray) -> tuple[PlacedSample, ...]:
    """Return the samples at these indices as records of the planner, in order. The two samples of a pair get
    one group number, so that they run in the same microbatch."""
    return group_samples(_place_samples([samples], indices), samples.group_size)


def _place_samples(parts: Sequence[Samples], indices: np.ndarray) -> tuple[PlacedSample, ...]:
    """Return the samples with the given numbers, in order. Numbers are counted through all `parts`, as if
    these were concatenated."""
    lengths = _concatenate_arrays([samples.lengths for samples in parts])[indices].tolist()
    supervised = _concatenate_arrays([samples.supervised for samples in parts])[indices].tolist()
    offsets = accumulate(lengths, initial=0)
    # `offsets` has one more element: the end of the last sample.
    return tuple(map(PlacedSample, indices.tolist(), lengths, offsets, supervised))


def _concatenate_arrays(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def save_interval(spec: JobSpec, steps: int) -> int:
    """Return the number of steps between two checkpoints, which is also the maximum number of steps that a
    killed job loses. Without `save_every`, the interval is extended to `MIN_SAVE_SECONDS` of training if
    steps are short."""
    if spec.save_every is None:
        return max(to_steps(DEFAULT_SAVE_EVERY, steps), MIN_SAVE_STEPS)
    return max(1, to_steps(spec.save_every, steps))


def _save_steps(spec: JobSpec, steps: int) -> frozenset[int]:
    """Return the steps after which a checkpoint is begun: two in each interval at which the job saves.

    A checkpoint is written while training continues and is complete when the next one is due, so that at most
    one interval is lost. No checkpoint follows the last step, when the adapter itself is written. A
    checkpoint at step 0 is needed only if the job starts from another adapter, which may be deleted before
    the job resumes.
    """
    interval = save_interval(spec, steps)
    wholes = range(0, steps, interval)
    halves = range(interval // 2, steps, interval)
    first = {0} if spec.adapter.init_from is not None else set()
    return frozenset({*wholes, *halves} - {0, steps} | first)


def _evaluation_steps(interval: float | None, steps: int) -> frozenset[int]:
    """Return the steps at which a job is evaluated: step 0, every `interval` steps, and the last step. If
    `interval` is None, the job is evaluated at step 0 and at the last step only."""
    if interval is None:
        return frozenset({0, steps})
    return frozenset({*range(0, steps, max(1, to_steps(interval, steps))), steps})
