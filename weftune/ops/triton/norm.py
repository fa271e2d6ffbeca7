"""Kernels of RMSNorm. A program holds whole rows, so that each row is read once and its mean stays in
registers.

All loads are issued before the sum over the row, so that their latencies overlap: the compiler cannot move
loads across the barrier of the sum.

Shapes: R rows of a program, B its columns (a power of two that covers the width).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def norm_forward(
    x: tl.tensor,
    weight: tl.tensor,
    n: tl.tensor,
    rstd: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    residual: tl.tensor,
    residual_stride: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute n, the normalised x, and rstd, the inverse root of the mean square of x. If `residual` is
    given, write residual + n instead of n."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_B = tl.arange(0, BLOCK)
    inside_RB = (row_R < rows)[:, None] & (column_B < WIDTH)[None, :]
    at_RB = row_R[:, None] * WIDTH + column_B[None, :]
    x_at_RB = row_R[:, None] * x_stride + column_B[None, :]
    x_RB = tl.load(x + x_at_RB, mask=inside_RB, other=0.0).to(tl.float32)
    weight_B = tl.load(weight + column_B, mask=column_B < WIDTH, other=0.0).to(tl.float32) + offset
    if residual is not None:
        residual_RB = tl.load(
            residual + row_R[:, None] * residual_stride + column_B[None, :], mask=inside_RB, other=0.0
        )
    rstd_R = tl.rsqrt(tl.sum(x_RB * x_RB, axis=1) / WIDTH + eps)
    tl.store(rstd + row_R, rstd_R, mask=row_R < rows)
    n_RB = x_RB * rstd_R[:, None] * weight_B[None, :]
    if residual is not None:
        n_RB += residual_RB.to(tl.float32)
    tl.store(n + at_RB, n_RB.to(n.dtype.element_ty), mask=inside_RB)


@triton.jit(do_not_specialize=["rows"])
def norm_backward(
    dn: tl.tensor,
    dskip: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    rstd: tl.tensor,
    dx: tl.tensor,
    dn_stride: tl.tensor,
    dskip_stride: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    offset: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute dx, the gradient of the norm's input x. If dskip, the gradient of the residual connection, is
    given, add it to dx."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_B = tl.arange(0, BLOCK)
    inside_RB = (row_R < rows)[:, None] & (column_B < WIDTH)[None, :]
    dn_RB = tl.load(dn + row_R[:, None] * dn_stride + column_B[None, :], mask=inside_RB, other=0.0)
    x_RB = tl.load(x + row_R[:, None] * x_stride + column_B[None, :], mask=inside_RB, other=0.0)
    rstd_R = tl.load(rstd + row_R, mask=row_R < rows, other=0.0)
    weight_B = tl.load(weight + column_B, mask=column_B < WIDTH, other=0.0).to(tl.float32) + offset
    if dskip is not None:
        dskip_at_RB = row_R[:, None] * dskip_stride + column_B[None, :]
        dskip_RB = tl.load(dskip + dskip_at_RB, mask=inside_RB, other=0.0)
    unit_RB = x_RB.to(tl.float32) * rstd_R[:, None]
    dunit_RB = dn_RB.to(tl.float32) * weight_B[None, :]
    along_R = tl.sum(dunit_RB * unit_RB, axis=1) / WIDTH
    dx_RB = (dunit_RB - unit_RB * along_R[:, None]) * rstd_R[:, None]
    if dskip is not None:
        dx_RB += dskip_RB.to(tl.float32)
    at_RB = row_R[:, None] * WIDTH + column_B[None, :]
    tl.store(dx + at_RB, dx_RB.to(dx.dtype.element_ty), mask=inside_RB)
