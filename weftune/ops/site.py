"""The frozen product of a site whose jobs scale its input or its output: y = g_out ⊙ ((x ⊙ g_in)Wᵀ + …) + b.

Every job scales its own rows only, so that no reduction ever mixes rows of two jobs: a NaN stays with its
owner. Sums are kept in at least float32 and rounded once, by whoever asks.

Shapes: T rows, L of them that belong to one job, K inputs, N outputs, M columns of either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weftune.core.coded import is_coded, wide
from weftune.core.weight import Weight, coded_product, frozen_product, frozen_product_by
from weftune.ops.lora.operands import in_float32

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class RowScale:
    """Rows `start` to `stop` are multiplied by `values`, column by column; autograd may see the values."""

    start: int
    stop: int
    values_M: Tensor
    scales_bias: bool = False
    """At an output: whether the frozen bias is scaled, too."""


def scaled_rows(x_TM: Tensor, scales: Sequence[RowScale]) -> Tensor:
    """x with the rows of every scale multiplied by it; no two scales share a row."""
    return _by_rows(x_TM, scales, lambda part, scale: part if scale is None else part * scale.values_M)


def scaled_outputs(y_TN: Tensor, bias_N: Tensor | None, scales: Sequence[RowScale]) -> Tensor:
    """The same, and the bias added: behind the scale, or before it where that scales the bias, too."""
    if bias_N is None:
        return scaled_rows(y_TN, scales)

    def finish(part: Tensor, scale: RowScale | None) -> Tensor:
        if scale is None:
            return part + bias_N
        if scale.scales_bias:
            return (part + bias_N) * scale.values_M
        return part * scale.values_M + bias_N

    return _by_rows(y_TN, scales, finish)


def _by_rows(
    x_TM: Tensor, scales: Sequence[RowScale], make: Callable[[Tensor, RowScale | None], Tensor]
) -> Tensor:
    parts, row = [], 0
    for scale in sorted(scales, key=lambda one: one.start):
        assert row <= scale.start, "a row is scaled twice"
        parts += [make(x_TM[row : scale.start], None)] if row < scale.start else []
        parts.append(make(x_TM[scale.start : scale.stop], scale))
        row = scale.stop
    parts += [make(x_TM[row:], None)] if row < len(x_TM) else []
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def with_rows(y_TN: Tensor, made: Sequence[tuple[slice, Tensor]]) -> Tensor:
    """y with other values in some of its rows."""
    parts, row = [], 0
    for rows, value_LN in sorted(made, key=lambda one: one[0].start):
        parts += [y_TN[row : rows.start], value_LN]
        row = rows.stop
    return torch.cat([*parts, y_TN[row:]])


Change = tuple[slice, slice, Callable[[Tensor], Tensor]]
"""Rows, columns, and what becomes of them."""


def zero_where_changed(residual_TN: Tensor, changes: Sequence[Change]) -> Tensor:
    """The residual as y takes it before `changed_rows`; it gets its gradient there."""
    residual_TN = residual_TN.detach().clone()
    for rows, columns, _ in changes:
        residual_TN[rows, columns] = 0.0
    return residual_TN


def changed_rows(y_TN: Tensor, residual_TN: Tensor | None, changes: Sequence[Change]) -> Tensor:
    """y, which is overwritten, with f(y) + residual in the place of some of its rows and columns; elsewhere
    the residual is in y already.

    What a change computes is not kept but recomputed in the backward, and no more than its rows are copied.
    """
    changed: Tensor = _Changed.apply(y_TN, residual_TN, changes)
    return changed


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_TN: Tensor, residual_TN: Tensor | None, changes: Sequence[Change]) -> Tensor:
        before = [y_TN[rows, columns].clone() for rows, columns, _ in changes]
        for own_LM, (rows, columns, change) in zip(before, changes, strict=True):
            made_LM = change(own_LM)
            y_TN[rows, columns] = made_LM if residual_TN is None else made_LM + residual_TN[rows, columns]
        ctx.mark_dirty(y_TN)
        ctx.changes = changes
        ctx.save_for_backward(*before)
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, Tensor | None, None]:
        own_TN = dy_TN.clone()
        for own_LM, (rows, columns, change) in zip(ctx.saved_tensors, ctx.changes, strict=True):
            with torch.enable_grad():
                before_LM = own_LM.detach().requires_grad_()
                change(before_LM).backward(dy_TN[rows, columns])
            own_TN[rows, columns] = before_LM.grad
        return own_TN, dy_TN if ctx.needs_input_grad[1] else None, None


def summed_product(x_TK: Tensor, weight: Weight) -> Tensor:
    """xWᵀ as it is summed up: of 16-bit numbers in float32, so that what is added to it is not rounded."""
    if is_coded(weight):
        return coded_product(x_TK, weight, wide(x_TK.dtype))
    if x_TK.dtype in HALVES:
        return frozen_product_by(_in_float32, x_TK, weight, None)
    return frozen_product(x_TK, weight, None)


def _in_float32(x_TK: Tensor, weight_NK: Tensor, _: None) -> Tensor:
    return in_float32(x_TK, weight_NK.T)
