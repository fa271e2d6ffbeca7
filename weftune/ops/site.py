"""The product of an adapted linear (a site) whose jobs scale its input or output: y = g_out ⊙ ((x ⊙ g_in)Wᵀ +
…) + b, in plain torch.

Every job scales only its own rows, and no reduction mixes rows of two jobs: a NaN in one job does not reach
other jobs. Sums are kept in at least float32; the caller rounds them once.

Shapes: T rows, L rows of one job, R the maximum of L, K inputs, N outputs, M columns of the input or the
output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from weftune.core.weights import (
    Weight,
    accumulation_dtype,
    frozen_product,
    frozen_product_by,
    is_coded,
    quantised_product,
)
from weftune.ops.lora.products import product_in_float32

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class RowScale:
    """A vector `values_M` by which a job's rows, from `start` to `stop` − 1, are multiplied. Autograd may
    track the vector."""

    start: int
    stop: int
    values_M: Tensor
    scales_bias: bool = False
    """Whether the frozen bias is scaled too. Only scales of outputs use this."""


def scaled_rows(x_TM: Tensor, scales: Sequence[RowScale]) -> Tensor:
    """Return x with each job's rows multiplied by the job's vector. No two scales may share a row."""
    return _apply_by_rows(x_TM, scales, lambda part, scale: part if scale is None else part * scale.values_M)


def scaled_outputs(y_TN: Tensor, bias_N: Tensor | None, scales: Sequence[RowScale]) -> Tensor:
    """Return y with each job's rows multiplied by the job's vector, plus the bias. If a scale's `scales_bias`
    is set, the bias is added before the multiplication, else after it."""
    if bias_N is None:
        return scaled_rows(y_TN, scales)

    def scale_and_add_bias(part: Tensor, scale: RowScale | None) -> Tensor:
        if scale is None:
            return part + bias_N
        if scale.scales_bias:
            return (part + bias_N) * scale.values_M
        return part * scale.values_M + bias_N

    return _apply_by_rows(y_TN, scales, scale_and_add_bias)


def _apply_by_rows(
    x_TM: Tensor, scales: Sequence[RowScale], compute: Callable[[Tensor, RowScale | None], Tensor]
) -> Tensor:
    parts, row = [], 0
    for scale in sorted(scales, key=lambda one: one.start):
        assert row <= scale.start, "a row is scaled twice"
        parts += [compute(x_TM[row : scale.start], None)] if row < scale.start else []
        parts.append(compute(x_TM[scale.start : scale.stop], scale))
        row = scale.stop
    parts += [compute(x_TM[row:], None)] if row < len(x_TM) else []
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def replace_rows(y_TN: Tensor, values: Sequence[tuple[slice, Tensor]]) -> Tensor:
    """Return a copy of y in which the given slices of rows are replaced by the given values."""
    parts, row = [], 0
    for rows, value_LN in sorted(values, key=lambda one: one[0].start):
        parts += [y_TN[row : rows.start], value_LN]
        row = rows.stop
    return torch.cat([*parts, y_TN[row:]])


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """The indices of one job's rows as a tensor, so that a captured CUDA graph can select the rows in any
    microbatch.

    The length R is fixed. If the job has fewer rows, some of them are repeated as padding.
    """

    index_R: Tensor
    is_counted_R1: Tensor
    """Whether each element of `index_R` is a row of the job. False for repeated rows, which are padding."""
    first_position_R: Tensor
    """For each element of `index_R`, the position of the first element with the same row."""


@runtime_checkable
class RowChange(Protocol):
    """A function that a job applies to its rows of a linear's output. Its `backward` computes gradients
    without an autograd graph."""

    def __call__(self, y_LM: Tensor) -> Tensor:
        """Return the output rows that replace `y_LM`, computed by operations that autograd records."""

    def forward(self, y_LM: Tensor) -> Tensor: ...

    def backward(self, y_LM: Tensor, dy_LM: Tensor) -> Tensor:
        """Return the gradient of `y_LM`, and add the gradients of the job's weights to their accumulators."""


Change = tuple[slice | GatheredRows, slice, Callable[[Tensor], Tensor]]
"""A change of a linear's output: the rows and the columns that are changed, and the function that is applied
to their values."""


def zero_where_changed(residual_TN: Tensor, changes: Sequence[Change]) -> Tensor:
    """Return a detached copy of the residual, with zeros in the rows and columns of all changes. The caller
    adds the copy to y. `change_rows` then adds the values that were set to zero, and passes on the whole
    gradient of the residual."""
    residual_TN = residual_TN.detach().clone()
    for rows, columns, _ in changes:
        _zero_rows(residual_TN[:, columns], rows)
    return residual_TN


def change_rows(
    y_TN: Tensor, residual_TN: Tensor | None, changes: Sequence[Change], anchor: Tensor
) -> Tensor:
    """Overwrite y with f(y) + residual in the rows and columns of every change, where f is the function of
    the change, and return y. Elsewhere y must already contain the residual. `anchor` makes autograd record
    the changes (`ops.accumulate`).

    Only the changed rows are copied for the backward, which recomputes f.
    """
    changed_TN: Tensor = _Changed.apply(y_TN, residual_TN, changes, anchor)
    return changed_TN


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_TN: Tensor, residual_TN: Tensor | None, changes: Sequence[Change], anchor: Tensor
    ) -> Tensor:
        before = [_copy_rows(y_TN[:, columns], rows) for rows, columns, _ in changes]
        for own_LM, (rows, columns, change) in zip(before, changes, strict=True):
            made_LM = change.forward(own_LM) if isinstance(change, RowChange) else change(own_LM)
            if residual_TN is not None:
                made_LM = made_LM + _take_rows(residual_TN[:, columns], rows)
            _put_rows(y_TN[:, columns], rows, made_LM.to(y_TN.dtype))
        ctx.mark_dirty(y_TN)
        ctx.changes = changes
        ctx.save_for_backward(*before)
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        own_TN = dy_TN.clone()
        for own_LM, (rows, columns, change) in zip(ctx.saved_tensors, ctx.changes, strict=True):
            dy_LM = _take_rows(dy_TN[:, columns], rows)
            if isinstance(rows, GatheredRows):
                # With a gradient of zero, repeated rows add nothing to the gradients of the weights.
                dy_LM = torch.where(rows.is_counted_R1, dy_LM, 0.0)
            back = (
                change.backward if isinstance(change, RowChange) else partial(_gradient_by_autograd, change)
            )
            before_LM = back(own_LM, dy_LM)
            if isinstance(rows, GatheredRows):
                before_LM = before_LM.index_select(0, rows.first_position_R)
            _put_rows(own_TN[:, columns], rows, before_LM.to(own_TN.dtype))
        of_y, of_residual, *_ = ctx.needs_input_grad
        return own_TN if of_y else None, dy_TN if of_residual else None, None, None


def _gradient_by_autograd(change: Callable[[Tensor], Tensor], y_LM: Tensor, dy_LM: Tensor) -> Tensor:
    with torch.enable_grad():
        before_LM = y_LM.detach().requires_grad_()
        change(before_LM).backward(dy_LM)
    assert before_LM.grad is not None
    return before_LM.grad


def _take_rows(x_TM: Tensor, rows: slice | GatheredRows) -> Tensor:
    return x_TM[rows] if isinstance(rows, slice) else x_TM.index_select(0, rows.index_R)


def _copy_rows(x_TM: Tensor, rows: slice | GatheredRows) -> Tensor:
    taken_LM = _take_rows(x_TM, rows)
    return taken_LM.clone() if isinstance(rows, slice) else taken_LM


def _put_rows(x_TM: Tensor, rows: slice | GatheredRows, value_LM: Tensor) -> None:
    """Overwrite the given rows of x. If a row occurs several times, its values must be equal."""
    if isinstance(rows, slice):
        x_TM[rows] = value_LM
    else:
        x_TM.index_copy_(0, rows.index_R, value_LM)


def _zero_rows(x_TM: Tensor, rows: slice | GatheredRows) -> None:
    if isinstance(rows, slice):
        x_TM[rows] = 0.0
    else:
        x_TM.index_fill_(0, rows.index_R, 0.0)


def unrounded_product(x_TK: Tensor, weight: Weight) -> Tensor:
    """Return xWᵀ without rounding to the dtype of x, in float32 for 16-bit operands. Small terms that are
    added later are then not lost."""
    if is_coded(weight):
        return quantised_product(x_TK, weight, accumulation_dtype(x_TK.dtype))
    if x_TK.dtype in HALVES:
        return frozen_product_by(
            lambda x_TK, weight_NK, _: product_in_float32(x_TK, weight_NK.T), x_TK, weight, None
        )
    return frozen_product(x_TK, weight, None)
