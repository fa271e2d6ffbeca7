"""Messages between workers while a Program runs: hidden states and gradients of neighbours, transferred while
the device computes; the sums and decisions by which workers agree on optimizer steps (Steps); and the
gradients and scores that replicas exchange. Receives are posted ahead in the order of the Program, which
determines their shapes.

Shapes: T rows of a microbatch, D hidden width, N numbers of a replica's message: a stage's slice of the
gradient, then loss, correct predictions and metrics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from weftune.objectives.spec import MAX_METRICS
from weftune.plan.program.program import Program, Recv, Reduce, Reduced, Send, Step
from weftune.run.training.state import master_dtype
from weftune.run.workers.groups import Purpose, WorkerConnections
from weftune.run.workers.mailbox import DirectInbox, Inbox, Outbox, PeerLane, create_inbox

DECISION_VALUES = 2
"""Number of values in a decision on an optimizer step: the index of the global batch in the Program, and the
norm of its gradient."""
SUMS_PER_MESSAGE = 2 + MAX_METRICS
"""Number of values after the gradient in a message between replicas: loss, correct predictions, and
metrics."""
SUMS_VALUES = 2 + SUMS_PER_MESSAGE
"""Number of values in the sums over a global batch: its index in the Program, the squared norm of its
gradient, then loss, correct predictions and metrics."""

SCORE_VALUES = 4
"""Length of a message with scores for the KL term of KTO: their sum and count for a global batch, then their
sum and count for the held-out samples."""

NOWHERE = slice(0, 0)
AnyInbox = Inbox | DirectInbox
StepKey = tuple[str, int]
"""The name of a job, and the number of one of the job's optimizer steps."""


class Transport:
    """The connections of one worker over which tensors and decisions are exchanged while a Program runs."""

    def __init__(
        self,
        connections: WorkerConnections,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        delay: float = 0.0,
    ) -> None:
        """Open the connections. `width` is the hidden width of the model. `delay` is the number of seconds
        that are added to the time of every message, to emulate a slow link in tests and benchmarks."""
        self._width, self._dtype, self._device = width, dtype, device
        cpu = torch.device("cpu")

        def inbox(purpose: Purpose, dtype: torch.dtype, device: torch.device) -> AnyInbox | None:
            lane = _single_lane(connections.incoming_lanes(purpose))
            return None if lane is None else create_inbox(lane, dtype, device)

        def outbox(purpose: Purpose, device: torch.device, delay: float) -> Outbox | None:
            lane = _single_lane(connections.outgoing_lanes(purpose))
            return None if lane is None else Outbox(lane, device, delay)

        self._activation_in = inbox("activation", dtype, device)
        self._gradient_in = inbox("gradient", dtype, device)
        self._sums_in = inbox("sums", torch.float64, cpu)
        self._decision_in = inbox("decision", torch.float64, cpu)
        self._activation_out = outbox("activation", device, delay)
        self._gradient_out = outbox("gradient", device, delay)
        self._sums_out = outbox("sums", cpu, 0.0)
        self._decisions_out = [Outbox(lane, cpu) for lane in connections.outgoing_lanes("decision")]
        self.exchange = Exchange(connections, "share", master_dtype(dtype), device, delay)
        self.scores = Exchange(connections, "scores", torch.float64, cpu)

    def expect(self, program: Program, worker: int, sizes: Mapping[str, int]) -> None:
        """Post in advance the receives in the actions of a worker. `worker` is the index of its list of
        actions in the Program, and `sizes` maps each job to the number of parameters that this worker
        holds."""
        actions = program.devices[worker]
        self.exchange.expect(program, lambda job: sizes[job] + SUMS_PER_MESSAGE)
        self.scores.expect(program, lambda job: SCORE_VALUES)
        rows = [microbatch.rows for microbatch in program.microbatches]
        for inbox, what in ((self._activation_in, "activation"), (self._gradient_in, "gradient")):
            if inbox is not None:
                expected = [one for one in actions if isinstance(one, Recv) and one.payload == what]
                inbox.expect((rows[one.microbatch], self._width) for one in expected)
        if self._sums_in is not None:
            sums = [one for one in actions if isinstance(one, Reduce) and one.payload == "norm"]
            self._sums_in.expect((SUMS_VALUES,) for _ in sums)
        if self._decision_in is not None:
            self._decision_in.expect((DECISION_VALUES,) for one in actions if isinstance(one, Step))

    def receive(self, action: Recv) -> Tensor:
        inbox = self._activation_in if action.payload == "activation" else self._gradient_in
        assert inbox is not None, f"{action}: there is no neighbour on that side"
        return inbox.receive(action)

    def send(self, action: Send, tensor_TD: Tensor) -> None:
        outbox = self._activation_out if action.payload == "activation" else self._gradient_out
        assert outbox is not None, f"{action}: there is no neighbour on that side"
        outbox.send(tensor_TD)

    def zeros(self, rows: int) -> Tensor:
        """Return zeros for `rows` rows of hidden states or of their gradient, which are sent in place of a
        tensor that was never computed."""
        return torch.zeros(rows, self._width, dtype=self._dtype, device=self._device)

    def receive_sums(self) -> Tensor:
        """Return the next message with the sums over a job's global batch in all later stages."""
        assert self._sums_in is not None, "the last stage, and other replicas than the first, receive no sums"
        return self._sums_in.receive("the sums of a batch")

    def send_sums(self, sums: Tensor) -> None:
        assert self._sums_out is not None, "the first stage keeps its sums"
        self._sums_out.send(sums)

    def receive_decision(self) -> Tensor:
        """Return the first worker's next decision on an optimizer step, after forwarding it to the next
        stage."""
        assert self._decision_in is not None, "the first worker decides by itself"
        decision = self._decision_in.receive("a decision")
        self.send_decision(decision)
        return decision

    def send_decision(self, decision: Tensor) -> None:
        """Send a decision on an optimizer step to the next stage, and from the first worker also to the other
        replicas."""
        for outbox in self._decisions_out:
            outbox.send(decision)

    def flush(self) -> None:
        """Wait until the other workers have received all messages that were sent."""
        for outbox in self._outboxes():
            outbox.flush()

    def close(self) -> None:
        for outbox in self._outboxes():
            outbox.close()
        inboxes = self._activation_in, self._gradient_in, self._sums_in, self._decision_in
        for inbox in (*inboxes, *self.exchange.inboxes, *self.scores.inboxes):
            if inbox is not None:
                inbox.close()

    def _outboxes(self) -> list[Outbox]:
        outboxes = (self._activation_out, self._gradient_out, self._sums_out)
        given = (one for one in outboxes if one is not None)
        return [*given, *self._decisions_out, *self.exchange.outboxes, *self.scores.outboxes]


def _single_lane(lanes: tuple[PeerLane, ...]) -> PeerLane | None:
    assert len(lanes) <= 1, "a worker has one neighbour on each side"
    return lanes[0] if lanes else None


class _Replica:
    """The messages from one worker of another replica (copy of the pipeline), in the order of that worker's
    actions in the Program."""

    def __init__(
        self, lane: PeerLane, shards: int, payload: Reduced, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.worker, self._payload = lane.peer // shards, payload
        """Index of the sender's list of actions in a Program, and the payload of those of its Reduce actions
        that send messages."""
        self.inbox = create_inbox(lane, dtype, device)
        self._expected_keys: deque[StepKey] = deque()
        self._received_messages: dict[StepKey, Tensor] = {}

    def expect(self, program: Program, size: Callable[[str], int]) -> None:
        expected = [
            one
            for one in program.devices[self.worker]
            if isinstance(one, Reduce) and one.payload == self._payload
        ]
        self._expected_keys.extend((one.job, one.step) for one in expected)
        self.inbox.expect((size(one.job),) for one in expected)

    def has_message(self, key: StepKey) -> bool:
        return key in self._received_messages or key in self._expected_keys

    def receive(self, key: StepKey) -> Tensor:
        """Return the message with this key (job and step). Messages of other jobs that arrive earlier are
        kept."""
        while key not in self._received_messages:
            self._received_messages[self._expected_keys.popleft()] = self.inbox.receive(
                f"the {self._payload} of a batch from list {self.worker}"
            )
        return self._received_messages.pop(key)


class Exchange:
    """The exchange of gradients, or of scores, with the workers that hold the same stage in other replicas
    (copies of the pipeline).

    Every replica adds the messages in the same order, so that all replicas, and repeated runs, get the same
    bits. Sending never blocks: gradients are transferred while the workers continue to compute.
    """

    def __init__(
        self,
        connections: WorkerConnections,
        purpose: Literal["share", "scores"],
        dtype: torch.dtype,
        device: torch.device,
        delay: float = 0.0,
    ) -> None:
        shards = connections.position.shards
        payload: Reduced = "gradient" if purpose == "share" else "scores"
        self._others = [
            _Replica(lane, shards, payload, dtype, device) for lane in connections.incoming_lanes(purpose)
        ]
        self.outboxes = [Outbox(lane, device, delay) for lane in connections.outgoing_lanes(purpose)]
        self.inboxes = [other.inbox for other in self._others]
        self._own_messages: dict[StepKey, Tensor] = {}

    def expect(self, program: Program, size: Callable[[str], int]) -> None:
        """Post in advance the receives of a Program. `size` returns the number of values in a message about a
        job."""
        for other in self._others:
            other.expect(program, size)

    def send_to_replicas(self, key: StepKey, message_N: Tensor) -> None:
        """Send a message to all other replicas (copies of the pipeline). `message_N` must not be changed
        afterwards."""
        self._own_messages[key] = message_N
        for outbox in self.outboxes:
            outbox.send(message_N)

    def sum(self, key: StepKey, worker: int, maxima: slice = NOWHERE) -> Tensor:
        """Return the sum of the messages with this key (job and step) over all replicas, added in their
        order. At the indices `maxima`, return the maximum. Waits until all messages have arrived."""
        parts_N = {other.worker: other.receive(key) for other in self._others if other.has_message(key)}
        if key in self._own_messages:
            parts_N[worker] = self._own_messages.pop(key)
        first, *others = (parts_N[one] for one in sorted(parts_N))
        total_N = first.clone()
        for part_N in others:
            largest = torch.maximum(total_N[maxima], part_N[maxima])
            total_N += part_N
            total_N[maxima] = largest
        return total_N
