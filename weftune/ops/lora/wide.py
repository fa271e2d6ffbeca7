"""The frozen product by the library, in float32, with the adapters' part added before it is rounded.

If the library adds a product of 16-bit numbers to another tensor, it rounds the product to 16 bits first, at
nearly every shape and whatever torch's settings for sums: only a sixth of the addition of a newly initialised
adapter was kept.

Shapes: T rows, K inputs, N outputs of all parts, W columns of a span, P parts, R ranks of one part up to a
power of two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weftune.ops.lora.operands import Right, backward_operands, forward_operands
from weftune.ops.lora.tiled_kernels import add_dx, up
from weftune.ops.lora.tiling import RowSpan, SiteCall

SPAN_BYTES = 256 << 20
"""Bytes of a float32 product that are in memory at a time; a block of columns is never split and may exceed
it."""


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


def spans(parts: tuple[tuple[int, int], ...], columns: int, rows: int) -> Iterator[RowSpan]:
    """Yield all blocks of `columns` columns, none shared by two parts, in as few spans as allowed."""
    edges = [(at, min(at + columns, high)) for low, high in parts for at in range(low, high, columns)]
    most = max(1, SPAN_BYTES // (torch.float32.itemsize * rows * columns))
    count = -(-len(edges) // most)
    for turn in range(count):
        first, end = turn * len(edges) // count, (turn + 1) * len(edges) // count
        yield RowSpan(first, end - first, edges[first][0], edges[end - 1][1])
