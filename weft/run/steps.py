"""One optimizer step of every job whose global batch is complete; the device is asked but twice for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.ops.adamw import Update, gradient_norms, update
from weft.ops.triton.at_hand import kernels_at_hand
from weft.run.measure import is_out_of_memory
from weft.run.training import StepOutcome, Training


@dataclass(frozen=True, slots=True)
class Due:
    """A job whose open batch is complete, and how many supervised tokens that batch had."""

    training: Training
    supervised: int


@dataclass(frozen=True, slots=True)
class NoStep:
    """A job that could not make its step; the sentence becomes the reason of its failure."""

    reason: str


@dataclass(frozen=True, slots=True)
class Sums:
    """What a job's global batch came to."""

    loss: float
    norm: float
    hits: float


def take_steps(due: Sequence[Due]) -> list[StepOutcome | NoStep]:
    """Clip, step and close every open batch. Where a NoStep comes back, the weights must not be used."""
    sums = batch_sums([one.training for one in due])
    reasons = [why_no_step(one.training, found) for one, found in zip(due, sums, strict=True)]
    updates = {
        index: one.training.update(found.norm)
        for index, (one, found) in enumerate(zip(due, sums, strict=True))
        if reasons[index] is None
    }
    for index, reason in zip(updates, make_updates(list(updates.values())), strict=True):
        reasons[index] = reason
    return [
        close_batch(one, found, updates[index].learning_rate) if reason is None else NoStep(reason)
        for index, (one, found, reason) in enumerate(zip(due, sums, reasons, strict=True))
    ]


def batch_sums(trainings: Sequence[Training]) -> list[Sums]:
    rows = []
    for training in trainings:
        assert training.open is not None, "a step needs an open batch"
        rows += [training.open.loss, training.open.hits]
    norms_J = gradient_norms([training.state for training in trainings])
    sums_J2 = torch.stack([row.double() for row in rows]).view(-1, 2)
    values = torch.cat([sums_J2, norms_J[:, None]], dim=1).tolist()
    return [Sums(loss=loss, norm=norm, hits=hits) for loss, hits, norm in values]


def why_no_step(training: Training, sums: Sums) -> str | None:
    """Why the job must not make its next step, or None."""
    step = training.progress.step + 1
    if not math.isfinite(sums.loss):
        return f"its loss at step {step} is {sums.loss}"
    if not math.isfinite(sums.norm):
        return f"its gradient norm at step {step} is {sums.norm}"
    return None


def make_updates(updates: Sequence[Update]) -> list[str | None]:
    """Make the updates; for each, why its weights must not be used, or None."""
    if updates and kernels_at_hand(updates[0].state.master):
        finite = update(updates).tolist()
    else:
        finite = [_make_alone(one) for one in updates]
    reasons: list[str | None] = []
    for one, good in zip(updates, finite, strict=True):
        reason = None if good else f"its weights after step {one.step} are not finite"
        reasons.append(f"out of memory inside its optimizer step {one.step}" if good is None else reason)
    return reasons


def _make_alone(one: Update) -> bool | None:
    """Whether the weights are finite; None if memory was short, since half a step cannot be replayed."""
    try:
        return bool(update([one]))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def close_batch(due: Due, sums: Sums, rate: float) -> StepOutcome:
    """Count the step that was made."""
    training = due.training
    assert training.open is not None
    outcome = StepOutcome(
        loss=sums.loss,
        grad_norm=sums.norm,
        learning_rate=rate,
        token_accuracy=sums.hits / due.supervised,
        tokens=training.open.tokens,
    )
    training.progress.step += 1
    training.progress.trained_tokens += outcome.tokens
    training.open = None
    return outcome
