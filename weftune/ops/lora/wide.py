"""The frozen product by the library, in float32, with the adapters' part added before it is rounded.

A product of 16-bit numbers that the library adds to something is rounded to 16 bits before it is added, at
nearly every shape and whatever torch is told of its sums: of what a young adapter adds a sixth was kept.

Shapes: T rows, K inputs, N outputs of all parts, W columns of a span, P parts, R ranks of one part up to a
power of two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weftune.ops.lora.tiled_kernels import add_dx, up
from weftune.ops.lora.weave import RowSpan, Weave

SPAN_BYTES = 256 << 20
"""Of a product in float32 that are in memory at a time; only a block of columns is never cut."""


def wide_y(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    residual_TN: Tensor | None,
    s_TPR: Tensor,
    u_TN: Tensor | None,
    weave: Weave,
) -> Tensor:
    """residual + bias + g ⊙ (xWᵀ + sB); where outputs are scaled, u takes them before they are."""
    y_TN = x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])
    for span in spans(weave.group.columns, weave.tiling.up.columns, len(y_TN)):
        # Without a name, which would keep it while the next one is made.
        up(
            s_TPR,
            in_float32(x_TK, weight_NK[span.low : span.high].T),
            span,
            bias_N,
            residual_TN,
            y_TN,
            u_TN,
            weave,
        )
    return y_TN


def wide_dx(dy_TN: Tensor, weight_NK: Tensor, ds_TPR: Tensor, weave: Weave) -> Tensor:
    """dyW + the dropped ds · A of all parts."""
    dx_TK = dy_TN.new_empty(dy_TN.shape[0], weight_NK.shape[1])
    for span in spans(((0, dx_TK.shape[1]),), weave.tiling.up.columns, len(dx_TK)):
        add_dx(ds_TPR, in_float32(dy_TN, weight_NK[:, span.low : span.high]), span, dx_TK, weave)
    return dx_TK


def spans(parts: tuple[tuple[int, int], ...], columns: int, rows: int) -> Iterator[RowSpan]:
    """All blocks of so many columns, no part sharing one with the next, in as few spans as are allowed."""
    edges = [(at, min(at + columns, high)) for low, high in parts for at in range(low, high, columns)]
    most = max(1, SPAN_BYTES // (torch.float32.itemsize * rows * columns))
    count = -(-len(edges) // most)
    for turn in range(count):
        first, end = turn * len(edges) // count, (turn + 1) * len(edges) // count
        yield RowSpan(first, end - first, edges[first][0], edges[end - 1][1])


def in_float32(left: Tensor, right: Tensor) -> Tensor:
    """left · right as it is summed up; torch has no such product of 16-bit numbers on a CPU."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
