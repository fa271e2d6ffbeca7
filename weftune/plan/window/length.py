"""The number of rounds per window: no more than are predicted to end soon, since jobs join, leave and are
interrupted between windows.

The prediction uses the pace that the run has recorded, and before that what is known of the device. It never
uses the clock, so that a resumed run plans the same windows as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from weftune.core.shapes import ModelShape
from weftune.errors import PlanError
from weftune.plan.cost.cluster import this_machine
from weftune.plan.cost.estimate import Speed, sheet_speed
from weftune.plan.cost.learned import EVALUATION_PART
from weftune.plan.cost.time import CostModel, PassWork
from weftune.plan.window.rounds import JobWindow

WINDOW_SECONDS = 10.0
"""Maximum predicted seconds of a window, unless a single round takes longer."""
ROW_FLOPS = 4
"""FLOPs per parameter and row: two each for forward and backward."""


@dataclass(frozen=True, slots=True)
class WindowPace:
    """Predicted time of a round of a window; zeros if nothing is known."""

    row_seconds: float = 0.0
    """Seconds per row that is trained."""
    round_seconds: float = 0.0
    """Minimum seconds of a round, however few rows it has: if stages take turns, all of them are loaded."""


def shortened(courses: Sequence[JobWindow], pace: WindowPace) -> list[JobWindow]:
    """Return the courses with as many of their rounds as fit in WINDOW_SECONDS, but at least one."""
    rounds = rounds_within(courses, pace)
    return [replace(course, batches=course.batches[:rounds]) for course in courses]


def rounds_within(courses: Sequence[JobWindow], pace: WindowPace) -> int:
    """Return how many rounds fit in WINDOW_SECONDS, but at least one."""
    longest = max((len(course.batches) for course in courses), default=0)
    ends = accumulate(_round_seconds(courses, turn, pace) for turn in range(longest))
    return max(1, sum(end <= WINDOW_SECONDS for end in ends))


def _round_seconds(courses: Sequence[JobWindow], turn: int, pace: WindowPace) -> float:
    moving = [(course, course.batches[turn]) for course in courses if turn < len(course.batches)]
    rows = sum(batch.tokens for _, batch in moving)
    evaluating = [course for course, batch in moving if course.evaluates_at(batch.step)]
    evaluated = sum(placed.length for course in evaluating for placed in course.evaluation)
    return max(pace.round_seconds, pace.row_seconds * (rows + EVALUATION_PART * evaluated))


def first_pace(cost: CostModel, shape: ModelShape, on_gpu: bool, max_tokens: int) -> WindowPace:
    """Return the pace before the run has measured anything: from a profile, for a pass that one sample fills,
    or from the data sheet."""
    if cost.measured:
        full = PassWork(
            tokens=max_tokens, squares=max_tokens**2, samples=1, supervised=max_tokens, adapted=0, segments=1
        )
        return WindowPace(cost.pass_seconds(full) / max_tokens)
    speed = speed_by_sheet(on_gpu)
    return WindowPace(ROW_FLOPS * shape.active_parameters / speed.flops if speed else 0.0)


def speed_by_sheet(on_gpu: bool) -> Speed | None:
    """Return the speed of this machine's devices from their data sheet. None if no data sheet is known."""
    try:
        sheet = this_machine().devices[0]
    except PlanError:
        return None
    return sheet_speed(sheet) if sheet.is_gpu == on_gpu else None
