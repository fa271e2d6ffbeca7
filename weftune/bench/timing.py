"""Timing of the GPU benchmarks: after a warm-up, the median of several blocks of steps, each synchronised."""

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
"""Function that prepares the given number of steps without being timed, and returns a function that runs
them, which is timed."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The device that a benchmark runs on, and the dtype of the base model there."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a benchmark repeats its steps: warm-up steps, timed blocks, and steps per block. The device
    is synchronised between blocks."""

    warmup: int = 3
    blocks: int = 5
    steps: int = 4


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measured time and memory of one round (one step of every job). If `seconds` is None, `note` says
    why the round could not be measured."""

    seconds: float | None
    peak_bytes: int | None
    note: str = ""
    base_bytes: int | None = None
    """Bytes of the base's weights. None if not known."""


def bench_hardware(toy: bool) -> Hardware | None:
    """Return the GPU with bfloat16, or None if there is no GPU. With `toy`, return the CPU with float32."""
    if toy:
        return Hardware(torch.device("cpu"), torch.float32)
    if not torch.cuda.is_available():
        return None
    return Hardware(torch.device("cuda", 0), torch.bfloat16)


def measure(block: Block, hardware: Hardware, repeats: Repeats) -> MeasuredStep:
    """Measure the seconds of one step, and the peak memory since the last call of `reset_memory`."""
    block(repeats.warmup)()
    taken = []
    for _ in range(repeats.blocks):
        run = block(repeats.steps)
        synchronise(hardware.device)
        began = time.perf_counter()
        run()
        synchronise(hardware.device)
        taken.append((time.perf_counter() - began) / repeats.steps)
    return MeasuredStep(statistics.median(taken), peak_bytes(hardware.device))


def repeat_step(step: Callable[[], object]) -> Block:
    def block(steps: int) -> Callable[[], object]:
        def run() -> None:
            for _ in range(steps):
                step()

        return run

    return block


def measure_or_explain(run: Callable[[], MeasuredStep], hardware: Hardware) -> MeasuredStep:
    """Call `run` while nothing else uses the device, and return its result.

    If the memory does not suffice, or the jobs cannot be planned, the result has a note instead of a time, so
    that the remaining rows are still measured.
    """
    reset_memory(hardware.device)
    try:
        return run()
    except (torch.OutOfMemoryError, OutOfMemory) as error:
        # The allocator's message says what was requested, and how fragmented the memory is.
        said = str(error).partition("If reserved but")[0].partition("\n")[0].strip()
        return MeasuredStep(None, None, f"out of memory: {said}")
    except UserError as error:
        return MeasuredStep(None, None, str(error).partition("\n")[0])


def reset_memory(device: torch.device) -> None:
    """Free the memory of the last measurement, and reset the device's record of peak memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def gemm_rate(hardware: Hardware, matrix_side: int | None = None) -> float:
    """Return the operations per second of one large matrix product, from which the minimum times of all rows
    are computed."""
    matrix_side = matrix_side or (8192 if hardware.device.type == "cuda" else 256)
    a = torch.randn(matrix_side, matrix_side, device=hardware.device, dtype=hardware.dtype)
    b = torch.randn_like(a)
    measured = measure(repeat_step(lambda: a @ b), hardware, Repeats(warmup=5, blocks=5, steps=10))
    assert measured.seconds is not None
    return 2 * matrix_side**3 / measured.seconds
