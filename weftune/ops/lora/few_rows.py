"""Frozen linears of a group and all jobs' adapters for few rows without gradients, such as a decode step. A
training pass computes many rows per job, a decode step one row per sequence.

A decode step takes about as long as it takes to read weights and adapters, so programs that read little, and
additional launches, cost most. Beside the frozen product there are two launches for all sites (adapted
linears) of a group and all jobs. The first computes partial sums of xAᵀ (shares); the second adds them up to
s = factor · xAᵀ and computes y. Slots (table indices of jobs), ranks and addresses are read from device
tensors, so a captured graph remains valid for other jobs.

Shapes: T rows, K inputs, N outputs of all linears, P parts (`ops.lora.table`), R rank of one part, rounded up
to a power of two, C shares.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from weftune.ops import triton as kernels
from weftune.ops.lora.products import Right, forward_operands
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import ALIGNMENT, Group
from weftune.ops.lora.tiling import KernelLaunch, precision, rank_block
from weftune.ops.side_stream import SideStream

FEW_ROWS = 256
"""Maximum number of rows for which the kernels of this module compute the adapters, and torch the frozen
product, in a pass without gradients."""
TILE_ROWS = 16
"""Number of rows per program in a decode step: the smallest number that tensor cores can multiply."""
SHARE_INPUTS = 512
"""Number of inputs over which one share (partial sum) is computed. For wide inputs it is larger, so that
there are at most MAX_SHARES shares."""
MAX_SHARES = 16
SPANS = (1024, 512)
"""Candidates for the number of output columns per program. The first with which there are at least PROGRAMS
programs is used; if there is none, 256 is used."""
PROGRAMS = 512
"""Number of concurrent kernel programs that keep a large GPU busy."""


def is_unscaled_lora(group: Group) -> bool:
    """Return whether all adapters of a group (linears that share their input) are plain LoRA, without scales
    (IA³, DoRA) or computed matrices (VeRA). The kernels for few rows support only these."""
    return group.g_out is None and group.g_in is None and group.computed_table is None


def few_rows_linear(
    x_TK: Tensor, weight: Right, bias_N: Tensor | None, residual_TN: Tensor | None, group: Group, rows: Rows
) -> Tensor:
    """Return y = residual + bias + xWᵀ + scale · xAᵀB, where each row uses A and B of its job."""
    assert is_unscaled_lora(group)
    with torch.cuda.device_of(x_TK):
        x_TK = x_TK.contiguous()
        shares = share_count(x_TK.shape[1])
        partial_PCTR = _allocate_shares(x_TK, group, shares)
        # In a graph a second stream costs no time of the host, and hides the shares behind the product.
        side_stream = SideStream(x_TK.device) if _is_capturing(x_TK) else None
        operands = forward_operands(x_TK, weight)
        residual_TN = None if residual_TN is None else residual_TN.contiguous()
        y_TN = x_TK.new_empty(operands.shape)
        frozen_TN = operands.unscaled_product(0, y_TN.shape[1])
        with nullcontext() if side_stream is None else side_stream.concurrent_work():
            _write_shares(x_TK, partial_PCTR, group, rows)
        columns = span_columns(group, len(rows.tiles_G3))
        kernels.few_rows.up_shares[(_count_spans(group, columns), len(rows.tiles_G3))](
            partial_PCTR,
            frozen_TN,
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
            SPAN=columns,
            SPLITS=shares,
            **_constants(x_TK, group, rows),
        )
        return y_TN


def share_count(features: int) -> int:
    """Return the number of partial sums (shares) into which a sum over `features` inputs is split."""
    return max(1, min(MAX_SHARES, -(-features // SHARE_INPUTS)))


def span_columns(group: Group, tiles: int) -> int:
    """Return the number of output columns per program. It is small if there are few tiles of rows and few
    columns, so that there are enough programs."""
    return next((span for span in SPANS if tiles * _count_spans(group, span) >= PROGRAMS), 256)


def _count_spans(group: Group, columns: int) -> int:
    return sum(-(-(high - low) // columns) for low, high in group.columns)


def _is_capturing(x_TK: Tensor) -> bool:
    return x_TK.is_cuda and torch.cuda.is_current_stream_capturing()


def _allocate_shares(x_TK: Tensor, group: Group, shares: int) -> Tensor:
    shape = len(group.columns) * group.bands, shares, len(x_TK), rank_block(group.rank)
    return x_TK.new_empty(shape, dtype=torch.float32)


def _write_shares(x_TK: Tensor, partial_PCTR: Tensor, group: Group, rows: Rows) -> None:
    """Write partial sums of xAᵀ (shares) to `partial_PCTR`. Values where a row's job has no ranks remain
    arbitrary."""
    parts, shares = partial_PCTR.shape[:2]
    kernels.few_rows.down_share[(len(rows.tiles_G3), shares, parts)](
        x_TK,
        partial_PCTR,
        rows.tiles_G3,
        group.table.address_PS4,
        group.table.rank_PS,
        *x_TK.shape,
        SPLITS=shares,
        **_constants(x_TK, group, rows),
    )


def _constants(x_TK: Tensor, group: Group, rows: Rows) -> dict[str, object]:
    """Return the compile-time constants that both kernels for few rows (`down_share` and `up_shares`)
    need."""
    launch = choose_launch(rank_block(group.rank), x_TK.dtype)
    return {
        "S": len(rows.key_S),
        "R": rank_block(group.rank),
        "M": rows.tile,
        "C": launch.columns,
        "ALIGNMENT": ALIGNMENT if group.table.is_aligned else x_TK.element_size(),
        "PRECISION": precision(x_TK),
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


def choose_launch(ranks: int, dtype: torch.dtype) -> KernelLaunch:
    """Return launch parameters with which programs that process `ranks` ranks fit on a multiprocessor beside
    programs of the frozen product, and on small GPUs."""
    if dtype.itemsize > 2:
        return KernelLaunch(32, warps=4, stages=1)
    return KernelLaunch(256 if ranks <= 16 else 128 if ranks <= 64 else 64, warps=4, stages=2)
