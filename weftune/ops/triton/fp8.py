"""Conversion of the rows of a matrix to 8-bit floats (e4m3) with a scale per row.

Shapes: R rows of a program, C columns, rounded up to a power of two.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
LEAST_SCALE = tl.constexpr(1.1754943508222875e-38)


@triton.jit(do_not_specialize=["T"])
def row_codes(
    x,
    column_scale,
    codes,
    scale,
    T,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Compute 8-bit codes, and one scale per row, such that codes · scale ≈ x ⊙ column_scale. A row with a
    NaN or an infinity gets the scale NaN."""
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    column_C = tl.arange(0, C)
    inside_C = column_C < WIDTH
    inside_RC = (row_R < T)[:, None] & inside_C[None, :]
    at_RC = row_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
    x_RC = tl.load(x + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
    if column_scale is not None:
        # All rows read it.
        factor_C = tl.load(column_scale + column_C, mask=inside_C, other=0.0, eviction_policy="evict_last")
        x_RC *= factor_C[None, :]
    broken_R = tl.max((x_RC != x_RC).to(tl.int32), axis=1) > 0
    scale_R = tl.max(tl.abs(x_RC), axis=1) * (1.0 / LARGEST)
    scale_R = tl.where(broken_R | (scale_R == float("inf")), float("nan"), scale_R)
    # A row of zeros, or of values that are almost zero, has codes of zero.
    scaled_R = scale_R >= LEAST_SCALE
    inverse_R = tl.where(scaled_R, tl.math.div_rn(1.0, tl.where(scaled_R, scale_R, 1.0)), 0.0)
    scaled_RC = x_RC * inverse_R[:, None]
    scaled_RC = tl.minimum(tl.maximum(scaled_RC, -LARGEST), LARGEST)
    tl.store(codes + at_RC, scaled_RC.to(codes.dtype.element_ty), mask=inside_RC)
    tl.store(scale + row_R, scale_R, mask=row_R < T)
