"""Events that the executor reports while it runs a Program."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weftune.plan.cost.time import PassTime, StateTime
from weftune.plan.program.program import MicrobatchPlan
from weftune.run.training.state import EvaluationSums, StepOutcome


@dataclass(frozen=True, slots=True)
class Stepped:
    """A job made an optimizer step."""

    job: str
    step: int
    outcome: StepOutcome


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A job was evaluated on its held-out samples after `step`."""

    job: str
    step: int
    loss: float
    tokens: int
    token_accuracy: float


@dataclass(frozen=True, slots=True)
class SaveDue:
    """The Program requests a checkpoint of this job now."""

    job: str
    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A job has failed for the given reason; other jobs continue."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Passed:
    """A microbatch has passed through the base: its plan and the duration."""

    microbatch: MicrobatchPlan
    time: PassTime


Event = Stepped | Evaluated | SaveDue | Failed | Passed | StateTime
"""An event. `StateTime` is the duration of optimizer steps that were made together."""


class OutOfMemory(RuntimeError):
    """A pass did not fit into memory. Unfinished global batches have been dropped."""


def evaluation_event(sums: EvaluationSums) -> Evaluated | Failed:
    """Return the event of a finished evaluation. A loss that is not finite makes the job fail."""
    if not math.isfinite(sums.loss):
        return Failed(sums.job, f"its evaluation loss at step {sums.step} is {sums.loss}")
    return Evaluated(sums.job, sums.step, sums.loss / sums.tokens, sums.tokens, sums.correct / sums.tokens)
