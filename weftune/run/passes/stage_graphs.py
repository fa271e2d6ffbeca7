"""CUDA graphs of stages that take turns: one launch a visit instead of hundreds.

A stage's weights never change their address, nor do adapters' rooms, so a graph is captured for a stage, a
way through it and a key (`graph_inputs.py`). What a visit is given and leaves behind lies in buffers that all
graphs share; the rest is of one visit at a time, in one pool.

A visit is captured in the second round that has it: the first runs plainly, which compiles its kernels and
measures choices. Plain passes take memory of their own, which the plan has once, not beside the pool: where
there is no room for both, all graphs are given up for the rest of the round.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from weftune.adapters.banks import Banks
from weftune.base.model import Base
from weftune.ops.lora.routes import Route
from weftune.plan.program.program import Forward, Program
from weftune.plan.program.recompute import NOTHING
from weftune.run.measure.memory import is_out_of_memory
from weftune.run.passes.graph_inputs import Feed, Key, key_of
from weftune.run.passes.graph_pool import Pool
from weftune.run.passes.plain import MadeBackward, MadeForward, PlainPasses
from weftune.run.passes.rows import LaidMicrobatch, Membership, RowsHere, Visitor

MOST_KEYS = 8
"""When so many are known, the one that was met longest ago is forgotten, with the graphs of all stages."""


class Way(Enum):
    forward = auto()
    """A forward of which nothing but the result is kept."""
    turn = auto()
    """The last stage's: a forward that is kept, and behind the head the backward."""
    backward = auto()
    """The forward recomputed, and the backward."""


@dataclass(frozen=True, slots=True)
class GraphVisit:
    way: Way
    stage: int


@dataclass(frozen=True, slots=True)
class Buffers:
    """One microbatch between what is captured and what is not."""

    h_TD: Tensor
    """What a stage is given; in a forward also what it makes of it."""
    dh_TD: Tensor
    """The gradient that comes and the one that goes. What the last stage makes waits here for its own."""

    @classmethod
    def empty(cls, base: Base, rows: int) -> Buffers:
        shape = rows, base.shape.hidden
        return cls(*(torch.zeros(shape, dtype=base.dtype, device=base.device) for _ in range(2)))

    def first(self, rows: int) -> Buffers:
        return Buffers(self.h_TD[:rows], self.dh_TD[:rows])


@dataclass(slots=True)
class _Known:
    """A key: when each visit was first met, and what has been captured."""

    feed: Feed
    met: dict[GraphVisit, int] = field(default_factory=dict)
    graphs: dict[GraphVisit, StageGraph] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Served:
    graph: StageGraph | None
    """None: the visit is made plainly."""
    settled: bool
    """Whether later visits will be made so, too, and nothing was set up for this one."""


class StageGraphs:
    def __init__(self, whole: Base, stages: Mapping[int, Base], banks: Banks, pool: Pool) -> None:
        self.captures = 0
        self.refused: set[Key] = set()
        """Keys for whose graphs there was no memory."""
        self._whole, self._stages, self._banks, self._pool = whole, stages, banks, pool
        self._buffers = Buffers.empty(whole, 0)
        self._known: dict[Key, _Known] = {}
        self._round = 0
        self._plain_round = -1
        """The last one in which graphs had to make room."""

    def reserve(self, rows: int) -> None:
        """Have buffers for microbatches of so many rows."""
        if rows > len(self._buffers.h_TD):
            self.clear()
            self._buffers = Buffers.empty(self._whole, 0)
            self._buffers = Buffers.empty(self._whole, rows)

    def begin_round(self) -> None:
        self._round += 1

    def serve(self, visit: GraphVisit, laid: LaidMicrobatch) -> Served:
        """How a microbatch of the round is to visit a stage."""
        key = key_of(laid, self._banks, NOTHING)
        if not self._banks.capturable(laid.microbatch):
            self.make_room()
            return Served(None, settled=True)
        if key in self.refused:
            return Served(None, settled=True)
        known = self._met(key)
        if known.met.setdefault(visit, self._round) == self._round or self._plain_round == self._round:
            self.make_room()
            return Served(None, settled=False)
        if (graph := known.graphs.get(visit)) is not None:
            return Served(graph, settled=True)
        return Served(self._capture(key, known, visit), settled=False)

    def make_room(self) -> None:
        """For a pass that is not captured."""
        if any(known.graphs for known in self._known.values()) and not self._pool.has_room():
            self.clear()

    def clear(self) -> None:
        """Give up all graphs and their memory; in the next round they are captured when they are needed."""
        for known in self._known.values():
            known.graphs.clear()
        self._pool.clear()
        self._plain_round = self._round

    def _met(self, key: Key) -> _Known:
        if key not in self._known:
            if len(self._known) >= MOST_KEYS:
                del self._known[next(iter(self._known))]
            return self._known.setdefault(key, _Known(Feed(self._banks, key, self._whole.device)))
        # The one that was met last comes last.
        self._known[key] = self._known.pop(key)
        return self._known[key]

    def _capture(self, key: Key, known: _Known, visit: GraphVisit) -> StageGraph | None:
        base, buffers = self._stages[visit.stage], self._buffers.first(key.rows)
        try:
            graph = StageGraph(visit.way, base, self._banks, known.feed, buffers, self._pool)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            graph = None
        if graph is None:
            # Out here, where no traceback holds what was captured so far any longer.
            self.refused.add(key)
            self.clear()
            return None
        known.graphs[visit] = graph
        self.captures += 1
        return graph


class StageGraph:
    """One way through one stage, captured; it stands for a `Plain` pass of the microbatch that it is open for
    until it is opened for another."""

    def __init__(self, way: Way, base: Base, banks: Banks, feed: Feed, buffers: Buffers, pool: Pool) -> None:
        self._base, self._banks, self._feed, self._buffers = base, banks, feed, buffers
        self._given_TD: Tensor | None = None
        self._made_TD: Tensor | None = None
        """Between what is captured of a forward and of its backward; never between two replays."""
        if way is Way.turn:
            self._forward, self._backward = pool.capture(self._turn), pool.capture(self._return)
        else:
            self._forward = self._backward = pool.capture(
                self._forward_only if way is Way.forward else self._recompute_backward
            )

    def open(self, laid: LaidMicrobatch, dealt: Membership, given_TD: Tensor | None) -> StageGraph:
        self._feed.copy(laid, dealt)
        if given_TD is not None:
            self._buffers.h_TD.copy_(given_TD)
        return self

    # -- what is replayed --------------------------------------------------------------------------------

    def forward_only(self) -> Tensor:
        self._forward()
        return self._buffers.h_TD.clone()

    def forward(self) -> Tensor:
        """What it gives is there until `backward`."""
        self._forward()
        return self._buffers.dh_TD

    def backward(self, dh_TD: Tensor) -> None:
        """What was not kept is recomputed first."""
        self._buffers.dh_TD.copy_(dh_TD)
        self._backward()

    @property
    def dgiven_TD(self) -> Tensor:
        return self._buffers.dh_TD.clone()

    # -- what is captured --------------------------------------------------------------------------------

    @torch.no_grad()
    def _forward_only(self) -> None:
        self._buffers.h_TD.copy_(self._hidden(self._buffers.h_TD))

    def _recompute_backward(self) -> None:
        self._keep()
        self._return()

    def _turn(self) -> None:
        self._buffers.dh_TD.copy_(self._keep().detach())

    def _keep(self) -> Tensor:
        self._given_TD = self._buffers.h_TD.detach().requires_grad_()
        self._made_TD = self._hidden(self._given_TD)
        return self._made_TD

    def _return(self) -> None:
        made_TD, given_TD = self._made_TD, self._given_TD
        self._made_TD = self._given_TD = None
        assert made_TD is not None
        assert given_TD is not None
        if made_TD.requires_grad:
            with self._banks.bound(self._feed.microbatch, Route.tiled, True, self._feed.rows):
                made_TD.backward(self._buffers.dh_TD)
        if not self._base.first:
            assert given_TD.grad is not None
            self._buffers.dh_TD.copy_(given_TD.grad)

    def _hidden(self, given_TD: Tensor) -> Tensor:
        feed = self._feed
        with self._banks.bound(feed.microbatch, Route.tiled, True, feed.rows):
            return self._base.hidden(feed.microbatch, feed.pack, None if self._base.first else given_TD)


class CapturedVisits:
    """Passes over stages that take turns: only the last stage's forward is kept, its backward follows at
    once, and that of all others is recomputed."""

    def __init__(self, plain: PlainPasses, pool: Pool) -> None:
        self._plain = plain
        adapted = plain.adapted
        self.graphs = StageGraphs(adapted.base, plain.stages, adapted.banks, pool)
        self._open: dict[Visitor, StageGraph] = {}

    @property
    def captures(self) -> int:
        return self.graphs.captures

    @property
    def refused(self) -> int:
        return len(self.graphs.refused)

    def begin_window(self, program: Program) -> None:
        self._plain.begin_window(program)
        self.graphs.reserve(most_rows(program))

    def begin_round(self) -> None:
        self.graphs.begin_round()

    def forward(self, visitor: Visitor, rows: RowsHere, given_TD: Tensor | None, keep: bool) -> MadeForward:
        served = self.graphs.serve(GraphVisit(Way.turn if keep else Way.forward, visitor.stage), rows.laid)
        if served.graph is None:
            return MadeForward(self._plain.forward(visitor, rows, given_TD, keep).h_TD, served.settled)
        graph = self._opened(served.graph, rows, given_TD)
        if not keep:
            return MadeForward(graph.forward_only(), served.settled)
        self._open[visitor] = graph
        return MadeForward(graph.forward(), served.settled)

    def backward(
        self, visitor: Visitor, rows: RowsHere, given_TD: Tensor | None, dh_TD: Tensor
    ) -> MadeBackward:
        if self._plain.holds(visitor):
            return self._plain.backward(visitor, rows, given_TD, dh_TD)
        graph, settled = self._open.pop(visitor, None), True
        if graph is None:
            served = self.graphs.serve(GraphVisit(Way.backward, visitor.stage), rows.laid)
            if served.graph is None:
                made = self._plain.backward(visitor, rows, given_TD, dh_TD)
                return MadeBackward(made.dgiven_TD, served.settled)
            graph, settled = self._opened(served.graph, rows, given_TD), served.settled
        graph.backward(dh_TD)
        return MadeBackward(None if given_TD is None else graph.dgiven_TD, settled)

    def evaluate(self, visitor: Visitor, rows: RowsHere, given_TD: Tensor | None) -> Tensor:
        self.graphs.make_room()
        return self._plain.evaluate(visitor, rows, given_TD)

    def abandon(self) -> None:
        self._plain.abandon()
        self._open.clear()
        self.graphs.clear()

    def _opened(self, graph: StageGraph, rows: RowsHere, given_TD: Tensor | None) -> StageGraph:
        return graph.open(rows.laid, rows.dealt(self._plain.adapted), given_TD)


def most_rows(program: Program) -> int:
    """Of one microbatch that is trained."""
    trained = (plan.rows for action, plan in program.compute() if isinstance(action, Forward))
    return max(trained, default=0)
