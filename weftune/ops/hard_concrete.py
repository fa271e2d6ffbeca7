"""A sparse trained matrix that is added to a frozen weight (the difference), with hard-concrete gates, a
relaxation of the L0 penalty.

A gate is z = clip(σ(α + logit u) · (UPPER − LOWER) + LOWER, 0, 1) with u uniform in (0, 1). The noise u is a
pure function of (job seed, step, name of the linear, element): it does not depend on other jobs, packing,
splitting or recomputation. The product with the difference saves only its input for the backward, which
recomputes the gates: temporary tensors of the size of a weight exist for one linear at a time.

Shapes: L rows of one job, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weftune.core.weights import accumulation_dtype
from weftune.ops.dropout import STRIDE, hash_bits, hash_to_odd, to_signed

LOWER, UPPER = -1.5, 1.5
OPEN, SHUT = 1e4, -1e4
"""Values of a gate's parameter α for which the gate is 1 (OPEN) or 0 (SHUT) with any noise, also after any
optimizer step."""
BITS = 23
"""Number of bits of the random integer n from which a uniform number (n + ½) / 2²³ is computed, exactly in
float32."""


@dataclass(frozen=True, slots=True)
class Gated:
    """A trained difference to a frozen weight and the parameters α of its gates. Also used for the
    accumulators of their gradients."""

    w_NK: Tensor
    alpha_NK: Tensor
    group_alpha: Tensor | None
    """Parameter α [1] of an additional gate that multiplies the whole tensor. None if the tensor has no such
    gate."""


@dataclass(frozen=True, slots=True)
class DrawnGates:
    """The random keys from which one pass draws the noise of its gates, and the weight `l0_weight` of the L0
    penalty."""

    key: int
    """Random key from which the noise u of every element's gate is computed."""
    group_key: int
    l0_weight: float
    adds_penalty: Tensor
    """Scalar tensor: 1 if the backward of this pass adds the gradient of the L0 penalty, else 0."""


def uniform_noise(key: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """Return uniform random numbers in (0, 1), [rows, columns], in the dtype of `like`. Each number is a pure
    function of the key and its position."""
    row, column = (
        torch.arange(1, count + 1, dtype=torch.int32, device=like.device) for count in (rows, columns)
    )
    row, column = hash_to_odd(row ^ to_signed(key)), hash_to_odd(column * to_signed(STRIDE) ^ to_signed(key))
    bits = hash_bits(row[:, None] * column) & (1 << BITS) - 1
    return (bits.to(like.dtype) + 0.5) / (1 << BITS)


def gate_with_slope(alpha: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the hard-concrete gate z for the parameter α, and its derivative dz/dα. If `noise` (u) is None,
    the gate has no noise, as in evaluation."""
    s = torch.sigmoid(alpha if noise is None else alpha + torch.logit(noise))
    stretched = s * (UPPER - LOWER) + LOWER
    inside = (stretched > 0) & (stretched < 1)
    return stretched.clamp(0.0, 1.0), torch.where(inside, (UPPER - LOWER) * s * (1 - s), 0.0)


def pruned_values(values: Gated, kept_count: int) -> Tensor:
    """Return the trained difference to the frozen weight, multiplied by its gates without noise, with all but
    the `kept_count` largest elements set to 0."""
    dtype = accumulation_dtype(values.w_NK.dtype)
    whole = values.w_NK.to(dtype) * gate_with_slope(values.alpha_NK.to(dtype))[0]
    if values.group_alpha is not None:
        whole = whole * gate_with_slope(values.group_alpha.to(dtype))[0]
    largest = whole.abs().flatten().topk(min(kept_count, whole.numel())).indices
    found = torch.zeros_like(whole)
    found.view(-1)[largest] = whole.view(-1)[largest]
    return found


def fix_gates(values: Gated, kept_count: int) -> None:
    """Prune the trained difference in place to its `kept_count` largest elements, the elements that
    `pruned_values` keeps. Fix the gates of these elements at 1 and all other gates at 0."""
    whole = pruned_values(values, kept_count)
    values.w_NK.copy_(whole)
    values.alpha_NK.copy_(torch.where(whole != 0, OPEN, SHUT))
    if values.group_alpha is not None:
        values.group_alpha.fill_(OPEN)


def difference_product(
    x_LK: Tensor, values: Gated, totals: Gated, drawn_gates: DrawnGates | None, anchor: Tensor
) -> Tensor:
    """Return x(z ⊙ w)ᵀ, where w is the trained difference to the frozen weight and z are its gates. The
    backward adds the gradients of w and of the gates to `totals`. If `drawn_gates` is None, the gates are
    fixed and only w has a gradient. `anchor` makes autograd record the product (`ops.accumulate`)."""
    return _DifferenceProduct.apply(x_LK, anchor, values, totals, drawn_gates)


class _DifferenceProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_LK: Tensor, anchor: Tensor, values: Gated, totals: Gated, drawn_gates: DrawnGates | None
    ) -> Tensor:
        ctx.save_for_backward(x_LK)
        ctx.values, ctx.totals, ctx.drawn = values, totals, drawn_gates
        (element_NK, _), (group, _) = _gate_values(values, drawn_gates)
        delta_NK = (values.w_NK * element_NK * group).to(x_LK.dtype)
        return x_LK @ delta_NK.T

    @staticmethod
    def backward(ctx: Any, dy_LN: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (x_LK,) = ctx.saved_tensors
        values, totals, drawn = ctx.values, ctx.totals, ctx.drawn
        (element_NK, slope_NK), (group, group_slope) = _gate_values(values, drawn)
        z_NK = element_NK * group
        dx_LK = None
        if ctx.needs_input_grad[0]:
            dx_LK = dy_LN @ (values.w_NK * z_NK).to(dy_LN.dtype)
        change_NK = (dy_LN.T @ x_LK).to(totals.w_NK.dtype)
        totals.w_NK.add_(change_NK * z_NK)
        if drawn is not None:
            change_NK *= values.w_NK
            totals.alpha_NK.add_(change_NK * slope_NK * group)
            if totals.group_alpha is not None:
                totals.group_alpha.add_((change_NK * element_NK).sum() * group_slope)
            _add_penalty(values, totals, drawn)
        return dx_LK, None, None, None, None


def _gate_values(
    values: Gated, drawn_gates: DrawnGates | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the gates of the elements and the gate of the whole tensor, each together with its derivative
    dz/dα."""
    alpha_NK = values.alpha_NK.to(accumulation_dtype(values.alpha_NK.dtype))
    fixed = alpha_NK.new_ones(1), alpha_NK.new_zeros(1)
    if drawn_gates is None:
        return gate_with_slope(alpha_NK), fixed
    rows, columns = alpha_NK.shape
    element = gate_with_slope(alpha_NK, uniform_noise(drawn_gates.key, rows, columns, alpha_NK))
    if values.group_alpha is None:
        return element, fixed
    group = values.group_alpha.to(alpha_NK.dtype)
    return element, gate_with_slope(group, uniform_noise(drawn_gates.group_key, 1, 1, group)[0])


def _add_penalty(values: Gated, totals: Gated, drawn_gates: DrawnGates) -> None:
    """Add the gradient of the L0 penalty to `totals`. The penalty is l0_weight times the expected number of
    elements whose gates are not 0."""
    # The probability that a gate is not 0 is σ(α), since UPPER = −LOWER.
    p_NK = torch.sigmoid(values.alpha_NK.to(totals.alpha_NK.dtype))
    cost = drawn_gates.l0_weight * drawn_gates.adds_penalty.to(p_NK.dtype)
    if values.group_alpha is None or totals.group_alpha is None:
        totals.alpha_NK.add_(cost * p_NK * (1 - p_NK))
        return
    p = torch.sigmoid(values.group_alpha.to(p_NK.dtype))
    totals.group_alpha.add_(cost * p * (1 - p) * p_NK.sum())
    totals.alpha_NK.add_(cost * p * p_NK * (1 - p_NK))
