"""Evaluations of a window: sums over the microbatches so far, and the number of microbatches still to
come."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from weftune.plan.program.program import Evaluate, MicrobatchPlan, Program

EvaluationKey = tuple[str, int]
"""A job, and the step after which it is evaluated."""


@dataclass(slots=True)
class EvaluationSums:
    """Sums over held-out samples of one job."""

    loss: float = 0.0
    correct: int = 0
    tokens: int = 0


class Evaluations:
    """The evaluations of one window."""

    def __init__(self, program: Program) -> None:
        self.left = Counter(
            (segment.job, segment.step)
            for action, plan in program.compute()
            if isinstance(action, Evaluate)
            for segment in plan.segments
        )
        self._sums: defaultdict[EvaluationKey, EvaluationSums] = defaultdict(EvaluationSums)

    def begin(self, plan: MicrobatchPlan) -> None:
        """Count one microbatch as arrived."""
        self.left.subtract((segment.job, segment.step) for segment in plan.segments)

    def add(self, key: EvaluationKey, more: EvaluationSums) -> EvaluationSums:
        """Add a microbatch's sums and return the sums so far."""
        so_far = self._sums[key]
        so_far.loss += more.loss
        so_far.correct += more.correct
        so_far.tokens += more.tokens
        return so_far
