"""Rows of 8-bit floats with a scale each, and their products."""

from __future__ import annotations

import pytest
import torch

from tests.shards import on_shards
from weftune.core.weights import CODES, LARGEST, adjacent_view, join_tensors, multiply_codes, quantise_rows
from weftune.ops.fp8 import row_codes

GRID = torch.arange(256, dtype=torch.uint8).view(CODES).float()
GRID = GRID[GRID.isfinite()].unique()


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_codes_are_the_nearest_that_there_are_and_the_largest_of_a_row_is_the_largest_of_all(dtype):
    x_TM = (drawn(20, 33) * torch.logspace(-20, 20, 20)[:, None]).to(dtype)
    codes_TM, scale_T = quantise_rows(x_TM)
    assert (codes_TM.dtype, scale_T.shape) == (CODES, (20,))
    scaled_TM = x_TM.double() / (x_TM.double().abs().amax(dim=1, keepdim=True) / LARGEST)
    nearest_TM = (scaled_TM[..., None] - GRID).abs().amin(dim=-1)
    off_TM = (codes_TM.double() - scaled_TM).abs()
    assert (off_TM <= nearest_TM + 1e-4).all()
    assert (codes_TM.float().abs().amax(dim=1) == LARGEST).all()


def test_a_row_of_zeros_has_zeros_and_a_row_with_a_nan_or_an_infinity_is_lost_alone():
    x_TM = drawn(5, 16)
    x_TM[1], x_TM[2, 3], x_TM[3, 4] = 0.0, torch.nan, torch.inf
    x_TM[4] = 1e-44
    codes_LM, _ = quantise_rows(drawn(16, 16, seed=1))
    y_TL = multiply_codes(x_TM, codes_LM, None, None, torch.float32)
    alone_TL = multiply_codes(x_TM[:1], codes_LM, None, None, torch.float32)
    torch.testing.assert_close(y_TL[:1], alone_TL, rtol=1e-6, atol=0)
    assert torch.equal(y_TL[1], torch.zeros(16))
    assert y_TL[2:4].isnan().all()
    assert y_TL[4].isfinite().all()


def test_a_product_is_that_of_the_rounded_operands_with_both_scales():
    left_TM, scale_M, scale_L = drawn(7, 32), drawn(32, seed=1).abs(), drawn(24, seed=2)
    codes_LM, _ = quantise_rows(drawn(24, 32, seed=3))
    codes_TM, scale_T = quantise_rows(left_TM * scale_M)
    want_TL = (codes_TM.double() * scale_T.double()[:, None]) @ (codes_LM.double() * scale_L[:, None]).T
    got_TL = multiply_codes(left_TM, codes_LM, scale_M, scale_L, torch.float32)
    torch.testing.assert_close(got_TL.double(), want_TL, rtol=1e-5, atol=1e-3)
    exact_TL = ((left_TM * scale_M) @ (codes_LM.float() * scale_L[:, None]).T).double()
    off = (got_TL - exact_TL).square().mean().sqrt() / exact_TL.square().mean().sqrt()
    assert 0.005 < off < 0.05, "the left operand has three digits after the first"


@pytest.mark.parametrize("quantise", [quantise_rows, row_codes])
def test_parts_of_rows_on_shards_have_the_codes_of_whole_rows(quantise):
    x_TM, scale_M = drawn(7, 32), drawn(32, seed=1).abs()
    x_TM[1], x_TM[2, 20], x_TM[3, :16] = 0.0, torch.nan, 0.0
    codes_TM, scale_T = quantise_rows(x_TM, scale_M)

    def on_shard(team):
        own = slice(16 * team.shard, 16 * team.shard + 16)
        return quantise(x_TM[:, own], scale_M[own], team.max_over_shards)

    parts, scales = zip(*on_shards(2, on_shard), strict=True)
    whole = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
    # The scale of a row with a NaN is NaN on both shards, so that its codes do not matter.
    kept = torch.arange(7) != 2
    assert torch.equal(whole[kept], codes_TM.view(torch.uint8)[kept])
    assert all(torch.equal(one[kept], scale_T[kept]) and one[2].isnan() for one in scales)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_one_tensor_are_joined_without_a_copy_and_others_with_one(dim):
    whole = quantise_rows(drawn(6, 8))[0]
    parts = whole.split([2, 3, 1] if dim == 0 else [4, 3, 1], dim)
    found = adjacent_view(parts, dim)
    assert found is not None
    assert (found.data_ptr(), found.shape, found.stride()) == (whole.data_ptr(), whole.shape, whole.stride())
    assert adjacent_view(parts[::-1], dim) is None
    assert adjacent_view([part.clone() for part in parts], dim) is None
    made = join_tensors([part.clone() for part in parts], dim)
    assert made.data_ptr() != whole.data_ptr()
    assert torch.equal(made.view(torch.uint8), whole.view(torch.uint8))


def test_parts_with_a_gap_between_them_are_not_side_by_side():
    whole = drawn(6, 8)
    assert adjacent_view([whole[:2], whole[3:]], 0) is None
    assert adjacent_view([whole[:, :2], whole[:, 2:7]], 1) is None
