"""Queues of tensors between workers. Receives are posted ahead, and a sender never waits until a tensor has
arrived.

With NCCL, an operation that waits for the other worker (its peer) occupies the device. Every operation that
synchronises the device (such as the capture of a graph, or the return of memory to the driver) then waits for
the peer, and the peer may be waiting for this worker. So a transfer starts on both devices only when both
workers are ready for it: each tensor is announced by a message in host memory, which threads of both workers
exchange.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weftune.run.workers.ordered import POLL_SECONDS, WaitWatch

POSTED_AHEAD = 2
"""Number of receives that are posted in addition to the receive that is waited for."""


class PeerLost(RuntimeError):
    """Raised if the worker at the other end of a connection is gone, so that messages from it or to it will
    never arrive."""


@dataclass(frozen=True, slots=True)
class PeerLane:
    """One direction of communication between this worker and another worker, the peer. It has a separate
    process group, so that no other messages delay it."""

    group: Any
    peer: int
    announcement_group: Any = None
    """Process group in host memory over which each tensor is announced before it is sent. None if `group`
    itself waits in host memory, as gloo does, so that no announcement is needed."""
    watch: WaitWatch | None = None
    """In tests, the object that detects deadlocks between workers. None otherwise."""

    @contextmanager
    def record_wait(self, description: object) -> Iterator[None]:
        """Return a context in which the caller waits for the other worker (the peer). A RuntimeError in it
        means that the peer is gone, and is raised as PeerLost."""
        recorded = (
            nullcontext() if self.watch is None else self.watch.record_wait([self.peer], str(description))
        )
        try:
            with recorded:
                yield
        except PeerLost:
            raise
        except RuntimeError as error:
            raise self.make_peer_lost(error) from error

    def make_peer_lost(self, error: BaseException) -> PeerLost:
        return PeerLost(f"worker {self.peer} is gone: {error}")


class Inbox:
    """The queue of tensors that arrive from one worker, in the order in which they were sent. A few receives
    are posted ahead."""

    def __init__(self, lane: PeerLane, dtype: torch.dtype, device: torch.device) -> None:
        self._lane = lane
        self._dtype, self._device = dtype, device
        self._staged = device.type == "cuda"
        self._shapes: deque[tuple[int, ...]] = deque()
        self._posted_receives: deque[tuple[Tensor, Any]] = deque()
        self._number = 0

    def expect(self, shapes: Iterable[tuple[int, ...]]) -> None:
        self._shapes.extend(shapes)
        self._post_receive()

    def receive(self, description: object = "a tensor") -> Tensor:
        """Return the next tensor, on this worker's device. `description` names the tensor in error messages
        about deadlocks between workers."""
        self._post_receive()
        buffer, work = self._posted_receives.popleft()
        with self._lane.record_wait(description):
            work.wait()
        self._post_receive()
        return buffer.to(self._device, non_blocking=True) if self._staged else buffer

    def close(self) -> None:
        pass

    def _post_receive(self) -> None:
        while self._shapes and len(self._posted_receives) <= POSTED_AHEAD:
            buffer = torch.empty(self._shapes[0], dtype=self._dtype, pin_memory=self._staged)
            self._shapes.popleft()
            work = dist.irecv(buffer, self._lane.peer, group=self._lane.group, tag=self._number)
            self._posted_receives.append((buffer, work))
            self._number += 1


class DirectInbox:
    """The queue of tensors that arrive from a worker with a separate GPU, received directly on the device. A
    thread starts to receive each tensor when it has been announced."""

    def __init__(self, lane: PeerLane, dtype: torch.dtype, device: torch.device) -> None:
        self._lane = lane
        self._dtype, self._device = dtype, device
        self._shapes: deque[tuple[int, ...]] = deque()
        self._posted_receives: deque[Tensor] = deque()
        self._queue: queue.Queue[tuple[Tensor, torch.cuda.Event | None] | None] = queue.Queue()
        self._started_transfers: queue.Queue[Any] = queue.Queue()
        """Handles of the receives that have started. If the sender is gone, the queue contains a PeerLost
        instead of a handle."""
        self._thread = threading.Thread(target=self._serve, name=f"from worker {lane.peer}", daemon=True)
        self._thread.start()

    def expect(self, shapes: Iterable[tuple[int, ...]]) -> None:
        self._shapes.extend(shapes)
        self._post_receive()

    def receive(self, description: object = "a tensor") -> Tensor:
        """Return the next tensor, on this worker's device. `description` names the tensor in error messages
        about deadlocks between workers."""
        self._post_receive()
        with self._lane.record_wait(description):
            work = self._next_started()
            if isinstance(work, PeerLost):
                self._started_transfers.put(work)
                raise work
            work.wait()
        buffer = self._posted_receives.popleft()
        self._post_receive()
        return buffer

    def close(self) -> None:
        self._queue.put(None)

    def _post_receive(self) -> None:
        while self._shapes and len(self._posted_receives) <= POSTED_AHEAD:
            # Not in the thread: a lack of memory is to be found where it can be handled.
            buffer = torch.empty(self._shapes[0], dtype=self._dtype, device=self._device)
            self._shapes.popleft()
            self._posted_receives.append(buffer)
            self._queue.put((buffer, _record_event(buffer)))

    def _next_started(self) -> Any:
        if self._lane.watch is None:
            return self._started_transfers.get()
        while True:
            try:
                return self._started_transfers.get(timeout=POLL_SECONDS)
            except queue.Empty:
                self._lane.watch.check_for_cycle()

    def _serve(self) -> None:
        with _separate_stream(self._device):
            try:
                while (posted := self._queue.get()) is not None:
                    self._started_transfers.put(self._start(*posted))
            except Exception as error:
                self._started_transfers.put(self._lane.make_peer_lost(error))

    def _start(self, buffer: Tensor, free_event: torch.cuda.Event | None) -> Any:
        """Wait until a tensor is announced, and start to receive it in `buffer` once the event `free_event`
        is done. Return the handle of the receive."""
        dist.recv(_announcement_buffer(), self._lane.peer, group=self._lane.announcement_group)
        if free_event is not None:
            free_event.wait()
        return dist.irecv(buffer, self._lane.peer, group=self._lane.group)


class Outbox:
    """The queue of tensors that are sent to one worker, the peer. A thread sends them in order, so that the
    caller of `send` never waits for the peer."""

    def __init__(self, lane: PeerLane, device: torch.device, delay: float = 0.0) -> None:
        """Start the thread that sends tensors. `delay` is the number of seconds by which tests delay every
        message."""
        self._lane = lane
        self._device = device
        self._delay = delay
        self._queue: queue.Queue[tuple[Tensor, torch.cuda.Event | None] | None] = queue.Queue()
        self._started_transfers: deque[tuple[Tensor, Any]] = deque()
        """Tensors whose transfer between devices has started and may not have ended, with the handle of each
        transfer."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=f"to worker {lane.peer}", daemon=True)
        self._thread.start()

    def send(self, tensor: Tensor) -> None:
        self._raise_failure()
        given = kept = tensor.detach().contiguous()
        if given.is_cuda and self._lane.announcement_group is None:
            kept = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
            kept.copy_(given, non_blocking=True)
        self._queue.put((kept, _record_event(given)))

    def flush(self) -> None:
        """Wait until the receiving worker has received all tensors."""
        with self._lane.record_wait("the last of its messages to be received"):
            self._queue.join()
            while self._started_transfers and self._error is None:
                self._started_transfers.popleft()[1].wait()
        self._raise_failure()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._lane.make_peer_lost(self._error) from self._error

    def _serve(self) -> None:
        is_direct, number = self._lane.announcement_group is not None, 0
        transfer = self._start if is_direct else self._send
        with _separate_stream(self._device) if is_direct else nullcontext():
            while (item := self._queue.get()) is not None:
                try:
                    if self._error is None:
                        time.sleep(self._delay)
                        transfer(*item, number)
                except Exception as error:
                    self._error = error
                finally:
                    number += 1
                    self._queue.task_done()

    def _send(self, tensor: Tensor, ready_event: torch.cuda.Event | None, number: int) -> None:
        """Send a tensor that is in host memory, and return when the other worker has received it."""
        if ready_event is not None:
            ready_event.synchronize()
        dist.send(tensor, self._lane.peer, group=self._lane.group, tag=number)

    def _start(self, tensor: Tensor, ready_event: torch.cuda.Event | None, number: int) -> None:
        """Announce a tensor that is on the device, and start its transfer as soon as the receiver is ready
        for it."""
        dist.send(_announcement_buffer(), self._lane.peer, group=self._lane.announcement_group)
        if ready_event is not None:
            ready_event.wait()
        while self._started_transfers and self._started_transfers[0][1].is_completed():
            self._started_transfers.popleft()
        self._started_transfers.append((tensor, dist.isend(tensor, self._lane.peer, group=self._lane.group)))


def create_inbox(lane: PeerLane, dtype: torch.dtype, device: torch.device) -> Inbox | DirectInbox:
    made = Inbox if lane.announcement_group is None else DirectInbox
    return made(lane, dtype, device)


def _announcement_buffer() -> Tensor:
    return torch.zeros(1)


def _record_event(tensor: Tensor) -> torch.cuda.Event | None:
    """Return a CUDA event after all work launched so far on the tensor's GPU. None for a tensor on a CPU."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def _separate_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a thread's work on a GPU runs on a separate stream."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
