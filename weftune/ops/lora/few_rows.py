"""Frozen linears of a group and all jobs' adapters for few rows without gradients, such as a decode step.

A training pass computes many rows per job, a decode step one row per sequence. Its time is that of reading
weights and adapters, so launches and programs that read little matter. Beside the frozen product there are
two launches for all sites of a group and all jobs: shares of s = factor · xAᵀ, and y, which adds the shares.
Slots, ranks and addresses are read from device tensors, so a captured graph remains valid for other jobs.

Shapes: T rows, K inputs, N outputs of all linears, P parts (`ops.lora.table`), R rank of one part, rounded up
to a power of two, C shares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weftune.ops import triton as kernels
from weftune.ops.lora.products import Right, forward_operands
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import ALIGNMENT, Group
from weftune.ops.lora.tiling import KernelLaunch, precision, rank_block

FEW_ROWS = 256
"""Maximum rows of a pass without gradients for which the frozen product is left to torch."""
TILE_ROWS = 16
"""Rows per program in a decode step: the fewest that tensor cores multiply."""
SHARE_INPUTS = 512
"""Inputs of one share of a sum, unless there would be more than MAX_SHARES."""
MAX_SHARES = 16
SPAN_COLUMNS = 1024
"""Columns of the output per program."""


def is_plain(group: Group) -> bool:
    """Return whether all adapters of a group are LoRA without scales, the only ones with these kernels."""
    return group.g_out is None and group.g_in is None and group.computed_table is None


def few_rows_linear(
    x_TK: Tensor, weight: Right, bias_N: Tensor | None, residual_TN: Tensor | None, group: Group, rows: Rows
) -> Tensor:
    """Return y = residual + bias + xWᵀ + scale · xAᵀB, A and B by job."""
    assert is_plain(group)
    with torch.cuda.device_of(x_TK):
        x_TK = x_TK.contiguous()
        shares = share_count(x_TK.shape[1])
        partial_PCTR = _down_shares(x_TK, group, rows, shares)
        operands = forward_operands(x_TK, weight)
        residual_TN = None if residual_TN is None else residual_TN.contiguous()
        y_TN = x_TK.new_empty(operands.shape)
        spans = sum(-(-(high - low) // SPAN_COLUMNS) for low, high in group.columns)
        kernels.few_rows.up_shares[(spans, len(rows.tiles_G3))](
            partial_PCTR,
            operands.summed(0, y_TN.shape[1]),
            operands.scale_T,
            operands.scale_L,
            bias_N,
            residual_TN,
            y_TN,
            rows.tiles_G3,
            group.table.address_PS4,
            group.table.factor_PS2,
            group.table.rank_PS,
            *y_TN.shape,
            COLUMNS=tuple(edge for part in group.columns for edge in part),
            P=len(group.columns) * group.bands,
            BANDS=group.bands,
            SPAN=SPAN_COLUMNS,
            SPLITS=shares,
            **_constants(x_TK, group, rows),
        )
        return y_TN


def share_count(features: int) -> int:
    """Return the number of shares of a sum over `features` inputs."""
    return max(1, min(MAX_SHARES, -(-features // SHARE_INPUTS)))


def _down_shares(x_TK: Tensor, group: Group, rows: Rows, shares: int) -> Tensor:
    """Return shares of xAᵀ. Values of rows and parts without ranks are arbitrary."""
    (count, features), parts = x_TK.shape, len(group.columns) * group.bands
    shape = parts, shares, count, rank_block(group.rank)
    partial_PCTR = x_TK.new_empty(shape, dtype=torch.float32)
    kernels.few_rows.down_share[(len(rows.tiles_G3), shares, parts)](
        x_TK,
        partial_PCTR,
        rows.tiles_G3,
        group.table.address_PS4,
        group.table.rank_PS,
        count,
        features,
        SPLITS=shares,
        **_constants(x_TK, group, rows),
    )
    return partial_PCTR


def _constants(x_TK: Tensor, group: Group, rows: Rows) -> dict[str, object]:
    """Return the compile-time constants that both kernels need."""
    launch = launch_for(rank_block(group.rank), x_TK.dtype)
    return {
        "S": len(rows.key_S),
        "R": rank_block(group.rank),
        "M": rows.tile,
        "C": launch.columns,
        "ALIGNMENT": ALIGNMENT if group.table.aligned else x_TK.element_size(),
        "PRECISION": precision(x_TK),
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


def launch_for(ranks: int, dtype: torch.dtype) -> KernelLaunch:
    """Return a launch of at most 64 KiB of shared memory, which every class of GPUs has."""
    if dtype.itemsize > 2:
        return KernelLaunch(32, warps=4, stages=1)
    return KernelLaunch(256 if ranks <= 16 else 128 if ranks <= 64 else 64, warps=4, stages=3)
