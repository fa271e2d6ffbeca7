"""Launchers of the kernels of the tiled route: their outputs, grids and arguments.

Triton is imported when the first kernel is launched, so that this module loads without it.

Shapes: T rows, K inputs, N outputs of all parts, P parts, R ranks of one part up to a power of two, C shares
of a sum, Q pieces of slots that have several, L ranks of all bands of a site.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weftune.ops.lora.computed import add_pair_gradients, write_pairs
from weftune.ops.lora.rows import BLOCK
from weftune.ops.lora.table import ALIGNMENT
from weftune.ops.lora.weave import DIRECT_RANKS, RowSpan, Weave

LENGTH_ROWS, LENGTH_COLUMNS, LENGTH_RANKS = 64, 128, 64
"""Block of W that a program processes at a time to compute the norms of rows, and the total ranks of the
slots that it computes them for."""
LENGTH_WARPS, LENGTH_STAGES = 4, 3
LARGE_SPAN = 1024
"""Columns per program that writes the addition of large slots: most programs find no large slot, so there
should be few."""


def down(x_TK: Tensor, weave: Weave) -> Tensor:
    """Return s = factor · drop(x)Aᵀ [T, P·R]; zero beyond a job's rank and in rows of no job."""
    from weftune.ops.triton import site

    (rows, features), tiling, table, ranks = x_TK.shape, weave.tiling, weave.group.table, weave.ranks
    s_TPR = x_TK.new_empty(rows, weave.parts * ranks)
    partial = s_TPR
    if tiling.split > 1:
        partial = x_TK.new_empty(weave.parts * tiling.split, rows, ranks, dtype=torch.float32)
    site.down[(len(weave.rows.tiles_G3), tiling.split, weave.parts // tiling.down.together)](
        x_TK,
        s_TPR,
        partial,
        weave.rows.tiles_G3,
        weave.rows.key_S,
        weave.rows.token_index_T,
        table.address_PS4,
        table.factor_PS2,
        table.rank_PS,
        table.threshold_PS,
        table.crc_P,
        int(not weave.training),
        rows,
        features,
        S=weave.slots,
        P=weave.parts,
        TOGETHER=tiling.down.together,
        R=ranks,
        M=weave.rows.tile,
        C=tiling.down.columns,
        SPLIT=tiling.split > 1,
        DROPS=weave.group.drops and weave.training,
        ALIGNMENT=alignment(x_TK, weave),
        PRECISION=precision(x_TK),
        num_warps=tiling.down.warps,
        num_stages=tiling.down.stages,
    )
    if tiling.split > 1:
        sum_rows(partial, s_TPR, [tiling.split] * weave.parts, weave)
    return s_TPR


def sum_rows(partial_CTR: Tensor, s_TPR: Tensor, shares: list[int], weave: Weave) -> None:
    """Compute s = factor · the sum of its shares; `shares` is their number per part."""
    from weftune.ops.triton import site

    step = min(weave.rows.tile, max(1, 1024 // weave.ranks))
    site.sum_rows[(len(weave.rows.tiles_G3), -(-weave.rows.tile // step))](
        partial_CTR,
        s_TPR,
        weave.rows.tiles_G3,
        weave.group.table.factor_PS2,
        weave.group.table.rank_PS,
        int(not weave.training),
        s_TPR.shape[0],
        S=weave.slots,
        P=weave.parts,
        R=weave.ranks,
        M=step,
        SHARES=tuple(sum(shares[:part]) for part in range(weave.parts + 1)),
        num_warps=4,
    )


def up(
    s_TPR: Tensor,
    frozen_TW: Tensor,
    span: RowSpan,
    bias_N: Tensor | None,
    residual_TN: Tensor | None,
    y_TN: Tensor,
    u_TN: Tensor | None,
    weave: Weave,
    scale_T: Tensor | None = None,
    scale_N: Tensor | None = None,
) -> None:
    """Compute y = g ⊙ (frozen ⊙ scales + sB) + bias + residual in the columns of the span, which are all that
    `frozen` has."""
    from weftune.ops.triton import site

    launch, table, g_out = weave.tiling.up, weave.group.table, weave.group.g_out
    site.up[(span.blocks, len(weave.rows.tiles_G3))](
        s_TPR,
        frozen_TW,
        scale_T,
        scale_N,
        bias_N,
        residual_TN,
        y_TN,
        u_TN,
        weave.rows.tiles_G3,
        table.address_PS4,
        table.rank_PS,
        None if g_out is None else g_out.address_PSA,
        None if g_out is None else g_out.number_PSn,
        span.first,
        span.low,
        y_TN.shape[1],
        frozen_TW.shape[1],
        COLUMNS=weave.columns,
        S=weave.slots,
        P=weave.parts,
        BANDS=weave.bands,
        R=weave.ranks,
        M=weave.rows.tile,
        C=launch.columns,
        ALIGNMENT=alignment(s_TPR, weave),
        PRECISION=precision(s_TPR),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def ds_db(dy_TN: Tensor, s_TPR: Tensor, weave: Weave) -> tuple[Tensor, Tensor]:
    """Return ds = factor · dyBᵀ and the shares of dB of slots with several pieces; other dB are added at
    once."""
    partial_db_QLN = room_for_db(dy_TN, weave)
    if not weave.tiling.one_read:
        db(dy_TN, s_TPR, partial_db_QLN, weave)
        return ds(dy_TN, weave), partial_db_QLN
    blocks = weave.blocks(weave.tiling.ds_db.columns) * weave.bands
    ds_TPR = torch.empty_like(s_TPR)
    partial_ds_CTR = dy_TN.new_empty(sum(blocks), len(dy_TN), weave.ranks, dtype=torch.float32)
    _launch_ds_db(dy_TN, s_TPR, partial_ds_CTR, partial_db_QLN, weave)
    sum_rows(partial_ds_CTR, ds_TPR, blocks, weave)
    return ds_TPR, partial_db_QLN


def room_for_db(dy_TN: Tensor, weave: Weave) -> Tensor:
    """Allocate the shares of dB of slots with several pieces."""
    shape = weave.rows.partials, weave.bands * weave.ranks, dy_TN.shape[1]
    return dy_TN.new_empty(shape, dtype=torch.float32)


def db(dy_TN: Tensor, s_TPR: Tensor, partial_db_QLN: Tensor, weave: Weave) -> None:
    """Compute dB alone: it is added at once, or its shares are written."""
    _launch_ds_db(dy_TN, s_TPR, None, partial_db_QLN, weave)


def _launch_ds_db(
    dy_TN: Tensor, s_TPR: Tensor, partial_ds_CTR: Tensor | None, partial_db_QLN: Tensor, weave: Weave
) -> None:
    from weftune.ops.triton import site_gradients

    (rows, outputs), tiling, table = dy_TN.shape, weave.tiling, weave.group.table
    launch = tiling.db if partial_ds_CTR is None else tiling.ds_db
    blocks = weave.bands * sum(weave.blocks(launch.columns))
    site_gradients.ds_db[(blocks, len(weave.rows.pieces_Q4))](
        dy_TN,
        s_TPR,
        partial_ds_CTR,
        partial_db_QLN,
        weave.rows.pieces_Q4,
        table.address_PS4,
        table.rank_PS,
        rows,
        outputs,
        COLUMNS=weave.columns,
        S=weave.slots,
        P=weave.parts,
        BANDS=weave.bands,
        R=weave.ranks,
        M=launch.rows,
        C=launch.columns,
        DS=partial_ds_CTR is not None,
        ALIGNMENT=alignment(s_TPR, weave),
        PRECISION=precision(s_TPR),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def ds(dy_TN: Tensor, weave: Weave) -> Tensor:
    """Return ds = factor · dyBᵀ, without dB."""
    from weftune.ops.triton import site_gradients

    launch, split, table = weave.tiling.ds, weave.tiling.ds_split, weave.group.table
    (rows, outputs), ranks = dy_TN.shape, weave.ranks
    ds_TPR = dy_TN.new_empty(rows, weave.parts * ranks)
    partial = ds_TPR
    if split > 1:
        partial = dy_TN.new_empty(weave.parts * split, rows, ranks, dtype=torch.float32)
    site_gradients.ds_alone[(len(weave.rows.tiles_G3), split, weave.parts)](
        dy_TN,
        ds_TPR,
        partial,
        weave.rows.tiles_G3,
        table.address_PS4,
        table.factor_PS2,
        table.rank_PS,
        int(not weave.training),
        rows,
        outputs,
        COLUMNS=weave.columns,
        S=weave.slots,
        P=weave.parts,
        BANDS=weave.bands,
        R=ranks,
        M=weave.rows.tile,
        C=launch.columns,
        SPLIT=split > 1,
        ALIGNMENT=alignment(dy_TN, weave),
        PRECISION=precision(dy_TN),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    if split > 1:
        sum_rows(partial, ds_TPR, [split] * weave.parts, weave)
    return ds_TPR


def room_for_da(x_TK: Tensor, weave: Weave) -> Tensor:
    """Allocate the shares of dA of slots with several pieces."""
    shape = weave.rows.partials, weave.parts, weave.ranks, x_TK.shape[1]
    return x_TK.new_empty(shape, dtype=torch.float32)


def da(x_TK: Tensor, ds_TPR: Tensor, partial_da_QPRK: Tensor, weave: Weave) -> None:
    """Compute dA: it is added at once, or its shares are written."""
    from weftune.ops.triton import site_gradients

    launch, table = weave.tiling.da, weave.group.table
    blocks = -(-x_TK.shape[1] // launch.columns)
    site_gradients.da[(blocks, len(weave.rows.pieces_Q4), weave.parts // launch.together)](
        x_TK,
        ds_TPR,
        partial_da_QPRK,
        weave.rows.pieces_Q4,
        weave.rows.key_S,
        weave.rows.token_index_T,
        table.address_PS4,
        table.rank_PS,
        table.threshold_PS,
        table.crc_P,
        x_TK.shape[1],
        S=weave.slots,
        P=weave.parts,
        TOGETHER=launch.together,
        R=weave.ranks,
        M=launch.rows,
        C=launch.columns,
        DROPS=weave.group.drops and weave.training,
        ALIGNMENT=alignment(x_TK, weave),
        PRECISION=precision(x_TK),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def add_dx(
    ds_TPR: Tensor,
    frozen_TW: Tensor,
    span: RowSpan,
    dx_TK: Tensor,
    weave: Weave,
    scale_T: Tensor | None = None,
) -> None:
    """Compute dx = frozen ⊙ scale + the dropped ds · A in the columns of the span, which are all that
    `frozen` has."""
    from weftune.ops.triton import site_gradients

    launch, table = weave.tiling.up, weave.group.table
    site_gradients.add_dx[(span.blocks, len(weave.rows.tiles_G3))](
        ds_TPR,
        frozen_TW,
        scale_T,
        dx_TK,
        weave.rows.tiles_G3,
        weave.rows.key_S,
        weave.rows.token_index_T,
        table.address_PS4,
        table.rank_PS,
        table.threshold_PS,
        table.crc_P,
        span.low,
        dx_TK.shape[1],
        frozen_TW.shape[1],
        S=weave.slots,
        P=weave.parts,
        BANDS=weave.bands,
        R=weave.ranks,
        M=weave.rows.tile,
        C=launch.columns,
        DROPS=weave.group.drops and weave.training,
        ALIGNMENT=alignment(ds_TPR, weave),
        PRECISION=precision(ds_TPR),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def large_y(s_TPR: Tensor, y_TN: Tensor, weave: Weave) -> None:
    """Write sB of large slots to their rows of y and nowhere else."""
    from weftune.ops.triton import large

    launch, table = weave.tiling.large_y, weave.group.table
    large.large_y[(sum(weave.blocks(LARGE_SPAN)), len(weave.rows.runs_U3))](
        s_TPR,
        y_TN,
        weave.rows.runs_U3,
        table.address_PS4,
        table.rank_PS,
        y_TN.shape[1],
        COLUMNS=weave.columns,
        S=weave.slots,
        P=weave.parts,
        BANDS=weave.bands,
        R=weave.ranks,
        M=BLOCK,
        C=launch.columns,
        SPAN=LARGE_SPAN,
        ALIGNMENT=alignment(s_TPR, weave),
        PRECISION=precision(s_TPR),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def large_dx(ds_TPR: Tensor, dx_TK: Tensor, weave: Weave) -> None:
    """Write the dropped ds · A of slots at the sites where they are large to their rows of dx and nowhere
    else."""
    from weftune.ops.triton import large

    launch, table, features = weave.tiling.large_dx, weave.group.table, dx_TK.shape[1]
    large.large_dx[(-(-features // LARGE_SPAN), len(weave.rows.runs_U3))](
        ds_TPR,
        dx_TK,
        weave.rows.runs_U3,
        weave.rows.key_S,
        weave.rows.token_index_T,
        table.address_PS4,
        table.rank_PS,
        table.threshold_PS,
        table.crc_P,
        features,
        S=weave.slots,
        P=weave.parts,
        BANDS=weave.bands,
        R=weave.ranks,
        M=BLOCK,
        C=launch.columns,
        SPAN=LARGE_SPAN,
        DROPS=weave.group.drops and weave.training,
        ALIGNMENT=alignment(ds_TPR, weave),
        PRECISION=precision(ds_TPR),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def add_gradients(partial_da_QPRK: Tensor, partial_db_QLN: Tensor, weave: Weave) -> None:
    """Add the shares of slots with several pieces to their accumulators."""
    from weftune.ops.triton import site_gradients

    features, outputs = partial_da_QPRK.shape[-1], partial_db_QLN.shape[-1]
    columns = max(32, 4096 // weave.ranks)
    blocks = weave.parts * -(-features // columns) + weave.bands * sum(weave.blocks(columns))
    site_gradients.add_gradients[(blocks, len(weave.rows.sums_M3))](
        partial_da_QPRK,
        partial_db_QLN,
        weave.rows.sums_M3,
        weave.group.table.address_PS4,
        weave.group.table.rank_PS,
        features,
        outputs,
        COLUMNS=weave.columns,
        S=weave.slots,
        P=weave.parts,
        BANDS=weave.bands,
        R=weave.ranks,
        C=columns,
        ALIGNMENT=alignment(partial_da_QPRK, weave),
        num_warps=4,
    )


def row_lengths(weight_NK: Tensor, weave: Weave) -> None:
    """Write 1 / ‖W + scale · BA‖ for the slots whose outputs are scaled by it besides a trained vector."""
    from weftune.ops.triton import scales

    table, g_out = weave.group.table, weave.group.g_out
    assert g_out is not None
    ranks = min(weave.ranks, DIRECT_RANKS)
    slots, half = LENGTH_RANKS // ranks, weight_NK.dtype.itemsize == 2
    scales.row_lengths[(-(-weave.slots // slots), sum(weave.blocks(LENGTH_ROWS)))](
        weight_NK,
        table.address_PS4,
        table.factor_PS2,
        table.rank_PS,
        g_out.address_PSA,
        weight_NK.shape[1],
        weight_NK.stride(0),
        weight_NK.stride(1),
        COLUMNS=weave.columns,
        S=weave.slots,
        P=weave.sites,
        G=slots,
        R=ranks,
        M=LENGTH_ROWS,
        C=LENGTH_COLUMNS if half else LENGTH_COLUMNS // 2,
        ALIGNMENT=alignment(weight_NK, weave),
        PRECISION=precision(weight_NK),
        num_warps=LENGTH_WARPS,
        num_stages=LENGTH_STAGES if half else 1,
    )


def compute_pairs(like_TK: Tensor, weave: Weave) -> None:
    """Write A and B of the slots that have them computed."""
    group = weave.group
    assert group.computed is not None
    write_pairs(like_TK, group.computed, group.table.address_PS4, group.columns)


def take_pair_gradients(like_TK: Tensor, weave: Weave) -> None:
    """Add the gradients that follow from dA and dB of these slots to those of the vectors that A and B are
    computed from."""
    group = weave.group
    assert group.computed is not None
    add_pair_gradients(like_TK, group.computed, group.table.address_PS4, group.columns)


def alignment(x: Tensor, weave: Weave) -> int:
    return ALIGNMENT if weave.group.table.aligned else x.element_size()


def precision(x: Tensor) -> str:
    """Return the precision of products: exact for float32; without effect for 16 bits."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
