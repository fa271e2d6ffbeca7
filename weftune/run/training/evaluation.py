"""Evaluations in the making: what their microbatches came to so far, and how many are still to come."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from weftune.plan.program.program import Evaluate, MicrobatchPlan, Program

Key = tuple[str, int]
"""A job, and the step after which it looks."""


@dataclass(slots=True)
class EvaluationSums:
    """Sums over held-out samples of one job."""

    loss: float = 0.0
    hits: int = 0
    tokens: int = 0


class Evaluations:
    """Those of one window."""

    def __init__(self, program: Program) -> None:
        self.left = Counter(
            (segment.job, segment.step)
            for action, plan in program.compute()
            if isinstance(action, Evaluate)
            for segment in plan.segments
        )
        self._sums: defaultdict[Key, EvaluationSums] = defaultdict(EvaluationSums)

    def begin(self, plan: MicrobatchPlan) -> None:
        """One microbatch less is to come."""
        self.left.subtract((segment.job, segment.step) for segment in plan.segments)

    def add(self, key: Key, more: EvaluationSums) -> EvaluationSums:
        """What the evaluation has come to with that."""
        so_far = self._sums[key]
        so_far.loss += more.loss
        so_far.hits += more.hits
        so_far.tokens += more.tokens
        return so_far
