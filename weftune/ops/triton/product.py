"""The frozen product of a group of adapted linears (sites) with all adapters in its epilogue: a program adds
the low-rank products of its rows' jobs to the frozen sum before it writes the result.

A program may hold rows of several jobs. A job's product is computed for all rows of the program, and added by
selection to the job's own rows only: so a NaN in one job's weights or rows cannot reach another job's rows. A
slot is the table index of a job. The product of a large slot (one with more ranks than fit the registers) has
been written to the output beforehand, and is added by selection too.

Shapes: M rows of a program, C columns of a program, H of them at a time, D of the inner dimension at a time,
R the ranks of one part (`ops.lora.table`) up to a power of two, P parts, S slots, W warps.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from weftune.ops.triton.scales import is_scaled, scale_at
from weftune.ops.triton.slots import (
    DIRECT,
    NEVER,
    column_factor,
    first_input,
    is_large,
    keep_mask,
    matrix_pointer,
    row_factor,
    site_key,
)


@triton.jit
def tile_blocks(tile, row_blocks, column_blocks, GROUP: tl.constexpr):
    """Return (row block, column block) of the tile of the output with the index `tile`. Tiles are ordered so
    that GROUP row blocks share their columns of the weight in the cache."""
    width = GROUP * column_blocks
    first = tile // width * GROUP
    height = tl.minimum(row_blocks - first, GROUP)
    return first + tile % width % height, tile % width // height


@triton.jit
def part_bounds(column, N, COLUMNS: tl.constexpr, P: tl.constexpr):
    """Return the part (range of columns) that a column belongs to, as (index, first column, end). If there is
    a single part, `COLUMNS` is not used."""
    part = 0
    low = 0
    high = N if P == 1 else COLUMNS[1]
    for p in tl.static_range(1, P):
        here = column >= COLUMNS[2 * p]
        part = tl.where(here, p, part)
        low = tl.where(here, COLUMNS[2 * p], low)
        high = tl.where(here, COLUMNS[2 * p + 1], high)
    return part, low, high


@triton.jit
def split_halves(sum_MC):
    """Return the left and the right half of the columns of a tile. Each thread has some columns of both, so
    no data moves between threads."""
    M: tl.constexpr = sum_MC.shape[0]
    C: tl.constexpr = sum_MC.shape[1]
    return tl.split(tl.permute(tl.reshape(sum_MC, (M, 2, C // 2)), (0, 2, 1)))


@triton.jit
def product_by_warps(s_MR, weight_RH, PRECISION: tl.constexpr):
    """Return s · weight, computed as one small product for each 16 rows, which belong to one warp. One large
    product would use instructions of the whole warp group, and the compiler would then make the frozen
    product wait after each of its own such instructions."""
    M: tl.constexpr = s_MR.shape[0]
    R: tl.constexpr = s_MR.shape[1]
    H: tl.constexpr = weight_RH.shape[1]
    s_WMR = tl.reshape(s_MR, (M // 16, 16, R))
    weight_WRH = tl.broadcast_to(weight_RH[None, :, :], (M // 16, R, H))
    return tl.reshape(tl.dot(s_WMR, weight_WRH, input_precision=PRECISION), (M, H))


@triton.jit
def own_rank_product(
    s,
    key,
    token_index,
    weight,
    ranks,
    threshold,
    crc,
    slot,
    part,
    row_M,
    is_own_M,
    column_H,
    low,
    high,
    T,
    S: tl.constexpr,
    P: tl.constexpr,
    OWN_RANKS: tl.constexpr,
    R: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the product of s = xAᵀ (or its gradient) and a job's B (or A), with the result of
    `low_rank_product`, for a job with at most OWN_RANKS ranks in the part (band of ranks of one linear). Only
    OWN_RANKS ranks are multiplied."""
    r_R = tl.arange(0, OWN_RANKS)
    weight_RH = tl.load(
        weight + r_R[:, None] * (high - low) + (column_H - low)[None, :],
        mask=(r_R < ranks)[:, None] & (column_H < high)[None, :],
        other=0.0,
    )
    s_at_MR = row_M.to(tl.int64)[:, None] * (P * R) + part * R + r_R[None, :]
    s_MR = tl.load(s + s_at_MR, mask=is_own_M[:, None], other=0.0)
    added_MH = product_by_warps(s_MR, weight_RH, PRECISION)
    if HAS_DROPOUT:
        drops = tl.load(threshold + part * S + slot)
        if drops > NEVER:
            token_M = tl.load(token_index + row_M, mask=row_M < T, other=0)
            drawn = site_key(key, crc, slot, part)
            feature_H = first_input(crc, P) + column_H
            row_M1, column_1H = row_factor(token_M, drawn)[:, None], column_factor(feature_H, drawn)[None, :]
            added_MH = tl.where(keep_mask(row_M1, column_1H, drops), added_MH, 0.0)
    return added_MH


@triton.jit
def low_rank_product(
    s,
    key,
    token_index,
    address,
    ranks,
    threshold,
    crc,
    slot,
    part,
    row_M,
    is_own_M,
    column_H,
    low,
    high,
    T,
    MATRIX: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the product of s = xAᵀ and a job's B (MATRIX 1), or of the gradient of s and A (MATRIX 0), in
    one part (a band of ranks of one linear). The caller adds it to the job's own rows; in other rows the
    result is undefined. Small ranks have a separate code path if other jobs have much larger ones."""
    weight = matrix_pointer(address, part * S + slot, MATRIX, s.dtype.element_ty, ALIGNMENT)
    if R > 32 and ranks <= 16:
        added_MH = own_rank_product(
            s, key, token_index, weight, ranks, threshold, crc, slot, part, row_M, is_own_M, column_H,
            low, high, T, S, P, 16, R, HAS_DROPOUT, PRECISION,
        )  # fmt: skip
    else:
        added_MH = own_rank_product(
            s, key, token_index, weight, ranks, threshold, crc, slot, part, row_M, is_own_M, column_H,
            low, high, T, S, P, R if R < DIRECT else DIRECT, R, HAS_DROPOUT, PRECISION,
        )  # fmt: skip
    return added_MH


@triton.jit
def add_residual_and_bias(y_MH, residual, bias, n_H, row, column, N):
    """Return y plus the residual and the bias, if they are given."""
    if residual is not None:
        y_MH += residual.load([row, column]).to(tl.float32)
    if bias is not None:
        y_MH += tl.load(bias + n_H, mask=n_H < N, other=0.0).to(tl.float32)[None, :]
    return y_MH


@triton.jit
def has_scaled_outputs(runs, first, end, scales, part, S: tl.constexpr):
    """Return whether any of the runs from `first` to `end` − 1 (ranges of rows of one job) belongs to a job
    that scales outputs."""
    some = False
    turn = first
    while turn < end:
        some = some | is_scaled(scales, part * S + tl.load(runs + turn * 3 + 2))
        turn += 1
    return some


@triton.jit
def scale_runs(
    y_MH, runs, first, end, bias, scales, scales_bias, part, row_M, n_H, low, high, S: tl.constexpr, s
):
    """Return y with the rows of every run (range of rows of one job) multiplied by the scales g of the run's
    job. For a job that also scales the bias, bias · (g − 1) is added, because the bias itself is added
    later."""
    turn = first
    while turn < end:
        run = runs + turn * 3
        is_own_M = (row_M >= tl.load(run)) & (row_M < tl.load(run + 1))
        entry = part * S + tl.load(run + 2)
        if is_scaled(scales, entry):
            g_H = scale_at(scales, entry, n_H - low, n_H < high, s.dtype.element_ty)
            scaled_MH = y_MH * g_H[None, :]
            if bias is not None:
                changes_H = (n_H < high) & (tl.load(scales_bias + entry) != 0)
                bias_H = tl.load(bias + n_H, mask=changes_H, other=0.0).to(tl.float32)
                scaled_MH += (bias_H * (g_H - 1.0))[None, :]
            y_MH = tl.where(is_own_M[:, None], scaled_MH, y_MH)
        turn += 1
    return y_MH


@triton.jit(do_not_specialize=["T"])
def product(
    lhs,
    rhs,
    residual,
    target,
    unscaled,
    bias,
    row_scale,
    column_scale,
    s,
    runs,
    edges,
    key,
    token_index,
    address,
    rank,
    threshold,
    crc,
    scales,
    scales_bias,
    T,
    N,
    K,
    COLUMNS: tl.constexpr,
    BACKWARD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BANDS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    PRODUCTS_PER_SUM: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_LARGE_RANKS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute target [T, N] = lhs [T, K] · rhs + residual + bias + the adapters' products. If jobs scale
    their outputs, the values before scaling, residual and bias are written to `unscaled`; blocks without rows
    of such jobs are left unchanged.

    Forward: the adapters add sB, with s = factor · drop(x)Aᵀ, of the linear that the columns belong to.
    Backward: the adapters add ds · A (ds is the gradient of xAᵀ), with dropout masks applied, of all linears.
    When the kernel starts, `target` holds the products of jobs with large ranks. `rhs` is stored as [K, N],
    or as [N, K] if TRANSPOSED. With 8-bit operands the sum is multiplied by their scales. PRODUCTS_PER_SUM is
    the number of 8-bit products that a tensor core may sum by itself (None means all); a tensor core keeps
    only some 14 bits of such a sum.
    """
    H: tl.constexpr = C // 2
    SITES: tl.constexpr = P // BANDS
    PARTS: tl.constexpr = SITES if BACKWARD else 1
    PARTED: tl.constexpr = 1 if BACKWARD else SITES
    row_blocks = tl.cdiv(T, M)
    column_blocks = tl.cdiv(N, C)
    tl.assume(K > 0)
    for tile in tl.range(tl.program_id(0), row_blocks * column_blocks, tl.num_programs(0), flatten=True):
        row_block, column_block = tile_blocks(tile, row_blocks, column_blocks, GROUP)
        sum_MC = tl.zeros((M, C), tl.float32)
        for k in range(0, K, D):
            lhs_MD = lhs.load([row_block * M, k])
            rhs_DC = rhs.load([column_block * C, k]).T if TRANSPOSED else rhs.load([k, column_block * C])
            sum_MC = tl.dot(
                lhs_MD, rhs_DC, sum_MC, input_precision=PRECISION, max_num_imprecise_acc=PRODUCTS_PER_SUM
            )
        row_M = row_block * M + tl.arange(0, M)
        first = tl.load(edges + row_block) * PARTS
        end = tl.load(edges + row_block + 1) * PARTS
        sums = split_halves(sum_MC)
        # One after the other, so that there are registers for the adapters' products.
        for half in tl.static_range(2):
            column = column_block * C + half * H
            n_H = column + tl.arange(0, H)
            y_MH = sums[half]
            if row_scale is not None:
                y_MH *= tl.load(row_scale + row_M, mask=row_M < T, other=0.0)[:, None]
            if column_scale is not None:
                y_MH *= tl.load(column_scale + n_H, mask=n_H < N, other=0.0)[None, :]
            if unscaled is None:
                y_MH = add_residual_and_bias(y_MH, residual, bias, n_H, row_block * M, column, N)
            part, low, high = part_bounds(column, N, COLUMNS, PARTED)
            turn = first
            large_M = row_M < 0
            some = False
            # Not a for loop, which would be fused with the outer loop.
            while turn < end:
                run = runs + turn // PARTS * 3
                is_own_M = (row_M >= tl.load(run)) & (row_M < tl.load(run + 1))
                slot = tl.load(run + 2)
                if BACKWARD:
                    part = turn % PARTS
                ranks = tl.load(rank + part * S + slot)
                direct = ranks > 0
                if HAS_LARGE_RANKS:
                    large = is_large(rank, part, slot, S, P, BANDS, R)
                    some = some | large
                    large_M = large_M | (is_own_M & large)
                    direct = direct & (not large)
                if direct:
                    added_MH = low_rank_product(
                        s, key, token_index, address, ranks, threshold, crc,
                        slot, part, row_M, is_own_M, n_H, low, high, T,
                        0 if BACKWARD else 1, S, P, R, HAS_DROPOUT, ALIGNMENT, PRECISION,
                    )  # fmt: skip
                    y_MH += tl.where(is_own_M[:, None], added_MH, 0.0)
                turn += 1
            if HAS_LARGE_RANKS and some:
                written_MH = target.load([row_block * M, column]).to(tl.float32)
                y_MH += tl.where(large_M[:, None], written_MH, 0.0)
            if unscaled is not None:
                if has_scaled_outputs(runs, first, end, scales, part, S):
                    unscaled.store([row_block * M, column], y_MH.to(target.dtype))
                y_MH = scale_runs(
                    y_MH, runs, first, end, bias, scales, scales_bias, part, row_M, n_H, low, high, S, s
                )
                y_MH = add_residual_and_bias(y_MH, residual, bias, n_H, row_block * M, column, N)
            target.store([row_block * M, column], y_MH.to(target.dtype))
