"""Ways of running the jobs: which jobs share microbatches, how they are packed, and the order of passes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from weftune.plan.pack.best import Limits

Groups = tuple[tuple[str, ...], ...]
GREEDY = Limits(tries=0, kicks=0, solver_cells=0, room_cells=0)
"""Limits that allow best fit only."""
SEARCHED = Limits(tries=1000, kicks=50, solver_cells=0, room_cells=0)
"""Limits without the solver, since a forecast packs the same window many times."""


class SchemeOrder(StrEnum):
    gpipe = "GPipe"
    alternating = "1F1B"
    multi_job = "multi-job 1F1B"
    template = "pipeline template"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way of running the jobs."""

    name: str
    groups: Groups
    """Groups of jobs that share microbatches; the groups take turns."""
    order: SchemeOrder = SchemeOrder.alternating
    limits: Limits = SEARCHED
    shift: bool = True
    """Whether samples may fill the preceding round."""
