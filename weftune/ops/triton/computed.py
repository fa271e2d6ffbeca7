"""Kernels that compute the A and B of VeRA adapters from constants and two trained vectors, d and e, and
their backward. A slot is the table index of a job.

Shapes: R ranks and C columns that a program processes at a time, W columns of a rank, P sites (adapted
linears), S slots, K inputs, N outputs.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from weftune.ops.triton.slots import matrix_pointer


@triton.jit
def pair_pointer(pairs, entry, MATRIX: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(pairs + entry * 6 + MATRIX).to(tl.pointer_type(TYPE))


@triton.jit
def site_width(site, WIDTHS: tl.constexpr, P: tl.constexpr):
    """Return the number of outputs, which are the columns of B, of the linear with the index `site`."""
    width = WIDTHS[0]
    for p in tl.static_range(1, P):
        width = tl.where(site == p, WIDTHS[p], width)
    return width


@triton.jit
def write_pairs(
    like, pairs, strides, matrices, K,
    WIDTHS: tl.constexpr, S: tl.constexpr, P: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write C columns of A (a constant matrix whose rows are scaled by d) and of B (another constant matrix
    whose columns are scaled by e) for a job that uses VeRA."""
    entry = tl.program_id(0)
    ranks = tl.load(strides + entry * 3)
    if ranks == 0:
        return
    N = site_width(entry // S, WIDTHS, P)
    TYPE: tl.constexpr = like.dtype.element_ty
    d, e = pair_pointer(pairs, entry, 0, TYPE), pair_pointer(pairs, entry, 1, TYPE)
    constant_a, constant_b = pair_pointer(pairs, entry, 4, TYPE), pair_pointer(pairs, entry, 5, TYPE)
    a, b = matrix_pointer(matrices, entry, 0, TYPE, 1), matrix_pointer(matrices, entry, 1, TYPE, 1)
    stride_a = tl.load(strides + entry * 3 + 1).to(tl.int64)
    stride_b = tl.load(strides + entry * 3 + 2).to(tl.int64)
    column_1C = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    e_1C = tl.load(e + column_1C, mask=column_1C < N, other=0.0).to(tl.float32)
    for first in range(0, ranks, R):
        r_R1 = (first + tl.arange(0, R))[:, None]
        in_a, in_b = (r_R1 < ranks) & (column_1C < K), (r_R1 < ranks) & (column_1C < N)
        d_R1 = tl.load(d + r_R1, mask=r_R1 < ranks, other=0.0).to(tl.float32)
        a_RC = tl.load(constant_a + r_R1 * stride_a + column_1C, mask=in_a, other=0.0).to(tl.float32)
        tl.store(a + r_R1 * K + column_1C, (a_RC * d_R1).to(TYPE), mask=in_a)
        b_RC = tl.load(constant_b + r_R1 * stride_b + column_1C, mask=in_b, other=0.0).to(tl.float32)
        tl.store(b + r_R1 * N + column_1C, (b_RC * e_1C).to(TYPE), mask=in_b)


@triton.jit
def add_pair_gradients(
    like, pairs, strides, matrices, K,
    WIDTHS: tl.constexpr, S: tl.constexpr, P: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the vectors d and e from dA and dB, add them to their accumulators, and zero
    dA and dB. The gradient of e is the sum over ranks of dB times the constant B, for C columns per program.
    The gradient of d is the sum over columns of dA times the constant A; the ranks are distributed over the
    programs."""
    entry = tl.program_id(0)
    ranks = tl.load(strides + entry * 3)
    if ranks == 0:
        return
    N = site_width(entry // S, WIDTHS, P)
    TYPE: tl.constexpr = like.dtype.element_ty
    constant_b, db = pair_pointer(pairs, entry, 5, TYPE), matrix_pointer(matrices, entry, 3, tl.float32, 1)
    stride_b = tl.load(strides + entry * 3 + 2).to(tl.int64)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    sum_C = tl.full((C,), 0.0, tl.float32)
    for first in range(0, ranks, R):
        r_R1 = (first + tl.arange(0, R))[:, None]
        inside = (r_R1 < ranks) & (column_C < N)[None, :]
        at_RC = r_R1 * N + column_C[None, :]
        constant_at_RC = constant_b + r_R1 * stride_b + column_C[None, :]
        b_RC = tl.load(constant_at_RC, mask=inside, other=0.0).to(tl.float32)
        sum_C += tl.sum(tl.load(db + at_RC, mask=inside, other=0.0) * b_RC, axis=0)
        tl.store(db + at_RC, tl.full((R, C), 0.0, tl.float32), mask=inside)
    de = pair_pointer(pairs, entry, 3, tl.float32) + column_C
    tl.store(de, tl.load(de, mask=column_C < N, other=0.0) + sum_C, mask=column_C < N)
    constant_a, da = pair_pointer(pairs, entry, 4, TYPE), matrix_pointer(matrices, entry, 2, tl.float32, 1)
    dd = pair_pointer(pairs, entry, 2, tl.float32)
    stride_a = tl.load(strides + entry * 3 + 1).to(tl.int64)
    for r in range(tl.program_id(1), ranks, tl.num_programs(1)):
        total = 0.0
        for k in range(0, K, WIDE):
            k_W = k + tl.arange(0, WIDE)
            a_W = tl.load(constant_a + r * stride_a + k_W, mask=k_W < K, other=0.0).to(tl.float32)
            da_at = da + r * K + k_W
            total += tl.sum(tl.load(da_at, mask=k_W < K, other=0.0) * a_W, axis=0)
            tl.store(da_at, tl.full((WIDE,), 0.0, tl.float32), mask=k_W < K)
        tl.store(dd + r, tl.load(dd + r) + total)
