"""How fast each stage of a pipeline was, as lines over rows that the planner can use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.plan.cost import Line
from weft.plan.nnls import non_negative
from weft.plan.pipeline_window import StagePace, timeline_foreseen
from weft.plan.program import Backward, Evaluate, Forward, Program, Step
from weft.run.stage_executor import RankReport

REMEMBERED = 200
BACKWARD_GUESS = 1.5
"""A backward over a forward, until one was measured."""


@dataclass(frozen=True, slots=True)
class RowsTime:
    """One measured pass over a stage."""

    rows: int
    seconds: float


class Paces:
    def __init__(self, layers: Sequence[int]) -> None:
        """`layers` of each stage: what times are guessed from until there are any."""
        self._guess = tuple(layers)
        self._forwards: list[deque[RowsTime]] = [deque(maxlen=REMEMBERED) for _ in layers]
        self._backwards: list[deque[RowsTime]] = [deque(maxlen=REMEMBERED) for _ in layers]
        self._steps: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in layers]

    @property
    def measured(self) -> bool:
        return all((*self._forwards, *self._backwards))

    def learn(self, program: Program, reports: Sequence[RankReport]) -> None:
        for stage, report in enumerate(reports):
            for one in report.times:
                if isinstance(one.action, Step):
                    self._steps[stage].append(one.stop - one.start)
                if not isinstance(one.action, Forward | Backward | Evaluate):
                    continue
                rows = program.microbatches[one.action.microbatch].rows
                forth = not isinstance(one.action, Backward)
                into = self._forwards if forth else self._backwards
                into[stage].append(RowsTime(rows, one.stop - one.start))

    def stages(self) -> tuple[StagePace, ...]:
        if not self.measured:
            guesses = (Line(0.0, float(count)) for count in self._guess)
            return tuple(StagePace(line, Line(0.0, BACKWARD_GUESS * line.per_token)) for line in guesses)
        return tuple(
            StagePace(_line(forwards), _line(backwards), sum(steps) / max(1, len(steps)))
            for forwards, backwards, steps in zip(self._forwards, self._backwards, self._steps, strict=True)
        )

    def predicted_seconds(self, program: Program) -> float | None:
        """The simulated time of a window, or None while nothing has been measured."""
        return timeline_foreseen(program, self.stages()).makespan if self.measured else None


def _line(passes: Sequence[RowsTime]) -> Line:
    matrix = np.array([(1.0, one.rows) for one in passes])
    fixed, per_token = non_negative(matrix, np.array([one.seconds for one in passes]))
    return Line(float(fixed), float(per_token))
