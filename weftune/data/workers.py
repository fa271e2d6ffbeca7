"""Tokenisation in several processes, if there are enough rows and cores.

Most of the work holds the interpreter lock (checking rows, computing masks), so threads would not help. A
worker process imports no torch: it gets the tokenizer serialised as text, and renders chat templates in its
own limited process. A chunk that a worker could not tokenise is tokenised by the caller, so that errors in
rows have the same messages.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any

from weftune.core.limited import receive_bytes, send_bytes, start_server

MIN_CORES = 4
MAX_WORKERS = 8
SINGLE_CORE_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""Environment variables that limit the libraries of each worker to one core."""

Work = Callable[[Any, Any], Any]
"""Module-level function that workers call for each item. The function's arguments are the values shared by
all items, and the item."""


def worker_count() -> int:
    """Return the number of workers for this machine's cores; 0 if workers would not be faster."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_WORKERS, cores) if cores >= MIN_CORES else 0


class Workers:
    def __init__(self, count: int) -> None:
        """Create `count` workers. Their processes are started by `start`, or when the first item needs
        them."""
        self._count = count
        self.has_answered = False
        """Whether any worker has answered yet. Until then, the caller should do the work itself, since
        starting a worker takes a moment."""
        self._is_started = False
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokeniser")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all = [_Worker() for _ in range(count)]
        for worker in self._all:
            self._idle.put(worker)

    def start(self, function: Work, shared_values: Any) -> None:
        """Start all worker processes without waiting for them, and send them the shared values. Later calls
        have no effect."""
        if not self._is_started:
            self._is_started = True
            known = _pickle_or_empty((function.__module__, function.__qualname__, shared_values))
            for _ in range(self._count):
                # None is not a valid item for any work: the reply is empty.
                self._threads.submit(self._request_result, known, None)

    def map_items(
        self, function: Work, shared_values: Any, items: Iterable[Any]
    ) -> Iterator[tuple[Any, Any]]:
        """Yield each item with its result, in order; if a worker fails, `function` runs in this process."""
        known = _pickle_or_empty((function.__module__, function.__qualname__, shared_values))
        pending_items: deque[tuple[Any, Future[Any]]] = deque()
        try:
            for item in items:
                pending_items.append((item, self._threads.submit(self._request_result, known, item)))
                # Enough to keep all workers busy without holding more rows in memory.
                if len(pending_items) > 2 * self._count:
                    yield _run_item(function, shared_values, *pending_items.popleft())
            while pending_items:
                yield _run_item(function, shared_values, *pending_items.popleft())
        finally:
            for _, reply in pending_items:
                reply.cancel()

    def _request_result(self, shared_values: bytes, item: Any) -> bytes:
        payload = _pickle_or_empty(item)
        if not (shared_values and payload):
            return b""
        worker = self._idle.get()
        try:
            return worker.request(shared_values, payload)
        finally:
            self.has_answered = True
            self._idle.put(worker)

    def shutdown(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.shutdown()


def _pickle_or_empty(value: Any) -> bytes:
    """Return the pickled value; empty if it cannot be pickled, as is the case for some rows from Python."""
    try:
        return pickle.dumps(value)
    except Exception:
        return b""


def _run_item(function: Work, shared_values: Any, item: Any, reply: Future[bytes]) -> tuple[Any, Any]:
    found = reply.result()
    return item, pickle.loads(found) if found else function(shared_values, item)


class _Worker:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._sent_digest = b""
        """Digest of the shared values that were last sent to the process, so that equal values are not sent
        again."""

    def request(self, shared_values: bytes, payload: bytes) -> bytes:
        """Return the pickled result that the process computed for an item; empty if it failed or died."""
        process = self._ensure_started()
        assert process.stdin is not None
        assert process.stdout is not None
        digest = hashlib.blake2b(shared_values).digest()
        try:
            send_bytes(process.stdin, b"" if digest == self._sent_digest else shared_values)
            send_bytes(process.stdin, payload)
            self._sent_digest = digest
            return receive_bytes(process.stdout) or b""
        except OSError:
            return b""

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._sent_digest, self._process = b"", start_server(__name__, SINGLE_CORE_ENVIRONMENT)
        return self._process

    def shutdown(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_LOCK = threading.Lock()
_WORKERS: dict[int, Workers] = {}
"""Maps the id of a process to the workers that it has created, so that a forked process does not use its
parent's workers."""


def get_workers(count: int) -> Workers:
    """Return this process's workers, created once and reused for all tables until `end_workers`."""
    with _LOCK:
        if os.getpid() not in _WORKERS:
            _WORKERS[os.getpid()] = Workers(count)
        return _WORKERS[os.getpid()]


def have_workers_answered() -> bool:
    """Return whether workers of this process have been started and have answered."""
    workers = _WORKERS.get(os.getpid())
    return workers is not None and workers.has_answered


def end_workers() -> None:
    with _LOCK:
        workers = _WORKERS.pop(os.getpid(), None)
    if workers is not None:
        workers.shutdown()


atexit.register(end_workers)


def serve() -> None:
    """Answer requests in a worker process until the caller closes the pipe. The reply is empty if an item
    fails."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the parent decides
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    function: Work | None = None
    shared_values: Any = None
    while (known := receive_bytes(stdin)) is not None:
        payload = receive_bytes(stdin)
        if payload is None:
            return
        reply = b""
        with suppress(Exception):
            if known:
                module, name, shared_values = pickle.loads(known)
                function = getattr(import_module(module), name)
            if function is not None:
                reply = pickle.dumps(function(shared_values, pickle.loads(payload)))
        send_bytes(stdout, reply)
