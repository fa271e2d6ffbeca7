"""Ways of running the jobs: who shares microbatches, how they are packed, and in which order passes go."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from weftune.plan.pack.best import Limits

Groups = tuple[tuple[str, ...], ...]
GREEDY = Limits(tries=0, kicks=0, solver_cells=0, room_cells=0)
"""Best fit and nothing else."""
SEARCHED = Limits(tries=1000, kicks=50, solver_cells=0, room_cells=0)
"""Without the solver: the outlook packs the same window many times over."""


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
    """Jobs that share microbatches; the groups take turns."""
    order: SchemeOrder = SchemeOrder.alternating
    limits: Limits = SEARCHED
    shift: bool = True
    """Whether samples may fill up the round before theirs."""
