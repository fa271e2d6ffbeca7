"""How fast bytes come from the host and how fast the device multiplies: what a streamed plan hangs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.base.host import host_bytes
from weft.ops.adamw import State, Update
from weft.ops.adamw import update as torch_update
from weft.run.measure import Stopwatch

SAMPLE_BYTES = 256 << 20
SIDE = 8192
"""Of the matrices that are multiplied."""
STEPPED = 16 << 20
"""Parameters of a sample adapter."""
REACHED = 0.8
"""Of a plain product's speed, what whole layers reach."""


@dataclass(frozen=True, slots=True)
class Link:
    bandwidth: float
    """Bytes per second from the host."""
    flops: float
    """What passes reach in a second."""
    stepped: float
    """Adapter parameters that the host steps in a second."""


PRETENDED = Link(bandwidth=1e10, flops=1e11, stepped=1e9)
"""A device that shares the host's memory: nobody waits for what is only copied."""


def measure_link(device: torch.device, dtype: torch.dtype) -> Link:
    if device.type != "cuda":
        return PRETENDED
    host = torch.device("cpu")
    update = _sample_update(dtype)
    stepped = STEPPED / _quickest(host, lambda: torch_update([update]))
    there = host_bytes(SAMPLE_BYTES, device)
    here = torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device=device)
    x, y = (torch.ones(SIDE, SIDE, dtype=dtype, device=device) for _ in range(2))
    copied = _quickest(device, lambda: here.copy_(there, non_blocking=True))
    multiplied = _quickest(device, lambda: torch.mm(x, y))
    return Link(SAMPLE_BYTES / copied, REACHED * 2 * SIDE**3 / multiplied, stepped)


def _sample_update(dtype: torch.dtype) -> Update:
    master, exp_avg, exp_avg_sq, gradient = (torch.zeros(STEPPED) for _ in range(4))
    state = State(master, exp_avg, exp_avg_sq, gradient, torch.zeros(STEPPED, dtype=dtype))
    return Update(state, step=1, learning_rate=1e-4, weight_decay=0.0, factor=1.0)


def _quickest(device: torch.device, work: Callable[[], object], times: int = 4) -> float:
    """Seconds; the first time also sets things up."""
    found = []
    for _ in range(times):
        watch = Stopwatch(device)
        work()
        watch.mark()
        found += watch.laps()
    return min(found)
