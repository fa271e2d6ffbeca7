"""Ctrl-C and SIGTERM: the first asks to finish the step and save, the second stops at once.

A step that takes long is not waited for: the sender may kill the process after 30 seconds.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

FINISHING = 10.0
"""Seconds that steps have to finish after a stop is requested; then open global batches are dropped."""


class StopRequest:
    """A request to stop, as seen by the code that runs a window."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop
        self._since: float | None = None

    def is_pending(self) -> bool:
        """Return whether to stop at the next point where no job is inside a step."""
        if self._since is None and self._stop():
            self._since = time.monotonic()
        return self._since is not None

    def is_overdue(self) -> bool:
        """Return whether to stop at once, wherever the window is."""
        return self.is_pending() and time.monotonic() - (self._since or 0.0) > FINISHING


@contextmanager
def interrupts(on_first: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a stop was requested. Threads other than the main one cannot
    receive signals; there it always returns False."""
    requested, reported = threading.Event(), threading.Event()

    def handle(_: int, __: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    def stop() -> bool:
        # Reported here and not by the handler, which may have interrupted a print itself.
        if requested.is_set() and not reported.is_set():
            reported.set()
            on_first()
        return requested.is_set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
