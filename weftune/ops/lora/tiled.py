"""Frozen linears of a group and all jobs' adapters as one autograd node, with Triton kernels (the tiled
route).

The kernels of the low-rank products find each job by its slot, its index in a table (`ops.lora.table`), and
`ops.lora.products` has the frozen product. No shape, address or launch depends on the jobs, so all work can
be captured in a CUDA graph. Besides LoRA, adapters may have vectors that scale outputs or inputs (DoRA, IA³),
and matrices that are computed from vectors (VeRA).

Shapes: T rows, K inputs, N outputs of all linears, P parts (`ops.lora.table`), R rank of one part, rounded up
to a power of two, Q pieces of slots with several pieces (`ops.lora.rows`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weftune.core.weights import FrozenWeight, Weight, is_coded, weight_matrix
from weftune.ops.fallback import rehearse_kernels
from weftune.ops.lora.choice import Choices, PlanTrial
from weftune.ops.lora.computed import add_pair_gradients, write_pairs
from weftune.ops.lora.few_rows import FEW_ROWS, few_rows_linear, is_unscaled_lora
from weftune.ops.lora.products import Right, fused_dx, fused_y, matrix_like, wide_dx, wide_y
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.scales import scale_rows, unscale_rows
from weftune.ops.lora.table import Group
from weftune.ops.lora.tiled_kernels import (
    add_gradients,
    allocate_da,
    allocate_db,
    da,
    db,
    down,
    ds,
    ds_db,
    row_lengths,
)
from weftune.ops.lora.tiling import ProductPlan, SiteCall, candidate_plans, choose_tiling
from weftune.ops.side_stream import SideStream

OP = "LoRA"


def plan_trial(
    weight: Weight, residual: bool, group: Group, rows: Rows, dtype: torch.dtype
) -> PlanTrial | None:
    """Return the trial that measures the fastest product plan (method of the tiled kernels) for `lora_linear`
    with these arguments. None for weights that are dequantised at each use, whose plan is not measured."""
    if not isinstance(weight, Tensor) and not is_coded(weight):
        return None
    weight_NK = _stored_tensor(weight)
    plans = candidate_plans(weight_NK, group, weight_NK.device)
    return PlanTrial.for_linears(plans, dtype, weight_NK, residual, group, rows)


def lora_linear(
    x_TK: Tensor,
    weight: Weight,
    bias_N: Tensor | None,
    residual_TN: Tensor | None,
    anchor: Tensor,
    group: Group,
    rows: Rows,
    training: bool,
    choices: Choices | None = None,
    graph_only: bool = False,
) -> Tensor:
    """Return y = residual + bias + g_out ⊙ ((x ⊙ g_in)Wᵀ + factor · drop(x)AᵀB), where each row has A, B and
    the scales g of its job. The backward adds dA and dB to the jobs' accumulators; for a group of several
    linears it may overwrite dy. `anchor` makes autograd call the backward even if x needs no gradient
    (`ops.accumulate`). If `graph_only`, y may have arbitrary values, since only the backward is used. Raises
    KernelsFailed if the kernels do not run on the device."""
    assert x_TK.shape[0] == len(rows.token_index_T)
    right = multiplied_form(weight)
    if len(x_TK) <= FEW_ROWS and not torch.is_grad_enabled() and not training and is_unscaled_lora(group):
        _warm_up_few_rows(x_TK, right, bias_N, residual_TN, group, rows)
        return few_rows_linear(x_TK, right, bias_N, residual_TN, group, rows)
    weight_NK = _stored_tensor(right)
    plans = candidate_plans(weight_NK, group, x_TK.device)
    if not training and len(x_TK) <= FEW_ROWS:
        # A decode step reads the weight once, and torch divides that among all multiprocessors.
        plan = ProductPlan.wide
    else:
        plan = choices.choose_plan(x_TK, weight_NK, residual_TN, group, rows, plans) if choices else plans[0]
    tiling = choose_tiling(rows, group, x_TK.shape[1], x_TK.dtype)
    call = SiteCall(group, rows, training, tiling, plan, graph_only)
    _rehearse_tiles(x_TK, right, bias_N, residual_TN, call)
    source = None if isinstance(weight, Tensor) else weight
    return _LoraLinear.apply(x_TK, right, bias_N, residual_TN, anchor, call, source)


@torch.no_grad()
def _rehearse_tiles(
    x_TK: Tensor, right: Right, bias_N: Tensor | None, residual_TN: Tensor | None, call: SiteCall
) -> None:
    """Test whether the tiled kernels run on the device: launch them on rows of no job, so that nothing is
    written, once per set of launch parameters. Raises KernelsFailed if they do not run."""
    rows, lying = call.rows, _stored_tensor(right)
    # The kernels depend on the number of rows only through their tiling and the alignment of that number.
    tiling = replace(
        call.tiling, y=replace(call.tiling.y, programs=0), dx=replace(call.tiling.dx, programs=0)
    )
    key = (
        *(x_TK.device, x_TK.dtype, len(x_TK) % 16 == 0, lying.shape, lying.dtype, lying.stride(0) == 1),
        *(
            bias_N is None,
            residual_TN is None,
            call.group.launch_key,
            call.slots,
            call.training,
            call.plan,
            tiling,
        ),
    )

    def launch_kernels() -> None:
        empty = Rows.empty(len(x_TK), call.slots, x_TK.device, rows.tile, rows.piece)
        vacant = replace(call, rows=empty, graph_only=False)
        y_TN, s_TPR, u_TN = forward(x_TK.contiguous(), right, bias_N, residual_TN, vacant)
        if call.training:
            dy_TN = torch.zeros_like(y_TN)
            backward(dy_TN, x_TK.contiguous(), right, s_TPR, vacant, True, u_TN, bias_N)

    rehearse_kernels(OP, key, x_TK.device, launch_kernels)


def _warm_up_few_rows(
    x_TK: Tensor, right: Right, bias_N: Tensor | None, residual_TN: Tensor | None, group: Group, rows: Rows
) -> None:
    """Test whether the kernels for few rows run on the device: launch them on rows of no job, so that nothing
    is written, once per set of launch parameters. Raises KernelsFailed if they do not run."""
    lying, slots = _stored_tensor(right), len(rows.key_S)
    key = (
        *("few rows", x_TK.device, x_TK.dtype, lying.shape, lying.dtype, lying.stride(0) == 1),
        *(bias_N is None, residual_TN is None, group.launch_key, slots, rows.tile),
    )

    def launch_kernels() -> None:
        empty = Rows.empty(len(x_TK), slots, x_TK.device, rows.tile, rows.piece)
        few_rows_linear(x_TK, right, bias_N, residual_TN, group, empty)

    rehearse_kernels(OP, key, x_TK.device, launch_kernels)


def multiplied_form(weight: Weight) -> Right:
    """Return the form of a weight that products read: the weight itself if it is stored in fp8, else its
    matrix."""
    return weight if is_coded(weight) else weight_matrix(weight)


def _stored_tensor(right: Right) -> Tensor:
    """Return the tensor [N, K] that the product xWᵀ reads from memory: the matrix, or the 8-bit codes."""
    return right if isinstance(right, Tensor) else right.codes()


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        right: Right,
        bias_N: Tensor | None,
        residual_TN: Tensor | None,
        anchor: Tensor,
        call: SiteCall,
        source: FrozenWeight | None,
    ) -> Tensor:
        """Compute y. `right` is the weight in the form that products read. `source` is the weight from which
        the backward recomputes `right`, or None if `right` is a tensor of the base model, which is saved."""
        x_TK = x_TK.contiguous()
        y_TN, s_TPR, u_TN = forward(x_TK, right, bias_N, residual_TN, call)
        ctx.call, ctx.source = call, source
        ctx.save_for_backward(x_TK, right if source is None else None, s_TPR, u_TN, bias_N)
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, weight_NK, s_TPR, u_TN, bias_N = ctx.saved_tensors
        right = weight_NK if ctx.source is None else multiplied_form(ctx.source)
        wants_dx = ctx.needs_input_grad[0]
        own_TN = dy_TN.contiguous()
        dx_TK = backward(own_TN, x_TK, right, s_TPR, ctx.call, wants_dx, u_TN, bias_N)
        return dx_TK, None, None, dy_TN if ctx.needs_input_grad[3] else None, None, None, None


def forward(
    x_TK: Tensor, weight: Right, bias_N: Tensor | None, residual_TN: Tensor | None, call: SiteCall
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (y, s, u): the outputs y, and for the backward s = factor · drop(x)Aᵀ and the outputs u before
    they are scaled, None if no job scales outputs."""
    group = call.group
    with torch.cuda.device_of(x_TK):
        if group.computed_table is not None:
            write_pairs(x_TK, group.computed_table, group)
        if group.g_in is not None:
            x_TK = scale_rows(x_TK, group.g_in, ((0, x_TK.shape[1]),), call.rows)
        s_TPR = down(x_TK, call)
        if group.has_dora:
            row_lengths(matrix_like(x_TK, weight), call)
        residual_TN = None if residual_TN is None else residual_TN.contiguous()
        outputs = len(x_TK), group.columns[-1][1]
        if call.graph_only and group.g_out is None:
            return x_TK.new_empty(outputs), s_TPR, None
        u_TN = None if group.g_out is None else x_TK.new_empty(outputs)
        product = fused_y if call.plan.is_fused else wide_y
        return product(x_TK, weight, bias_N, residual_TN, s_TPR, u_TN, call), s_TPR, u_TN


def backward(
    dy_TN: Tensor,
    x_TK: Tensor,
    weight: Right,
    s_TPR: Tensor,
    call: SiteCall,
    needs_dx: bool,
    u_TN: Tensor | None = None,
    bias_N: Tensor | None = None,
) -> Tensor | None:
    """Return dx, the gradient of x, if `needs_dx`, else None, and add the adapters' gradients to the jobs'
    accumulators."""
    group = call.group
    with torch.cuda.device_of(x_TK):
        if group.computed_table is not None:
            write_pairs(x_TK, group.computed_table, group)
        if group.g_out is not None:
            assert u_TN is not None
            # Groups of several sites occur only in fused layers, where no other operation uses dy. Elsewhere
            # dy may also be the gradient of other operations, and must not be overwritten.
            alone = call.sites > 1
            dy_TN = unscale_rows(dy_TN, u_TN, bias_N, group.g_out, group.columns, call.rows, in_place=alone)
        dx_TK = _low_rank_backward(dy_TN, x_TK, weight, s_TPR, call, needs_dx or group.g_in is not None)
        if group.g_in is not None:
            assert dx_TK is not None
            inputs = ((0, x_TK.shape[1]),)
            dx_TK = unscale_rows(dx_TK, x_TK, None, group.g_in, inputs, call.rows, in_place=True)
        if group.computed_table is not None:
            add_pair_gradients(x_TK, group.computed_table, group)
        return dx_TK if needs_dx else None


def _low_rank_backward(
    dy_TN: Tensor, x_TK: Tensor, weight: Right, s_TPR: Tensor, call: SiteCall, needs_dx: bool
) -> Tensor | None:
    """Add dA and dB to the jobs' accumulators, and return dx, the gradient of x, if `needs_dx`, else None. dx
    depends only on ds, the gradient of xAᵀ, so dA and dB are computed concurrently with dx if
    `plan.uses_side_stream`."""
    product = fused_dx if call.plan.is_fused else wide_dx
    if not needs_dx or not call.plan.uses_side_stream:
        ds_TPR, partial_db_QLN = ds_db(dy_TN, s_TPR, call)
        partial_da_QPRK = allocate_da(x_TK, call)
        da(x_TK, ds_TPR, partial_da_QPRK, call)
        add_gradients(partial_da_QPRK, partial_db_QLN, call)
        return product(dy_TN, weight, ds_TPR, call) if needs_dx else None
    ds_TPR = ds(dy_TN, call)
    partial_da_QPRK, partial_db_QLN = allocate_da(x_TK, call), allocate_db(dy_TN, call)
    aside = SideStream(x_TK.device)
    # The product is launched first: work on the second stream uses the multiprocessors that it leaves idle.
    dx_TK = product(dy_TN, weight, ds_TPR, call)
    with aside.concurrent_work():
        db(dy_TN, s_TPR, partial_db_QLN, call)
        da(x_TK, ds_TPR, partial_da_QPRK, call)
        add_gradients(partial_da_QPRK, partial_db_QLN, call)
    return dx_TK
