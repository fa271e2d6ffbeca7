"""RMSNorm of packed rows, alone or fused with the residual connection. The weight is frozen. For the
backward, the fused autograd node saves its input and one float per row.

Shapes: T rows, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weftune.ops import triton as kernels
from weftune.ops.fallback import run_with_fallback
from weftune.ops.triton import kernels_available, with_contiguous_rows

OP = "RMSNorm"
TILE = 4096
"""Minimum number of values per kernel program. Narrow rows share a program: the norm of attention heads has
millions of rows of 64 or 128 values, and a program for each row would take longer to start than to run."""
VALUES_A_THREAD = 16
"""Number of values per thread of a kernel: two 16-byte accesses per tensor in half precision, which hide the
latency of the row's mean."""


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return x · rsqrt(mean x² + eps) · (weight + offset). The offset is 1 in Gemma models."""
    if not kernels_available(x_TD):
        return rms_norm_reference(x_TD, weight_D, eps, offset)
    return _RmsNorm.apply(x_TD, None, weight_D, eps, offset)


def skip_rms_norm(h_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return h, for the residual connection, and the RMSNorm of h, the input of a branch. One fused backward
    computes the gradient of both."""
    if not kernels_available(h_TD):
        return h_TD, rms_norm_reference(h_TD, weight_D, eps, offset)
    return _SkipRmsNorm.apply(h_TD, weight_D, eps, offset)


def rms_norm_onto(h_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return h plus the RMSNorm of x: the residual connection plus the normalised output of a branch."""
    if not kernels_available(x_TD):
        return rms_norm_onto_reference(h_TD, x_TD, weight_D, eps, offset)
    return _RmsNorm.apply(x_TD, h_TD, weight_D, eps, offset)


def rms_norm_onto_reference(
    h_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0
) -> Tensor:
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    n_TD = rms_norm_reference(x_TD.to(wide), weight_D, eps, offset)
    return (h_TD.to(wide) + n_TD).to(h_TD.dtype)


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    x = x_TD.to(wide)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * rstd * (weight_D.to(wide) + offset)).to(x_TD.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, offset: float
    ) -> Tensor:
        x_TD = with_contiguous_rows(x_TD)
        residual_TD = None if residual_TD is None else with_contiguous_rows(residual_TD)
        n_TD, rstd_T = _forward(x_TD, weight_D, eps, offset, residual_TD)
        ctx.offset = offset
        ctx.save_for_backward(x_TD, weight_D, rstd_T)
        return n_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dn_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_D, rstd_T = ctx.saved_tensors
        dx_TD = _backward(dn_TD, None, x_TD, weight_D, rstd_T, ctx.offset)
        return dx_TD, dn_TD if ctx.needs_input_grad[1] else None, None, None, None


class _SkipRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, weight_D: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        h_TD = with_contiguous_rows(h_TD)
        n_TD, rstd_T = _forward(h_TD, weight_D, eps, offset)
        ctx.offset = offset
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h_TD, weight_D, rstd_T)
        return h_TD.view_as(h_TD), n_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dskip_TD: Tensor | None, dn_TD: Tensor | None) -> tuple[Tensor | None, ...]:
        h_TD, weight_D, rstd_T = ctx.saved_tensors
        if dn_TD is None:
            return dskip_TD, None, None, None
        return _backward(dn_TD, dskip_TD, h_TD, weight_D, rstd_T, ctx.offset), None, None, None


def _forward(
    x_TD: Tensor, weight_D: Tensor, eps: float, offset: float, residual_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    given = x_TD, weight_D, eps, offset, residual_TD
    return run_with_fallback(OP, x_TD.device, _launch_forward, _plain_forward, *given)


def _backward(
    dn_TD: Tensor, dskip_TD: Tensor | None, x_TD: Tensor, weight_D: Tensor, rstd_T: Tensor, offset: float
) -> Tensor:
    given = dn_TD, dskip_TD, x_TD, weight_D, rstd_T, offset
    return run_with_fallback(OP, x_TD.device, _launch_backward, _plain_backward, *given)


def _plain_forward(
    x_TD: Tensor, weight_D: Tensor, eps: float, offset: float, residual_TD: Tensor | None
) -> tuple[Tensor, Tensor]:
    x = x_TD.float()
    rstd_T = torch.rsqrt(x.pow(2).mean(-1) + eps)
    n = x * rstd_T[:, None] * (weight_D.float() + offset)
    return (n if residual_TD is None else residual_TD.float() + n).to(x_TD.dtype), rstd_T


def _plain_backward(
    dn_TD: Tensor, dskip_TD: Tensor | None, x_TD: Tensor, weight_D: Tensor, rstd_T: Tensor, offset: float
) -> Tensor:
    unit, dunit = x_TD.float() * rstd_T[:, None], dn_TD.float() * (weight_D.float() + offset)
    dx = rstd_T[:, None] * (dunit - unit * (unit * dunit).mean(-1, keepdim=True))
    return (dx if dskip_TD is None else dskip_TD.float() + dx).to(x_TD.dtype)


def _launch_forward(
    x_TD: Tensor, weight_D: Tensor, eps: float, offset: float, residual_TD: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, width = x_TD.shape
    assert weight_D.shape == (width,)
    assert weight_D.is_contiguous()
    assert residual_TD is None or residual_TD.shape == x_TD.shape
    n_TD = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    rstd_T = torch.empty(rows, dtype=torch.float32, device=x_TD.device)
    tile_rows, block, warps = _tile_width(width)
    with torch.cuda.device_of(x_TD):
        kernels.norm.norm_forward[(-(-rows // tile_rows),)](
            x_TD,
            weight_D,
            n_TD,
            rstd_T,
            x_TD.stride(0),
            rows,
            eps,
            offset,
            residual_TD,
            0 if residual_TD is None else residual_TD.stride(0),
            WIDTH=width,
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=warps,
        )
    return n_TD, rstd_T


def _launch_backward(
    dn_TD: Tensor, dskip_TD: Tensor | None, x_TD: Tensor, weight_D: Tensor, rstd_T: Tensor, offset: float
) -> Tensor:
    rows, width = x_TD.shape
    dn_TD = with_contiguous_rows(dn_TD)
    dskip_TD = None if dskip_TD is None else with_contiguous_rows(dskip_TD)
    dx_TD = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    tile_rows, block, warps = _tile_width(width)
    with torch.cuda.device_of(x_TD):
        kernels.norm.norm_backward[(-(-rows // tile_rows),)](
            dn_TD,
            dskip_TD,
            x_TD,
            weight_D,
            rstd_T,
            dx_TD,
            dn_TD.stride(0),
            0 if dskip_TD is None else dskip_TD.stride(0),
            x_TD.stride(0),
            rows,
            offset,
            WIDTH=width,
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=warps,
        )
    return dx_TD


def _tile_width(width: int) -> tuple[int, int, int]:
    """Return, for rows of this width, (rows per program, columns rounded up to a power of two, warps)."""
    block = 1 << (width - 1).bit_length()
    rows = max(1, TILE // block)
    return rows, block, min(16, rows * block // (32 * VALUES_A_THREAD))
