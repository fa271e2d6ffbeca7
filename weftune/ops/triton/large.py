"""Kernels for large slots: jobs with more ranks than the fused kernel has registers for. They write the
adapter's output to the output tensor; the fused kernel then adds the frozen product to the values that it
finds there. Rows of all other slots are not touched. A slot is the table index of a job.

A program processes the rows of one slot in a block of M rows, and SPAN columns, C of them at a time. It keeps
its part of s = xAᵀ in registers. SPAN is large, so that few programs find no large slot.

Shapes: M rows of a program, C columns at a time, R the ranks of one part (`ops.lora.table`) up to a power of
two, P parts, S slots, K inputs, N outputs of all sites (adapted linears).
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from weftune.ops.triton.slots import (
    band_count,
    column_block,
    column_factor,
    first_input,
    is_large,
    keep_mask,
    matrix_pointer,
    padded_rank_mask,
    row_factor,
    site_key,
)


@triton.jit
def load_low_rank_rows(s, row_M, stop, part, ranks, P: tl.constexpr, R: tl.constexpr):
    """Load M rows of s = xAᵀ for one part (a band of ranks of one linear). Columns beyond the job's ranks in
    the part are zero."""
    r_R = tl.arange(0, R)
    at_MR = row_M[:, None] * (P * R) + part * R + r_R[None, :]
    travels_MR = (row_M < stop)[:, None] & (padded_rank_mask(r_R, ranks) & (ranks > 0))[None, :]
    return tl.load(s + at_MR, mask=travels_MR, other=0.0)


@triton.jit
def load_weight_columns(weight, column_C, width, ranks, R: tl.constexpr):
    """Load C columns of A or B, which is `width` columns wide, for one part (a band of ranks of one linear).
    Ranks beyond the job's are zero."""
    r_R = tl.arange(0, R)
    owned_RC = (r_R < ranks)[:, None] & (column_C < width)[None, :]
    return tl.load(weight + r_R[:, None] * width + column_C[None, :], mask=owned_RC, other=0.0)


@triton.jit
def large_y(
    s,
    y,
    runs,
    address,
    rank,
    N,
    COLUMNS: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BANDS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPAN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write sB, with s = factor · drop(x)Aᵀ, to a job's rows of y, in SPAN columns of one linear. Only jobs
    are processed whose rank exceeds what the fused kernel (frozen product plus adapters) supports."""
    SITES: tl.constexpr = P // BANDS
    site, low, high, origin = column_block(tl.program_id(0), COLUMNS, SITES, SPAN)
    run = runs + tl.program_id(1) * 3
    start = tl.load(run)
    stop = tl.load(run + 1)
    slot = tl.load(run + 2)
    if slot < 0:
        return
    if not is_large(rank, site, slot, S, P, BANDS, R):
        return
    row_M = (start + tl.arange(0, M)).to(tl.int64)
    inside_M1 = (row_M < stop)[:, None]
    end = tl.minimum(low + SPAN, high)
    if BANDS == 1:
        ranks = tl.load(rank + site * S + slot)
        s_MR = load_low_rank_rows(s, row_M, stop, site, ranks, P, R)
        b = matrix_pointer(address, site * S + slot, 1, s.dtype.element_ty, ALIGNMENT)
        for n in range(low, end, C):
            n_C = n + tl.arange(0, C)
            b_RC = load_weight_columns(b, n_C - origin, high - origin, ranks, R)
            y_MC = tl.dot(s_MR, b_RC, input_precision=PRECISION)
            at_MC = row_M[:, None] * N + n_C[None, :]
            tl.store(y + at_MC, y_MC.to(y.dtype.element_ty), mask=inside_M1 & (n_C < high)[None, :])
    else:
        bands = band_count(rank, site, slot, S, P, BANDS)
        for n in range(low, end, C):
            n_C = n + tl.arange(0, C)
            y_MC = tl.full((M, C), 0.0, tl.float32)
            for band in range(bands):
                part = band * SITES + site
                ranks = tl.load(rank + part * S + slot)
                s_MR = load_low_rank_rows(s, row_M, stop, part, ranks, P, R)
                b = matrix_pointer(address, part * S + slot, 1, s.dtype.element_ty, ALIGNMENT)
                b_RC = load_weight_columns(b, n_C - origin, high - origin, ranks, R)
                y_MC = tl.dot(s_MR, b_RC, y_MC, input_precision=PRECISION)
            at_MC = row_M[:, None] * N + n_C[None, :]
            tl.store(y + at_MC, y_MC.to(y.dtype.element_ty), mask=inside_M1 & (n_C < high)[None, :])


@triton.jit
def large_ranks(rank, site, slot, S: tl.constexpr, P: tl.constexpr, BANDS: tl.constexpr, R: tl.constexpr):
    """Return the number of ranks of a job in the first band of a linear if the job's rank there exceeds what
    the fused kernel (frozen product plus adapters) supports, else 0."""
    ranks = tl.load(rank + site * S + slot)
    return tl.where(is_large(rank, site, slot, S, P, BANDS, R), ranks, 0)


@triton.jit
def kept_values(
    sum_MC, key, token_index, threshold, crc, slot, site, row_M, stop, k_C, S: tl.constexpr, P: tl.constexpr
):
    """Return `sum_MC` with zeros where the dropout mask of the job at the linear drops values."""
    token_M = tl.load(token_index + row_M, mask=row_M < stop, other=0)
    drawn = site_key(key, crc, slot, site)
    feature_C = first_input(crc, P) + k_C
    row_M1, column_1C = row_factor(token_M, drawn)[:, None], column_factor(feature_C, drawn)[None, :]
    return tl.where(keep_mask(row_M1, column_1C, tl.load(threshold + site * S + slot)), sum_MC, 0.0)


@triton.jit
def large_dx(
    ds,
    dx,
    runs,
    key,
    token_index,
    address,
    rank,
    threshold,
    crc,
    K,
    S: tl.constexpr,
    P: tl.constexpr,
    BANDS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute SPAN columns of a job's rows of dx: the sum of ds · A (ds is the gradient of xAᵀ) with dropout
    masks over all linears where the job's rank exceeds what the fused kernel (frozen product plus adapters)
    supports."""
    SITES: tl.constexpr = P // BANDS
    run = runs + tl.program_id(1) * 3
    start = tl.load(run)
    stop = tl.load(run + 1)
    slot = tl.load(run + 2)
    if slot < 0:
        return
    max_ranks = 0
    for one in tl.static_range(SITES):
        max_ranks = tl.maximum(max_ranks, large_ranks(rank, one, slot, S, P, BANDS, R))
    if max_ranks == 0:
        return
    row_M = (start + tl.arange(0, M)).to(tl.int64)
    inside_M1 = (row_M < stop)[:, None]
    low = tl.program_id(0) * SPAN
    end = tl.minimum(low + SPAN, K)
    # With more sites the shared memory has no room for all of ds.
    if BANDS == 1 and SITES <= 3:
        factors = ()
        weights = ()
        ranks = ()
        for i in tl.static_range(SITES):
            ranks = ranks + (large_ranks(rank, i, slot, S, P, BANDS, R),)  # noqa: RUF005
            factors = factors + (load_low_rank_rows(ds, row_M, stop, i, ranks[i], P, R),)  # noqa: RUF005
            a = matrix_pointer(address, i * S + slot, 0, ds.dtype.element_ty, ALIGNMENT)
            weights = weights + (a,)  # noqa: RUF005
        for k in range(low, end, C):
            k_C = k + tl.arange(0, C)
            dx_MC = tl.full((M, C), 0.0, tl.float32)
            for i in tl.static_range(SITES):
                a_RC = load_weight_columns(weights[i], k_C, K, ranks[i], R)
                if HAS_DROPOUT:
                    part_MC = tl.dot(factors[i], a_RC, input_precision=PRECISION)
                    dx_MC += kept_values(
                        part_MC, key, token_index, threshold, crc, slot, i, row_M, stop, k_C, S, P
                    )
                else:
                    dx_MC = tl.dot(factors[i], a_RC, dx_MC, input_precision=PRECISION)
            at_MC = row_M[:, None] * K + k_C[None, :]
            tl.store(dx + at_MC, dx_MC.to(dx.dtype.element_ty), mask=inside_M1 & (k_C < K)[None, :])
    else:
        for k in range(low, end, C):
            k_C = k + tl.arange(0, C)
            dx_MC = tl.full((M, C), 0.0, tl.float32)
            for site in range(SITES):
                part_MC = tl.full((M, C), 0.0, tl.float32)
                bands = band_count(rank, site, slot, S, P, BANDS)
                for band in range(tl.where(is_large(rank, site, slot, S, P, BANDS, R), bands, 0)):
                    part = band * SITES + site
                    here = tl.load(rank + part * S + slot)
                    ds_MR = load_low_rank_rows(ds, row_M, stop, part, here, P, R)
                    a = matrix_pointer(address, part * S + slot, 0, ds.dtype.element_ty, ALIGNMENT)
                    a_RC = load_weight_columns(a, k_C, K, here, R)
                    part_MC = tl.dot(ds_MR, a_RC, part_MC, input_precision=PRECISION)
                if HAS_DROPOUT:
                    part_MC = kept_values(
                        part_MC, key, token_index, threshold, crc, slot, site, row_M, stop, k_C, S, P
                    )
                dx_MC += part_MC
            at_MC = row_M[:, None] * K + k_C[None, :]
            tl.store(dx + at_MC, dx_MC.to(dx.dtype.element_ty), mask=inside_M1 & (k_C < K)[None, :])
