"""Memory of captured work: taken once for the hungriest, and nobody else's while graphs are kept."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from weftune.run.measure.memory import release

Work = Callable[[], None]
"""Reads and writes at addresses that never change."""


class Pool(Protocol):
    def capture(self, work: Work) -> Work:
        """What does the work again; whether it is done now, too, nobody may rely on."""

    def has_room(self) -> bool:
        """Whether work that is not captured finds as much memory beside what is held here."""

    def clear(self) -> None:
        """Hand everything back; all that was captured must have been given up."""


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """What is asked for within. Meanwhile other threads may ask their own streams for copies: of stages that
    are read out of their files, or of what goes to another worker.

    Python collects no garbage: with it graphs or page-locked memory could go, and that ends a capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


class GraphPool:
    """On a GPU. Work is captured and done one piece at a time, so that every piece may use the same memory:
    what it leaves behind must lie elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()
        self.held_bytes = 0

    def capture(self, work: Work) -> Work:
        # The allocator hands nothing back while a capture is under way.
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
