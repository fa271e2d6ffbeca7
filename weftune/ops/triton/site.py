"""Forward kernels of the tiled LoRA route. A program works on rows of one slot (the table index of a job)
only. Values outside its rows, its job's rank or a width are loaded as zero, so no reduction can include
another job's NaN.

Shapes: M rows of a program, C columns of a program (of the input or of the output), R the ranks of one part
(`ops.lora.table`) up to a power of two, P parts, S slots, T rows of the microbatch, K inputs, N outputs of
all parts.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from weftune.ops.triton.scales import is_scaled, scale_at
from weftune.ops.triton.slots import (
    band_count,
    column_block,
    column_factor,
    first_input,
    has_dropout_in_any,
    keep_mask,
    largest_rank,
    matrix_pointer,
    padded_rank_mask,
    row_factor,
    site_key,
)


@triton.jit
def down_of_tile(
    x,
    s,
    partial_sums,
    key,
    token_index,
    address,
    factor,
    rank,
    threshold,
    crc,
    is_evaluation,
    start,
    stop,
    slot,
    T,
    K,
    S: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,
    OWN_RANKS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute s = factor · drop(x)Aᵀ for a tile (range of rows) of a job with at most OWN_RANKS ranks in each
    part (band of ranks of one linear). This is a case of the kernel `down`, in which only OWN_RANKS ranks are
    multiplied and written."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    first = tl.program_id(2) * PARTS
    row_M = start + tl.arange(0, M)
    inside_M = row_M < stop
    r_R = tl.arange(0, OWN_RANKS)
    weights = ()
    owned = ()
    keys = ()
    row_factors = ()
    thresholds = ()
    if HAS_DROPOUT:
        first_feature = first_input(crc, P)
    for i in tl.static_range(PARTS):
        entry = (first + i) * S + slot
        a = matrix_pointer(address, entry, 0, x.dtype.element_ty, ALIGNMENT)
        weights = weights + (a + r_R[:, None] * K,)  # noqa: RUF005
        owned = owned + (r_R < tl.load(rank + entry),)  # noqa: RUF005
        if HAS_DROPOUT:
            token_M = tl.load(token_index + row_M, mask=inside_M, other=0)
            keys = keys + (site_key(key, crc, slot, first + i),)  # noqa: RUF005
            row_factors = row_factors + (row_factor(token_M, keys[i]),)  # noqa: RUF005
            thresholds = thresholds + (tl.load(threshold + entry),)  # noqa: RUF005
    share = (K + splits * C - 1) // (splits * C) * C
    low = split * share
    x_M = x + row_M.to(tl.int64) * K
    sums = (tl.full((M, OWN_RANKS), 0.0, tl.float32),) * PARTS
    for k in range(low, tl.minimum(low + share, K), C):
        k_C = k + tl.arange(0, C)
        inside_C = k_C < K
        x_MC = tl.load(x_M[:, None] + k_C[None, :], mask=inside_M[:, None] & inside_C[None, :], other=0.0)
        longer = ()
        for i in tl.static_range(PARTS):
            a_RC = tl.load(weights[i] + k_C[None, :], mask=owned[i][:, None] & inside_C[None, :], other=0.0)
            dropped_MC = x_MC
            if HAS_DROPOUT:
                column_C = column_factor(first_feature + k_C, keys[i])
                kept_MC = keep_mask(row_factors[i][:, None], column_C[None, :], thresholds[i])
                dropped_MC = tl.where(kept_MC, x_MC, 0.0)
            sum_MR = tl.dot(dropped_MC, tl.trans(a_RC), sums[i], input_precision=PRECISION)
            longer = longer + (sum_MR,)  # noqa: RUF005
        sums = longer
    for i in tl.static_range(PARTS):
        entry = (first + i) * S + slot
        if not SPLIT:
            s_MR = tl.where(owned[i][None, :], sums[i] * tl.load(factor + entry * 2 + is_evaluation), 0.0)
            at_MR = row_M.to(tl.int64)[:, None] * (P * R) + (first + i) * R + r_R[None, :]
            tl.store(s + at_MR, s_MR.to(s.dtype.element_ty), mask=inside_M[:, None])
        else:
            share_M = ((first + i) * splits + split).to(tl.int64) * T + row_M
            stored_MR = inside_M[:, None] & padded_rank_mask(r_R, tl.load(rank + entry))[None, :]
            tl.store(partial_sums + share_M[:, None] * R + r_R[None, :], sums[i], mask=stored_MR)


@triton.jit
def down_by_ranks(
    x,
    s,
    partial_sums,
    key,
    token_index,
    address,
    factor,
    rank,
    threshold,
    crc,
    is_evaluation,
    start,
    stop,
    slot,
    max_ranks,
    T,
    K,
    S: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute s = factor · drop(x)Aᵀ for a tile (range of rows) of one job, as a part of the kernel `down`.
    Jobs of small rank have a separate code path if the ranks of other jobs are much larger."""
    if R > 32 and max_ranks <= 16:
        down_of_tile(
            x, s, partial_sums, key, token_index, address, factor, rank, threshold, crc, is_evaluation,
            start, stop, slot, T, K, S, P, PARTS, 16, R, M, C, SPLIT, HAS_DROPOUT, ALIGNMENT, PRECISION,
        )  # fmt: skip
    else:
        down_of_tile(
            x, s, partial_sums, key, token_index, address, factor, rank, threshold, crc, is_evaluation,
            start, stop, slot, T, K, S, P, PARTS, R, R, M, C, SPLIT, HAS_DROPOUT, ALIGNMENT, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["is_evaluation", "T"])
def down(
    x,
    s,
    partial_sums,
    tiles,
    key,
    token_index,
    address,
    factor,
    rank,
    threshold,
    crc,
    is_evaluation,
    T,
    K,
    S: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute s = factor · drop(x)Aᵀ of a tile of rows for PARTS parts (bands of ranks of one linear), with x
    read once. If SPLIT, compute a partial sum, over a range of the inputs, without the factor.

    Nothing is written for parts in which the job has no ranks, and masks are drawn only for jobs with
    dropout.
    """
    tile = tl.program_id(0)
    first = tl.program_id(2) * PARTS
    start = tl.load(tiles + tile * 3)
    stop = tl.load(tiles + tile * 3 + 1)
    slot = tl.load(tiles + tile * 3 + 2)
    if start == stop:
        return
    if slot < 0:
        if not SPLIT:
            row_M = start + tl.arange(0, M)
            zero_MR = tl.full((M, R), 0.0, s.dtype.element_ty)
            for i in tl.static_range(PARTS):
                at_MR = row_M.to(tl.int64)[:, None] * (P * R) + (first + i) * R + tl.arange(0, R)[None, :]
                tl.store(s + at_MR, zero_MR, mask=(row_M < stop)[:, None])
        return
    max_ranks = largest_rank(rank, first, slot, S, PARTS)
    if max_ranks == 0:
        return
    dropping = has_dropout_in_any(threshold, first, slot, S, PARTS) if HAS_DROPOUT else False
    if HAS_DROPOUT and dropping:
        down_by_ranks(
            x, s, partial_sums, key, token_index, address, factor, rank, threshold, crc, is_evaluation,
            start, stop, slot, max_ranks, T, K, S, P, PARTS, R, M, C, SPLIT, True, ALIGNMENT, PRECISION,
        )  # fmt: skip
    else:
        down_by_ranks(
            x, s, partial_sums, key, token_index, address, factor, rank, threshold, crc, is_evaluation,
            start, stop, slot, max_ranks, T, K, S, P, PARTS, R, M, C, SPLIT, False, ALIGNMENT, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["is_evaluation", "T"])
def sum_rows(
    partial_sums,
    s,
    tiles,
    factor,
    rank,
    is_evaluation,
    T,
    S: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Compute s = factor · drop(x)Aᵀ, or its gradient ds, from partial sums without the factor. The partial
    sums of part p (a band of ranks of one linear) have the indices SHARES[p] to SHARES[p + 1] − 1."""
    tile = tl.program_id(0)
    start = tl.load(tiles + tile * 3) + tl.program_id(1) * M
    stop = tl.load(tiles + tile * 3 + 1)
    slot = tl.load(tiles + tile * 3 + 2)
    if start >= stop:
        return
    row_M = (start + tl.arange(0, M)).to(tl.int64)
    inside_M1 = (row_M < stop)[:, None]
    r_R = tl.arange(0, R)
    for p in tl.static_range(P):
        s_MR = tl.full((M, R), 0.0, tl.float32)
        ranks = 0
        if slot >= 0:
            entry = p * S + slot
            ranks = tl.load(rank + entry)
            stored_MR = inside_M1 & (padded_rank_mask(r_R, ranks) & (ranks > 0))[None, :]
            first: tl.constexpr = SHARES[p]
            end: tl.constexpr = SHARES[p + 1]
            for share in tl.static_range(first, end):
                at_MR = (row_M + share * T)[:, None] * R + r_R[None, :]
                s_MR += tl.load(partial_sums + at_MR, mask=stored_MR, other=0.0)
            owned_R = r_R < ranks
            s_MR = tl.where(owned_R[None, :], s_MR * tl.load(factor + entry * 2 + is_evaluation), 0.0)
        at_MR = row_M[:, None] * (P * R) + p * R + r_R[None, :]
        tl.store(s + at_MR, s_MR.to(s.dtype.element_ty), mask=inside_M1 & ((slot < 0) | (ranks > 0)))


@triton.jit(do_not_specialize=["first"])
def up(
    s,
    frozen,
    row_scale,
    column_scale,
    bias,
    residual,
    y,
    u,
    tiles,
    address,
    rank,
    scales,
    scales_bias,
    first,
    begin,
    N,
    W,
    COLUMNS: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BANDS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute y = g ⊙ (frozen + sB) + bias + residual in the columns of one site (an adapted linear), rounded
    once, with s = factor · drop(x)Aᵀ and the job's output scales g. u is frozen + sB, before scaling.

    `frozen` has W columns of xWᵀ, which begin at column `begin` of y, where block `first` begins. It should
    be float32, and may be y itself. If it has scales, it is multiplied by them first. Small terms are added
    first: the last digit of a residual can be larger than the whole output of a newly initialised adapter.
    """
    SITES: tl.constexpr = P // BANDS
    site, low, high, origin = column_block(first + tl.program_id(0), COLUMNS, SITES, C)
    tile = tl.program_id(1)
    start = tl.load(tiles + tile * 3)
    stop = tl.load(tiles + tile * 3 + 1)
    slot = tl.load(tiles + tile * 3 + 2)
    if start == stop:
        return
    row_M = (start + tl.arange(0, M)).to(tl.int64)
    n_C = low + tl.arange(0, C)
    inside_C = n_C < high
    inside_MC = (row_M < stop)[:, None] & inside_C[None, :]
    y_MC = tl.load(frozen + row_M[:, None] * W + (n_C - begin)[None, :], mask=inside_MC, other=0.0)
    y_MC = y_MC.to(tl.float32)
    if row_scale is not None:
        y_MC *= tl.load(row_scale + row_M, mask=row_M < stop, other=0.0)[:, None]
    if column_scale is not None:
        y_MC *= tl.load(column_scale + n_C, mask=inside_C, other=0.0)[None, :]
    if slot >= 0:
        r_R = tl.arange(0, R)
        for band in range(band_count(rank, site, slot, S, P, BANDS)):
            part = band * SITES + site
            entry = part * S + slot
            ranks = tl.load(rank + entry)
            s_at_MR = row_M[:, None] * (P * R) + part * R + r_R[None, :]
            travels_MR = (row_M < stop)[:, None] & padded_rank_mask(r_R, ranks)[None, :]
            s_MR = tl.load(s + s_at_MR, mask=travels_MR, other=0.0)
            b = matrix_pointer(address, entry, 1, s.dtype.element_ty, ALIGNMENT)
            b_at_RC = r_R[:, None] * (high - origin) + (n_C - origin)[None, :]
            b_RC = tl.load(b + b_at_RC, mask=(r_R < ranks)[:, None] & inside_C[None, :], other=0.0)
            y_MC = tl.dot(s_MR, b_RC, y_MC, input_precision=PRECISION)
    at_MC = row_M[:, None] * N + n_C[None, :]
    bias_C = tl.full((C,), 0.0, tl.float32)
    if bias is not None:
        bias_C = tl.load(bias + n_C, mask=inside_C, other=0.0).to(tl.float32)
    if u is not None:
        tl.store(u + at_MC, y_MC.to(u.dtype.element_ty), mask=inside_MC)
        if slot >= 0:
            entry = site * S + slot
            if is_scaled(scales, entry):
                g_C = scale_at(scales, entry, n_C - origin, inside_C, s.dtype.element_ty)
                bias_C = tl.where(tl.load(scales_bias + entry) != 0, bias_C * g_C, bias_C)
                y_MC = y_MC * g_C[None, :]
    if bias is not None:
        y_MC += bias_C[None, :]
    if residual is not None:
        y_MC += tl.load(residual + at_MC, mask=inside_MC, other=0.0).to(tl.float32)
    tl.store(y + at_MC, y_MC.to(y.dtype.element_ty), mask=inside_MC)
