"""A process group with NCCL's rules on top of gloo, for tests of several workers on a CPU.

The operations of a communicator complete one after another, in the order in which each member enqueued them.
A send completes only when its receive has been enqueued, since nothing is buffered. All members must enqueue
operations that match in kind, size and order. Gloo tolerates orders that break these rules; here a mismatch
raises OrderError on every member, and so does a deadlock.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "ordered"
POLL_SECONDS = 0.5
"""Seconds between two checks for a deadlock, in which a worker reads what the other workers wait for."""
STABLE_POLLS = 6
"""Number of consecutive checks that must find the same deadlock before it is reported, since a message may be
on its way."""


class OrderError(AssertionError):
    """Raised for an order of operations between workers with which NCCL would hang or mix up messages. Such
    an order is always a bug in Weftune."""


# -- cycles of workers that wait for one another ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wait:
    """A worker's wait for an operation, with the workers that it waits for."""

    number: int
    """Serial number of this wait among all waits of its worker."""
    peers: tuple[int, ...]
    """Workers for which this worker waits. At least one of them has not reached the operation."""
    operation: str
    operation_key: str = ""
    """Name of the communicator and index of the awaited operation in it. Empty if the worker does not wait
    for an operation of an `OrderedGroup`."""

    def is_at_operation_of(self, other_wait: Wait) -> bool:
        """Return whether the workers of both waits have reached the same operation, and therefore do not wait
        for each other."""
        return self.operation_key != "" and self.operation_key == other_wait.operation_key


class WaitWatch:
    """A detector of deadlocks between workers. Each worker records what it waits for in a store that all
    workers share, and searches for a cycle of workers that wait for one another."""

    def __init__(self, store: Any, worker: int) -> None:
        self._store, self._worker = store, worker
        self._numbers = count()
        self._cycle: tuple[tuple[int, Wait], ...] = ()
        """Workers of the last cycle of waiting workers that was found, each with its wait."""
        self._repeat_count = 0
        """Number of consecutive checks in which the cycle `_cycle` was found again."""

    @contextmanager
    def record_wait(self, peers: Sequence[int], operation: str, operation_key: str = "") -> Iterator[None]:
        """Return a context in which this worker is recorded as waiting for `peers`. The record is kept after
        an OrderError, so that the other workers of the deadlock find the deadlock, too."""
        wait = Wait(next(self._numbers), tuple(peers), operation, operation_key)
        self._store.set(_key(self._worker), json.dumps(asdict(wait)))
        try:
            yield
        except OrderError:
            raise
        except BaseException:
            self._store.set(_key(self._worker), "")
            raise
        self._store.set(_key(self._worker), "")

    def check_for_cycle(self) -> None:
        """Raise OrderError if this worker is in a deadlock that several consecutive checks have found. Called
        repeatedly while the worker waits."""
        cycle = self._find_cycle()
        self._repeat_count = self._repeat_count + 1 if cycle and cycle == self._cycle else 0
        self._cycle = cycle
        if self._repeat_count >= STABLE_POLLS:
            told = ", ".join(f"worker {worker} waits for {wait.operation}" for worker, wait in cycle)
            raise OrderError(f"workers wait for one another, as they would with NCCL: {told}")

    def _find_cycle(self) -> tuple[tuple[int, Wait], ...]:
        """Return the workers of a cycle that wait for one another and include this worker, each with its
        wait. Empty if there is no such cycle."""
        own = self._read(self._worker)
        if own is None:
            return ()
        paths: list[tuple[tuple[int, Wait], ...]] = [((self._worker, own),)]
        seen = {self._worker}
        while paths:
            path = paths.pop()
            wait = path[-1][1]
            for peer in wait.peers:
                if (found := self._read(peer)) is None or wait.is_at_operation_of(found):
                    continue
                if peer == self._worker:
                    return path
                if peer not in seen:
                    seen.add(peer)
                    paths.append((*path, (peer, found)))
        return ()

    def _read(self, worker: int) -> Wait | None:
        if not self._store.check([_key(worker)]) or not (text := self._store.get(_key(worker))):
            return None
        said = json.loads(text)
        return Wait(**{**said, "peers": tuple(said["peers"])})


def make_watch(worker: int) -> WaitWatch:
    """Return a detector of deadlocks for this worker that uses the store of the default process group."""
    return WaitWatch(dist.distributed_c10d._get_default_store(), worker)


def _key(worker: int) -> str:
    return f"waits/{worker}"


# -- the process group ------------------------------------------------------------------------------------

OperationKind = Literal["send", "receive", "sum"]
KINDS: tuple[OperationKind, ...] = ("send", "receive", "sum")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@dataclass(frozen=True, slots=True)
class Operation:
    kind: OperationKind
    values: int
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, kind: OperationKind, tensor: Tensor) -> Operation:
        return cls(kind, tensor.numel(), tensor.dtype)

    @classmethod
    def from_header(cls, header: Tensor) -> Operation:
        kind, values, dtype = header.tolist()
        return cls(KINDS[kind], values, DTYPES[dtype])

    def header(self) -> Tensor:
        return torch.tensor([KINDS.index(self.kind), self.values, DTYPES.index(self.dtype)])

    def matches(self, other: Operation) -> bool:
        kinds = {self.kind, other.kind}
        fits = kinds in ({"send", "receive"}, {"sum"})
        return fits and (self.values, self.dtype) == (other.values, other.dtype)

    def __str__(self) -> str:
        return f"a {self.kind} of {self.values} values of {str(self.dtype).removeprefix('torch.')}"


@dataclass(slots=True)
class OrderedWork:
    """The handle of an operation that has been enqueued, with the interface of torch's `Work`."""

    operation: Operation
    operation_key: str
    run: Callable[[], Any]
    peers: tuple[int, ...]
    watch: WaitWatch
    error: BaseException | None = None
    done_event: threading.Event = field(default_factory=threading.Event)

    def is_completed(self) -> bool:
        return self.done_event.is_set()

    def wait(self, timeout: object = None) -> bool:
        if threading.current_thread() is not threading.main_thread():
            # Of a worker with several threads, only the main thread can be part of a cycle.
            self.done_event.wait()
        elif not self.done_event.wait(POLL_SECONDS):
            others = " and ".join(map(str, self.peers))
            with self.watch.record_wait(
                self.peers, f"{self.operation} with worker {others}", self.operation_key
            ):
                while not self.done_event.wait(POLL_SECONDS):
                    self.watch.check_for_cycle()
        if self.error is not None:
            raise self.error
        return True


class OrderedGroup(dist.ProcessGroup):
    """A process group over gloo that keeps NCCL's rules of order: point-to-point transfers between two
    workers, and all-reduces over all of them."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
        self._members = tuple(options.global_ranks_in_group)
        self._name = options.group_id
        self._worker = self._members[rank]
        self._watch = make_watch(self._worker)
        self._enqueued = 0
        self._queue: queue.Queue[OrderedWork] = queue.Queue()
        threading.Thread(target=self._serve, name=f"ordered group {self._name}", daemon=True).start()

    def getBackendName(self) -> str:
        return BACKEND

    def send(  # type: ignore[override]
        self, tensors: Sequence[Tensor], peer: int, tag: int
    ) -> OrderedWork:
        (tensor,) = tensors
        return self._enqueue("send", tensor, lambda: self._gloo.send([tensor], peer, 0))

    def recv(  # type: ignore[override]
        self, tensors: Sequence[Tensor], peer: int, tag: int
    ) -> OrderedWork:
        (tensor,) = tensors
        return self._enqueue("receive", tensor, lambda: self._gloo.recv([tensor], peer, 0))

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], options: Any = None
    ) -> OrderedWork:
        (tensor,) = tensors
        assert options is None or options.reduceOp == dist.ReduceOp.SUM, "only sums are implemented"
        return self._enqueue("sum", tensor, lambda: self._gloo.allreduce([tensor]))

    def _enqueue(self, kind: OperationKind, tensor: Tensor, run: Callable[[], Any]) -> OrderedWork:
        assert kind == "sum" or len(self._members) == 2, "messages have communicators of two workers"
        others = tuple(one for one in self._members if one != self._worker)
        operation_key = f"{self._name}/{self._enqueued}"
        self._enqueued += 1
        work = OrderedWork(Operation.from_tensor(kind, tensor), operation_key, run, others, self._watch)
        self._queue.put(work)
        return work

    def _serve(self) -> None:
        first_error: Exception | None = None
        while True:
            work = self._queue.get()
            try:
                if first_error is None:
                    self._await_match(work.operation)
                    work.run().wait()
            except Exception as error:
                first_error = error
            work.error = first_error
            work.done_event.set()

    def _await_match(self, operation: Operation) -> None:
        """Wait until every member of the group has reached this operation; raise OrderError unless the
        operations of all members match."""
        header = operation.header()
        headers = [torch.zeros_like(header) for _ in self._members]
        self._gloo.allgather([headers], [header]).wait()
        for member, found in zip(self._members, map(Operation.from_header, headers), strict=True):
            if member != self._worker and not operation.matches(found):
                raise OrderError(
                    f"worker {self._worker} is at {operation}, where worker {member} is at {found}; the "
                    "members of a communicator must enqueue operations of one kind and size in one order"
                )


def register() -> None:
    """Register `OrderedGroup` with torch as a backend for process groups, unless it is registered already."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, lambda options, _: OrderedGroup(options), True, ["cpu"])
