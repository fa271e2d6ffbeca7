"""Microbatches through the base and back: plainly, or by replaying a captured CUDA graph.

A pass ends at the last hidden states. What comes after them (head, losses) sees a leaf, and hands its
gradient back.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from weftune.adapters.banks import Banks
from weftune.base.model import Base
from weftune.ops.lora.routes import Route
from weftune.run.passes.graphs import Graph, Graphs
from weftune.run.passes.rows import LaidMicrobatch, Membership, deal


class _Open(Protocol):
    """A pass between its forward and its backward."""

    def backward(self, dh_TD: Tensor) -> None: ...


class Passes:
    def __init__(self, base: Base, banks: Banks, graphs: Graphs | None) -> None:
        self.base = base
        self.banks = banks
        self.graphs = graphs
        self._open: _Open | None = None

    def forward(self, laid: LaidMicrobatch, route: Route) -> Tensor:
        """The last hidden states, as a leaf that wants a gradient; `backward` must come before the next."""
        assert self._open is None, "a pass is still open"
        if route is Route.tiled and self.graphs is not None and (graph := self.graphs.serve(laid)):
            h_TD = graph.forward(laid)
            self._open = graph
        else:
            plain = Plain(self.base, self.banks, laid, route)
            h_TD = plain.forward()
            self._open = plain
        return h_TD.detach().requires_grad_()

    def backward(self, dh_TD: Tensor) -> None:
        """Add the gradients of everybody aboard to their totals."""
        assert self._open is not None, "no pass is open"
        self._open.backward(dh_TD)
        self._open = None

    @property
    def replays(self) -> bool:
        """Whether the open pass is a captured one."""
        return isinstance(self._open, Graph)

    def abandon(self) -> None:
        self._open = None

    @torch.no_grad()
    def look(self, laid: LaidMicrobatch, route: Route) -> Tensor:
        """The last hidden states without dropout and without a way back."""
        return Plain(self.base, self.banks, laid, route).forward(training=False)


class Plain:
    """One microbatch through the base, or through a stage of it that is given what the stage before made."""

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

    def anew(self) -> Plain:
        """The same pass, before it was made."""
        return Plain(self.base, self.banks, self.laid, self.route, self._given_TD, self._dealt)

    def forward(self, training: bool = True) -> Tensor:
        if training and self._given_TD is not None:
            self._given_TD.requires_grad_()
        with self.banks.bound(self.laid.microbatch, self.route, training, self._dealt.rows):
            self._h_TD = self.base.hidden(self.laid.microbatch, self._dealt.pack, self._given_TD)
        return self._h_TD

    @torch.no_grad()
    def forth(self) -> Tensor:
        """A forward of which nothing but the result is kept."""
        return self.forward()

    def back(self, dh_TD: Tensor) -> None:
        """The forward made again, and the backward."""
        self.forward()
        self.backward(dh_TD)

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
