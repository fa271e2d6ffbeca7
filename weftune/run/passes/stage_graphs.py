"""CUDA graphs of streamed stages: one launch per visit (a microbatch's pass over one stage), instead of
hundreds.

A stage's weights and the adapters' tensors never change their address, so a graph is captured for a stage, a
kind of visit and a key (`graph_inputs.py`). Inputs and results of a visit are in buffers that all graphs
share. All other memory belongs to one visit at a time, in one pool.

A visit is captured in the second round (one global batch of every job) in which it occurs: in the first it
runs uncaptured, so that kernels are compiled and tuned. Uncaptured passes need memory in addition to the
pool, which the plan does not count: if both do not fit, all graphs are dropped for the rest of the round.

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
from weftune.plan.program.program import NOTHING, Forward, Program
from weftune.run.measure.memory import is_out_of_memory
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.graph_inputs import GraphInputs, GraphKey, make_graph_key
from weftune.run.passes.graphs import Pool
from weftune.run.passes.plain import PlainPasses
from weftune.run.passes.rows import DeviceMicrobatch, InFlight, Membership, StageVisit

MAX_KEYS = 8
"""Maximum number of graph keys (sets of sizes that CUDA graphs fix). When another key occurs, the least
recently used key is dropped with all its graphs."""


class VisitKind(Enum):
    forward = auto()
    """A forward without a backward, of which only the output is kept."""
    turn = auto()
    """A pass over the last stage: the forward, whose activations are kept, then head and loss, then the
    backward."""
    backward = auto()
    """A pass that recomputes the forward from the stage's input, then runs the backward."""


GraphVisit = tuple[VisitKind, int]
"""A kind of pass that is captured as a CUDA graph, and the index of its stage."""


@dataclass(slots=True)
class _KeyState:
    """The state of one graph key (a set of sizes that CUDA graphs fix): its input tensors, its graphs, and
    for each pass the first round (one global batch of every job) in which it occurred."""

    inputs: GraphInputs
    first_rounds: dict[GraphVisit, int] = field(default_factory=dict)
    graphs: dict[GraphVisit, StageGraph] = field(default_factory=dict)


class StageGraphs:
    def __init__(self, whole: Base, stages: Mapping[int, Base], banks: Banks, pool: Pool) -> None:
        self.captures = 0
        self.failed_captures: set[GraphKey] = set()
        """Keys (sets of sizes that CUDA graphs fix) for which a capture ran out of memory."""
        self._whole, self._stages, self._banks, self._pool = whole, stages, banks, pool
        self._h_TD, self._dh_TD = self._zero_buffer(0), self._zero_buffer(0)
        """Buffers through which graphs receive and return hidden states and gradients (see `StageGraph`)."""
        self._key_states: dict[GraphKey, _KeyState] = {}
        self._round = 0
        self._plain_round = -1
        """Number of the last round (one global batch of every job) in which all graphs were dropped to free
        memory. No graph is captured in the rest of that round."""

    def reserve(self, rows: int) -> None:
        """Allocate buffers for the hidden states and gradients of microbatches of up to this many rows."""
        if rows > len(self._h_TD):
            self.clear()
            self._h_TD, self._dh_TD = self._zero_buffer(0), self._zero_buffer(0)
            self._h_TD, self._dh_TD = self._zero_buffer(rows), self._zero_buffer(rows)

    def _zero_buffer(self, rows: int) -> Tensor:
        whole = self._whole
        return torch.zeros((rows, whole.shape.hidden), dtype=whole.dtype, device=whole.device)

    def begin_round(self) -> None:
        self._round += 1

    def find_or_capture(self, kind: VisitKind, stage: int, in_flight: InFlight) -> StageGraph | None:
        """Return the CUDA graph for a microbatch's pass over a stage, captured now if necessary, or None if
        the pass must run uncaptured. The time of a pass in which kernels are compiled or a graph is captured
        is marked as not typical (`TimedPass.is_typical`)."""
        device_microbatch, visit = in_flight.device_microbatch, (kind, stage)
        key = make_graph_key(device_microbatch, self._banks, NOTHING, self._whole.shape.context)
        if not self._banks.is_capturable(device_microbatch.microbatch):
            self.free_memory()
            return None
        if key in self.failed_captures:
            return None
        known = self._get_state(key)
        if (
            known.first_rounds.setdefault(visit, self._round) == self._round
            or self._plain_round == self._round
        ):
            in_flight.pass_times.is_typical = False
            self.free_memory()
            return None
        if (graph := known.graphs.get(visit)) is not None:
            return graph
        in_flight.pass_times.is_typical = False
        return self._capture(key, known, visit)

    def free_memory(self) -> None:
        """Free memory for an uncaptured pass, by dropping all graphs if necessary."""
        if any(known.graphs for known in self._key_states.values()) and not self._pool.has_room():
            self.clear()

    def clear(self) -> None:
        """Drop all graphs and free their memory. They are captured again when they are needed, from the next
        round (one global batch of every job) on."""
        for known in self._key_states.values():
            known.graphs.clear()
        self._pool.clear()
        self._plain_round = self._round

    def _get_state(self, key: GraphKey) -> _KeyState:
        if key not in self._key_states:
            if len(self._key_states) >= MAX_KEYS:
                del self._key_states[next(iter(self._key_states))]
            return self._key_states.setdefault(
                key, _KeyState(GraphInputs(self._banks, key, self._whole.device))
            )
        # The most recently used key comes last.
        self._key_states[key] = self._key_states.pop(key)
        return self._key_states[key]

    def _capture(self, key: GraphKey, key_state: _KeyState, visit: GraphVisit) -> StageGraph | None:
        kind, stage = visit
        base, buffers = self._stages[stage], (self._h_TD[: key.rows], self._dh_TD[: key.rows])
        try:
            graph = StageGraph(kind, base, self._banks, key_state.inputs, *buffers, self._pool)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            graph = None
        if graph is None:
            # Outside the handler, where no traceback holds the captured tensors any longer.
            self.failed_captures.add(key)
            self.clear()
            return None
        key_state.graphs[visit] = graph
        self.captures += 1
        return graph


class StageGraph:
    """The CUDA graphs of one kind of pass over one stage. The class has the same methods as `Plain`, the
    class of passes without graphs."""

    def __init__(
        self,
        kind: VisitKind,
        base: Base,
        banks: Banks,
        inputs: GraphInputs,
        h_TD: Tensor,
        dh_TD: Tensor,
        pool: Pool,
    ) -> None:
        """Capture the pass in the memory of `pool`. `h_TD` holds the input of the stage and, after a forward,
        its output. `dh_TD` holds the gradient of the output and, after a backward, that of the input. At the
        last stage, `dh_TD` also holds the output until the output's gradient is known."""
        self._base, self._banks, self._inputs = base, banks, inputs
        self._h_TD, self._dh_TD = h_TD, dh_TD
        self._input_TD: Tensor | None = None
        self._output_TD: Tensor | None = None
        """Output of the forward from its capture until the capture of its backward. None during replays."""
        if kind is VisitKind.turn:
            self._forward, self._backward = (
                pool.capture(self._last_stage_forward),
                pool.capture(self._backward_from_output),
            )
        else:
            self._forward = self._backward = pool.capture(
                self._forward_only if kind is VisitKind.forward else self._recompute_backward
            )

    def set_inputs(
        self, device_microbatch: DeviceMicrobatch, membership: Membership, input_TD: Tensor | None
    ) -> None:
        self._inputs.copy(device_microbatch, membership)
        if input_TD is not None:
            self._h_TD.copy_(input_TD)

    # -- what is replayed --------------------------------------------------------------------------------

    def forward_only(self) -> Tensor:
        self._forward()
        return self._h_TD.clone()

    def forward(self) -> Tensor:
        """Replay the forward and return the output, which stays valid until `backward`."""
        self._forward()
        return self._dh_TD

    def backward(self, dh_TD: Tensor) -> None:
        """Replay the backward. If the forward was not kept, the same graph recomputes it first."""
        self._dh_TD.copy_(dh_TD)
        self._backward()

    @property
    def dinput_TD(self) -> Tensor:
        return self._dh_TD.clone()

    # -- what is captured --------------------------------------------------------------------------------

    @torch.no_grad()
    def _forward_only(self) -> None:
        self._h_TD.copy_(self._hidden_states(self._h_TD))

    def _recompute_backward(self) -> None:
        self._keep_forward()
        self._backward_from_output()

    def _last_stage_forward(self) -> None:
        self._dh_TD.copy_(self._keep_forward().detach())

    def _keep_forward(self) -> Tensor:
        self._input_TD = self._h_TD.detach().requires_grad_()
        self._output_TD = self._hidden_states(self._input_TD)
        return self._output_TD

    def _backward_from_output(self) -> None:
        output_TD, input_TD = self._output_TD, self._input_TD
        self._output_TD = self._input_TD = None
        assert output_TD is not None
        assert input_TD is not None
        if output_TD.requires_grad:
            with self._banks.bind(self._inputs.microbatch, Route.tiled, True, self._inputs.rows):
                output_TD.backward(self._dh_TD)
        if not self._base.is_first:
            assert input_TD.grad is not None
            self._dh_TD.copy_(input_TD.grad)

    def _hidden_states(self, input_TD: Tensor) -> Tensor:
        feed = self._inputs
        with self._banks.bind(feed.microbatch, Route.tiled, True, feed.rows):
            return self._base.hidden(feed.microbatch, feed.pack, None if self._base.is_first else input_TD)


class CapturedVisits:
    """Passes over streamed stages, captured as CUDA graphs. Only the last stage's forward is kept, since its
    backward follows at once; the forwards of other stages are recomputed in the backward."""

    def __init__(self, adapted: AdaptedBase, stages: Mapping[int, Base], pool: Pool) -> None:
        self.adapted, self.stages = adapted, stages
        self._plain = PlainPasses(adapted, stages)
        self.graphs = StageGraphs(adapted.base, stages, adapted.banks, pool)

    @property
    def captures(self) -> int:
        return self.graphs.captures

    @property
    def failed_captures(self) -> int:
        return len(self.graphs.failed_captures)

    def begin_window(self, program: Program) -> None:
        self._plain.begin_window(program)
        trained = (plan.rows for action, plan in program.forward_passes() if isinstance(action, Forward))
        self.graphs.reserve(max(trained, default=0))

    def begin_round(self) -> None:
        self.graphs.begin_round()

    def forward(
        self, visit: StageVisit, in_flight: InFlight, input_TD: Tensor | None, keeps_activations: bool
    ) -> Tensor:
        graph = self.graphs.find_or_capture(
            VisitKind.turn if keeps_activations else VisitKind.forward, visit.stage, in_flight
        )
        if graph is None:
            return self._plain.forward(visit, in_flight, input_TD, keeps_activations)
        graph.set_inputs(in_flight.device_microbatch, in_flight.membership(self.adapted), input_TD)
        if not keeps_activations:
            return graph.forward_only()
        self._plain.open_passes[visit] = graph
        return graph.forward()

    def backward(
        self, visit: StageVisit, in_flight: InFlight, input_TD: Tensor | None, dh_TD: Tensor
    ) -> Tensor | None:
        if visit not in self._plain.open_passes:
            graph = self.graphs.find_or_capture(VisitKind.backward, visit.stage, in_flight)
            if graph is not None:
                graph.set_inputs(in_flight.device_microbatch, in_flight.membership(self.adapted), input_TD)
                self._plain.open_passes[visit] = graph
        return self._plain.backward(visit, in_flight, input_TD, dh_TD)

    def evaluate(self, visit: StageVisit, in_flight: InFlight, input_TD: Tensor | None) -> Tensor:
        self.graphs.free_memory()
        return self._plain.evaluate(visit, in_flight, input_TD)

    def renumber_microbatches(self, numbers: Mapping[int, int]) -> None:
        assert not numbers, "a streamed base has no microbatch in flight between two windows"

    def abandon(self) -> None:
        self._plain.abandon()
        self.graphs.clear()
