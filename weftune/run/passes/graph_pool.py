"""The memory pool of captured work: sized by the largest graph, and reserved while graphs are kept."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from weftune.core.clock import Phase, phase
from weftune.run.measure.memory import release

Work = Callable[[], None]
"""Work that reads and writes at addresses that never change."""


class Pool(Protocol):
    def capture(self, work: Work) -> Work:
        """Return a function that replays the work. Whether the work is also done now is not specified."""

    def has_room(self) -> bool:
        """Return whether there is as much memory beside the pool for uncaptured work."""

    def clear(self) -> None:
        """Free the pool; all graphs in it must have been dropped."""


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture the work launched inside the context. Other threads may use their own streams meanwhile: for
    stages that are read from files, or for tensors to another worker.

    Garbage collection is off: freeing graphs or page-locked memory would end a capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with (
            phase(Phase.CAPTURING),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield
    finally:
        if collects:
            gc.enable()


class GraphPool:
    """A pool on a GPU. Work is captured and replayed one piece at a time, so all pieces may share the same
    memory: their results must be stored elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()
        self.held_bytes = 0

    def capture(self, work: Work) -> Work:
        # The allocator releases nothing during a capture.
        release(self._device)
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        with captured(graph, self._handle, stream):
            work()
        self.held_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph.replay

    def has_room(self) -> bool:
        total = torch.cuda.get_device_properties(self._device).total_memory
        limit = int(total * torch.cuda.get_per_process_memory_fraction(self._device))
        free, _ = torch.cuda.mem_get_info(self._device)
        used = torch.cuda.memory_allocated(self._device) + self.held_bytes
        within = min(limit - used, free + torch.cuda.memory_reserved(self._device) - used)
        return within >= self.held_bytes

    def clear(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self.held_bytes = 0
        release(self._device)
