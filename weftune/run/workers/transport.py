"""Messages between neighbours of a pipeline while a Program runs: hidden states and gradients, moved while
the device computes, and the sums and decisions by which workers agree on Steps. Receives are posted ahead in
the order of the Program, which fixes their shapes.

Shapes: T rows of a microbatch, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.plan.program.program import Program, Recv, Reduce, Send, Step
from weftune.run.training.state import master_dtype
from weftune.run.workers.mailbox import DirectOutbox, Inbox, Outbox, PeerLane, outbox_for
from weftune.run.workers.replicas import Exchange

DECISION = 2
"""Number of values in a decision: the batch's index in the Program, and the norm of its gradient."""
SUMS = 4
"""Number of values in the sums of a batch: its index, then loss, correct predictions and the squared norm."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """A worker's connections. None means that it has no neighbour on that side."""

    activation_in: PeerLane | None
    activation_out: PeerLane | None
    gradient_in: PeerLane | None
    gradient_out: PeerLane | None
    sums_in: PeerLane | None
    """Sums of a batch over the stages after."""
    sums_out: PeerLane | None
    decision_in: PeerLane | None
    """Decision of the first worker on a Step: from the stage before, or directly for the first worker of a
    replica."""
    decisions_out: tuple[PeerLane, ...]
    shares_in: tuple[PeerLane, ...] = ()
    """Gradient and sums of a batch from the same stage of the other replicas, in their order."""
    shares_out: tuple[PeerLane, ...] = ()


class Transport:
    """All messages between a worker and its neighbours while a Program runs."""

    def __init__(
        self, lanes: Lanes, width: int, dtype: torch.dtype, device: torch.device, delay: float = 0.0
    ) -> None:
        """`delay` is added to the seconds of every message: a slow link, for tests and benchmarks."""
        self._width, self._dtype, self._device = width, dtype, device
        cpu = torch.device("cpu")
        self._activation_in = _inbox(lanes.activation_in, dtype, device)
        self._gradient_in = _inbox(lanes.gradient_in, dtype, device)
        self._sums_in = _inbox(lanes.sums_in, torch.float64, cpu)
        self._decision_in = _inbox(lanes.decision_in, torch.float64, cpu)
        self._activation_out = _outbox(lanes.activation_out, device, delay)
        self._gradient_out = _outbox(lanes.gradient_out, device, delay)
        self._sums_out = _outbox(lanes.sums_out, cpu, 0.0)
        self._decisions_out = [outbox_for(lane, cpu) for lane in lanes.decisions_out]
        self.exchange = Exchange(lanes.shares_in, lanes.shares_out, master_dtype(dtype), device, delay)

    def expect(self, program: Program, worker: int, sizes: Mapping[str, int]) -> None:
        """Post the receives of a worker's list ahead. `sizes` maps each job to the parameters of its slice
        here."""
        actions = program.devices[worker]
        self.exchange.expect(program, sizes)
        rows = [microbatch.rows for microbatch in program.microbatches]
        for inbox, what in ((self._activation_in, "activation"), (self._gradient_in, "gradient")):
            if inbox is not None:
                coming = [one for one in actions if isinstance(one, Recv) and one.what == what]
                inbox.expect((rows[one.microbatch], self._width) for one in coming)
        if self._sums_in is not None:
            sums = [one for one in actions if isinstance(one, Reduce) and one.what == "norm"]
            self._sums_in.expect((SUMS,) for _ in sums)
        if self._decision_in is not None:
            self._decision_in.expect((DECISION,) for one in actions if isinstance(one, Step))

    def receive(self, action: Recv) -> Tensor:
        inbox = self._activation_in if action.what == "activation" else self._gradient_in
        assert inbox is not None, f"{action}: there is no neighbour on that side"
        return inbox.take()

    def send(self, action: Send, tensor_TD: Tensor) -> None:
        outbox = self._activation_out if action.what == "activation" else self._gradient_out
        assert outbox is not None, f"{action}: there is no neighbour on that side"
        outbox.send(tensor_TD)

    def zeros(self, rows: int) -> Tensor:
        """Return zeros in the shape of hidden states or gradients that were never computed."""
        return torch.zeros(rows, self._width, dtype=self._dtype, device=self._device)

    def sums_from_next(self) -> Tensor:
        """Return the next sums of a batch over all stages after."""
        assert self._sums_in is not None, "the last stage, and other replicas than the first, hear of no sums"
        return self._sums_in.take()

    def sums_to_before(self, sums: Tensor) -> None:
        assert self._sums_out is not None, "the first stage keeps its sums"
        self._sums_out.send(sums)

    def decision_from_before(self) -> Tensor:
        """Return the first worker's next decision, after passing it on."""
        assert self._decision_in is not None, "the first worker decides by itself"
        decision = self._decision_in.take()
        self.pass_decision_on(decision)
        return decision

    def pass_decision_on(self, decision: Tensor) -> None:
        """Send a decision to the stage after, and from the first worker also to the other replicas."""
        for outbox in self._decisions_out:
            outbox.send(decision)

    def settle(self) -> None:
        for outbox in self._outboxes():
            outbox.settle()

    def close(self) -> None:
        for outbox in self._outboxes():
            outbox.close()

    def _outboxes(self) -> list[Outbox | DirectOutbox]:
        boxes = (self._activation_out, self._gradient_out, self._sums_out)
        alone = [box for box in boxes if box is not None]
        return [*alone, *self._decisions_out, *self.exchange.outboxes]


def _inbox(lane: PeerLane | None, dtype: torch.dtype, device: torch.device) -> Inbox | None:
    return None if lane is None else Inbox(lane, dtype, device)


def _outbox(lane: PeerLane | None, device: torch.device, delay: float) -> Outbox | DirectOutbox | None:
    return None if lane is None else outbox_for(lane, device, delay)
