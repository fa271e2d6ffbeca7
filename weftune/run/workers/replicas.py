"""What replicas of a stage made of a job's batch, handed out to one another and added up.

Everybody adds in the order of replicas, so that all of them hold the same bits, and two runs do too. Handing
out never waits: gradients cross while the workers compute on.

Shapes: N numbers of a message: a stage's slice of the gradient, and behind it loss and hits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from weftune.plan.program.program import Program, Reduce
from weftune.run.workers.mailbox import Inbox, PeerLane, outbox_for

BEHIND = 2
"""Numbers behind the gradient in a message."""

Key = tuple[str, int]
"""A job and its step."""


class _Replica:
    """What comes from the worker of one other replica, in the order of that worker's list."""

    def __init__(self, lane: PeerLane, dtype: torch.dtype, device: torch.device) -> None:
        self.worker = lane.peer
        self._inbox = Inbox(lane, dtype, device)
        self._coming: deque[Key] = deque()
        self._came: dict[Key, Tensor] = {}

    def expect(self, program: Program, sizes: Mapping[str, int]) -> None:
        coming = [
            one for one in program.devices[self.worker] if isinstance(one, Reduce) and one.what == "gradient"
        ]
        self._coming.extend((one.job, one.step) for one in coming)
        self._inbox.expect((sizes[one.job] + BEHIND,) for one in coming)

    def contributes(self, key: Key) -> bool:
        return key in self._came or key in self._coming

    def take(self, key: Key) -> Tensor:
        """Its jobs may come to their ends in another order than here: what comes before is kept."""
        while key not in self._came:
            self._came[self._coming.popleft()] = self._inbox.take()
        return self._came.pop(key)


class Exchange:
    """One worker's side, for the workers that hold its stage in other replicas; without any it has no use."""

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
        self._own: dict[Key, Tensor] = {}

    def expect(self, program: Program, sizes: Mapping[str, int]) -> None:
        """Post receives ahead. `sizes` are the parameters of every job's slice."""
        for other in self._others:
            other.expect(program, sizes)

    def hand_out(self, key: Key, message_N: Tensor) -> None:
        """`message_N` is taken over."""
        self._own[key] = message_N
        for outbox in self.outboxes:
            outbox.send(message_N)

    def sum(self, key: Key, worker: int) -> Tensor:
        """What all replicas handed out, in their order; waits for the last of them."""
        parts_N = {other.worker: other.take(key) for other in self._others if other.contributes(key)}
        if key in self._own:
            parts_N[worker] = self._own.pop(key)
        first, *others = (parts_N[one] for one in sorted(parts_N))
        total_N = first.clone()
        for part_N in others:
            total_N += part_N
        return total_N
