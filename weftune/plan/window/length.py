"""How many rounds a window has: no more than are predicted to end soon, since jobs join, leave and are
interrupted between windows.

The prediction is made from what the run has recorded of its pace, and before that from what is known of the
device: never from the clock, so that a resumed run plans the windows of the undisturbed one.
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
from weftune.plan.window.rounds import Course

WINDOW_SECONDS = 10.0
"""No window is predicted to take longer, unless a single round does."""
ROW_FLOPS = 4
"""For each parameter and row: forward and backward, two each."""


@dataclass(frozen=True, slots=True)
class WindowPace:
    """What a round of a window is predicted to take; zeros where nothing is known."""

    row_seconds: float = 0.0
    """For each row that is trained."""
    round_seconds: float = 0.0
    """At least, however few its rows are: where stages take turns, all of them come."""


def shortened(courses: Sequence[Course], pace: WindowPace) -> list[Course]:
    """The courses with as many of their rounds as WINDOW_SECONDS have room for, and one at the least."""
    rounds = rounds_within(courses, pace)
    return [replace(course, batches=course.batches[:rounds]) for course in courses]


def rounds_within(courses: Sequence[Course], pace: WindowPace) -> int:
    """How many rounds that are."""
    longest = max((len(course.batches) for course in courses), default=0)
    ends = accumulate(_round_seconds(courses, turn, pace) for turn in range(longest))
    return max(1, sum(end <= WINDOW_SECONDS for end in ends))


def _round_seconds(courses: Sequence[Course], turn: int, pace: WindowPace) -> float:
    moving = [(course, course.batches[turn]) for course in courses if turn < len(course.batches)]
    rows = sum(batch.tokens for _, batch in moving)
    evaluating = [course for course, batch in moving if course.evaluates_at(batch.step)]
    evaluated = sum(placed.length for course in evaluating for placed in course.evaluation)
    return max(pace.round_seconds, pace.row_seconds * (rows + EVALUATION_PART * evaluated))


def first_pace(cost: CostModel, shape: ModelShape, on_gpu: bool, max_tokens: int) -> WindowPace:
    """Before the run has measured anything: by a profile, for a pass that one sample fills, or by the data
    sheet."""
    if cost.measured:
        full = PassWork(
            tokens=max_tokens, squares=max_tokens**2, samples=1, supervised=max_tokens, adapted=0, segments=1
        )
        return WindowPace(cost.pass_seconds(full) / max_tokens)
    speed = speed_by_sheet(on_gpu)
    return WindowPace(ROW_FLOPS * shape.active_parameters / speed.flops if speed else 0.0)


def speed_by_sheet(on_gpu: bool) -> Speed | None:
    """Of this machine's devices; None where no data sheet is known."""
    try:
        sheet = this_machine().devices[0]
    except PlanError:
        return None
    return sheet_speed(sheet) if sheet.is_gpu == on_gpu else None
