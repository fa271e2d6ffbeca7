"""Backward kernels of the tiled LoRA route. There are no atomics: each piece (a range of the rows of one
slot) belongs to one program, and a slot's pieces are added in order. A slot is the table index of a job.
Values outside a program's rows, rank or width are loaded as zero, so no sum can include another job's NaN.

Shapes: M rows of a program, C columns of a program (of the input or of the output), R the ranks of one part
(`ops.lora.table`) up to a power of two, P parts, S slots, T rows of the microbatch, K inputs, N outputs of
all parts.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from weftune.ops.triton.slots import (
    NEVER,
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
def ds_db_of_piece(
    dy,
    s,
    partial_ds,
    partial_db,
    pieces,
    address,
    slot,
    ranks,
    T,
    N,
    COLUMNS: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BANDS: tl.constexpr,
    OWN_RANKS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    COMPUTES_DS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dB and ds (the gradient of xAᵀ) for a piece (range of rows) of a job with at most OWN_RANKS
    ranks. This is a case of the kernel `ds_db`, in which only OWN_RANKS ranks are multiplied; tensors keep
    the layout for R ranks."""
    piece = tl.program_id(1)
    band, block = tl.program_id(0) % BANDS, tl.program_id(0) // BANDS
    site, low, high, origin = column_block(block, COLUMNS, P // BANDS, C)
    part = band * (P // BANDS) + site
    start = tl.load(pieces + piece * 4)
    stop = tl.load(pieces + piece * 4 + 1)
    alone = tl.load(pieces + piece * 4 + 3)
    entry = part * S + slot
    r_R = tl.arange(0, OWN_RANKS)
    stored_1R = padded_rank_mask(r_R, ranks)[None, :]
    n_C = low + tl.arange(0, C)
    owned_RC = (r_R < ranks)[:, None] & (n_C < high)[None, :]
    b = matrix_pointer(address, entry, 1, s.dtype.element_ty, ALIGNMENT)
    b_at_RC = r_R[:, None] * (high - origin) + (n_C - origin)[None, :]
    if COMPUTES_DS:
        b_RC = tl.load(b + b_at_RC, mask=owned_RC, other=0.0)
    db_CR = tl.full((C, OWN_RANKS), 0.0, tl.float32)
    for m in range(start, stop, M):
        row_M = (m + tl.arange(0, M)).to(tl.int64)
        inside_M = row_M < stop
        dy_MC = tl.load(
            dy + row_M[:, None] * N + n_C[None, :],
            mask=inside_M[:, None] & (n_C < high)[None, :],
            other=0.0,
        )
        s_at_MR = row_M[:, None] * (P * R) + part * R + r_R[None, :]
        s_MR = tl.load(s + s_at_MR, mask=inside_M[:, None] & stored_1R, other=0.0)
        db_CR = tl.dot(tl.trans(dy_MC), s_MR, db_CR, input_precision=PRECISION)
        if COMPUTES_DS:
            ds_MR = tl.dot(dy_MC, tl.trans(b_RC), input_precision=PRECISION)
            share_M = (band * (tl.num_programs(0) // BANDS) + block).to(tl.int64) * T + row_M
            ds_at_MR = share_M[:, None] * R + r_R[None, :]
            tl.store(partial_ds + ds_at_MR, ds_MR, mask=inside_M[:, None] & stored_1R)
    db_RC = tl.trans(db_CR)
    if alone:
        db_at = matrix_pointer(address, entry, 3, tl.float32, ALIGNMENT) + b_at_RC
        tl.store(db_at, tl.load(db_at, mask=owned_RC, other=0.0) + db_RC, mask=owned_RC)
    else:
        at_RC = ((piece.to(tl.int64) * BANDS + band) * R + r_R)[:, None] * N + n_C[None, :]
        tl.store(partial_db + at_RC, db_RC, mask=owned_RC)


@triton.jit(do_not_specialize=["T"])
def ds_db(
    dy,
    s,
    partial_ds,
    partial_db,
    pieces,
    address,
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
    COMPUTES_DS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dB in C columns for a piece (range of a job's rows), and these columns' part of ds, the
    gradient of xAᵀ, from one read of dy.

    dB is accumulated transposed, columns by ranks, so that the tensor cores can read both products from the
    same copy of dy in shared memory for any rank. Small ranks have a separate code path if other jobs have
    larger ones; it needs no more registers or shared memory. Programs of the bands (ranges of ranks) of the
    same columns are adjacent: the second finds dy in the cache.
    """
    slot = tl.load(pieces + tl.program_id(1) * 4 + 2)
    if slot < 0:
        return
    band, block = tl.program_id(0) % BANDS, tl.program_id(0) // BANDS
    site, _, _, _ = column_block(block, COLUMNS, P // BANDS, C)
    ranks = tl.load(rank + (band * (P // BANDS) + site) * S + slot)
    if ranks == 0:
        return
    if R > 16 and ranks <= 16:
        ds_db_of_piece(
            dy, s, partial_ds, partial_db, pieces, address, slot, ranks, T, N,
            COLUMNS, S, P, BANDS, 16, R, M, C, COMPUTES_DS, ALIGNMENT, PRECISION,
        )  # fmt: skip
    else:
        ds_db_of_piece(
            dy, s, partial_ds, partial_db, pieces, address, slot, ranks, T, N,
            COLUMNS, S, P, BANDS, R, R, M, C, COMPUTES_DS, ALIGNMENT, PRECISION,
        )  # fmt: skip


@triton.jit
def ds_of_tile(
    dy,
    ds,
    partial_sums,
    address,
    factor,
    is_evaluation,
    start,
    stop,
    slot,
    ranks,
    low,
    high,
    T,
    N,
    S: tl.constexpr,
    P: tl.constexpr,
    OWN_RANKS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute ds = factor · dyBᵀ for a tile (range of rows) of a job with at most OWN_RANKS ranks. This is a
    case of the kernel `ds_alone`, in which only OWN_RANKS ranks are multiplied and written."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    part = tl.program_id(2)
    row_M = (start + tl.arange(0, M)).to(tl.int64)
    inside_M = row_M < stop
    r_R = tl.arange(0, OWN_RANKS)
    owned_R = r_R < ranks
    entry = part * S + slot
    ds_MR = tl.full((M, OWN_RANKS), 0.0, tl.float32)
    b_R = matrix_pointer(address, entry, 1, dy.dtype.element_ty, ALIGNMENT) + r_R * (high - low)
    share = (high - low + splits * C - 1) // (splits * C) * C
    for n in range(split * share, tl.minimum((split + 1) * share, high - low), C):
        n_C = n + tl.arange(0, C)
        inside_C = n_C < high - low
        dy_MC = tl.load(
            dy + row_M[:, None] * N + (low + n_C)[None, :],
            mask=inside_M[:, None] & inside_C[None, :],
            other=0.0,
        )
        b_RC = tl.load(b_R[:, None] + n_C[None, :], mask=owned_R[:, None] & inside_C[None, :], other=0.0)
        ds_MR = tl.dot(dy_MC, tl.trans(b_RC), ds_MR, input_precision=PRECISION)
    if SPLIT:
        share_M = (part * splits + split).to(tl.int64) * T + row_M
        stored_MR = inside_M[:, None] & padded_rank_mask(r_R, ranks)[None, :]
        tl.store(partial_sums + share_M[:, None] * R + r_R[None, :], ds_MR, mask=stored_MR)
    else:
        ds_MR = tl.where(owned_R[None, :], ds_MR * tl.load(factor + entry * 2 + is_evaluation), 0.0)
        at_MR = row_M[:, None] * (P * R) + part * R + r_R[None, :]
        tl.store(ds + at_MR, ds_MR.to(ds.dtype.element_ty), mask=inside_M[:, None])


@triton.jit(do_not_specialize=["is_evaluation", "T"])
def ds_alone(
    dy,
    ds,
    partial_sums,
    tiles,
    address,
    factor,
    rank,
    is_evaluation,
    T,
    N,
    COLUMNS: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BANDS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute ds = factor · dyBᵀ for a tile of rows and a part (a band of ranks of one linear), without dB.
    If SPLIT, compute a partial sum, over a range of the outputs, without the factor.

    Nothing is written for parts in which the job has no ranks.
    """
    tile, part = tl.program_id(0), tl.program_id(2)
    low = 0
    high = 0
    for p in tl.static_range(P // BANDS):
        here = part % (P // BANDS) == p
        low = tl.where(here, COLUMNS[2 * p], low)
        high = tl.where(here, COLUMNS[2 * p + 1], high)
    start = tl.load(tiles + tile * 3)
    stop = tl.load(tiles + tile * 3 + 1)
    slot = tl.load(tiles + tile * 3 + 2)
    if start == stop:
        return
    if slot < 0:
        if not SPLIT:
            row_M = (start + tl.arange(0, M)).to(tl.int64)
            at_MR = row_M[:, None] * (P * R) + part * R + tl.arange(0, R)[None, :]
            zero_MR = tl.full((M, R), 0.0, ds.dtype.element_ty)
            tl.store(ds + at_MR, zero_MR, mask=(row_M < stop)[:, None])
        return
    ranks = tl.load(rank + part * S + slot)
    if ranks == 0:
        return
    if R > 32 and ranks <= 16:
        ds_of_tile(
            dy, ds, partial_sums, address, factor, is_evaluation, start, stop, slot, ranks, low, high,
            T, N, S, P, 16, R, M, C, SPLIT, ALIGNMENT, PRECISION,
        )  # fmt: skip
    else:
        ds_of_tile(
            dy, ds, partial_sums, address, factor, is_evaluation, start, stop, slot, ranks, low, high,
            T, N, S, P, R, R, M, C, SPLIT, ALIGNMENT, PRECISION,
        )  # fmt: skip


@triton.jit
def da_of_piece(
    x,
    ds,
    partial_da,
    pieces,
    key,
    token_index,
    address,
    rank,
    threshold,
    crc,
    slot,
    K,
    S: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,
    OWN_RANKS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dA for a piece (range of rows) of a job with at most OWN_RANKS ranks in each part (band of
    ranks of one linear). This is a case of the kernel `da`, in which only OWN_RANKS ranks are multiplied."""
    piece = tl.program_id(1)
    first = tl.program_id(2) * PARTS
    start = tl.load(pieces + piece * 4)
    stop = tl.load(pieces + piece * 4 + 1)
    alone = tl.load(pieces + piece * 4 + 3)
    k_C = tl.program_id(0) * C + tl.arange(0, C)
    inside_C = k_C < K
    r_R = tl.arange(0, OWN_RANKS)
    a_at_RC = r_R[:, None] * K + k_C[None, :]
    keys = ()
    thresholds = ()
    ranks = ()
    for i in tl.static_range(PARTS):
        ranks = ranks + (tl.load(rank + (first + i) * S + slot),)  # noqa: RUF005
    if HAS_DROPOUT:
        first_feature = first_input(crc, P)
        for i in tl.static_range(PARTS):
            keys = keys + (site_key(key, crc, slot, first + i),)  # noqa: RUF005
            thresholds = thresholds + (tl.load(threshold + (first + i) * S + slot),)  # noqa: RUF005
    sums = (tl.full((C, OWN_RANKS), 0.0, tl.float32),) * PARTS
    for m in range(start, stop, M):
        row_M = (m + tl.arange(0, M)).to(tl.int64)
        inside_M = row_M < stop
        at_CM = k_C[:, None] + row_M[None, :] * K
        x_CM = tl.load(x + at_CM, mask=inside_C[:, None] & inside_M[None, :], other=0.0)
        if HAS_DROPOUT:
            token_M = tl.load(token_index + row_M, mask=inside_M, other=0)
        longer = ()
        for i in tl.static_range(PARTS):
            ds_at_MR = row_M[:, None] * (P * R) + (first + i) * R + r_R[None, :]
            # If the slot has no ranks, its ds has not been written.
            written_M = inside_M & (ranks[i] > 0)
            ds_MR = tl.load(ds + ds_at_MR, mask=written_M[:, None], other=0.0)
            dropped_CM = x_CM
            if HAS_DROPOUT:
                drawn_M = row_factor(token_M, keys[i])
                # Recomputed for every M rows, since registers are scarce.
                column_C = column_factor(first_feature + k_C, keys[i])
                kept_CM = keep_mask(drawn_M[None, :], column_C[:, None], thresholds[i])
                dropped_CM = tl.where(kept_CM, x_CM, 0.0)
            longer = longer + (tl.dot(dropped_CM, ds_MR, sums[i], input_precision=PRECISION),)  # noqa: RUF005
        sums = longer
    for i in tl.static_range(PARTS):
        entry = (first + i) * S + slot
        owned_RC = (r_R < ranks[i])[:, None] & inside_C[None, :]
        sum_RC = tl.trans(sums[i])
        if alone:
            da_at = matrix_pointer(address, entry, 2, tl.float32, ALIGNMENT) + a_at_RC
            tl.store(da_at, tl.load(da_at, mask=owned_RC, other=0.0) + sum_RC, mask=owned_RC)
        else:
            at_RC = ((piece.to(tl.int64) * P + first + i) * R + r_R)[:, None] * K + k_C[None, :]
            tl.store(partial_da + at_RC, sum_RC, mask=owned_RC)


@triton.jit
def da_by_ranks(
    x,
    ds,
    partial_da,
    pieces,
    key,
    token_index,
    address,
    rank,
    threshold,
    crc,
    slot,
    max_ranks,
    K,
    S: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dA for a piece (range of rows) of one job, as a part of the kernel `da`. Jobs of small rank
    have a separate code path if the ranks of other jobs are much larger."""
    if R > 32 and max_ranks <= 16:
        da_of_piece(
            x, ds, partial_da, pieces, key, token_index, address, rank, threshold, crc, slot, K,
            S, P, PARTS, 16, R, M, C, HAS_DROPOUT, ALIGNMENT, PRECISION,
        )  # fmt: skip
    else:
        da_of_piece(
            x, ds, partial_da, pieces, key, token_index, address, rank, threshold, crc, slot, K,
            S, P, PARTS, R, R, M, C, HAS_DROPOUT, ALIGNMENT, PRECISION,
        )  # fmt: skip


@triton.jit
def da(
    x,
    ds,
    partial_da,
    pieces,
    key,
    token_index,
    address,
    rank,
    threshold,
    crc,
    K,
    S: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dA in C columns for a piece (range of a job's rows) and PARTS parts (bands of ranks of one
    linear), with x read once.

    The tile of x is transposed, columns by rows, so that the tensor cores accept it for any rank. Values
    beyond a job's ranks in ds, the gradient of xAᵀ, only affect columns of the sum that are not stored. Masks
    are drawn only for jobs with dropout.
    """
    first = tl.program_id(2) * PARTS
    slot = tl.load(pieces + tl.program_id(1) * 4 + 2)
    if slot < 0:
        return
    max_ranks = largest_rank(rank, first, slot, S, PARTS)
    if max_ranks == 0:
        return
    dropping = has_dropout_in_any(threshold, first, slot, S, PARTS) if HAS_DROPOUT else False
    if HAS_DROPOUT and dropping:
        da_by_ranks(
            x, ds, partial_da, pieces, key, token_index, address, rank, threshold, crc, slot, max_ranks, K,
            S, P, PARTS, R, M, C, True, ALIGNMENT, PRECISION,
        )  # fmt: skip
    else:
        da_by_ranks(
            x, ds, partial_da, pieces, key, token_index, address, rank, threshold, crc, slot, max_ranks, K,
            S, P, PARTS, R, M, C, False, ALIGNMENT, PRECISION,
        )  # fmt: skip


@triton.jit
def dx_of_part(
    ds,
    sum_MC,
    address,
    rank,
    slot,
    part,
    row_M,
    inside_M,
    k_C,
    inside_C,
    K,
    S: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return `sum_MC` plus ds · A of one part (a band of ranks of one linear), where ds is the gradient of
    xAᵀ."""
    r_R = tl.arange(0, R)
    entry = part * S + slot
    ranks = tl.load(rank + entry)
    ds_at_MR = row_M[:, None] * (P * R) + part * R + r_R[None, :]
    ds_MR = tl.load(ds + ds_at_MR, mask=inside_M[:, None] & padded_rank_mask(r_R, ranks)[None, :], other=0.0)
    a = matrix_pointer(address, entry, 0, ds.dtype.element_ty, ALIGNMENT)
    owned_RC = (r_R < ranks)[:, None] & inside_C[None, :]
    a_RC = tl.load(a + r_R[:, None] * K + k_C[None, :], mask=owned_RC, other=0.0)
    return tl.dot(ds_MR, a_RC, sum_MC, input_precision=PRECISION)


@triton.jit
def add_dx(
    ds,
    frozen,
    row_scale,
    dx,
    tiles,
    key,
    token_index,
    address,
    rank,
    threshold,
    crc,
    begin,
    K,
    W,
    S: tl.constexpr,
    P: tl.constexpr,
    BANDS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dx = frozen + Σ ds · A over all linears of the group, with dropout masks applied, rounded once.
    ds is the gradient of xAᵀ. `frozen` has W columns of dyW, which begin at column `begin` of dx. It should
    be float32, and may be dx itself. If it has scales, its rows are multiplied by them."""
    SITES: tl.constexpr = P // BANDS
    tile = tl.program_id(1)
    start = tl.load(tiles + tile * 3)
    stop = tl.load(tiles + tile * 3 + 1)
    slot = tl.load(tiles + tile * 3 + 2)
    if start == stop:
        return
    row_M = (start + tl.arange(0, M)).to(tl.int64)
    inside_M = row_M < stop
    c_C = tl.program_id(0) * C + tl.arange(0, C)
    k_C = begin + c_C
    inside_C = k_C < K
    inside_MC = inside_M[:, None] & inside_C[None, :]
    dx_MC = tl.load(frozen + row_M[:, None] * W + c_C[None, :], mask=inside_MC, other=0.0).to(tl.float32)
    if row_scale is not None:
        dx_MC *= tl.load(row_scale + row_M, mask=inside_M, other=0.0)[:, None]
    if slot >= 0:
        # One site after the other: the masks of several do not fit the registers together.
        for site in range(SITES):
            bands = band_count(rank, site, slot, S, P, BANDS)
            masked = tl.load(threshold + site * S + slot) > NEVER if HAS_DROPOUT else False
            if HAS_DROPOUT and masked:
                part_MC = tl.full((M, C), 0.0, tl.float32)
                for band in range(bands):
                    part_MC = dx_of_part(
                        ds, part_MC, address, rank, slot, band * SITES + site, row_M, inside_M, k_C,
                        inside_C, K, S, P, R, ALIGNMENT, PRECISION,
                    )  # fmt: skip
                token_M = tl.load(token_index + row_M, mask=inside_M, other=0)
                drawn = site_key(key, crc, slot, site)
                feature_C = first_input(crc, P) + k_C
                row_M1, column_1C = (
                    row_factor(token_M, drawn)[:, None],
                    column_factor(feature_C, drawn)[None, :],
                )
                kept_MC = keep_mask(row_M1, column_1C, tl.load(threshold + site * S + slot))
                dx_MC += tl.where(kept_MC, part_MC, 0.0)
            else:
                for band in range(bands):
                    dx_MC = dx_of_part(
                        ds, dx_MC, address, rank, slot, band * SITES + site, row_M, inside_M, k_C,
                        inside_C, K, S, P, R, ALIGNMENT, PRECISION,
                    )  # fmt: skip
    tl.store(dx + row_M[:, None] * K + k_C[None, :], dx_MC.to(dx.dtype.element_ty), mask=inside_MC)


@triton.jit
def add_gradients(
    partial_da,
    partial_db,
    sums,
    address,
    rank,
    K,
    N,
    COLUMNS: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BANDS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Add the partial sums of dA and dB of a job's pieces (ranges of its rows), in order, to the job's
    gradient accumulators. Only jobs with several pieces need this."""
    slot = tl.load(sums + tl.program_id(1) * 3)
    first = tl.load(sums + tl.program_id(1) * 3 + 1)
    end = tl.load(sums + tl.program_id(1) * 3 + 2)
    if slot < 0:
        return
    block = tl.program_id(0)
    r_R = tl.arange(0, R)
    c_C = tl.arange(0, C)
    blocks = P * ((K + C - 1) // C)
    if block < blocks:
        part = block // ((K + C - 1) // C)
        k_C = (block - part * ((K + C - 1) // C)) * C + c_C
        entry = part * S + slot
        owned_RC = (r_R < tl.load(rank + entry))[:, None] & (k_C < K)[None, :]
        gradient = matrix_pointer(address, entry, 2, tl.float32, ALIGNMENT) + r_R[:, None] * K + k_C[None, :]
        at_RC = (part * R + r_R)[:, None] * K + k_C[None, :]
        share = partial_da + first.to(tl.int64) * (P * R * K)
        total_RC = tl.full((R, C), 0.0, tl.float32)
        for _ in range(first, end):
            total_RC += tl.load(share + at_RC, mask=owned_RC, other=0.0)
            share += P * R * K
        tl.store(gradient, tl.load(gradient, mask=owned_RC, other=0.0) + total_RC, mask=owned_RC)
    else:
        band = (block - blocks) % BANDS
        site, low, high, origin = column_block((block - blocks) // BANDS, COLUMNS, P // BANDS, C)
        n_C = low + c_C
        entry = (band * (P // BANDS) + site) * S + slot
        owned_RC = (r_R < tl.load(rank + entry))[:, None] & (n_C < high)[None, :]
        gradient = matrix_pointer(address, entry, 3, tl.float32, ALIGNMENT)
        gradient += r_R[:, None] * (high - origin) + (n_C - origin)[None, :]
        at_RC = (band * R + r_R)[:, None] * N + n_C[None, :]
        share = partial_db + first.to(tl.int64) * (BANDS * R * N)
        total_RC = tl.full((R, C), 0.0, tl.float32)
        for _ in range(first, end):
            total_RC += tl.load(share + at_RC, mask=owned_RC, other=0.0)
            share += BANDS * R * N
        tl.store(gradient, tl.load(gradient, mask=owned_RC, other=0.0) + total_RC, mask=owned_RC)
