"""Rows tokenised by several processes, where there are enough rows and cores.

Most of the work holds the interpreter's lock (rows checked, offsets turned into masks), so threads would not
help. A worker process imports no torch: it gets the tokenizer as the text that it is made of, and its chat
templates run in a limited process of its own. A chunk that a worker could not make is made here, so whatever
is wrong with a row is told in the same words.
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
from pathlib import Path
from typing import Any

from weftune.core.limited import receive_bytes, send_bytes

FEWEST_CORES = 4
MOST_WORKERS = 8
PROGRAM = "import sys; sys.path[:] = {path!r}; from weftune.data.workers import serve; serve()"
ALONE = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""Each worker has one core, also where its libraries would take all."""

Work = Callable[[Any, Any], Any]
"""A function of a module: what all items share, and one item."""


def worker_count() -> int:
    """Workers that this machine has cores for; 0 where they would not be faster."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, cores) if cores >= FEWEST_CORES else 0


class Workers:
    def __init__(self, count: int) -> None:
        """Processes are started by `start`, or as they are needed."""
        self._count = count
        self.answers = False
        """Whether a worker has answered: they take a moment to start."""
        self._is_started = False
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokeniser")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all = [_Worker() for _ in range(count)]
        for worker in self._all:
            self._idle.put(worker)

    def start(self, work: Work, shared: Any) -> None:
        """Start all of them, once, with what they need for this work, and go on meanwhile."""
        if not self._is_started:
            self._is_started = True
            known = _pickled((work.__module__, work.__qualname__, shared))
            for _ in range(self._count):
                # An item that no work takes: the answer is that there is none.
                self._threads.submit(self._asked, known, None)

    def each(self, work: Work, shared: Any, items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Every item, in order, with what `work` made of it; in this thread where a worker could not."""
        known = _pickled((work.__module__, work.__qualname__, shared))
        waiting: deque[tuple[Any, Future[Any]]] = deque()
        try:
            for item in items:
                waiting.append((item, self._threads.submit(self._asked, known, item)))
                # Enough to keep all of them busy, and no more rows in memory than that.
                if len(waiting) > 2 * self._count:
                    yield _made(work, shared, *waiting.popleft())
            while waiting:
                yield _made(work, shared, *waiting.popleft())
        finally:
            for _, made in waiting:
                made.cancel()

    def _asked(self, known: bytes, item: Any) -> bytes:
        payload = _pickled(item)
        if not (known and payload):
            return b""
        worker = self._idle.get()
        try:
            return worker.ask(known, payload)
        finally:
            self.answers = True
            self._idle.put(worker)

    def end(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.end()


def _pickled(value: Any) -> bytes:
    """Empty where that cannot be: rows from Python can hold anything."""
    try:
        return pickle.dumps(value)
    except Exception:
        return b""


def _made(work: Work, shared: Any, item: Any, reply: Future[bytes]) -> tuple[Any, Any]:
    found = reply.result()
    return item, pickle.loads(found) if found else work(shared, item)


class _Worker:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._told = b""
        """The digest of what the process was last told that items share."""

    def ask(self, known: bytes, payload: bytes) -> bytes:
        """What the process made of an item; empty where it could not, or was lost."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        digest = hashlib.blake2b(known).digest()
        try:
            send_bytes(process.stdin, b"" if digest == self._told else known)
            send_bytes(process.stdin, payload)
            self._told = digest
            return receive_bytes(process.stdout) or b""
        except OSError:
            return b""

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            paths = [str(Path(__file__).parents[2]), *(path for path in sys.path if path)]
            self._told = b""
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(path=paths)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | ALONE,
            )
        return self._process

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_LOCK = threading.Lock()
_WORKERS: dict[int, Workers] = {}
"""Of this process, not of one that it is a fork of."""


def workers_here(count: int) -> Workers:
    """Started once, and used for all tables until `end_workers`."""
    with _LOCK:
        if os.getpid() not in _WORKERS:
            _WORKERS[os.getpid()] = Workers(count)
        return _WORKERS[os.getpid()]


def workers_answer() -> bool:
    """Whether workers of this process have been started, and are there."""
    workers = _WORKERS.get(os.getpid())
    return workers is not None and workers.answers


def end_workers() -> None:
    with _LOCK:
        workers = _WORKERS.pop(os.getpid(), None)
    if workers is not None:
        workers.end()


atexit.register(end_workers)


def serve() -> None:
    """A worker's own side: answer until whoever asks is gone; an empty answer where an item has none."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the other one decides
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    work: Work | None = None
    shared: Any = None
    while (known := receive_bytes(stdin)) is not None:
        payload = receive_bytes(stdin)
        if payload is None:
            return
        reply = b""
        with suppress(Exception):
            if known:
                module, name, shared = pickle.loads(known)
                work = getattr(import_module(module), name)
            if work is not None:
                reply = pickle.dumps(work(shared, pickle.loads(payload)))
        send_bytes(stdout, reply)
