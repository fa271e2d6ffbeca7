"""Launchers of the tiled LoRA kernels: they allocate outputs and pass grids and arguments. s = factor ·
drop(x)Aᵀ are the rank-sized activations of the adapters, and ds their gradient. A slot is the table index of
a job, and pieces are ranges of a slot's rows (`ops.lora.rows`).

Shapes: T rows, K inputs, N outputs of all linears, P parts (`ops.lora.table`), R rank of one part, rounded up
to a power of two, C partial sums, Q pieces of slots with several pieces, L ranks of all bands of a linear.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.ops import triton as kernels
from weftune.ops.lora.rows import BLOCK
from weftune.ops.lora.tiling import DIRECT_RANKS, SiteCall, precision

LENGTH_ROWS, LENGTH_COLUMNS, LENGTH_RANKS = 64, 128, 64
"""Numbers of rows and columns of W that a program of the kernel `row_lengths` processes at a time, and the
maximum total rank of the jobs that it processes together."""
LENGTH_WARPS, LENGTH_STAGES = 4, 3
LARGE_SPAN = 1024
"""Number of columns per program of the kernels `large_y` and `large_dx`. It is large, because most programs
find no job with a large rank and end at once."""


@dataclass(frozen=True, slots=True)
class ColumnSpan:
    """A range of columns from `first_column` to `end_column` − 1. It consists of `block_count` consecutive
    blocks of columns, from the block `first_block` on."""

    first_block: int
    block_count: int
    first_column: int
    end_column: int


def down(x_TK: Tensor, call: SiteCall) -> Tensor:
    """Return s = factor · drop(x)Aᵀ [T, P·R] of each row's job. It is zero in ranks above the job's rank, and
    in rows without a job."""
    (rows, features), tiling, table = x_TK.shape, call.tiling, call.group.table
    s_TPR = x_TK.new_empty(rows, call.parts * call.ranks)
    partial = s_TPR
    if tiling.down_splits > 1:
        partial = x_TK.new_empty(call.parts * tiling.down_splits, rows, call.ranks, dtype=torch.float32)
    programs = call.parts // tiling.down.parts_per_program
    kernels.site.down[(len(call.rows.tiles_G3), tiling.down_splits, programs)](
        x_TK,
        s_TPR,
        partial,
        call.rows.tiles_G3,
        call.rows.key_S,
        call.rows.token_index_T,
        table.address_PS4,
        table.factor_PS2,
        table.rank_PS,
        table.threshold_PS,
        table.crc_P,
        int(not call.training),
        rows,
        features,
        PARTS=tiling.down.parts_per_program,
        M=call.rows.tile,
        SPLIT=tiling.down_splits > 1,
        HAS_DROPOUT=call.has_dropout,
        **call.constants(x_TK, tiling.down),
    )
    if tiling.down_splits > 1:
        sum_rows(partial, s_TPR, [tiling.down_splits] * call.parts, call)
    return s_TPR


def sum_rows(partial_CTR: Tensor, s_TPR: Tensor, shares: list[int], call: SiteCall) -> None:
    """Write s = factor · drop(x)Aᵀ to `s_TPR`, given partial sums of xAᵀ in `partial_CTR`. `shares[p]` is the
    number of partial sums of part p (a band of ranks of one linear)."""
    step = min(call.rows.tile, max(1, 1024 // call.ranks))
    kernels.site.sum_rows[(len(call.rows.tiles_G3), -(-call.rows.tile // step))](
        partial_CTR,
        s_TPR,
        call.rows.tiles_G3,
        call.group.table.factor_PS2,
        call.group.table.rank_PS,
        int(not call.training),
        s_TPR.shape[0],
        S=call.slots,
        P=call.parts,
        R=call.ranks,
        M=step,
        SHARES=tuple(sum(shares[:part]) for part in range(call.parts + 1)),
        num_warps=4,
    )


def up(
    s_TPR: Tensor,
    frozen_TW: Tensor,
    span: ColumnSpan,
    bias_N: Tensor | None,
    residual_TN: Tensor | None,
    y_TN: Tensor,
    u_TN: Tensor | None,
    call: SiteCall,
    scale_T: Tensor | None = None,
    scale_N: Tensor | None = None,
) -> None:
    """Write y = g ⊙ (frozen ⊙ scales + sB) + bias + residual in the columns of the span, with s = factor ·
    drop(x)Aᵀ and the output scales g of the job. `frozen_TW` has only these columns of xWᵀ; `scale_T` and
    `scale_N` are the scales of 8-bit operands."""
    launch, table = call.tiling.up, call.group.table
    kernels.site.up[(span.block_count, len(call.rows.tiles_G3))](
        s_TPR,
        frozen_TW,
        scale_T,
        scale_N,
        bias_N,
        residual_TN,
        y_TN,
        u_TN,
        call.rows.tiles_G3,
        table.address_PS4,
        table.rank_PS,
        *call.output_scales,
        span.first_block,
        span.first_column,
        y_TN.shape[1],
        frozen_TW.shape[1],
        COLUMNS=call.columns,
        BANDS=call.bands,
        M=call.rows.tile,
        **call.constants(s_TPR, launch),
    )


def ds_db(dy_TN: Tensor, s_TPR: Tensor, call: SiteCall) -> tuple[Tensor, Tensor]:
    """Return ds = factor · dyBᵀ, the gradient of drop(x)Aᵀ, and partial sums of dB for jobs whose rows are
    split into several pieces (row ranges). For other jobs, add dB to the accumulator."""
    partial_db_QLN = allocate_db(dy_TN, call)
    if not call.tiling.reads_dy_once:
        db(dy_TN, s_TPR, partial_db_QLN, call)
        return ds(dy_TN, call), partial_db_QLN
    blocks = call.blocks(call.tiling.ds_db.columns) * call.bands
    ds_TPR = torch.empty_like(s_TPR)
    partial_ds_CTR = dy_TN.new_empty(sum(blocks), len(dy_TN), call.ranks, dtype=torch.float32)
    db(dy_TN, s_TPR, partial_db_QLN, call, partial_ds_CTR)
    sum_rows(partial_ds_CTR, ds_TPR, blocks, call)
    return ds_TPR, partial_db_QLN


def allocate_db(dy_TN: Tensor, call: SiteCall) -> Tensor:
    """Return uninitialised memory for the partial sums of dB of jobs whose rows are split into several pieces
    (row ranges)."""
    shape = call.rows.max_pieces, call.bands * call.ranks, dy_TN.shape[1]
    return dy_TN.new_empty(shape, dtype=torch.float32)


def db(
    dy_TN: Tensor,
    s_TPR: Tensor,
    partial_db_QLN: Tensor,
    call: SiteCall,
    partial_ds_CTR: Tensor | None = None,
) -> None:
    """Compute dB. Add it to the jobs' accumulators, or write partial sums for jobs whose rows are split into
    several pieces (row ranges). If `partial_ds_CTR` is given, also write partial sums of ds, the gradient of
    xAᵀ, from the same read of dy."""
    (rows, outputs), tiling, table = dy_TN.shape, call.tiling, call.group.table
    launch = tiling.db if partial_ds_CTR is None else tiling.ds_db
    blocks = call.bands * sum(call.blocks(launch.columns))
    kernels.site_gradients.ds_db[(blocks, len(call.rows.pieces_Q4))](
        dy_TN,
        s_TPR,
        partial_ds_CTR,
        partial_db_QLN,
        call.rows.pieces_Q4,
        table.address_PS4,
        table.rank_PS,
        rows,
        outputs,
        COLUMNS=call.columns,
        BANDS=call.bands,
        M=launch.rows,
        COMPUTES_DS=partial_ds_CTR is not None,
        **call.constants(s_TPR, launch),
    )


def ds(dy_TN: Tensor, call: SiteCall) -> Tensor:
    """Return ds = factor · dyBᵀ, the gradient of drop(x)Aᵀ, without computing dB."""
    launch, split, table = call.tiling.ds, call.tiling.ds_splits, call.group.table
    rows, outputs = dy_TN.shape
    ds_TPR = dy_TN.new_empty(rows, call.parts * call.ranks)
    partial = ds_TPR
    if split > 1:
        partial = dy_TN.new_empty(call.parts * split, rows, call.ranks, dtype=torch.float32)
    kernels.site_gradients.ds_alone[(len(call.rows.tiles_G3), split, call.parts)](
        dy_TN,
        ds_TPR,
        partial,
        call.rows.tiles_G3,
        table.address_PS4,
        table.factor_PS2,
        table.rank_PS,
        int(not call.training),
        rows,
        outputs,
        COLUMNS=call.columns,
        BANDS=call.bands,
        M=call.rows.tile,
        SPLIT=split > 1,
        **call.constants(dy_TN, launch),
    )
    if split > 1:
        sum_rows(partial, ds_TPR, [split] * call.parts, call)
    return ds_TPR


def allocate_da(x_TK: Tensor, call: SiteCall) -> Tensor:
    """Return uninitialised memory for the partial sums of dA of jobs whose rows are split into several pieces
    (row ranges)."""
    shape = call.rows.max_pieces, call.parts, call.ranks, x_TK.shape[1]
    return x_TK.new_empty(shape, dtype=torch.float32)


def da(x_TK: Tensor, ds_TPR: Tensor, partial_da_QPRK: Tensor, call: SiteCall) -> None:
    """Compute dA. Add it to the jobs' accumulators, or write partial sums for jobs whose rows are split into
    several pieces (row ranges)."""
    launch = call.tiling.da
    blocks = -(-x_TK.shape[1] // launch.columns)
    kernels.site_gradients.da[(blocks, len(call.rows.pieces_Q4), call.parts // launch.parts_per_program)](
        x_TK,
        ds_TPR,
        partial_da_QPRK,
        call.rows.pieces_Q4,
        *call.adapters,
        x_TK.shape[1],
        PARTS=launch.parts_per_program,
        M=launch.rows,
        HAS_DROPOUT=call.has_dropout,
        **call.constants(x_TK, launch),
    )


def add_dx(
    ds_TPR: Tensor,
    frozen_TW: Tensor,
    span: ColumnSpan,
    dx_TK: Tensor,
    call: SiteCall,
    scale_T: Tensor | None = None,
) -> None:
    """Write dx = frozen ⊙ scale + ds · A with the dropout mask applied, in the columns of the span. ds is the
    gradient of xAᵀ, and `frozen_TW` has only these columns of dyW."""
    launch = call.tiling.up
    kernels.site_gradients.add_dx[(span.block_count, len(call.rows.tiles_G3))](
        ds_TPR,
        frozen_TW,
        scale_T,
        dx_TK,
        call.rows.tiles_G3,
        *call.adapters,
        span.first_column,
        dx_TK.shape[1],
        frozen_TW.shape[1],
        BANDS=call.bands,
        M=call.rows.tile,
        HAS_DROPOUT=call.has_dropout,
        **call.constants(ds_TPR, launch),
    )


def large_y(s_TPR: Tensor, y_TN: Tensor, call: SiteCall) -> None:
    """Write sB, with s = factor · drop(x)Aᵀ, to the rows of y whose jobs have a rank that is too large for
    the fused kernel (frozen product plus adapters). Other rows are left unchanged."""
    launch, table = call.tiling.large_y, call.group.table
    kernels.large.large_y[(sum(call.blocks(LARGE_SPAN)), len(call.rows.runs_U3))](
        s_TPR,
        y_TN,
        call.rows.runs_U3,
        table.address_PS4,
        table.rank_PS,
        y_TN.shape[1],
        COLUMNS=call.columns,
        BANDS=call.bands,
        M=BLOCK,
        SPAN=LARGE_SPAN,
        **call.constants(s_TPR, launch),
    )


def large_dx(ds_TPR: Tensor, dx_TK: Tensor, call: SiteCall) -> None:
    """Write ds · A (ds is the gradient of xAᵀ), with the dropout mask applied, to the rows of dx whose jobs
    have a rank that is too large for the fused kernel (frozen product plus adapters). Other rows are left
    unchanged."""
    launch, features = call.tiling.large_dx, dx_TK.shape[1]
    kernels.large.large_dx[(-(-features // LARGE_SPAN), len(call.rows.runs_U3))](
        ds_TPR,
        dx_TK,
        call.rows.runs_U3,
        *call.adapters,
        features,
        BANDS=call.bands,
        M=BLOCK,
        SPAN=LARGE_SPAN,
        HAS_DROPOUT=call.has_dropout,
        **call.constants(ds_TPR, launch),
    )


def add_gradients(partial_da_QPRK: Tensor, partial_db_QLN: Tensor, call: SiteCall) -> None:
    """Add the partial sums of dA and dB to the gradient accumulators of the jobs whose rows are split into
    several pieces (row ranges)."""
    features, outputs = partial_da_QPRK.shape[-1], partial_db_QLN.shape[-1]
    columns = max(32, 4096 // call.ranks)
    blocks = call.parts * -(-features // columns) + call.bands * sum(call.blocks(columns))
    kernels.site_gradients.add_gradients[(blocks, len(call.rows.sums_M3))](
        partial_da_QPRK,
        partial_db_QLN,
        call.rows.sums_M3,
        call.group.table.address_PS4,
        call.group.table.rank_PS,
        features,
        outputs,
        COLUMNS=call.columns,
        S=call.slots,
        P=call.parts,
        BANDS=call.bands,
        R=call.ranks,
        C=columns,
        ALIGNMENT=call.alignment(partial_da_QPRK),
        num_warps=4,
    )


def row_lengths(weight_NK: Tensor, call: SiteCall) -> None:
    """Write DoRA's factor 1 / ‖W + scale · BA‖ for each row of W and each job that uses DoRA."""
    table, g_out = call.group.table, call.group.g_out
    assert g_out is not None
    ranks = min(call.ranks, DIRECT_RANKS)
    slots, half = LENGTH_RANKS // ranks, weight_NK.dtype.itemsize == 2
    kernels.scales.row_lengths[(-(-call.slots // slots), sum(call.blocks(LENGTH_ROWS)))](
        weight_NK,
        table.address_PS4,
        table.factor_PS2,
        table.rank_PS,
        g_out.address_PSA,
        weight_NK.shape[1],
        weight_NK.stride(0),
        weight_NK.stride(1),
        COLUMNS=call.columns,
        S=call.slots,
        P=call.sites,
        G=slots,
        R=ranks,
        M=LENGTH_ROWS,
        C=LENGTH_COLUMNS if half else LENGTH_COLUMNS // 2,
        ALIGNMENT=call.alignment(weight_NK),
        PRECISION=precision(weight_NK),
        num_warps=LENGTH_WARPS,
        num_stages=LENGTH_STAGES if half else 1,
    )
