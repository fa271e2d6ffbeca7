"""Kernels that add adapters to a linear of few rows, such as the rows of a decode step (`ops.lora.few_rows`).
Every program reads thousands of values of A or B, since with few rows most of the time is spent reading the
adapters.

A program works on the rows of one slot (the table index of a job) only. Values outside its rows, its job's
rank or a width are loaded as zero, so no sum can include another job's NaN.

Shapes: M rows of a program, C columns per iteration (of the input or of the output), R the largest rank of a
part (`ops.lora.table`) rounded up to a power of two, P parts, S slots, T rows of the microbatch, K inputs, N
outputs of all parts.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from weftune.ops.triton.slots import band_count, column_block, matrix_pointer


@triton.jit(do_not_specialize=["T"])
def down_share(
    x,
    partial_sums,
    tiles,
    address,
    rank,
    T,
    K,
    S: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a partial sum (share) of xAᵀ for a tile of rows and one part (a band of ranks of one linear),
    over one of SPLITS ranges of the inputs. Nothing is written for rows without a job and for parts in which
    the job has no ranks."""
    tile, share, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(tiles + tile * 3)
    stop = tl.load(tiles + tile * 3 + 1)
    slot = tl.load(tiles + tile * 3 + 2)
    if (start == stop) | (slot < 0):
        return
    entry = part * S + slot
    ranks = tl.load(rank + entry)
    if ranks == 0:
        return
    r_R = tl.arange(0, R)
    row_M = (start + tl.arange(0, M)).to(tl.int64)
    inside_M1 = (row_M < stop)[:, None]
    owned_R1 = (r_R < ranks)[:, None]
    a = matrix_pointer(address, entry, 0, x.dtype.element_ty, ALIGNMENT)
    span = tl.cdiv(K, SPLITS * C) * C
    low = share * span
    s_MR = tl.full((M, R), 0.0, tl.float32)
    for k in range(low, tl.minimum(low + span, K), C):
        k_C = k + tl.arange(0, C)
        inside_1C = (k_C < K)[None, :]
        x_MC = tl.load(x + row_M[:, None] * K + k_C[None, :], mask=inside_M1 & inside_1C, other=0.0)
        a_RC = tl.load(a + r_R[:, None] * K + k_C[None, :], mask=owned_R1 & inside_1C, other=0.0)
        s_MR = tl.dot(x_MC, tl.trans(a_RC), s_MR, input_precision=PRECISION)
    at_MR = ((part * SPLITS + share) * T + row_M)[:, None] * R + r_R[None, :]
    tl.store(partial_sums + at_MR, s_MR, mask=inside_M1)


@triton.jit(do_not_specialize=["T"])
def up_shares(
    partial_sums,
    frozen,
    row_scale,
    column_scale,
    bias,
    residual,
    y,
    tiles,
    address,
    factor,
    rank,
    T,
    N,
    COLUMNS: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BANDS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute y = frozen + sB + bias + residual in SPAN columns of one linear, rounded once. s = factor · xAᵀ
    is the sum of its shares (partial sums) times the factor. `frozen` is xWᵀ in float32, which is first
    multiplied by its scales if it has any."""
    SITES: tl.constexpr = P // BANDS
    site, low, high, origin = column_block(tl.program_id(0), COLUMNS, SITES, SPAN)
    tile = tl.program_id(1)
    start = tl.load(tiles + tile * 3)
    stop = tl.load(tiles + tile * 3 + 1)
    slot = tl.load(tiles + tile * 3 + 2)
    if start == stop:
        return
    r_R = tl.arange(0, R)
    row_M = (start + tl.arange(0, M)).to(tl.int64)
    inside_M1 = (row_M < stop)[:, None]
    bands = 0
    if slot >= 0:
        bands = band_count(rank, site, slot, S, P, BANDS)
    # The first band, mostly the only one, is read once for all columns.
    s_MR = tl.full((M, R), 0.0, y.dtype.element_ty)
    ranks = 0
    entry = site * S
    if bands > 0:
        entry = site * S + slot
        ranks = tl.load(rank + entry)
        s_MR = sum_shares(partial_sums, factor, entry, site, row_M, inside_M1, ranks, T, R, M, SPLITS).to(
            y.dtype.element_ty
        )
    b = matrix_pointer(address, entry, 1, y.dtype.element_ty, ALIGNMENT)
    width = high - origin
    for n in range(low, tl.minimum(low + SPAN, high), C):
        n_C = n + tl.arange(0, C)
        inside_1C = (n_C < high)[None, :]
        inside_MC = inside_M1 & inside_1C
        at_MC = row_M[:, None] * N + n_C[None, :]
        b_at_RC = r_R[:, None] * width + (n_C - origin)[None, :]
        b_RC = tl.load(b + b_at_RC, mask=(r_R < ranks)[:, None] & inside_1C, other=0.0)
        y_MC = tl.load(frozen + at_MC, mask=inside_MC, other=0.0)
        if row_scale is not None:
            y_MC *= tl.load(row_scale + row_M, mask=row_M < stop, other=0.0)[:, None]
        if column_scale is not None:
            y_MC *= tl.load(column_scale + n_C, mask=n_C < high, other=0.0)[None, :]
        y_MC = tl.dot(s_MR, b_RC, y_MC, input_precision=PRECISION)
        if BANDS > 1:
            for band in range(1, bands):
                part = band * SITES + site
                more = part * S + slot
                own = tl.load(rank + more)
                more_MR = sum_shares(partial_sums, factor, more, part, row_M, inside_M1, own, T, R, M, SPLITS)
                more_b = matrix_pointer(address, more, 1, y.dtype.element_ty, ALIGNMENT)
                more_RC = tl.load(more_b + b_at_RC, mask=(r_R < own)[:, None] & inside_1C, other=0.0)
                y_MC = tl.dot(more_MR.to(y.dtype.element_ty), more_RC, y_MC, input_precision=PRECISION)
        if bias is not None:
            y_MC += tl.load(bias + n_C, mask=n_C < high, other=0.0).to(tl.float32)[None, :]
        if residual is not None:
            y_MC += tl.load(residual + at_MC, mask=inside_MC, other=0.0).to(tl.float32)
        tl.store(y + at_MC, y_MC.to(y.dtype.element_ty), mask=inside_MC)


@triton.jit
def sum_shares(
    partial_sums,
    factor,
    entry,
    part,
    row_M,
    inside_M1,
    ranks,
    T,
    R: tl.constexpr,
    M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return the sum of the shares (partial sums) of xAᵀ for one part (a band of ranks of one linear), times
    the factor. It is 0 in ranks above the job's rank."""
    r_R = tl.arange(0, R)
    s_MR = tl.full((M, R), 0.0, tl.float32)
    for share in tl.static_range(SPLITS):
        at_MR = ((part * SPLITS + share) * T + row_M)[:, None] * R + r_R[None, :]
        s_MR += tl.load(partial_sums + at_MR, mask=inside_M1, other=0.0)
    # The second factor of an entry is that of evaluation.
    return tl.where((r_R < ranks)[None, :], s_MR * tl.load(factor + entry * 2 + 1), 0.0)
