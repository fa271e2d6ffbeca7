"""Optimizer steps of all jobs whose global batch is complete.

On a GPU the device itself computes the clipping factor, and refuses a step if the loss or the gradient is not
finite, so the host need not wait: `begin_steps` launches the steps, and their outcomes are read later.

Shapes: J jobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weftune.objectives.spec import MAX_METRICS
from weftune.ops.adamw import Update, gradient_norms, update
from weftune.ops.triton import kernels_available, kernels_available_on
from weftune.run.measure.memory import is_out_of_memory
from weftune.run.measure.timers import Stopwatch
from weftune.run.training.state import NORM_EPSILON, OpenBatch, StepOutcome, Training


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A request for a job's optimizer step: its training state, whose global batch is complete, and the
    number of supervised tokens in that batch."""

    training: Training
    supervised_tokens: int

    def token_accuracy(self, correct: float) -> float | None:
        """Return the fraction of the supervised tokens that were predicted correctly. None if no token is
        supervised."""
        return correct / self.supervised_tokens if self.supervised_tokens else None


Outcome = StepOutcome | str
"""The outcome of an optimizer step. A string is the reason why the step could not be made and the job
fails."""


@dataclass(frozen=True, slots=True)
class BatchSums:
    """Loss, gradient norm, number of correct predictions and metrics of a job's global batch."""

    loss: float
    norm: float
    correct: float
    metrics: Sequence[float] = ()
    """Values of the metrics of the job's objective, padded with zeros at the end."""


@dataclass(slots=True, eq=False)
class StepRun:
    """Optimizer steps of several jobs that were started together and whose outcomes are not known yet."""

    requests: tuple[StepRequest, ...]
    updates: tuple[Update, ...]
    """Optimizer update of each job, which refers to the job's whole optimizer state."""
    tokens: tuple[int, ...]
    norm_J: Tensor
    """Norm of each job's gradient."""
    sums_JS: Tensor
    """Sums over each job's global batch, as returned by `open_batch_sums`: loss, correct predictions and
    metrics."""
    factor_J: Tensor | None
    """Factors on the device by which gradients are clipped, if kernels make the updates. None if `updates`
    hold the factors."""
    refusal_reasons: list[str | None] = field(init=False)
    """For each job, the reason why its new weights cannot be used, or None. Reasons are set only if the host
    makes the updates."""
    finite_flags: tuple[list[Tensor], ...] = field(init=False)
    """For each job whose update is made in pieces (ranges of parameters), whether the new weights of each
    piece are finite."""
    arrival_events: tuple[torch.cuda.Event, ...] = ()
    """CUDA events after which all gradients are on the host. Empty if gradients are not copied to the
    host."""
    _values_JV: Tensor | None = None
    """For each job: gradient norm, whether the new weights are finite, then its row of `sums_JS`. The values
    are on the host once the event `_copied_event` is done."""
    _copied_event: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self.refusal_reasons = [None] * len(self.requests)
        self.finite_flags = tuple([] for _ in self.requests)

    def is_refused(self, job_index: int) -> bool:
        """Return whether the host has refused a job's step because its loss or gradient is not finite. Always
        False if kernels make the updates, since the device then decides."""
        return self.factor_J is None and self.updates[job_index].factor < 0.0

    def read(self, finite_J: Tensor) -> None:
        """Start to copy the results of the steps to the host. Work launched later on this CUDA stream does
        not delay the copy."""
        self._values_JV = torch.cat([self.norm_J[:, None], finite_J[:, None].double(), self.sums_JS], dim=1)
        if self._values_JV.is_cuda:
            host_JV = torch.empty_like(self._values_JV, device="cpu", pin_memory=True)
            self._values_JV = host_JV.copy_(self._values_JV, non_blocking=True)
            self._copied_event = torch.cuda.current_stream().record_event()

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of every step. If it is a string, the reason of a failure, the job's weights
        must not be used."""
        assert self._values_JV is not None, "the results of these steps are not being read"
        if self._copied_event is not None:
            self._copied_event.synchronize()
        outcomes: list[Outcome] = []
        rows = zip(
            self.requests,
            self.updates,
            self.tokens,
            self.refusal_reasons,
            self._values_JV.tolist(),
            strict=True,
        )
        for request, one, tokens, failure, (norm, finite, loss, correct, *metrics) in rows:
            sums = BatchSums(loss=loss, norm=norm, correct=correct, metrics=metrics)
            reason = (
                find_step_problem(request.training, sums)
                or failure
                or (None if finite else _not_finite_reason(one))
            )
            outcomes.append(reason or _finish_step(request, sums, one.learning_rate, tokens))
        return outcomes


class StepsUnderway:
    """Optimizer steps that have been requested and whose outcomes will be read together."""

    def __init__(self, device: torch.device, finish: Callable[[], None] = lambda: None) -> None:
        """Create the record of requested steps. `finish` is a function that completes the steps and starts to
        copy their results to the host."""
        self._device, self._finish = device, finish
        self.runs: list[StepRun] = []
        self.is_done = False
        """Whether the steps are already finished, so that reading their outcomes does not block."""
        self.is_used = False
        """Whether a pass has included one of the steps' jobs since the steps were requested."""
        self._watches: list[Stopwatch] = []

    @property
    def requests(self) -> list[StepRequest]:
        return [request for run in self.runs for request in run.requests]

    @contextmanager
    def count_time(self) -> Iterator[None]:
        """Return a context whose device time is added to the total time of these steps."""
        watch = Stopwatch(self._device)
        yield
        watch.mark()
        self._watches.append(watch)

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of the steps, in the order of the requests. Waits until the steps are made."""
        self._finish()
        return [outcome for run in self.runs for outcome in run.outcomes()]

    def seconds(self) -> float:
        """Return the device time of the steps in seconds; call this after `outcomes`."""
        return sum(lap for watch in self._watches for lap in watch.seconds_between_marks())


def close_batches(requests: Sequence[StepRequest], norm_J: Tensor, device: torch.device) -> StepRun:
    """Close the complete global batches of these requests, and return their optimizer steps, which have not
    been made yet. `norm_J` are the norms of the gradients."""
    trainings = [request.training for request in requests]
    tokens = tuple(open_batch_tokens(training) for training in trainings)
    sums_JS = open_batch_sums(trainings)
    norm_J = norm_J.to(sums_JS.device)
    updates = tuple(training.update() for training in trainings)
    factor_J = clip_factors(trainings, sums_JS, norm_J)
    by_kernels = kernels_available_on(device, trainings[0].master.dtype)
    if not by_kernels:
        known = zip(updates, factor_J.tolist(), strict=True)
        updates = tuple(replace(one, factor=factor) for one, factor in known)
    for training in trainings:
        training.open_batch = None
    return StepRun(
        tuple(requests), updates, tokens, norm_J, sums_JS, factor_J.float() if by_kernels else None
    )


def begin_steps(requests: Sequence[StepRequest]) -> StepRun:
    """Start the optimizer steps of all jobs whose loss and gradient are finite. The host does not wait for a
    GPU."""
    states = [request.training.state for request in requests]
    run = close_batches(requests, gradient_norms(states), states[0].master.device)
    if run.factor_J is not None:
        run.read(update(run.updates, run.factor_J))
        return run
    for number, one in enumerate(run.updates):
        if not run.is_refused(number):
            run.refusal_reasons[number] = apply_update(one)
    run.read(torch.ones(len(requests), dtype=torch.bool))
    return run


def clip_factors(trainings: Sequence[Training], sums_JS: Tensor, norm_J: Tensor) -> Tensor:
    """Return the factors by which the jobs' gradients are multiplied to clip them, in float64 [J]. A factor
    is negative if the job's step cannot be made."""
    clips = [training.recipe.clip or math.inf for training in trainings]
    clip_J = torch.tensor(clips, dtype=norm_J.dtype).to(norm_J.device, non_blocking=True)
    good_J = sums_JS[:, 0].isfinite() & norm_J.isfinite()
    return torch.where(good_J, (clip_J / (norm_J + NORM_EPSILON)).clamp(max=1.0), -1.0)


def batch_sums(training: Training) -> BatchSums:
    """Return the sums over a job's complete global batch, whose optimizer step is still to be made. Waits for
    the device."""
    norm_J = gradient_norms([training.state])
    norm, loss, correct, *metrics = torch.cat([norm_J, open_batch_sums([training])[0]]).tolist()
    return BatchSums(loss=loss, norm=norm, correct=correct, metrics=metrics)


def open_batch_sums(trainings: Sequence[Training]) -> Tensor:
    """Return loss, correct predictions and metrics of each job's current global batch, as float64 [J, 2 +
    MAX_METRICS]. Metrics are padded with zeros. This takes only a few kernel launches."""
    batches = [_open_batch(training) for training in trainings]
    loss_J = torch.stack([batch.loss for batch in batches]).double()
    correct_J = torch.stack([batch.correct for batch in batches]).double()
    metrics_JM = loss_J.new_zeros(len(batches), MAX_METRICS)
    for number, batch in enumerate(batches):
        if batch.metrics_M is not None:
            metrics_JM[number, : len(batch.metrics_M)] = batch.metrics_M
    return torch.cat([loss_J[:, None], correct_J[:, None], metrics_JM], dim=1)


def find_step_problem(training: Training, sums: BatchSums) -> str | None:
    """Return the reason why the job's next step must not be made, or None if it may be made."""
    step = training.progress.step + 1
    if not math.isfinite(sums.loss):
        return f"its loss at step {step} is {sums.loss}"
    if not math.isfinite(sums.norm):
        return f"its gradient norm at step {step} is {sums.norm}"
    return None


def apply_update(job_update: Update) -> str | None:
    """Apply an optimizer update and wait for the device. Return the reason why the new weights cannot be
    used, or None."""
    try:
        return None if bool(update([job_update])) else _not_finite_reason(job_update)
    except Exception as error:
        if kernels_available(job_update.state.master) or not is_out_of_memory(error):
            raise
        # Half a step cannot be replayed.
        return f"out of memory inside its optimizer step {job_update.step}"


def make_step_from_sums(request: StepRequest, sums: BatchSums) -> Outcome:
    """Make a job's optimizer step from the sums of its global batch over all workers, and return the
    outcome."""
    training = request.training
    one = training.update(sums.norm)
    if (reason := apply_update(one)) is not None:
        return reason
    tokens = open_batch_tokens(training)
    training.open_batch = None
    return _finish_step(request, sums, one.learning_rate, tokens)


def outcome_over_workers(outcome: Outcome, request: StepRequest, sums: BatchSums) -> Outcome:
    """Return the outcome of a step with the loss, accuracy and metrics in `sums`, which are over all workers,
    instead of this worker's."""
    if isinstance(outcome, str):
        return outcome
    return replace(
        outcome,
        loss=sums.loss,
        token_accuracy=request.token_accuracy(sums.correct),
        metrics=_named_metrics(request, sums),
    )


def _finish_step(request: StepRequest, sums: BatchSums, learning_rate: float, tokens: int) -> StepOutcome:
    """Record a finished step in the job's progress, include its master weights in their mean if one is kept,
    and return the outcome."""
    progress = request.training.progress
    progress.step += 1
    progress.trained_tokens += tokens
    request.training.update_mean()
    return StepOutcome(
        loss=sums.loss,
        grad_norm=sums.norm,
        learning_rate=learning_rate,
        token_accuracy=request.token_accuracy(sums.correct),
        tokens=tokens,
        metrics=_named_metrics(request, sums),
    )


def _named_metrics(request: StepRequest, sums: BatchSums) -> dict[str, float]:
    return request.training.recipe.objective.named_metrics(sums.metrics)


def open_batch_tokens(training: Training) -> int:
    """Return the number of rows that the job's current global batch has had so far."""
    return _open_batch(training).tokens


def _open_batch(training: Training) -> OpenBatch:
    assert training.open_batch is not None, "a step needs an open batch"
    return training.open_batch


def batch_totals(training: Training) -> Tensor:
    """Return the sums of the job's current global batch, in the dtype in which replicas exchange them."""
    return open_batch_sums([training])[0].to(training.master.dtype)


def _not_finite_reason(update: Update) -> str:
    return f"its weights after step {update.step} are not finite"
