"""A heartbeat: every worker of a pipeline writes a counter to the shared store every second and checks the
counters of the others.

A worker that died or hangs writes nothing. A worker that notices this ends its own process at once: the
workers depend on each other, so no running work could finish, and the launcher restarts all workers from the
last checkpoints.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import DistStoreError, TCPStore

from weftune.run.workers.groups import WorkerPosition, restart_count

BEAT_SECONDS = 1.0
LOST_AFTER_SECONDS = 7.0
"""Seconds without a new heartbeat after which a worker counts as lost. Heartbeats are checked every second,
so the loss is noticed within 10 seconds."""
ABSENT_AFTER_SECONDS = 300.0
"""Seconds after which a worker that has not written its first heartbeat counts as lost. Its imports may be
slow."""
LOST = 75
"""Exit code of a worker that ended because another worker was lost. The launcher then restarts all
workers."""


class Heartbeat:
    def __init__(
        self, position: WorkerPosition, store: TCPStore, on_loss: Callable[[str], None] | None = None
    ) -> None:
        self._position = position
        self._store = store
        self._on_loss = on_loss or exit_process
        # torchrun keeps its store when it starts all workers again.
        self._restart_count = restart_count()
        self._stop = threading.Event()
        self._last_answer_time = time.monotonic()
        """Time of the machine's clock, in seconds, at which the store last answered."""
        self._thread = threading.Thread(target=self._write_marks, name="heartbeat", daemon=True)
        self._watch = threading.Thread(target=self._watch_store, name="store watch", daemon=True)

    def start(self) -> None:
        """Write this worker's first heartbeat to the store, and start to check the heartbeats of the other
        workers. Called before connecting, so that the loss of any connected worker is noticed."""
        self._store.set(self._key(self._position.worker), "0")
        self._last_answer_time = time.monotonic()
        self._thread.start()
        self._watch.start()

    def stop(self) -> None:
        """Write to the store that this worker has ended normally, so that the other workers do not count it
        as lost."""
        self._stop.set()
        self._thread.join(LOST_AFTER_SECONDS)
        # The launcher may have ended first; then there is no store to write to.
        with suppress(DistStoreError, RuntimeError):
            self._store.set(self._key(self._position.worker), "done")

    def _key(self, worker: int) -> str:
        return f"weftune/beat/{self._restart_count}/{worker}"

    def _write_marks(self) -> None:
        others = [worker for worker in range(self._position.workers) if worker != self._position.worker]
        marks: dict[int, bytes] = {}
        change_times: dict[int, float] = {}
        number = 0
        began = time.monotonic()
        while not self._stop.wait(BEAT_SECONDS):
            number += 1
            try:
                self._store.set(self._key(self._position.worker), str(number))
                for worker in others:
                    # A worker that has not started yet has written no mark.
                    if self._store.check([self._key(worker)]):
                        mark = self._store.get(self._key(worker))
                        if mark != marks.get(worker) or mark == b"done":
                            marks[worker], change_times[worker] = mark, time.monotonic()
            except (DistStoreError, RuntimeError) as error:
                self._report_loss(f"the store that all workers share is gone: {error}")
                return
            self._last_answer_time = time.monotonic()
            late = [
                worker
                for worker, when in change_times.items()
                if time.monotonic() - when > LOST_AFTER_SECONDS
            ]
            if late:
                self._report_loss(
                    f"worker {late[0]} has given no sign of life for {LOST_AFTER_SECONDS:.0f} seconds"
                )
                return
            absent = [worker for worker in others if worker not in change_times]
            if absent and time.monotonic() - began > ABSENT_AFTER_SECONDS:
                self._report_loss(
                    f"worker {absent[0]} has not appeared in {ABSENT_AFTER_SECONDS:.0f} seconds"
                )
                return

    def _watch_store(self) -> None:
        """Check in a second thread whether the store still answers. If the network is cut, a call to the
        store would wait for minutes."""
        while not self._stop.wait(BEAT_SECONDS):
            if time.monotonic() - self._last_answer_time > LOST_AFTER_SECONDS:
                self._report_loss(
                    f"the store that all workers share has not answered for {LOST_AFTER_SECONDS:.0f} seconds"
                )
                return

    def _report_loss(self, message: str) -> None:
        if not self._stop.is_set():
            self._on_loss(message)


def exit_process(message: str) -> None:
    """Print the message and end this process at once. Any thread may call this, since the main thread may be
    waiting for a lost worker."""
    print(f"weftune: {message}", file=sys.stderr, flush=True)
    os._exit(LOST)
