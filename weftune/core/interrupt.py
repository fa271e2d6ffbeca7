"""Ctrl-C and SIGTERM: the first signal requests to finish the step and save, the second stops at once.

A step that takes too long is abandoned, since the sender may kill the process after 30 seconds.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

FINISH_SECONDS = 10.0
"""Seconds that optimizer steps may take to finish after a request to stop. Global batches that are unfinished
by then are dropped."""


class StopRequest:
    """A request to stop the run, which is checked between the actions of a window (a few global batches of
    every job)."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop
        self._since: float | None = None

    def is_pending(self) -> bool:
        """Return whether the run must stop as soon as no global batch is unfinished."""
        if self._since is None and self._stop():
            self._since = time.monotonic()
        return self._since is not None

    def is_overdue(self) -> bool:
        """Return whether the run must stop at once, even within a global batch."""
        return self.is_pending() and time.monotonic() - (self._since or 0.0) > FINISH_SECONDS


@contextmanager
def handle_interrupts(
    on_first_signal: Callable[[], None], numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM)
) -> Iterator[Callable[[], bool]]:
    """Return a context manager that yields a function, which returns whether one of the signals has requested
    a stop. Outside the main thread, which alone can receive signals, the function always returns False."""
    requested, reported = threading.Event(), threading.Event()

    def handle(_: int, __: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    def stop() -> bool:
        # Reported here and not by the handler, which may have interrupted a print itself.
        if requested.is_set() and not reported.is_set():
            reported.set()
            on_first_signal()
        return requested.is_set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
