"""Ctrl-C and SIGTERM: the first asks to finish the step and save, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts(on_first: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Inside, the yielded function says whether somebody asked to stop. Other threads than the main one
    cannot receive signals; there it always says no."""
    asked, told = threading.Event(), threading.Event()

    def handle(_: int, __: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    def stop() -> bool:
        # Told from here: a handler that prints can come upon a print that it has itself interrupted.
        if asked.is_set() and not told.is_set():
            told.set()
            on_first()
        return asked.is_set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
