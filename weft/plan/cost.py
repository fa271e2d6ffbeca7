"""How long a pass over the base takes: a fixed part and a part per token, fitted to what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.plan.pack import pack
from weft.plan.program import Evaluate, GlobalBatch, Program


@dataclass(frozen=True, slots=True)
class PassTime:
    """One measured pass: its rows and its seconds."""

    tokens: int
    seconds: float
    training: bool


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = fixed + per_token · tokens, both at least 0."""

    fixed: float
    per_token: float

    def __call__(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True, slots=True)
class CostModel:
    training: Line | None
    evaluation: Line | None

    def program_seconds(self, program: Program) -> float | None:
        """The predicted time of a program, or None while a pass it needs has never been measured."""
        total = 0.0
        for action, microbatch in program.compute():
            line = self.evaluation if isinstance(action, Evaluate) else self.training
            if line is None:
                return None
            total += line(microbatch.rows)
        return total

    def alone_seconds(self, batches: Iterable[GlobalBatch], capacity: int) -> float | None:
        """What training these batches would take if every job packed its samples by itself."""
        if self.training is None:
            return None
        total = 0.0
        for batch in batches:
            lengths = [placed.length for placed in batch.samples]
            total += sum(self.training(sum(lengths[i] for i in chosen)) for chosen in pack(lengths, capacity))
        return total


def fit(passes: Sequence[PassTime]) -> CostModel:
    return CostModel(
        training=_line([p for p in passes if p.training]),
        evaluation=_line([p for p in passes if not p.training]),
    )


def _line(passes: Sequence[PassTime]) -> Line | None:
    """Least squares over two parameters that may not be negative."""
    if not passes:
        return None
    tokens = np.array([p.tokens for p in passes], dtype=float)
    seconds = np.array([p.seconds for p in passes], dtype=float)
    through_origin = Line(0.0, float(tokens @ seconds / max(tokens @ tokens, 1.0)))
    if np.ptp(tokens) == 0:
        return through_origin
    per_token, fixed = np.polyfit(tokens, seconds, 1)
    if fixed < 0:
        return through_origin
    if per_token < 0:
        return Line(float(seconds.mean()), 0.0)
    return Line(float(fixed), float(per_token))
