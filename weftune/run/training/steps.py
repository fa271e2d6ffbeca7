"""Optimizer steps of all jobs whose global batch is complete.

On a GPU the device itself computes the clipping factor and refuses a step that cannot be made, so the host
need not wait: `begin_steps` launches the steps, and their outcomes are read later.

Shapes: J jobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weftune.ops.adamw import Update, gradient_norms, update
from weftune.ops.triton.at_hand import kernels_at_hand
from weftune.run.measure.memory import is_out_of_memory
from weftune.run.training.state import LITTLE, OpenBatch, StepOutcome, Training


@dataclass(frozen=True, slots=True)
class Due:
    """A job whose open batch is complete, and the number of supervised tokens in that batch."""

    training: Training
    supervised: int


@dataclass(frozen=True, slots=True)
class NoStep:
    """A step that could not be made; the sentence becomes the reason of the job's failure."""

    reason: str


Outcome = StepOutcome | NoStep


class StepsUnderway(Protocol):
    """Steps that have been requested."""

    @property
    def due(self) -> Sequence[Due]: ...

    @property
    def made(self) -> bool:
        """Whether the Steps were made at once, so that their outcomes are known."""

    def outcomes(self) -> Sequence[Outcome]:
        """Return the outcomes of the Steps; waits for them."""

    def seconds(self) -> float:
        """Return the seconds of device time, once the outcomes are known."""


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of a job's global batch."""

    loss: float
    norm: float
    correct: float


@dataclass(frozen=True, slots=True)
class StepsBegun:
    """Steps launched on the device. Their outcomes must be read before the next ones are launched."""

    due: tuple[Due, ...]
    updates: tuple[Update, ...]
    tokens: tuple[int, ...]
    values_J4: Tensor
    """Loss, correct predictions, norm and whether the weights are finite, on the host once `read` is done."""
    read: torch.cuda.Event | None

    @classmethod
    def of(
        cls,
        due: tuple[Due, ...],
        updates: tuple[Update, ...],
        tokens: tuple[int, ...],
        sums_J3: Tensor,
        finite_J: Tensor,
    ) -> StepsBegun:
        """Start reading the results. `sums_J3` are loss, correct predictions and norm. Later work on this
        stream is not waited for."""
        values_J4 = torch.cat([sums_J3, finite_J[:, None].double()], dim=1)
        if not values_J4.is_cuda:
            return cls(due, updates, tokens, values_J4, None)
        host_J4 = torch.empty_like(values_J4, device="cpu", pin_memory=True)
        host_J4.copy_(values_J4, non_blocking=True)
        return cls(due, updates, tokens, host_J4, torch.cuda.current_stream().record_event())

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of every step. If it is a NoStep, the weights must not be used."""
        if self.read is not None:
            self.read.synchronize()
        found: list[Outcome] = []
        rows = zip(self.due, self.updates, self.tokens, self.values_J4.tolist(), strict=True)
        for one, made, tokens, (loss, correct, norm, finite) in rows:
            sums = Sums(loss=loss, norm=norm, correct=correct)
            reason = why_no_step(one.training, sums)
            if reason is None and not finite:
                reason = _spoilt(made)
            found.append(NoStep(reason) if reason else counted(one, sums, made.learning_rate, tokens))
        return found


def take_steps(due: Sequence[Due]) -> list[Outcome]:
    """Clip, step and close every open batch. If the outcome is a NoStep, the weights must not be used."""
    if kernels_at_hand(due[0].training.master):
        return begin_steps(due).outcomes()
    return [_take_alone(one) for one in due]


def begin_steps(due: Sequence[Due]) -> StepsBegun:
    """Launch the steps of all jobs, each made only if its loss and its gradient are finite."""
    trainings = [one.training for one in due]
    tokens = tuple(open_tokens(training) for training in trainings)
    sums_J2 = open_sums(trainings)
    norm_J = gradient_norms([training.state for training in trainings])
    updates = tuple(training.update() for training in trainings)
    finite_J = update(updates, factors(trainings, sums_J2, norm_J).float())
    for training in trainings:
        training.open = None
    return StepsBegun.of(tuple(due), updates, tokens, torch.cat([sums_J2, norm_J[:, None]], dim=1), finite_J)


def factors(trainings: Sequence[Training], sums_J2: Tensor, norm_J: Tensor) -> Tensor:
    """Return the clipping factor of each gradient, in float64 [J]; below 0 if no step can be made."""
    clips = [training.recipe.clip or math.inf for training in trainings]
    clip_J = torch.tensor(clips, dtype=norm_J.dtype).to(norm_J.device, non_blocking=True)
    good_J = sums_J2[:, 0].isfinite() & norm_J.isfinite()
    return torch.where(good_J, (clip_J / (norm_J + LITTLE)).clamp(max=1.0), -1.0)


def _take_alone(due: Due) -> Outcome:
    (sums,) = batch_sums([due.training])
    if reason := why_no_step(due.training, sums):
        return NoStep(reason)
    made = due.training.update(sums.norm)
    (reason,) = make_updates([made])
    return NoStep(reason) if reason else close_batch(due, sums, made.learning_rate)


def batch_sums(trainings: Sequence[Training]) -> list[Sums]:
    """Return the sums of the open batches; waits for the device once."""
    norm_J = gradient_norms([training.state for training in trainings])
    values = torch.cat([open_sums(trainings), norm_J[:, None]], dim=1).tolist()
    return [Sums(loss=loss, norm=norm, correct=correct) for loss, correct, norm in values]


def open_sums(trainings: Sequence[Training]) -> Tensor:
    """Return loss and correct predictions of the open batches, in float64 [J, 2], with a few launches for
    all."""
    batches = [_open_batch(training) for training in trainings]
    loss_J = torch.stack([batch.loss for batch in batches]).double()
    correct_J = torch.stack([batch.correct for batch in batches]).double()
    return torch.stack([loss_J, correct_J], dim=1)


def why_no_step(training: Training, sums: Sums) -> str | None:
    """Return why the job's next step must not be made, or None."""
    step = training.progress.step + 1
    if not math.isfinite(sums.loss):
        return f"its loss at step {step} is {sums.loss}"
    if not math.isfinite(sums.norm):
        return f"its gradient norm at step {step} is {sums.norm}"
    return None


def make_updates(updates: Sequence[Update]) -> list[str | None]:
    """Apply the updates, and return for each why its weights must not be used, or None."""
    if updates and kernels_at_hand(updates[0].state.master):
        finite = update(updates).tolist()
        return [None if good else _spoilt(one) for one, good in zip(updates, finite, strict=True)]
    return [_make_alone(one) for one in updates]


def _make_alone(one: Update) -> str | None:
    try:
        return None if bool(update([one])) else _spoilt(one)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Half a step cannot be replayed.
        return f"out of memory inside its optimizer step {one.step}"


def close_batch(due: Due, sums: Sums, rate: float) -> StepOutcome:
    """Close the batch of a step that was made, and count the step."""
    tokens = open_tokens(due.training)
    due.training.open = None
    return counted(due, sums, rate, tokens)


def counted(due: Due, sums: Sums, rate: float, tokens: int) -> StepOutcome:
    """Count a step of the job. Its master weights are those of this step: no later one has been requested."""
    progress = due.training.progress
    progress.step += 1
    progress.trained_tokens += tokens
    due.training.average()
    return StepOutcome(
        loss=sums.loss,
        grad_norm=sums.norm,
        learning_rate=rate,
        token_accuracy=sums.correct / due.supervised,
        tokens=tokens,
    )


def open_tokens(training: Training) -> int:
    """Return the number of rows in the open batch."""
    return _open_batch(training).tokens


def _open_batch(training: Training) -> OpenBatch:
    assert training.open is not None, "a step needs an open batch"
    return training.open


def _sums(training: Training) -> Tensor:
    """Return loss and correct predictions of the open batch, in float64 [2]."""
    return open_sums([training])[0]


def batch_totals(training: Training) -> Tensor:
    """Return loss and correct predictions of the open batch in the dtype of the master weights, which
    replicas exchange."""
    return _sums(training).to(training.master.dtype)


def _spoilt(made: Update) -> str:
    return f"its weights after step {made.step} are not finite"
