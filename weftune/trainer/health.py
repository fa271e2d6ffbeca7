"""Signs that training has ruined an adapter: it has collapsed, or it does not improve on the base."""

from __future__ import annotations

import math

from weftune.jobs.store.status import JobStatus
from weftune.report.words import loss_text
from weftune.run.training.state import StepOutcome

UNIFORM_TOLERANCE = 1e-3
"""Relative distance from ln(vocabulary) within which all tokens count as equally likely."""
VANISHED_GRADIENT = 1e-6
"""Gradient norm up to which an adapter no longer learns."""
LOSS_TOLERANCE = 1e-6
"""Relative difference below which two validation losses count as equal."""


def collapse_warning(outcome: StepOutcome, vocabulary: int) -> str:
    """Return the warning for a step whose loss is that of equally likely tokens and whose gradient is zero;
    empty for a healthy step."""
    uniform = math.log(vocabulary)
    if outcome.grad_norm > VANISHED_GRADIENT or abs(outcome.loss - uniform) > UNIFORM_TOLERANCE * uniform:
        return ""
    return (
        f"the adapter has collapsed: all {vocabulary:,} tokens are equally likely (loss "
        f"{loss_text(outcome.loss)}) and the gradient is zero; train it anew with a lower learning_rate"
    )


def base_warning(job: JobStatus) -> str:
    """Return the warning for a finished job whose adapter is no better than the base; empty if it is better,
    or if there is nothing to compare."""
    kept, base = job.eval_loss, job.base_loss
    if kept is None or base is None:
        return ""
    if kept > base * (1 + LOSS_TOLERANCE):
        return (
            f"the validation loss {loss_text(kept)} is above that of the base without the adapter "
            f"({loss_text(base)}); train it longer, or with another learning_rate"
        )
    if kept >= base * (1 - LOSS_TOLERANCE) and job.best_step == 0:
        return f"no step improved on the base's validation loss ({loss_text(base)})"
    return ""
