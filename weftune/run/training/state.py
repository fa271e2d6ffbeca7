"""The training state of attached jobs: master weights, their mean if a sweep requests it, moments,
accumulated gradients and progress. All parameters of an adapter live in one flat vector, so an optimizer step
consists of a few vector operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weftune.adapters.kind import JobAdapter, NewAdapter, WeightOf
from weftune.adapters.registry import adapter_layout, get_kind
from weftune.adapters.vector import VectorLayout
from weftune.core.batch import Segment
from weftune.core.shapes import SiteShape
from weftune.objectives.objective import add_metrics
from weftune.ops.adamw import AdamState, Update
from weftune.run.training.schedule import Recipe, learning_rate

NORM_EPSILON = 1e-6
"""Constant added to a norm before dividing by it, as in torch."""


@dataclass(slots=True)
class Progress:
    """The progress of a job (its step and the results of its evaluations), saved in every checkpoint."""

    step: int = 0
    trained_tokens: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    best_score: float | None = None
    """Value of the job's own metric at step `best_step`. None if evaluations are compared by their loss."""
    stale: int = 0
    """Number of evaluations since the last one that improved enough on the best."""
    evaluated: int = -1
    """Optimizer step of the last evaluation. −1 if there has been none."""
    evaluated_loss: float | None = None
    """Validation loss of the last evaluation that the job itself requested."""
    evaluated_score: float | None = None
    """Value of the job's own metric at the last evaluation that the job itself requested. None if the job has
    no metric."""
    averaged: int = 0
    """Number of steps over which the mean of the master weights has been taken. 0 if there is no mean."""


@dataclass(slots=True)
class OpenBatch:
    """Sums over the microbatches of an unfinished global batch that have run so far."""

    loss: Tensor
    correct: Tensor
    tokens: int = 0
    """Number of rows that have run so far, of prompts and completions together."""
    metrics_M: Tensor | None = None
    """Sums of the metrics of the job's objective over the microbatches that have run. None if this worker
    computes no metrics."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    loss: float
    grad_norm: float
    learning_rate: float
    token_accuracy: float | None
    """Fraction of the supervised tokens that were predicted correctly. None if no token is supervised."""
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Maps the name of each metric of the job's objective to its mean over the global batch."""


@dataclass(frozen=True, slots=True)
class EvaluationSums:
    """Sums over held-out samples of one job, evaluated with the weights after the optimizer step `step`."""

    job: str
    step: int
    loss: float
    correct: int
    tokens: int
    """Number of supervised tokens in the samples. The model predicted `correct` of them correctly."""
    count: int
    """Number of tokens, samples or pairs over which the loss and the metrics are summed."""
    metrics: tuple[float, ...] = ()
    maxima: int = 0
    """Number of metrics, at the end of `metrics`, that are maxima over the samples. All other metrics are
    sums."""

    def __add__(self, other: EvaluationSums) -> EvaluationSums:
        return EvaluationSums(
            self.job,
            self.step,
            self.loss + other.loss,
            self.correct + other.correct,
            self.tokens + other.tokens,
            self.count + other.count,
            tuple(
                max(pair) if number >= self._sum_count else sum(pair)
                for number, pair in enumerate(zip(self.metrics, other.metrics, strict=True))
            ),
            self.maxima,
        )

    @property
    def _sum_count(self) -> int:
        """Number of elements of `metrics` that are sums, not maxima."""
        return len(self.metrics) - self.maxima

    def mean_metrics(self) -> list[float]:
        """Return the value of each metric over all evaluated samples: the mean of a metric that was summed,
        and the maximum of a metric that is a maximum."""
        return [total / self.count for total in self.metrics[: self._sum_count]] + [
            *self.metrics[self._sum_count :]
        ]


@dataclass(slots=True)
class Training:
    adapter: JobAdapter
    recipe: Recipe
    layout: VectorLayout
    state: AdamState
    progress: Progress = field(default_factory=Progress)
    best_weights: Tensor | None = None
    """Master weights at the best evaluation so far. None if the job does not keep them."""
    mean_weights: Tensor | None = None
    """Mean of the master weights after the last `progress.averaged` steps. None unless the recipe requests
    it, for a sweep that compares trials by this mean."""
    open_batch: OpenBatch | None = None
    snapshot_copied_event: torch.cuda.Event | None = None
    """CUDA event after which the copy of the last snapshot to the host is complete. None if no copy can still
    be running."""

    @property
    def job(self) -> str:
        return self.adapter.job

    @property
    def master(self) -> Tensor:
        return self.state.master

    @property
    def gradient(self) -> Tensor:
        return self.state.gradient

    def update(self, norm: float = 0.0) -> Update:
        """Return the update of the next optimizer step, with the factor that clips the gradient, whose norm
        is `norm`. The device is made to wait until a running copy of a snapshot is complete."""
        if self.snapshot_copied_event is not None:
            torch.cuda.current_stream(self.master.device).wait_event(self.snapshot_copied_event)
            self.snapshot_copied_event = None
        step = self.progress.step + 1
        kind = get_kind(self.adapter.spec.kind)
        kind.before_step(self.adapter, step, lambda: self.layout.parameter_views(self.master))
        clip = self.recipe.clip
        return Update(
            state=self.state,
            step=step,
            learning_rate=learning_rate(self.recipe, step),
            weight_decay=self.recipe.weight_decay,
            factor=min(1.0, clip / (norm + NORM_EPSILON)) if clip else 1.0,
            betas=self.recipe.betas,
            eps=self.recipe.eps,
            rates=self.layout.rates,
        )

    def collect(
        self, segment: Segment, loss: Tensor, correct: Tensor, metrics_M: Tensor | None = None
    ) -> None:
        """Add the loss, correct predictions and metrics of this job's rows in a microbatch to the sums of the
        job's unfinished global batch."""
        tokens, before = segment.tokens, self.open_batch
        if before is None:
            # Most batches are one microbatch: with a thousand jobs every saved launch counts.
            self.open_batch = OpenBatch(loss.detach(), correct, tokens, metrics_M)
        else:
            self.open_batch = OpenBatch(
                before.loss + loss.detach(),
                before.correct + correct,
                before.tokens + tokens,
                metrics_M
                if before.metrics_M is None or metrics_M is None
                else add_metrics(before.metrics_M, metrics_M, self.recipe.objective.max_metric_count),
            )

    def update_mean(self) -> None:
        """Include the master weights after the latest step in the mean of the weights. No memory is
        allocated, so this cannot fail."""
        if self.mean_weights is None:
            return
        progress, step = self.progress, self.progress.step
        first = next((first for first, last in self.recipe.averaged_spans if step <= last), None)
        if first is None:
            # The job has passed its last rung.
            self.mean_weights, progress.averaged = None, 0
            return
        before = progress.averaged if step > first else 0
        progress.averaged = before + 1 if step >= first else 0
        if progress.averaged:
            self.mean_weights.lerp_(self.master, 1 / progress.averaged)

    @property
    def evaluated_weights(self) -> Tensor:
        """Weights with which a sweep (a search over hyperparameters) evaluates the job: the mean of the last
        master weights, or the master weights if there is no mean."""
        return self.mean_weights if self.mean_weights is not None and self.progress.averaged else self.master

    def drop_open_batch(self) -> None:
        """Drop the sums and the gradient of the unfinished global batch, as if none of its microbatches had
        run."""
        self.gradient.zero_()
        self.open_batch = None

    def record_evaluation(
        self,
        loss: float,
        keep_best: bool,
        min_delta: float,
        is_requested: bool = True,
        score: float | None = None,
    ) -> bool:
        """Record an evaluation and return whether it is the best so far: the one with the lowest loss or, if
        the job has its own metric, with the highest `score` and, among equal scores, the lowest loss. If
        `keep_best`, the weights of the best evaluation are kept. `is_requested` is False for an evaluation
        that only a sweep requested, which is not compared."""
        progress = self.progress
        progress.evaluated = progress.step
        if not is_requested:
            return False
        progress.evaluated_loss, progress.evaluated_score = loss, score
        best = (
            None if progress.best_loss is None else _evaluation_order(progress.best_loss, progress.best_score)
        )
        own = _evaluation_order(loss, score)
        progress.stale = 0 if best is None or own[0] < best[0] - min_delta else progress.stale + 1
        if best is not None and own >= best:
            return False
        progress.best_loss, progress.best_step, progress.best_score = loss, progress.step, score
        if keep_best:
            self.best_weights = self.master.clone()
        return True


def _evaluation_order(loss: float, score: float | None) -> tuple[float, float]:
    """Return a sort key for an evaluation with this loss and score of the job's own metric. Better
    evaluations have smaller keys."""
    return (loss, loss) if score is None else (-score, loss)


class Roster:
    """The training states of the attached jobs, and the set of jobs that have failed. All parts of an
    executor share one roster."""

    def __init__(self) -> None:
        self.trainings: dict[str, Training] = {}
        self.failed_jobs: set[str] = set()
        """Failed jobs, whose rows and actions in the Program are skipped."""

    def has_open_batch(self) -> bool:
        """Return whether the global batch of any job is unfinished."""
        return any(training.open_batch is not None for training in self.trainings.values())

    def collect(
        self,
        segments: Sequence[Segment],
        losses: Sequence[Tensor],
        correct: Sequence[Tensor],
        metrics: Sequence[Tensor | None],
    ) -> None:
        """Add a microbatch's losses, correct predictions and metrics to the sums of its jobs' unfinished
        global batches, except for jobs that have failed."""
        for segment, loss, count, metrics_M in zip(segments, losses, correct, metrics, strict=True):
            if segment.job not in self.failed_jobs:
                self.trainings[segment.job].collect(segment, loss, count, metrics_M)

    def drop_open_batches(self) -> None:
        """Drop the unfinished global batches of all jobs, as if none of their microbatches had run."""
        for training in self.trainings.values():
            training.drop_open_batch()


def new_training(
    adapter: JobAdapter,
    recipe: Recipe,
    sites: tuple[SiteShape, ...],
    dtype: torch.dtype,
    device: torch.device,
    whole_sites: tuple[SiteShape, ...] | None = None,
    draw_device: torch.device | None = None,
    frozen: WeightOf | None = None,
    is_restored: bool = False,
) -> Training:
    """Return the training state of a job at step 0, with weights drawn from its seed or read from
    `init_from`. `sites` are the linear layers that the adapter is attached to. If they are those of one
    stage, `whole_sites` are those of the whole base, which `init_from` must match. Weights are drawn on
    `draw_device`, by default `device`: a GPU is much faster than the host. `frozen` returns the base's
    weights, from which some adapter kinds are initialised. If `is_restored`, nothing is drawn, since a
    checkpoint will be read."""
    kind = get_kind(adapter.spec.kind)
    layout = adapter_layout(adapter.spec, sites)
    master = torch.zeros(layout.size, dtype=master_dtype(dtype), device=device)
    if not is_restored:
        kind.initialise(
            NewAdapter(adapter, layout.parameter_views(master), draw_device, frozen), whole_sites or sites
        )
    state = AdamState(
        master=master,
        exp_avg=torch.zeros_like(master),
        exp_avg_sq=torch.zeros_like(master),
        gradient=torch.zeros_like(master),
        weights=master.to(dtype, copy=True),
    )
    # Allocated now, when its memory is counted, so that no Step runs out of memory for it.
    mean = torch.zeros_like(master) if recipe.averaged_spans else None
    return Training(adapter, recipe, layout, state, mean_weights=mean)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
