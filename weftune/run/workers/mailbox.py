"""Tensors between workers: receives are posted ahead, and a sender never waits for an arrival."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

POSTED_AHEAD = 2
"""Number of receives posted beyond the one that is waited for."""


class PeerLost(RuntimeError):
    """Another worker is gone: messages from it or to it will never arrive."""


@dataclass(frozen=True, slots=True)
class PeerLane:
    """One direction between two workers, with a separate process group, so that nothing else delays it."""

    group: Any
    peer: int


class Inbox:
    """The tensors from one worker, in order, with a few receives posted ahead."""

    def __init__(self, lane: PeerLane, dtype: torch.dtype, device: torch.device) -> None:
        self._lane = lane
        self._dtype, self._device = dtype, device
        self._staged = device.type == "cuda" and dist.get_backend(lane.group) == "gloo"
        self._shapes: deque[tuple[int, ...]] = deque()
        self._posted: deque[tuple[Tensor, Any]] = deque()
        self._number = 0

    def expect(self, shapes: Iterable[tuple[int, ...]]) -> None:
        self._shapes.extend(shapes)
        self._post()

    def receive(self) -> Tensor:
        buffer, work = self._posted.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"worker {self._lane.peer} is gone: {error}") from error
        self._post()
        return buffer.to(self._device, non_blocking=True) if self._staged else buffer

    def _post(self) -> None:
        while self._shapes and len(self._posted) <= POSTED_AHEAD:
            shape = self._shapes.popleft()
            if self._staged:
                buffer = torch.empty(shape, dtype=self._dtype, pin_memory=True)
            else:
                buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
            work = dist.irecv(buffer, self._lane.peer, group=self._lane.group, tag=self._number)
            self._posted.append((buffer, work))
            self._number += 1


class Outbox:
    """The tensors to one worker, sent in order by a thread: the sender never waits for its peer."""

    def __init__(self, lane: PeerLane, delay: float = 0.0) -> None:
        self._lane = lane
        self._delay = delay
        self._queue: queue.Queue[tuple[Tensor, torch.cuda.Event | None] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=f"to worker {lane.peer}", daemon=True)
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

    def flush(self) -> None:
        """Wait until everything has been received."""
        self._queue.join()
        self._raise()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise PeerLost(f"worker {self._lane.peer} is gone: {self._error}") from self._error

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
    """The tensors to a worker with a separate GPU: the library orders them after the compute."""

    def __init__(self, lane: PeerLane) -> None:
        self._lane = lane
        self._works: deque[tuple[Tensor, Any]] = deque()

    def send(self, tensor: Tensor) -> None:
        while self._works and self._works[0][1].is_completed():
            self._works.popleft()
        kept = tensor.detach().contiguous()
        self._works.append((kept, dist.isend(kept, self._lane.peer, group=self._lane.group)))

    def flush(self) -> None:
        while self._works:
            self._works.popleft()[1].wait()

    def close(self) -> None:
        pass


def outbox_for(lane: PeerLane, device: torch.device, delay: float = 0.0) -> Outbox | DirectOutbox:
    """Return an outbox for a lane; `delay` is added to the seconds of every message."""
    direct = device.type == "cuda" and dist.get_backend(lane.group) == "nccl"
    return DirectOutbox(lane) if direct else Outbox(lane, delay)
