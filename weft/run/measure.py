"""What the device has and what was taken of it."""

from __future__ import annotations

import resource
import sys

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
