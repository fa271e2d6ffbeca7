"""Exchange of gradients between the replicas of a stage, summed for each job's batch.

Every replica adds in the same order, so that all hold the same bits, and so do two runs. Sending never
blocks: gradients are transferred while the workers continue to compute.

Shapes: N numbers of a message: a stage's slice of the gradient, then loss and correct predictions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from weftune.plan.program.program import Program, Reduce
from weftune.run.workers.mailbox import Inbox, PeerLane, outbox_for

BEHIND = 2
"""Number of values after the gradient in a message."""

StepKey = tuple[str, int]
"""A job and its step."""


class _Replica:
    """The messages from one other replica's worker, in the order of that worker's list."""

    def __init__(self, lane: PeerLane, dtype: torch.dtype, device: torch.device) -> None:
        self.worker = lane.peer
        self._inbox = Inbox(lane, dtype, device)
        self._coming: deque[StepKey] = deque()
        self._came: dict[StepKey, Tensor] = {}

    def expect(self, program: Program, sizes: Mapping[str, int]) -> None:
        coming = [
            one for one in program.devices[self.worker] if isinstance(one, Reduce) and one.what == "gradient"
        ]
        self._coming.extend((one.job, one.step) for one in coming)
        self._inbox.expect((sizes[one.job] + BEHIND,) for one in coming)

    def contributes(self, key: StepKey) -> bool:
        return key in self._came or key in self._coming

    def take(self, key: StepKey) -> Tensor:
        """Return the message of a job's batch. The other replica may finish jobs in another order: earlier
        messages are kept."""
        while key not in self._came:
            self._came[self._coming.popleft()] = self._inbox.take()
        return self._came.pop(key)


class Exchange:
    """One worker's side of the exchange with the workers that hold its stage in other replicas, if there are
    any."""

    def __init__(
        self,
        lanes_in: tuple[PeerLane, ...],
        lanes_out: tuple[PeerLane, ...],
        dtype: torch.dtype,
        device: torch.device,
        delay: float = 0.0,
    ) -> None:
        self._others = [_Replica(lane, dtype, device) for lane in lanes_in]
        self.outboxes = [outbox_for(lane, device, delay) for lane in lanes_out]
        self._own: dict[StepKey, Tensor] = {}

    def expect(self, program: Program, sizes: Mapping[str, int]) -> None:
        """Post receives ahead. `sizes` maps each job to the parameters of its slice."""
        for other in self._others:
            other.expect(program, sizes)

    def hand_out(self, key: StepKey, message_N: Tensor) -> None:
        """Send a message to all other replicas; `message_N` must not be changed afterwards."""
        self._own[key] = message_N
        for outbox in self.outboxes:
            outbox.send(message_N)

    def sum(self, key: StepKey, worker: int) -> Tensor:
        """Return the sum over all replicas in their order; waits for the last of them."""
        parts_N = {other.worker: other.take(key) for other in self._others if other.contributes(key)}
        if key in self._own:
            parts_N[worker] = self._own.pop(key)
        first, *others = (parts_N[one] for one in sorted(parts_N))
        total_N = first.clone()
        for part_N in others:
            total_N += part_N
        return total_N
