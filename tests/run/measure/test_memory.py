"""Marks are laps, and a window's peak is its own where the system can say it."""

import time

import numpy as np
import pytest
import torch

from tests.bench import CPU
from weftune.run.measure.memory import (
    is_out_of_memory,
    peak_bytes,
    release_cached_memory,
    reset_peak,
    resident_bytes,
)
from weftune.run.measure.timers import ActionTimer, DeviceClock, Stopwatch


def test_a_stopwatch_counts_from_each_mark_to_the_next() -> None:
    watch = Stopwatch(CPU)
    time.sleep(0.01)
    watch.mark()
    time.sleep(0.03)
    watch.mark()
    first, second = watch.seconds_between_marks()
    assert 0.01 <= first < second
    assert second >= 0.03


def test_a_clock_tells_moments_in_the_seconds_of_the_machine() -> None:
    before, clock = time.time(), DeviceClock(CPU)
    first = clock.mark()
    time.sleep(0.01)
    second = clock.mark()
    assert before <= clock.seconds(first) <= clock.seconds(second) - 0.01 <= time.time()


@pytest.mark.gpu
@pytest.mark.timed
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_moment_on_a_gpu_is_when_the_device_came_to_it() -> None:
    clock = DeviceClock(torch.device("cuda", 0))
    first = clock.mark()
    torch.cuda._sleep(400_000_000)
    second, asked = clock.mark(), time.time()
    begun, done = clock.seconds(first), clock.seconds(second)
    assert asked < done <= time.time() + 1e-3
    assert begun < asked
    assert done - begun > 0.1


@pytest.mark.gpu
@pytest.mark.timed
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_host_waits_until_the_device_begins_an_action_and_not_until_it_ends() -> None:
    timer = ActionTimer(torch.device("cuda", 0))
    torch.cuda._sleep(400_000_000)
    before = timer.stop()
    timer.start()
    torch.cuda._sleep(1_000_000_000)
    action = timer.stop()
    assert not before.is_over()
    timer.await_start()
    assert before.is_over()
    assert not action.is_over()


def test_a_peak_that_was_begun_forgets_what_came_before() -> None:
    if not reset_peak(CPU):
        pytest.skip("this system does not forget peaks")
    # Not of torch, whose allocator (mimalloc on ARM) may keep what is freed.
    large = np.ones(64 << 20, dtype=np.uint8)
    assert peak_bytes(CPU) >= resident_bytes(CPU) - (1 << 20)
    high = peak_bytes(CPU)
    del large
    release_cached_memory(CPU)
    assert reset_peak(CPU)
    assert peak_bytes(CPU) < high - (32 << 20)


@pytest.mark.parametrize("words", ["can't allocate memory: you tried", "not enough memory: you tried"])
def test_a_shortage_is_known_by_the_words_of_either_allocator(words: str) -> None:
    short = RuntimeError(
        f"[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: {words} to allocate 8"
    )
    assert is_out_of_memory(short)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
