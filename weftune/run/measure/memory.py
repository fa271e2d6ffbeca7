"""Measurement of a device's memory in bytes: how much a run may use, how much is in use, and the peak."""

from __future__ import annotations

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from weftune.errors import UserError

CPU_FRACTION = 0.85
GPU_FRACTION = 0.92
"""Fraction of the free memory that a run may use. The rest is for the allocator and other processes."""
CONTEXT_BYTES = 1 << 30
"""Assumed maximum size in bytes of the GPU memory that CUDA and its libraries use outside torch's
allocator."""
CPU_SHORTAGE = ("can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""Substrings of the RuntimeError that torch raises if memory is short on a CPU. The first occurs with the
allocator malloc, the second with mimalloc, which torch uses on ARM."""


def bytes_before_base(device: torch.device) -> int:
    """Return the size in bytes of the device memory that this process holds before the base is loaded."""
    return 0 if device.type == "cuda" else resident_bytes(device)


def resident_bytes(device: torch.device) -> int:
    """Return the size in bytes of the device memory that is in use now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def budget_bytes(device: torch.device) -> int:
    """Return the total size in bytes of the memory that a run may use on this device, including the memory
    that this process already holds."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_FRACTION)
    return bytes_before_base(device) + int(psutil.virtual_memory().available * CPU_FRACTION)


def fixed_budget_bytes(device: torch.device) -> int:
    """Return the size in bytes of the memory that a run may use on this device, computed without regard to
    how much memory is free now."""
    if device.type == "cuda":
        return int((torch.cuda.get_device_properties(device).total_memory - CONTEXT_BYTES) * GPU_FRACTION)
    return int(psutil.virtual_memory().total * CPU_FRACTION)


def set_memory_limit(device: torch.device, max_bytes: int | None) -> None:
    """Limit torch's allocator on a GPU to `max_bytes`. None sets no limit."""
    if max_bytes is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max_bytes / total), device)


def reset_peak(device: torch.device) -> bool:
    """Reset the peak that `peak_bytes` reports, and return whether that was possible. It is not possible on a
    GPU: there, the memory of a pass captured as a CUDA graph is counted only when it is captured."""
    if device.type == "cuda":
        return False
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory use in bytes since `reset_peak`, or since the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release_cached_memory(device: torch.device) -> None:
    """Release memory that is cached but not in use: on a GPU to the device, on a CPU to the operating
    system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error is a memory shortage, or has replaced a memory shortage that occurred during
    the capture of a CUDA graph."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(words in str(error) for words in CPU_SHORTAGE) or is_out_of_memory(error.__context__)


def visible_gpus(device: str | None) -> int:
    """Return the number of GPUs that a run may use with this value of `--device`: all GPUs for None or
    `cuda`, 1 for a single GPU such as `cuda:1`, and 0 for `cpu`."""
    if device not in (None, "cuda"):
        return int(str(device).startswith("cuda"))
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def requested_devices(count: int | None, kind: str | None, workers: int = 1) -> tuple[str, ...]:
    """Return the first device of each share that `--gpus COUNT` requests. A share is a group of processes
    that trains a part of the jobs on `workers` devices. If `count` is None, as many shares as possible are
    formed. With `--device cpu`, all processes are on the CPU."""
    text = "all" if count is None else str(count)
    if kind == "cpu":
        if count is None:
            raise UserError(
                "--gpus all counts GPUs; with --device cpu write how many processes, such as --gpus 2"
            )
        return ("cpu",) * count
    if kind not in (None, "cuda"):
        raise UserError(
            f"--gpus {text}: --device {kind} names one device; write cuda or cpu, or leave --gpus out"
        )
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if here == 0:
        raise UserError(
            f"--gpus {text}: no GPU is found here, see weftune doctor; leave it out, or start processes on "
            f"the CPU with --device cpu --gpus {count or 2}"
        )
    shares = count or max(1, here // workers)
    if workers == 1 and shares > here:
        raise UserError(f"--gpus {count}: this machine has {here}; write all, or at most {here}")
    if shares * workers > here:
        raise UserError(
            f"--gpus {text}: a share of the jobs needs {workers} GPUs for its stages, replicas and shards, "
            f"so {shares} need {shares * workers}, and this machine has {here}; write smaller numbers"
        )
    return tuple(f"cuda:{number}" for number in range(0, shares * workers, workers))
