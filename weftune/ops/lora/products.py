"""The frozen product of a linear with the adapters' output added before rounding, forward and backward, by
two methods (plans).

`wide`: `torch.mm` writes the product in float32, and kernels add the adapters' output. `torch.addmm` is not
used: it rounds a product of 16-bit operands to 16 bits before the addition, at nearly every shape and with
all settings of torch. In a measurement this kept only a sixth of the output of a newly initialised adapter.

`fused`: one kernel computes both. Its TMA descriptors are created on the host at every launch; a captured
graph stores them. For jobs with large ranks, the adapter's output is first written to the output tensor,
which the fused kernel reads and then overwrites. That value is rounded to 16 bits, as s is: this costs
relative precision of the adapter's output, but does not cut it off at the last digit of the sum.

Shapes: T rows, K inputs, N outputs of all linears, W columns of a span, M columns that are summed over, L
rows of the right operand, P parts (`ops.lora.table`), R rank of one part, rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.core.weights import CODES, CodedWeight
from weftune.ops import triton as kernels
from weftune.ops.fp8 import row_codes, unscaled_code_product
from weftune.ops.lora.rows import BLOCK
from weftune.ops.lora.tiled_kernels import ColumnSpan, add_dx, large_dx, large_y, up
from weftune.ops.lora.tiling import ProductBlocks, SiteCall, blocks_for_codes

SPAN_BYTES = 256 << 20
"""Maximum size in bytes of a temporary float32 product, unless a single block of columns takes more."""

Right = Tensor | CodedWeight
"""A weight [N, K] in a form that products read directly: a matrix, or 8-bit floats with scales."""


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of a product left · rightᵀ. If they are 8-bit floats, the product must be multiplied by
    their scales."""

    left_TM: Tensor
    right_LM: Tensor
    scale_T: Tensor | None = None
    scale_L: Tensor | None = None

    @property
    def has_codes(self) -> bool:
        return self.right_LM.dtype is CODES

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the product: number of rows of the left operand and number of rows of the right
        operand."""
        return len(self.left_TM), len(self.right_LM)

    def unscaled_product(self, first_column: int, end_column: int) -> Tensor:
        """Return the columns from `first_column` to `end_column` − 1 of left · rightᵀ in float32, before the
        scales are applied."""
        right_LM = self.right_LM[first_column:end_column]
        if self.has_codes:
            return unscaled_code_product(self.left_TM, right_LM)
        return product_in_float32(self.left_TM, right_LM.T)


def forward_operands(x_TK: Tensor, weight: Right) -> Operands:
    """Return the operands of xWᵀ, the frozen product of the forward."""
    if isinstance(weight, Tensor):
        return Operands(x_TK, weight)
    codes_TK, scale_T = row_codes(x_TK, None, weight.input_maxima)
    return Operands(codes_TK, weight.codes(), scale_T, weight.scale())


def backward_operands(dy_TN: Tensor, weight: Right) -> Operands:
    """Return the operands of dyW, the gradient of the linear's input."""
    if isinstance(weight, Tensor):
        return Operands(dy_TN, weight.T)
    codes_TN, scale_T = row_codes(dy_TN, weight.scale(), weight.output_maxima)
    return Operands(codes_TN, weight.transposed_codes(), scale_T)


def matrix_like(like: Tensor, weight: Right) -> Tensor:
    """Return the weight as a matrix in the dtype of `like`."""
    if isinstance(weight, Tensor):
        return weight
    return (weight.codes().to(torch.float32) * weight.scale()[:, None]).to(like.dtype)


def product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b in float32 without intermediate rounding. On a CPU, 16-bit operands are converted
    first."""
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
    """Return residual + bias + g ⊙ (xWᵀ + sB) by the `wide` plan (`torch.mm`, then kernels), with s = factor
    · drop(x)Aᵀ and the scales g of the job's outputs (1 without scales). If a job scales its outputs, also
    write xWᵀ + sB to u."""
    operands = forward_operands(x_TK, weight)
    y_TN = x_TK.new_empty(operands.shape)
    for span in column_spans(call.group.columns, call.tiling.up.columns, len(y_TN)):
        # The product is not assigned to a variable, which would keep it alive during the next product.
        up(
            s_TPR,
            operands.unscaled_product(span.first_column, span.end_column),
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
    """Return the gradient of x by the `wide` plan (`torch.mm`, then kernels): dyW plus the adapters' ds · A
    with the dropout mask applied, where ds = factor · dyBᵀ."""
    operands = backward_operands(dy_TN, weight)
    dx_TK = dy_TN.new_empty(operands.shape)
    for span in column_spans(((0, dx_TK.shape[1]),), call.tiling.up.columns, len(dx_TK)):
        add_dx(
            ds_TPR,
            operands.unscaled_product(span.first_column, span.end_column),
            span,
            dx_TK,
            call,
            operands.scale_T,
        )
    return dx_TK


def column_spans(column_ranges: tuple[tuple[int, int], ...], columns: int, rows: int) -> Iterator[ColumnSpan]:
    """Split each of `column_ranges` into blocks of `columns` columns, and yield spans (groups of consecutive
    blocks). There are as few spans as `SPAN_BYTES` allows for the temporary product of each."""
    edges = [(at, min(at + columns, high)) for low, high in column_ranges for at in range(low, high, columns)]
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
    """Return residual + bias + g ⊙ (xWᵀ + sB) by the `fused` plan (one kernel), with s = factor · drop(x)Aᵀ
    and the scales g of the job's outputs (1 without scales). If a job scales its outputs, also write xWᵀ + sB
    to u."""
    operands = forward_operands(x_TK, weight)
    return _fused_product(operands, bias_N, residual_TN, s_TPR, u_TN, call, call.tiling.y, backward=False)


def fused_dx(dy_TN: Tensor, weight: Right, ds_TPR: Tensor, call: SiteCall) -> Tensor:
    """Return the gradient of x by the `fused` plan (one kernel): dyW plus the adapters' ds · A with the
    dropout mask applied, where ds = factor · dyBᵀ."""
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
    if call.has_large_ranks:
        (large_dx if backward else large_y)(s_TPR, target, call)
    left, right = operands.left_TM, operands.right_LM
    turned = right.stride(1) == 1
    blocks = blocks_for_codes(blocks, left.shape[1]) if operands.has_codes else blocks
    half = [BLOCK, blocks.columns // 2]
    rows, outputs = target.shape
    tiles = -(-rows // BLOCK) * -(-outputs // blocks.columns)
    kernels.product.product[(min(tiles, blocks.programs),)](
        TensorDescriptor.from_tensor(left, [BLOCK, blocks.inner_size]),
        TensorDescriptor.from_tensor(right, [blocks.columns, blocks.inner_size])
        if turned
        else TensorDescriptor.from_tensor(right.T, [blocks.inner_size, blocks.columns]),
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
        # For a single linear the width is a runtime argument, so that linears of all widths share the kernel.
        COLUMNS=() if backward or call.sites == 1 else call.columns,
        BACKWARD=backward,
        TRANSPOSED=turned,
        BANDS=call.bands,
        M=BLOCK,
        D=blocks.inner_size,
        PRODUCTS_PER_SUM=blocks.products_per_sum,
        GROUP=blocks.group,
        HAS_LARGE_RANKS=call.has_large_ranks,
        HAS_DROPOUT=backward and call.has_dropout,
        **call.constants(target, blocks),
    )
    return target
