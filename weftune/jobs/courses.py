"""The part of a job in a window: its global batches, evaluations and saves, from its samples and its spec.

This module does not import torch, so that `weftune plan` plans the same batches as a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from weftune.adapters.kinds import AdapterSpec
from weftune.adapters.target import source_job
from weftune.core.shapes import JobShape, ModelShape, SiteShape, layer_sums
from weftune.data.prepare import Prepared
from weftune.data.samples import SampleOrder, Samples
from weftune.data.spec import DataSpec
from weftune.jobs.spec.spec import JobSpec, in_steps
from weftune.plan.program.program import GlobalBatch, PlacedSample
from weftune.plan.window.rounds import JobWindow

DEFAULT_SAVE_EVERY = 0.1
MIN_SAVE_STEPS = 25
MIN_SAVE_SECONDS = 30.0
"""Default of `save_every`, the most training that a kill may cost a job: a share of its steps, but at least
LEAST_SAVE_EVERY steps and LEAST_SAVE_SECONDS."""


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The whole training of a job: its samples in order, and the steps of its evaluations and checkpoints."""

    job: str
    data: Prepared
    order: SampleOrder
    steps: int
    evaluate_at: frozenset[int]
    save_at: frozenset[int]

    def job_window(self, step: int, rounds: int, begins: bool, limit: int | None = None) -> JobWindow:
        """Return the job's part of a window that starts after `step` and ends at step `limit` at the latest.
        If the job `begins`, it is first evaluated at its current step."""
        last = min(step + rounds, self.steps if limit is None else limit)
        return JobWindow(
            job=self.job,
            step=step,
            batches=tuple(self._batch(number) for number in range(step + 1, last + 1)),
            evaluation=self._held_out(),
            evaluate_at=self.evaluate_at | {step} if begins else self.evaluate_at,
            save_at=self.save_at,
            is_start=begins,
        )

    def _batch(self, step: int) -> GlobalBatch:
        placed = _place_samples(self.data.train, self.order.batch(step))
        supervised, before = sum(one.supervised for one in placed), len(placed) * self.data.train.before
        return GlobalBatch(self.job, step, placed, supervised, before)

    def _held_out(self) -> tuple[PlacedSample, ...]:
        held_out = self.data.evaluation
        return () if held_out is None else _place_samples(held_out, np.arange(len(held_out)))


def curriculum(spec: JobSpec, data: Prepared, max_steps: int | None = None) -> Curriculum:
    order = SampleOrder(len(data.train), spec.batch_size, spec.seed, data.train.weights)
    steps = spec.total_steps(order.steps_per_epoch)
    steps = steps if max_steps is None else min(steps, max_steps)
    evaluations = _evaluation_steps(spec.eval.every if spec.eval else None, steps)
    return Curriculum(spec.name, data, order, steps, evaluations, _save_steps(spec, steps))


def truncate_data(spec: JobSpec, context: int) -> DataSpec:
    """Return the job's data with samples truncated so that they fit into the base's context after the
    adapter's virtual tokens."""
    if not (before := spec.adapter.positions_before):
        return spec.data
    return replace(spec.data, max_length=spec.data.longest(context - before))


_ADAPTER_SIZES: deque[tuple[AdapterSpec, Sequence[SiteShape], JobShape]] = deque(maxlen=16)
"""Shapes of recent adapters: thousands of jobs may share a spec, and a base has hundreds of linears."""


def job_shape(spec: JobSpec, order: int, data: Prepared, base: ModelShape, means: int = 0) -> JobShape:
    """Return the shape of job number `order` in the jobs file, which keeps `means` means of weights."""
    return replace(
        _adapter_sizes(spec.adapter, base),
        name=spec.name,
        priority=spec.priority,
        order=order,
        longest=int(max(some.lengths.max() for some in (data.train, data.evaluation) if some is not None)),
        batch_tokens=data.train.largest_batch(spec.batch_size),
        starts_from=source_job(spec.adapter),
        means=means,
    )


def _adapter_sizes(adapter: AdapterSpec, base: ModelShape) -> JobShape:
    for known, sites, sizes in tuple(_ADAPTER_SIZES):
        if sites is base.sites and known == adapter:
            return sizes
    counts = list(adapter.counts(base.sites))
    adapted = [site for site in base.sites if adapter.adapts(site)]
    sizes = JobShape(
        "",
        priority=0,
        order=0,
        trainable=sum(count for _, count in counts),
        longest=0,
        parameters_by_layer=layer_sums(counts, base.layers),
        inactive_parameters=sum(site.inactive_parameters(adapter.parameters_at(site)) for site in adapted),
        scaled_outputs=adapter.scaled_outputs(base.sites),
    )
    _ADAPTER_SIZES.append((adapter, base.sites, sizes))
    return sizes


def _place_samples(samples: Samples, indices: np.ndarray) -> tuple[PlacedSample, ...]:
    lengths = samples.lengths[indices].tolist()
    supervised = samples.supervised[indices].tolist()
    offsets = accumulate(lengths, initial=0)
    # `offsets` has one more element: the end of the last sample.
    return tuple(map(PlacedSample, indices.tolist(), lengths, offsets, supervised))


def save_interval(spec: JobSpec, steps: int) -> int:
    """Return the steps between two checkpoints, the most that a kill may cost the job. A job without
    `save_every` may lose LEAST_SAVE_SECONDS of training if those are more steps."""
    if spec.save_every is None:
        return max(in_steps(DEFAULT_SAVE_EVERY, steps), MIN_SAVE_STEPS)
    return max(1, in_steps(spec.save_every, steps))


def _save_steps(spec: JobSpec, steps: int) -> frozenset[int]:
    """Return the steps after which a job is saved: after each interval and in the middle of each.

    A checkpoint is written while training continues and is complete when the next one is due, so at most two
    halves of an interval are in no complete checkpoint. None is written after the last step, where the
    adapter itself is written, and one at the start only if the job starts from another adapter, which may be
    deleted before the job resumes.
    """
    interval = save_interval(spec, steps)
    wholes = range(0, steps, interval)
    halves = range(interval // 2, steps, interval)
    first = {0} if spec.adapter.init_from is not None else set()
    return frozenset({*wholes, *halves} - {0, steps} | first)


def _evaluation_steps(interval: float | None, steps: int) -> frozenset[int]:
    """Return the steps at which a job is evaluated: step 0, every interval, and the last step. If `interval`
    is None, only the first and the last."""
    if interval is None:
        return frozenset({0, steps})
    return frozenset({*range(0, steps, max(1, in_steps(interval, steps))), steps})
