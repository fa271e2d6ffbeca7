"""Forward and backward of microbatches through the stages of a base, launched kernel by kernel.

A pass over the last stage ends at the last hidden states. Head and losses work on a leaf tensor, whose
gradient starts the backward.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.adapters.banks import Banks
from weftune.base.model import Base
from weftune.ops.lora.routes import Route
from weftune.plan.program.program import Program
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.rows import LaidMicrobatch, Membership, RowsHere, StageVisit, membership_of


@dataclass(frozen=True, slots=True)
class MadeForward:
    h_TD: Tensor
    settled: bool = True
    """Whether this pass included no setup, so that later ones take as long."""


@dataclass(frozen=True, slots=True)
class MadeBackward:
    dgiven_TD: Tensor | None
    """Gradient for the stage before. None at the first stage."""
    settled: bool = True


class PlainPasses:
    """Uncaptured passes. A forward that is kept stays open until its backward; any other is recomputed from
    its input."""

    def __init__(self, adapted: AdaptedBase, stages: Mapping[int, Base]) -> None:
        self.adapted, self.stages = adapted, stages
        self._open: dict[StageVisit, Plain] = {}

    @property
    def captures(self) -> int | None:
        """Number of CUDA graphs captured so far. None if passes are not captured."""
        return None

    @property
    def refused(self) -> int:
        """Number of sizes of microbatches whose passes are not captured for lack of memory."""
        return 0

    def begin_window(self, program: Program) -> None:
        if self.adapted.layers is not None:
            self.adapted.layers.recompute = program.recompute

    def begin_round(self) -> None:
        """Begin a round of microbatches; none is in flight."""

    def forward(self, visit: StageVisit, rows: RowsHere, given_TD: Tensor | None, keep: bool) -> MadeForward:
        """Run one stage's forward of a microbatch. If it is kept, `backward` must follow."""
        assert visit not in self._open, "a pass is still open"
        passed = self._pass(visit, rows, given_TD)
        if not keep:
            return MadeForward(passed.forward_only())
        self._open[visit] = passed
        return MadeForward(passed.forward())

    def backward(
        self, visit: StageVisit, rows: RowsHere, given_TD: Tensor | None, dh_TD: Tensor
    ) -> MadeBackward:
        """Add to the gradients of all jobs in the microbatch. A forward that was not kept is recomputed
        first."""
        passed = self._open.pop(visit, None)
        if passed is None:
            passed = self._pass(visit, rows, given_TD)
            passed.forward()
        passed.backward(dh_TD)
        return MadeBackward(None if given_TD is None else passed.dgiven_TD)

    @torch.no_grad()
    def evaluate(self, visit: StageVisit, rows: RowsHere, given_TD: Tensor | None) -> Tensor:
        """Return hidden states without dropout and without gradients."""
        return self._pass(visit, rows, given_TD).forward(training=False)

    def holds(self, visit: StageVisit) -> bool:
        """Return whether the forward of this visit was kept here."""
        return visit in self._open

    def abandon(self) -> None:
        """Drop open passes, and free memory that only makes passes faster."""
        self._open.clear()

    def _pass(self, visit: StageVisit, rows: RowsHere, given_TD: Tensor | None) -> Plain:
        given = None if given_TD is None else given_TD.detach()
        adapted = self.adapted
        base = self.stages[visit.stage]
        return Plain(base, adapted.banks, rows.laid, adapted.route, given, rows.membership(adapted))


class Plain:
    """One microbatch through a base, or through a stage of it, which is given the output of the stage
    before."""

    def __init__(
        self,
        base: Base,
        banks: Banks,
        laid: LaidMicrobatch,
        route: Route,
        given_TD: Tensor | None = None,
        membership: Membership | None = None,
    ) -> None:
        self.base = base
        self.banks = banks
        self.laid = laid
        self.route = route
        self._given_TD = given_TD
        self._h_TD: Tensor | None = None
        self._membership = membership or membership_of(base, banks, laid, route)

    def forward(self, training: bool = True) -> Tensor:
        if training and self._given_TD is not None:
            self._given_TD.requires_grad_()
        with self.banks.bound(self.laid.microbatch, self.route, training, self._membership.rows):
            self._h_TD = self.base.hidden(self.laid.microbatch, self._membership.pack, self._given_TD)
        return self._h_TD

    @torch.no_grad()
    def forward_only(self) -> Tensor:
        """Run a forward without keeping anything for a backward."""
        return self.forward()

    def backward(self, dh_TD: Tensor) -> None:
        assert self._h_TD is not None
        if not self._h_TD.requires_grad:
            return  # a first stage on which no job has an adapter
        # A layer that is recomputed must see the adapters of its own microbatch.
        with self.banks.bound(self.laid.microbatch, self.route, True, self._membership.rows):
            self._h_TD.backward(dh_TD)

    @property
    def dgiven_TD(self) -> Tensor:
        """Gradient for the stage before, once `backward` has run."""
        assert self._given_TD is not None
        assert self._given_TD.grad is not None
        return self._given_TD.grad
