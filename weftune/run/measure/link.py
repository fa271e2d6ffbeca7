"""Measurements for planning a streamed base: the bandwidths of host memory, files and device memory, and the
speed of matrix products on the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weftune.base.host.pinned import allocate_host_bytes
from weftune.base.host.source import CHUNK_BYTES, MappedFile
from weftune.plan.layout.need import EMULATED_BANDWIDTH, EMULATED_FLOPS
from weftune.run.measure.memory import release_cached_memory
from weftune.run.measure.timers import Stopwatch

SAMPLE_BYTES = 256 << 20
MATRIX_SIDE = 8192
"""Number of rows and columns of the matrices whose product is measured."""
LAYER_EFFICIENCY = 0.85
"""Ratio of the speed of a whole layer's forward pass to the speed of a plain matrix product. Both speeds are
in floating-point operations per second."""


@dataclass(frozen=True, slots=True)
class HostLink:
    bandwidth: float
    """Bandwidth in bytes per second of copies from host to device."""
    duplex_bandwidth: float
    """Bandwidth in bytes per second of copies from host to device while as many bytes are copied back."""
    flops: float
    """Speed of forward passes in floating-point operations per second."""
    memory_bandwidth: float = math.inf
    """Bandwidth in bytes per second with which the device reads and writes its own memory."""


EMULATED_LINK = HostLink(EMULATED_BANDWIDTH, EMULATED_BANDWIDTH, EMULATED_FLOPS)


def measure_link(device: torch.device, dtype: torch.dtype) -> HostLink:
    if device.type != "cuda":
        return EMULATED_LINK
    found = HostLink(
        _measure_bandwidth(device),
        _measure_duplex_bandwidth(device),
        _measure_flops(device, dtype),
        _measure_memory_bandwidth(device),
    )
    release_cached_memory(device)
    return found


def measure_file_bandwidth(files: Sequence[MappedFile]) -> float:
    """Return the bandwidth, in bytes per second, with which a sample of these files is read in chunks, as in
    a run. The sample is first dropped from the page cache, because weights stay in files only if host memory
    is too small for them. If the system keeps the sample cached anyway, it would also do so in a run."""
    out = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
    left, seconds = SAMPLE_BYTES, 0.0
    for file in files:
        sample = min(len(file), left)
        file.drop_from_cache(sample)
        began = time.perf_counter()
        for start in range(0, sample, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, sample)
            file.prefetch(stop, min(stop + CHUNK_BYTES, sample))
            file.read(start, stop, out[: stop - start])
        seconds += time.perf_counter() - began
        left -= sample
        if not left:
            break
    return (SAMPLE_BYTES - left) / seconds


def _measure_bandwidth(device: torch.device) -> float:
    host = allocate_host_bytes(SAMPLE_BYTES, device)
    here = torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device=device)
    return SAMPLE_BYTES / _fastest_seconds(device, lambda: here.copy_(host, non_blocking=True))


def _measure_memory_bandwidth(device: torch.device) -> float:
    here = torch.empty(2, SAMPLE_BYTES, dtype=torch.uint8, device=device)
    return 2 * SAMPLE_BYTES / _fastest_seconds(device, lambda: here[0].copy_(here[1]))


def _measure_duplex_bandwidth(device: torch.device) -> float:
    host = [allocate_host_bytes(SAMPLE_BYTES, device) for _ in range(2)]
    here = torch.empty(2, SAMPLE_BYTES, dtype=torch.uint8, device=device)
    other = torch.cuda.Stream(device)

    def copy() -> None:
        now = torch.cuda.current_stream(device)
        other.wait_stream(now)
        with torch.cuda.stream(other):
            host[1].copy_(here[1], non_blocking=True)
        here[0].copy_(host[0], non_blocking=True)
        now.wait_stream(other)

    return SAMPLE_BYTES / _fastest_seconds(device, copy)


def _measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    # Random numbers like those of a base: a GPU multiplies ones faster.
    drawn = torch.Generator(device).manual_seed(0)
    x, y = (
        torch.randn(MATRIX_SIDE, MATRIX_SIDE, dtype=dtype, device=device, generator=drawn) for _ in range(2)
    )
    return LAYER_EFFICIENCY * 2 * MATRIX_SIDE**3 / _fastest_seconds(device, lambda: torch.mm(x, y))


def _fastest_seconds(device: torch.device, function: Callable[[], object], repeats: int = 4) -> float:
    """Call the function `repeats` times, and return the shortest time of a call in seconds."""
    found = []
    for _ in range(repeats):
        watch = Stopwatch(device)
        function()
        watch.mark()
        found += watch.seconds_between_marks()
    return min(found)
