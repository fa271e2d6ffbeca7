"""Microbatches on their way through the stages of a streamed base.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weftune.plan.program.program import MicrobatchPlan
from weftune.run.passes.plain import Plain
from weftune.run.passes.rows import LaidMicrobatch, Membership
from weftune.run.passes.scorer import Scores
from weftune.run.passes.stage_graphs import StageGraph
from weftune.run.stream.visits import ThereAndBack, Visits


@dataclass(slots=True)
class Flight:
    """A microbatch between its first Forward and its last Backward."""

    plan: MicrobatchPlan
    laid: LaidMicrobatch
    dealt: Membership
    visits: ThereAndBack
    settled: bool = True
    """Whether nothing was set up for its passes."""
    dh_TD: Tensor | None = None
    """What the stage after hands back."""
    last: Plain | StageGraph | None = None
    """The last stage's pass, between its forward and its backward."""
    scores: Scores | None = None
    """Once it has been through the last stage."""


@dataclass(slots=True)
class Looking:
    """An evaluation on its way through the stages."""

    plan: MicrobatchPlan
    laid: LaidMicrobatch
    dealt: Membership
    visits: Visits
    h_TD: Tensor | None = None
