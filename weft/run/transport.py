"""Hidden states and gradients between neighbours of a pipeline, moved while the device computes.

Receives are posted ahead in the order of the Program, which fixes their shapes; sends are taken over by a
thread of their own that keeps each tensor until its receiver has it.

Shapes: T rows of a microbatch, D hidden width.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.plan.program import Action, Program, Recv, Reduce, Send, Step

AHEAD = 2
"""Receives posted beyond the one that is waited for."""
WORD = 3
"""Numbers in a small message."""


class PeerLost(RuntimeError):
    """Another rank is gone: what was to come from it, or go to it, never will."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction between two neighbours: its own process group, so that nothing stands in its way."""

    group: Any
    peer: int


@dataclass(frozen=True, slots=True)
class Lanes:
    """What a rank exchanges with its neighbours; None where it has none on that side."""

    activation_in: Lane | None
    activation_out: Lane | None
    gradient_in: Lane | None
    gradient_out: Lane | None
    sums_in: Lane | None
    """What a batch came to on the stages after."""
    sums_out: Lane | None
    word_in: Lane | None
    """The first rank's word on a step, from the stage before."""
    word_out: Lane | None


class Inbox:
    """Tensors from one neighbour, in order, a few of them posted ahead."""

    def __init__(self, lane: Lane, dtype: torch.dtype, device: torch.device) -> None:
        self._lane = lane
        self._dtype, self._device = dtype, device
        self._staged = device.type == "cuda" and dist.get_backend(lane.group) == "gloo"
        self._shapes: deque[tuple[int, ...]] = deque()
        self._posted: deque[tuple[Tensor, Any]] = deque()
        self._number = 0

    def expect(self, shapes: Iterable[tuple[int, ...]]) -> None:
        self._shapes.extend(shapes)
        self._post()

    def take(self) -> Tensor:
        buffer, work = self._posted.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"rank {self._lane.peer} is gone: {error}") from error
        self._post()
        return buffer.to(self._device, non_blocking=True) if self._staged else buffer

    def _post(self) -> None:
        while self._shapes and len(self._posted) <= AHEAD:
            shape = self._shapes.popleft()
            if self._staged:
                buffer = torch.empty(shape, dtype=self._dtype, pin_memory=True)
            else:
                buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
            work = dist.irecv(buffer, self._lane.peer, group=self._lane.group, tag=self._number)
            self._posted.append((buffer, work))
            self._number += 1


class Outbox:
    """Tensors for one neighbour. A thread sends them in order, so that the rank never waits for its peer."""

    def __init__(self, lane: Lane, delay: float = 0.0) -> None:
        self._lane = lane
        self._delay = delay
        self._queue: queue.Queue[tuple[Tensor, torch.cuda.Event | None] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=f"to rank {lane.peer}", daemon=True)
        self._thread.start()

    def send(self, tensor: Tensor) -> None:
        self._raise()
        if not tensor.is_cuda:
            self._queue.put((tensor.detach().contiguous(), None))
            return
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        staged.copy_(tensor.detach(), non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        self._queue.put((staged, ready))

    def settle(self) -> None:
        """Wait until everything is with its receiver."""
        self._queue.join()
        self._raise()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise PeerLost(f"rank {self._lane.peer} is gone: {self._error}") from self._error

    def _serve(self) -> None:
        number = 0
        while (item := self._queue.get()) is not None:
            tensor, ready = item
            try:
                if self._error is None:
                    if ready is not None:
                        ready.synchronize()
                    if self._delay:
                        time.sleep(self._delay)
                    dist.send(tensor, self._lane.peer, group=self._lane.group, tag=number)
            except Exception as error:
                self._error = error
            finally:
                number += 1
                self._queue.task_done()


class DirectOutbox:
    """Tensors for a neighbour with a GPU of its own: the library orders them behind the compute."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._works: deque[tuple[Tensor, Any]] = deque()

    def send(self, tensor: Tensor) -> None:
        kept = tensor.detach().contiguous()
        self._works.append((kept, dist.isend(kept, self._lane.peer, group=self._lane.group)))

    def settle(self) -> None:
        while self._works:
            self._works.popleft()[1].wait()

    def close(self) -> None:
        pass


class Transport:
    """All that passes between a rank and its neighbours while a Program runs."""

    def __init__(
        self, lanes: Lanes, width: int, dtype: torch.dtype, device: torch.device, delay: float = 0.0
    ) -> None:
        """With a `delay` every message takes so many seconds more: a slow link, for tests and benchmarks."""
        self._width = width
        cpu = torch.device("cpu")
        self._activation_in = _inbox(lanes.activation_in, dtype, device)
        self._gradient_in = _inbox(lanes.gradient_in, dtype, device)
        self._sums_in = _inbox(lanes.sums_in, torch.float64, cpu)
        self._word_in = _inbox(lanes.word_in, torch.float64, cpu)
        self._activation_out = _outbox(lanes.activation_out, device, delay)
        self._gradient_out = _outbox(lanes.gradient_out, device, delay)
        self._sums_out = _outbox(lanes.sums_out, cpu, 0.0)
        self._word_out = _outbox(lanes.word_out, cpu, 0.0)

    def expect(self, program: Program, actions: Sequence[Action]) -> None:
        """Post the receives of a rank's list ahead."""
        rows = [microbatch.rows for microbatch in program.microbatches]
        for inbox, what in ((self._activation_in, "activation"), (self._gradient_in, "gradient")):
            if inbox is not None:
                coming = [one for one in actions if isinstance(one, Recv) and one.what == what]
                inbox.expect((rows[one.microbatch], self._width) for one in coming)
        if self._sums_in is not None:
            self._sums_in.expect((WORD,) for one in actions if isinstance(one, Reduce))
        if self._word_in is not None:
            self._word_in.expect((WORD,) for one in actions if isinstance(one, Step))

    def receive(self, action: Recv) -> Tensor:
        inbox = self._activation_in if action.what == "activation" else self._gradient_in
        assert inbox is not None, f"{action}: there is no neighbour on that side"
        return inbox.take()

    def send(self, action: Send, tensor_TD: Tensor) -> None:
        outbox = self._activation_out if action.what == "activation" else self._gradient_out
        assert outbox is not None, f"{action}: there is no neighbour on that side"
        outbox.send(tensor_TD)

    def sums_from_next(self) -> Tensor | None:
        """What a job's batch came to on all stages after; None on the last."""
        return None if self._sums_in is None else self._sums_in.take()

    def sums_to_before(self, sums: Tensor) -> None:
        if self._sums_out is not None:
            self._sums_out.send(sums)

    def word_from_before(self) -> Tensor:
        """The first rank's word on the next step, handed on to the stage after at once."""
        assert self._word_in is not None, "the first rank decides by itself"
        word = self._word_in.take()
        self.word_to_next(word)
        return word

    def word_to_next(self, word: Tensor) -> None:
        if self._word_out is not None:
            self._word_out.send(word)

    def settle(self) -> None:
        for outbox in self._outboxes():
            outbox.settle()

    def close(self) -> None:
        for outbox in self._outboxes():
            outbox.close()

    def _outboxes(self) -> list[Outbox | DirectOutbox]:
        boxes = (self._activation_out, self._gradient_out, self._sums_out, self._word_out)
        return [box for box in boxes if box is not None]


def _inbox(lane: Lane | None, dtype: torch.dtype, device: torch.device) -> Inbox | None:
    return None if lane is None else Inbox(lane, dtype, device)


def _outbox(lane: Lane | None, device: torch.device, delay: float) -> Outbox | DirectOutbox | None:
    if lane is None:
        return None
    direct = device.type == "cuda" and dist.get_backend(lane.group) == "nccl"
    return DirectOutbox(lane) if direct else Outbox(lane, delay)
