"""The frozen product of a site with the adapters' part added before it is rounded, forward and backward.

`wide`: the library's product in float32, to which kernels add the adapters' part. If the library adds a
product of 16-bit numbers to another tensor, it rounds the product to 16 bits first, at nearly every shape and
whatever torch's settings for sums: only a sixth of the addition of a newly initialised adapter was kept.

`fused`: one kernel for both. The tensor descriptors of the copy engines are created on the host at every
launch; a captured graph keeps them, as it keeps addresses. The addition of large slots is first written to
the product's output, which the product reads before it overwrites it. It is rounded to 16 bits before the
sum, as s is: this loses digits of the addition itself, not those below the last digit of the sum.

Shapes: T rows, K inputs, N outputs of all parts, W columns of a span, M columns that are summed over, L rows
of the right operand, P parts, R ranks of one part up to a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.core.weights import CODES, CodedWeight
from weftune.ops import triton as kernels
from weftune.ops.fp8 import codes_in_float32, row_codes
from weftune.ops.lora.rows import BLOCK
from weftune.ops.lora.tiled_kernels import ColumnSpan, add_dx, large_dx, large_y, up
from weftune.ops.lora.tiling import ProductBlocks, SiteCall, blocks_for_codes

SPAN_BYTES = 256 << 20
"""Bytes of a float32 product that are in memory at a time, unless one block of columns takes more."""

Right = Tensor | CodedWeight
"""A weight [N, K] that products read as it is stored."""


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of left · rightᵀ. Its float32 sum is multiplied by the scales of 8-bit operands."""

    left_TM: Tensor
    right_LM: Tensor
    scale_T: Tensor | None = None
    scale_L: Tensor | None = None

    @property
    def coded(self) -> bool:
        return self.right_LM.dtype is CODES

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the product."""
        return len(self.left_TM), len(self.right_LM)

    def summed(self, low: int, high: int) -> Tensor:
        """Return some columns of the product in float32, without the scales."""
        right_LM = self.right_LM[low:high]
        if self.coded:
            return codes_in_float32(self.left_TM, right_LM)
        return in_float32(self.left_TM, right_LM.T)


def forward_operands(x_TK: Tensor, weight: Right) -> Operands:
    """Return the operands of xWᵀ."""
    if isinstance(weight, Tensor):
        return Operands(x_TK, weight)
    codes_TK, scale_T = row_codes(x_TK)
    return Operands(codes_TK, weight.codes(), scale_T, weight.scale())


def backward_operands(dy_TN: Tensor, weight: Right) -> Operands:
    """Return the operands of dyW."""
    if isinstance(weight, Tensor):
        return Operands(dy_TN, weight.T)
    codes_TN, scale_T = row_codes(dy_TN, weight.scale())
    return Operands(codes_TN, weight.turned(), scale_T)


def matrix_like(like: Tensor, weight: Right) -> Tensor:
    """Return the weight as a matrix of `like`'s dtype."""
    if isinstance(weight, Tensor):
        return weight
    return (weight.codes().to(torch.float32) * weight.scale()[:, None]).to(like.dtype)


def in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b in float32; torch has no such product of 16-bit numbers on a CPU."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def wide_y(
    x_TK: Tensor,
    weight: Right,
    bias_N: Tensor | None,
    residual_TN: Tensor | None,
    s_TPR: Tensor,
    u_TN: Tensor | None,
    call: SiteCall,
) -> Tensor:
    """Return residual + bias + g ⊙ (xWᵀ + sB). If outputs are scaled, u receives them unscaled."""
    operands = forward_operands(x_TK, weight)
    y_TN = x_TK.new_empty(operands.shape)
    for span in spans(call.group.columns, call.tiling.up.columns, len(y_TN)):
        # Not assigned to a variable, which would keep it alive while the next one is computed.
        up(
            s_TPR,
            operands.summed(span.low, span.high),
            span,
            bias_N,
            residual_TN,
            y_TN,
            u_TN,
            call,
            operands.scale_T,
            operands.scale_L,
        )
    return y_TN


def wide_dx(dy_TN: Tensor, weight: Right, ds_TPR: Tensor, call: SiteCall) -> Tensor:
    """Return dyW + the dropped ds · A of all parts."""
    operands = backward_operands(dy_TN, weight)
    dx_TK = dy_TN.new_empty(operands.shape)
    for span in spans(((0, dx_TK.shape[1]),), call.tiling.up.columns, len(dx_TK)):
        add_dx(ds_TPR, operands.summed(span.low, span.high), span, dx_TK, call, operands.scale_T)
    return dx_TK


def spans(parts: tuple[tuple[int, int], ...], columns: int, rows: int) -> Iterator[ColumnSpan]:
    """Yield all blocks of `columns` columns, none shared by two parts, in as few spans as allowed."""
    edges = [(at, min(at + columns, high)) for low, high in parts for at in range(low, high, columns)]
    max_blocks = max(1, SPAN_BYTES // (torch.float32.itemsize * rows * columns))
    count = -(-len(edges) // max_blocks)
    for turn in range(count):
        first, end = turn * len(edges) // count, (turn + 1) * len(edges) // count
        yield ColumnSpan(first, end - first, edges[first][0], edges[end - 1][1])


def fused_y(
    x_TK: Tensor,
    weight: Right,
    bias_N: Tensor | None,
    residual_TN: Tensor | None,
    s_TPR: Tensor,
    u_TN: Tensor | None,
    call: SiteCall,
) -> Tensor:
    """Return residual + bias + g ⊙ (xWᵀ + sB). If outputs are scaled, u receives them unscaled."""
    operands = forward_operands(x_TK, weight)
    return _fused_product(operands, bias_N, residual_TN, s_TPR, u_TN, call, call.tiling.y, backward=False)


def fused_dx(dy_TN: Tensor, weight: Right, ds_TPR: Tensor, call: SiteCall) -> Tensor:
    """Return dyW + the dropped ds · A of all parts."""
    operands = backward_operands(dy_TN, weight)
    return _fused_product(operands, None, None, ds_TPR, None, call, call.tiling.dx, backward=True)


def _fused_product(
    operands: Operands,
    bias_N: Tensor | None,
    residual: Tensor | None,
    s_TPR: Tensor,
    unscaled: Tensor | None,
    call: SiteCall,
    blocks: ProductBlocks,
    backward: bool,
) -> Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    target = s_TPR.new_empty(operands.shape)
    if call.has_large:
        (large_dx if backward else large_y)(s_TPR, target, call)
    left, right = operands.left_TM, operands.right_LM
    turned = right.stride(1) == 1
    blocks = blocks_for_codes(blocks, left.shape[1]) if operands.coded else blocks
    half = [BLOCK, blocks.columns // 2]
    rows, outputs = target.shape
    tiles = -(-rows // BLOCK) * -(-outputs // blocks.columns)
    kernels.product.product[(min(tiles, blocks.programs),)](
        TensorDescriptor.from_tensor(left, [BLOCK, blocks.inner]),
        TensorDescriptor.from_tensor(right, [blocks.columns, blocks.inner])
        if turned
        else TensorDescriptor.from_tensor(right.T, [blocks.inner, blocks.columns]),
        None if residual is None else TensorDescriptor.from_tensor(residual, half),
        TensorDescriptor.from_tensor(target, half),
        None if unscaled is None else TensorDescriptor.from_tensor(unscaled, half),
        bias_N,
        operands.scale_T,
        operands.scale_L,
        s_TPR,
        call.rows.runs_U3,
        call.rows.edges_V,
        *call.adapters,
        *(call.output_scales if unscaled is not None else (None, None)),
        rows,
        outputs,
        left.shape[1],
        # For a single site the width is a runtime argument, so that sites of other widths share the kernel.
        COLUMNS=() if backward or call.sites == 1 else call.columns,
        BACKWARD=backward,
        TURNED=turned,
        BANDS=call.bands,
        M=BLOCK,
        D=blocks.inner,
        ROUGH=blocks.rough,
        GROUP=blocks.group,
        LARGE=call.has_large,
        DROPS=backward and call.drops,
        **call.constants(target, blocks),
    )
    return target
