from __future__ import annotations

import time

import pytest
import torch

from weftune.bench.table import aligned, number, ratio
from weftune.bench.timing import (
    Hardware,
    MeasuredStep,
    Repeats,
    gemm_rate,
    measure,
    measure_or_explain,
    repeat_step,
)
from weftune.errors import PlanError
from weftune.run.events import OutOfMemory

CPU = Hardware(torch.device("cpu"), torch.float32)


def test_a_step_is_the_median_block_over_its_steps_and_the_warm_up_is_not_counted() -> None:
    naps = iter([0.2, 0.2, *[0.002] * 4, *[0.05] * 2, *[0.002] * 4])
    measured = measure(repeat_step(lambda: time.sleep(next(naps))), CPU, Repeats(warmup=2, blocks=5, steps=2))
    assert measured.seconds is not None
    assert 0.002 <= measured.seconds < 0.04
    assert next(naps, None) is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), OutOfMemory("no room")])
def test_a_lack_of_memory_is_a_row_that_says_so(error: Exception) -> None:
    def run() -> MeasuredStep:
        raise error

    assert measure_or_explain(run, CPU) == MeasuredStep(None, None, "out of memory: no room")


def test_what_cannot_be_planned_is_a_row_that_says_why() -> None:
    def run() -> MeasuredStep:
        raise PlanError("the host needs more")

    assert measure_or_explain(run, CPU) == MeasuredStep(None, None, "the host needs more")


def test_any_other_error_is_not_swallowed() -> None:
    def run() -> MeasuredStep:
        raise ValueError

    with pytest.raises(ValueError):
        measure_or_explain(run, CPU)


def test_a_large_product_has_a_rate() -> None:
    assert gemm_rate(CPU) > 1e8


def test_a_table_is_aligned_and_shows_a_dash_for_what_is_absent() -> None:
    drawn = aligned(("", "ms", ""), [("one", number(1234.5), ""), ("three", number(None), "why")])
    assert drawn == "            ms\none    1,234.5\nthree        —  why"
    assert ratio(None, 1.0) is None
    assert ratio(3.0, 2.0) == 1.5
