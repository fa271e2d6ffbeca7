"""Work that runs concurrently with the next kernels of a CUDA stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class SideStream:
    """A second CUDA stream for work that runs concurrently with the next kernels of the main stream: a matrix
    product leaves multiprocessors idle in its last wave, which independent memory-bound work can use."""

    def __init__(self, device: torch.device) -> None:
        """Record the current point of the current (main) CUDA stream. Work on the second stream will wait for
        this point."""
        self._stream = _side_stream(device) if device.type == "cuda" else None
        self._ready = torch.cuda.current_stream(device).record_event() if self._stream else None

    @contextmanager
    def concurrent_work(self) -> Iterator[None]:
        """Return a context in which work is launched on the second stream. At its end, the main stream is
        made to wait for this work. The work must not allocate memory, since the allocator does not track use
        by the second stream."""
        if self._stream is None or self._ready is None:
            yield
            return
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
