"""Launchers of the fused product of the frozen weight and the adapters, forward and backward.

The tensor descriptors of the copy engines are created on the host at every launch; a captured graph keeps
them, as it keeps addresses.

The addition of large slots is first written to the product's output, which the product reads before it
overwrites it. It is rounded to 16 bits before the sum, as s is: this loses digits of the addition itself, not
those below the last digit of the sum.

Shapes: T rows, K inputs, N outputs of all parts, P parts, R ranks of one part up to a power of two.
"""

from __future__ import annotations

from torch import Tensor

from weftune.ops.lora.operands import Operands, Right, backward_operands, forward_operands
from weftune.ops.lora.rows import BLOCK
from weftune.ops.lora.tiled_kernels import alignment, large_dx, large_y, precision
from weftune.ops.lora.tiling import ProductBlocks, SiteCall, blocks_for_codes


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
    y_TN = x_TK.new_empty(operands.shape)
    if call.has_large:
        large_y(s_TPR, y_TN, call)
    _launch(operands, bias_N, residual_TN, s_TPR, y_TN, u_TN, call, call.tiling.y, backward=False)
    return y_TN


def fused_dx(dy_TN: Tensor, weight: Right, ds_TPR: Tensor, call: SiteCall) -> Tensor:
    """Return dyW + the dropped ds · A of all parts."""
    operands = backward_operands(dy_TN, weight)
    dx_TK = dy_TN.new_empty(operands.shape)
    if call.has_large:
        large_dx(ds_TPR, dx_TK, call)
    _launch(operands, None, None, ds_TPR, dx_TK, None, call, call.tiling.dx, backward=True)
    return dx_TK


def _launch(
    operands: Operands,
    bias_N: Tensor | None,
    residual: Tensor | None,
    s_TPR: Tensor,
    target: Tensor,
    unscaled: Tensor | None,
    call: SiteCall,
    blocks: ProductBlocks,
    backward: bool,
) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from weftune.ops.triton import product

    left, right = operands.left_TM, operands.right_LM
    turned = right.stride(1) == 1
    blocks = blocks_for_codes(blocks, left.shape[1]) if operands.coded else blocks
    half = [BLOCK, blocks.columns // 2]
    table, (rows, outputs) = call.group.table, target.shape
    g_out = None if unscaled is None else call.group.g_out
    tiles = -(-rows // BLOCK) * -(-outputs // blocks.columns)
    product.product[(min(tiles, blocks.programs),)](
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
        call.rows.key_S,
        call.rows.token_index_T,
        table.address_PS4,
        table.rank_PS,
        table.threshold_PS,
        table.crc_P,
        None if g_out is None else g_out.address_PSA,
        None if g_out is None else g_out.number_PSn,
        rows,
        outputs,
        left.shape[1],
        # For a single site the width is a runtime argument, so that sites of other widths share the kernel.
        COLUMNS=() if backward or call.sites == 1 else call.columns,
        BACKWARD=backward,
        TURNED=turned,
        S=call.slots,
        P=call.parts,
        BANDS=call.bands,
        R=call.ranks,
        M=BLOCK,
        C=blocks.columns,
        D=blocks.inner,
        ROUGH=blocks.rough,
        GROUP=blocks.group,
        LARGE=call.has_large,
        DROPS=backward and call.group.drops and call.training,
        ALIGNMENT=alignment(target, call),
        PRECISION=precision(target),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
