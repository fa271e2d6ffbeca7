"""How the GPU benchmarks measure: warmed up, the median of several blocks of steps, the device waited for."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weftune.errors import UserError
from weftune.run.events import OutOfMemory

Block = Callable[[int], Callable[[], object]]
"""Prepares so many steps, outside the clock, and returns what the clock is held to."""


@dataclass(frozen=True, slots=True)
class BenchPlace:
    """Where a benchmark runs, and in which dtype its base is."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Repeats:
    """Steps to warm up with, then blocks of steps; the device is waited for only between blocks."""

    warmup: int = 3
    blocks: int = 5
    steps: int = 4


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One round of all jobs. No seconds: it could not be measured, and the note says why."""

    seconds: float | None
    peak_bytes: int | None
    note: str = ""
    base_bytes: int | None = None
    """Of the base's weights, where they are known."""


def here(toy: bool) -> BenchPlace | None:
    """The GPU in bfloat16, or for a toy the CPU in float32; None where there is no GPU."""
    if toy:
        return BenchPlace(torch.device("cpu"), torch.float32)
    if not torch.cuda.is_available():
        return None
    return BenchPlace(torch.device("cuda", 0), torch.bfloat16)


def measure(block: Block, place: BenchPlace, pace: Repeats) -> MeasuredStep:
    """Seconds of one step, and the most memory that was held since `fresh`."""
    block(pace.warmup)()
    taken = []
    for _ in range(pace.blocks):
        run = block(pace.steps)
        wait(place.device)
        began = time.perf_counter()
        run()
        wait(place.device)
        taken.append((time.perf_counter() - began) / pace.steps)
    return MeasuredStep(statistics.median(taken), peak_bytes(place.device))


def repeated(step: Callable[[], object]) -> Block:
    def block(steps: int) -> Callable[[], object]:
        def run() -> None:
            for _ in range(steps):
                step()

        return run

    return block


def attempted(run: Callable[[], MeasuredStep], place: BenchPlace) -> MeasuredStep:
    """What `run` measures with the device to itself; a lack of memory is a finding, not a crash, and so is
    what cannot be planned: the rows after it are measured all the same."""
    fresh(place.device)
    try:
        return run()
    except (torch.OutOfMemoryError, OutOfMemory) as error:
        # The allocator's own words say what was wanted, and what holes there are.
        said = str(error).partition("If reserved but")[0].partition("\n")[0].strip()
        return MeasuredStep(None, None, f"out of memory: {said}")
    except UserError as error:
        return MeasuredStep(None, None, str(error).partition("\n")[0])


def fresh(device: torch.device) -> None:
    """Hand back what the last row left behind, and count the peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def gemm_rate(place: BenchPlace, edge: int | None = None) -> float:
    """Operations a second of one large product, the device's best: what every floor is reckoned with."""
    edge = edge or (8192 if place.device.type == "cuda" else 256)
    a = torch.randn(edge, edge, device=place.device, dtype=place.dtype)
    b = torch.randn_like(a)
    measured = measure(repeated(lambda: a @ b), place, Repeats(warmup=5, blocks=5, steps=10))
    assert measured.seconds is not None
    return 2 * edge**3 / measured.seconds
