"""Kernels for few rows without gradients, in Triton's interpreter or on a GPU, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.lora.site_cases import Case, Job, attached, coded_truth, frozen_weight, truth, values
from weftune.ops.lora.few_rows import TILE_ROWS, few_rows_linear, share_count, span_columns

pytest.importorskip("triton")

CASES = {
    "a row of each of three jobs": Case([Job(1, rank=8), Job(1, rank=16), Job(1, rank=3)], gap=0, padding=0),
    "rows of nobody, of an empty slot and of a job without rows": Case(
        [Job(2, rank=8), None, Job(0, rank=4), Job(1, rank=2)]
    ),
    "more rows than a tile": Case([Job(37, rank=5), Job(16, rank=4)]),
    "several shares of the inputs": Case([Job(1, rank=4), Job(3, rank=8)], features=1100),
    "several spans of columns, one job with but one site": Case(
        [Job(2, rank=4), Job(1, rank=8, sites=(1,))], widths=(2064, 24, 1040), bias=True
    ),
    "residual and odd widths": Case(
        [Job(1, rank=3), Job(2, rank=5)], features=37, widths=(21,), residual=True
    ),
    "two bands of ranks": Case([Job(2, rank=200), Job(1, rank=3)], widths=(24, 40), residual=True),
    "a transposed weight": Case([Job(2, rank=4)], transposed=True),
    "nobody": Case([], padding=4),
}


def linear(case, dtype=torch.float32, tile=TILE_ROWS):
    case = replace(case, dtype=dtype)
    made = values(case)
    adapters, group, rows = attached(case, made, tile=tile)
    with torch.no_grad():
        y = few_rows_linear(made.x, frozen_weight(case, made), made.bias, made.residual, group, rows)
    del adapters  # The table has only their addresses.
    return y


@pytest.mark.parametrize("name", CASES)
def test_outputs_equal_plain_torch_one_job_after_another(name, device):
    case = replace(CASES[name], device=str(device))
    expected = truth(case)["y"]
    assert (linear(case) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_other_tiles_and_a_base_of_codes_have_the_same_outputs(device):
    case = Case([Job(20, rank=4), Job(1, rank=8)], features=64, widths=(48, 16), device=str(device))
    expected = truth(case)["y"]
    assert (linear(case, tile=64) - expected).abs().max() < 1e-5 * expected.abs().max()
    coded = replace(case, coded=True)
    expected = coded_truth(coded)["y"]
    assert (linear(coded) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_nan_in_one_job_stays_in_its_rows(device):
    case = Case([Job(1, rank=8), Job(1, rank=4), Job(2, rank=4)], gap=0, device=str(device))
    poisoned = case.poisoned("a", 1)
    y, others = linear(poisoned), torch.ones(case.rows, dtype=torch.bool)
    others[case.rows_of(1)] = False
    assert y[case.rows_of(1)].isnan().all()
    assert torch.equal(y[others], linear(case)[others])


def test_long_sums_have_a_limited_number_of_shares():
    assert [share_count(features) for features in (37, 512, 4096, 14336)] == [1, 1, 8, 16]


def test_programs_have_few_columns_unless_many_tiles_keep_the_device_busy():
    made = Case([Job(1, rank=4)], features=8, widths=(4096, 1024))
    _, group, _ = attached(made, values(made))
    assert [span_columns(group, tiles) for tiles in (1, 13, 69, 200)] == [256, 256, 512, 1024]
