"""Kernels of the attention of single rows to the pages of a key/value cache (flash decoding).

A program computes the query heads of one key head for a share (a range) of one sequence's rows; a second
kernel combines the shares. Pages are found through the sequence's page table, so nothing is gathered in
memory.

Shapes: R query heads per key head, rounded up to 16 for tensor cores, N cached rows at a time, D width of a
head, rounded up to a power of two.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-3.0e38)


@triton.jit
def attend_share(
    q,
    keys,
    values,
    tables,
    lengths,
    sums,
    norms,
    scale,
    window,
    softcap,
    table_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write the unnormalised output of attention for a share (range) of a sequence's rows, the share's
    largest score, and the sum of the exponentials of its scores. For a share without rows this sum is 0."""
    sequence, group, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    first = tl.maximum(length - window, 0) if HAS_WINDOW else 0
    span = tl.cdiv(tl.cdiv(length - first, N), SHARES) * N
    start = first + share * span
    stop = tl.minimum(length, start + span)
    per_group: tl.constexpr = HEADS // GROUPS
    r_R, d_D = tl.arange(0, R), tl.arange(0, D)
    head_R = group * per_group + r_R
    is_head_R, is_width_D = r_R < per_group, d_D < WIDTH
    q_RD = tl.load(
        q + (sequence * HEADS + head_R)[:, None] * WIDTH + d_D,
        mask=is_head_R[:, None] & is_width_D,
        other=0.0,
    )
    most_R = tl.full((R,), LEAST, tl.float32)
    total_R = tl.zeros((R,), tl.float32)
    sum_RD = tl.zeros((R, D), tl.float32)
    for begin in range(start, stop, N):
        n_N = begin + tl.arange(0, N)
        is_row_N = n_N < stop
        page_N = tl.load(tables + sequence * table_stride + n_N // PAGE, mask=is_row_N, other=0)
        row_N = page_N.to(tl.int64) * PAGE + n_N % PAGE
        at_ND = (row_N * GROUPS + group)[:, None] * WIDTH + d_D
        is_value_ND = is_row_N[:, None] & is_width_D
        k_ND = tl.load(keys + at_ND, mask=is_value_ND, other=0.0)
        score_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            small_RN = tl.exp(-2.0 * tl.abs(score_RN) / softcap)
            tanh_RN = (1.0 - small_RN) / (1.0 + small_RN)
            score_RN = softcap * tl.where(score_RN < 0, -tanh_RN, tanh_RN)
        score_RN = tl.where(is_row_N, score_RN, float("-inf"))
        new_R = tl.maximum(most_R, tl.max(score_RN, axis=1))
        weight_RN = tl.exp(score_RN - new_R[:, None])
        faded_R = tl.exp(most_R - new_R)
        v_ND = tl.load(values + at_ND, mask=is_value_ND, other=0.0)
        part_RD = tl.dot(weight_RN.to(v_ND.dtype), v_ND, input_precision=PRECISION)
        sum_RD = sum_RD * faded_R[:, None] + part_RD
        total_R = total_R * faded_R + tl.sum(weight_RN, axis=1)
        most_R = new_R
    at_R = (sequence * HEADS + head_R) * SHARES + share
    tl.store(sums + at_R[:, None] * WIDTH + d_D, sum_RD, mask=is_head_R[:, None] & is_width_D)
    tl.store(norms + at_R * 2, most_R, mask=is_head_R)
    tl.store(norms + at_R * 2 + 1, total_R, mask=is_head_R)


@triton.jit
def combine_shares(
    sums, norms, out, WIDTH: tl.constexpr, SHARES: tl.constexpr, S: tl.constexpr, D: tl.constexpr
) -> None:
    """Write the output of one head of one sequence by combining its shares (ranges of the sequence's rows). S
    is SHARES rounded up to a power of two."""
    head = tl.program_id(0).to(tl.int64)
    s_S, d_D = tl.arange(0, S), tl.arange(0, D)
    is_share_S = s_S < SHARES
    at_S = head * SHARES + s_S
    most_S = tl.load(norms + at_S * 2, mask=is_share_S, other=LEAST)
    total_S = tl.load(norms + at_S * 2 + 1, mask=is_share_S, other=0.0)
    factor_S = tl.exp(most_S - tl.max(most_S, axis=0))
    is_value_SD = is_share_S[:, None] & (d_D < WIDTH)
    sum_SD = tl.load(sums + at_S[:, None] * WIDTH + d_D, mask=is_value_SD, other=0.0)
    total = tl.sum(total_S * factor_S, axis=0)
    out_D = tl.sum(sum_SD * factor_S[:, None], axis=0) / total
    tl.store(out + head * WIDTH + d_D, out_D.to(out.dtype.element_ty), mask=d_D < WIDTH)
