"""What the device has and what was taken of it."""

from __future__ import annotations

import resource
import sys
import time

import psutil
import torch

CPU_SHARE = 0.85
GPU_SHARE = 0.92
"""How much of what is free a run may plan with; the rest is for the allocator and for others."""


def taken_bytes(device: torch.device) -> int:
    """What this process holds before the base is loaded."""
    return 0 if device.type == "cuda" else psutil.Process().memory_info().rss


def budget_bytes(device: torch.device) -> int:
    """What a run may take on this device in all, what it already holds included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    return taken_bytes(device) + int(psutil.virtual_memory().available * CPU_SHARE)


def peak_bytes(device: torch.device) -> int:
    """The most that was ever taken."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release(device: torch.device) -> None:
    """Hand cached memory back after a pass did not fit."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Also where the end of a graph's capture has complained about what the shortage left behind."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return "can't allocate memory" in str(error) or is_out_of_memory(error.__context__)


class Stopwatch:
    """Seconds on a device from its making to `stop`; on a GPU they are known only when it has got there."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in "ab"] if device.type == "cuda" else []
        self._times = [0.0, 0.0]
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def seconds(self) -> float:
        if self._events:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) / 1000
        return self._times[1] - self._times[0]

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        else:
            self._times[which] = time.perf_counter()
