"""Work on a second stream, concurrent with the main stream's next kernels.

A matrix product leaves multiprocessors idle in its last wave. Memory-bound work that the product does not
depend on can use that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class SideStream:
    def __init__(self, device: torch.device) -> None:
        """Make the second stream wait for everything launched on the current stream until now."""
        self._stream = _stream(device) if device.type == "cuda" else None
        self._ready = torch.cuda.current_stream(device).record_event() if self._stream else None

    @contextmanager
    def done(self) -> Iterator[None]:
        """Run the work launched inside the context on the second stream; later work of the main stream waits
        for it.

        It must not allocate: the allocator would not know that freed memory is still in use there.
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
