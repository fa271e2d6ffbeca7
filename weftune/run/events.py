"""Events that the executor reports while it runs a Program, the planned actions of every worker for a few
global batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from weftune.objectives.spec import ObjectiveSpec
from weftune.plan.cost.time import PassTime, StateTime
from weftune.plan.program.program import MicrobatchPlan
from weftune.run.training.state import EvaluationSums, StepOutcome


@dataclass(frozen=True, slots=True)
class Stepped:
    """The event that a job has made an optimizer step, with the step's number and outcome."""

    job: str
    step: int
    outcome: StepOutcome


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation of a job's held-out samples after the optimizer step `step`."""

    job: str
    step: int
    loss: float
    tokens: int
    token_accuracy: float | None
    """Fraction of the supervised tokens that were predicted correctly. None if no token is supervised."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Maps the name of each metric of the job's objective to its mean over the held-out rows."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of some samples of a job, computed with the weights after the optimizer step `step`. A score
    is the sum of the log-probabilities of a sample's supervised tokens."""

    job: str
    step: int
    samples: tuple[int, ...]
    """Indices of the scored samples in the job's data, as the Program numbers them."""
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SaveDue:
    """The event that the Program has reached its Save action for this job: a checkpoint of the job is to be
    written now."""

    job: str
    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The event that a job has failed, with the reason as a message for the user. Other jobs continue."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Passed:
    """The event that a microbatch has passed through the whole base, with the plan of the microbatch and the
    duration of the pass."""

    microbatch: MicrobatchPlan
    time: PassTime


Event = Stepped | Evaluated | Scored | SaveDue | Failed | Passed | StateTime
"""Any event that an executor reports. A `StateTime` is the duration of the optimizer steps of several jobs,
which were made together."""


class OutOfMemory(RuntimeError):
    """Raised if a pass did not fit into memory. Unfinished global batches have been dropped by then."""


def evaluation_event(sums: EvaluationSums, objective: ObjectiveSpec) -> Evaluated | Failed:
    """Return the event that reports a finished evaluation of a job with this objective. It is `Failed` if the
    loss is not finite."""
    if not math.isfinite(sums.loss):
        return Failed(sums.job, f"its evaluation loss at step {sums.step} is {sums.loss}")
    return Evaluated(
        job=sums.job,
        step=sums.step,
        loss=sums.loss / sums.count,
        tokens=sums.tokens,
        token_accuracy=sums.correct / sums.tokens if sums.tokens else None,
        metrics=objective.named_metrics(sums.mean_metrics()),
    )


def score_event(scores: Scored) -> Scored | Failed:
    """Return the event that reports the scores of samples: the scores themselves, or `Failed` if a score is
    not finite."""
    for sample, logprob in zip(scores.samples, scores.logprobs, strict=True):
        if not math.isfinite(logprob):
            return Failed(scores.job, f"the reference log-probability of its sample {sample} is {logprob}")
    return scores
