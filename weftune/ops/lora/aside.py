"""Work that the device may do beside what its stream is asked for next.

A frozen product leaves multiprocessors idle in its last turn. What needs memory more than arithmetic, and is
not needed by the product, finds its time there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class Aside:
    def __init__(self, device: torch.device) -> None:
        """What is done aside waits for all that the stream has been asked for until now."""
        self._stream = _stream(device) if device.type == "cuda" else None
        self._ready = torch.cuda.current_stream(device).record_event() if self._stream else None

    @contextmanager
    def done(self) -> Iterator[None]:
        """What is asked for within is done aside; what the stream is asked for afterwards waits for it.

        It may allocate nothing: memory that it gave back would not be known to be in use by it.
        """
        if self._stream is None or self._ready is None:
            yield
            return
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
