"""Microbatches through the stages of a base and back, launched kernel by kernel.

A pass over the last stage ends at the last hidden states. What comes after them (head, losses) sees a leaf,
and hands its gradient back.

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
from weftune.run.passes.rows import LaidMicrobatch, Membership, RowsHere, Visitor, deal


@dataclass(frozen=True, slots=True)
class MadeForward:
    h_TD: Tensor
    settled: bool = True
    """Whether later passes like it will be made so, too, and nothing was set up for this one."""


@dataclass(frozen=True, slots=True)
class MadeBackward:
    dgiven_TD: Tensor | None
    """What goes back to the stage before; None at the first one."""
    settled: bool = True


class PlainPasses:
    """Where a forward is kept, its pass stays open until its backward; else it is recomputed from its
    input."""

    def __init__(self, adapted: AdaptedBase, stages: Mapping[int, Base]) -> None:
        self.adapted, self.stages = adapted, stages
        self._open: dict[Visitor, Plain] = {}

    @property
    def captures(self) -> int | None:
        """How many CUDA graphs were captured so far; None where passes are not captured."""
        return None

    @property
    def refused(self) -> int:
        """Sizes of microbatches whose passes should be captured, but for lack of memory are not."""
        return 0

    def begin_window(self, program: Program) -> None:
        if self.adapted.layers is not None:
            self.adapted.layers.recompute = program.recompute

    def begin_round(self) -> None:
        """Microbatches begin to come while none is under way."""

    def forward(self, visitor: Visitor, rows: RowsHere, given_TD: Tensor | None, keep: bool) -> MadeForward:
        """One stage's forward of a microbatch; if it is to be kept, `backward` must follow."""
        assert visitor not in self._open, "a pass is still open"
        passed = self._pass(visitor, rows, given_TD)
        if not keep:
            return MadeForward(passed.forward_only())
        self._open[visitor] = passed
        return MadeForward(passed.forward())

    def backward(
        self, visitor: Visitor, rows: RowsHere, given_TD: Tensor | None, dh_TD: Tensor
    ) -> MadeBackward:
        """Add the gradients of everybody aboard to their totals. What was not kept is recomputed."""
        passed = self._open.pop(visitor, None)
        if passed is None:
            passed = self._pass(visitor, rows, given_TD)
            passed.forward()
        passed.backward(dh_TD)
        return MadeBackward(None if given_TD is None else passed.dgiven_TD)

    @torch.no_grad()
    def evaluate(self, visitor: Visitor, rows: RowsHere, given_TD: Tensor | None) -> Tensor:
        """Hidden states without dropout and without a way back."""
        return self._pass(visitor, rows, given_TD).forward(training=False)

    def holds(self, visitor: Visitor) -> bool:
        """Whether the forward of this visit was kept here."""
        return visitor in self._open

    def abandon(self) -> None:
        """What is under way ends unfinished; memory that only makes passes faster is given up."""
        self._open.clear()

    def _pass(self, visitor: Visitor, rows: RowsHere, given_TD: Tensor | None) -> Plain:
        given = None if given_TD is None else given_TD.detach()
        adapted = self.adapted
        base = self.stages[visitor.stage]
        return Plain(base, adapted.banks, rows.laid, adapted.route, given, rows.dealt(adapted))


class Plain:
    """One microbatch through a base, or through a stage of it that is given what the stage before made."""

    def __init__(
        self,
        base: Base,
        banks: Banks,
        laid: LaidMicrobatch,
        route: Route,
        given_TD: Tensor | None = None,
        dealt: Membership | None = None,
    ) -> None:
        self.base = base
        self.banks = banks
        self.laid = laid
        self.route = route
        self._given_TD = given_TD
        self._h_TD: Tensor | None = None
        self._dealt = dealt or deal(base, banks, laid, route)

    def forward(self, training: bool = True) -> Tensor:
        if training and self._given_TD is not None:
            self._given_TD.requires_grad_()
        with self.banks.bound(self.laid.microbatch, self.route, training, self._dealt.rows):
            self._h_TD = self.base.hidden(self.laid.microbatch, self._dealt.pack, self._given_TD)
        return self._h_TD

    @torch.no_grad()
    def forward_only(self) -> Tensor:
        """A forward of which nothing but the result is kept."""
        return self.forward()

    def backward(self, dh_TD: Tensor) -> None:
        assert self._h_TD is not None
        if not self._h_TD.requires_grad:
            return  # a first stage on which nobody has an adapter
        # A layer that is recomputed must see the adapters of its own microbatch.
        with self.banks.bound(self.laid.microbatch, self.route, True, self._dealt.rows):
            self._h_TD.backward(dh_TD)

    @property
    def dgiven_TD(self) -> Tensor:
        """What goes back to the stage before, once `backward` has run."""
        assert self._given_TD is not None
        assert self._given_TD.grad is not None
        return self._given_TD.grad
