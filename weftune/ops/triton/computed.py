"""Kernels that compute a slot's A and B from constants and two trained vectors, and the way back.

Shapes: C columns of a program, P sites, S slots, K inputs.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from weftune.ops.triton.slots import matrix


@triton.jit
def pair_pointer(pairs, entry, WHICH: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(pairs + entry * 6 + WHICH).to(tl.pointer_type(TYPE))


@triton.jit
def write_pairs(
    like, pairs, strides, matrices, K,
    WIDTHS: tl.constexpr, S: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A = d ⊙ the rows of one constant and B = e ⊙ the columns of the other, C columns of both, for a slot
    whose matrices are computed."""
    slot = tl.program_id(0)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    TYPE: tl.constexpr = like.dtype.element_ty
    for site in tl.static_range(P):
        entry = site * S + slot
        ranks = tl.load(strides + entry * 3)
        if ranks > 0:
            in_k, in_n = column_C < K, column_C < WIDTHS[site]
            d, e = pair_pointer(pairs, entry, 0, TYPE), pair_pointer(pairs, entry, 1, TYPE)
            constant_a = pair_pointer(pairs, entry, 4, TYPE)
            constant_b = pair_pointer(pairs, entry, 5, TYPE)
            a, b = matrix(matrices, entry, 0, TYPE, 1), matrix(matrices, entry, 1, TYPE, 1)
            stride_a = tl.load(strides + entry * 3 + 1).to(tl.int64)
            stride_b = tl.load(strides + entry * 3 + 2).to(tl.int64)
            e_C = tl.load(e + column_C, mask=in_n, other=0.0).to(tl.float32)
            for r in range(ranks):
                a_C = tl.load(constant_a + r * stride_a + column_C, mask=in_k, other=0.0).to(tl.float32)
                a_C = a_C * tl.load(d + r).to(tl.float32)
                tl.store(a + r * K + column_C, a_C.to(TYPE), mask=in_k)
                b_C = tl.load(constant_b + r * stride_b + column_C, mask=in_n, other=0.0).to(tl.float32)
                b_at = b + r * WIDTHS[site] + column_C
                tl.store(b_at, (b_C * e_C).to(TYPE), mask=in_n)


@triton.jit
def add_pair_gradients(
    like, pairs, strides, matrices, K,
    WIDTHS: tl.constexpr, S: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """de += Σ over ranks of dB ⊙ its constant, C columns of it; dd += Σ over columns of dA ⊙ its constant,
    by the first program alone. Then dA and dB are zero again."""
    slot = tl.program_id(0)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    TYPE: tl.constexpr = like.dtype.element_ty
    for site in tl.static_range(P):
        entry = site * S + slot
        ranks = tl.load(strides + entry * 3)
        if ranks > 0:
            in_n = column_C < WIDTHS[site]
            constant_b = pair_pointer(pairs, entry, 5, TYPE)
            db = matrix(matrices, entry, 3, tl.float32, 1)
            stride_b = tl.load(strides + entry * 3 + 2).to(tl.int64)
            sum_C = tl.full((C,), 0.0, tl.float32)
            for r in range(ranks):
                b_C = tl.load(constant_b + r * stride_b + column_C, mask=in_n, other=0.0).to(tl.float32)
                db_at = db + r * WIDTHS[site] + column_C
                sum_C += tl.load(db_at, mask=in_n, other=0.0) * b_C
                tl.store(db_at, tl.full((C,), 0.0, tl.float32), mask=in_n)
            de = pair_pointer(pairs, entry, 3, tl.float32) + column_C
            tl.store(de, tl.load(de, mask=in_n, other=0.0) + sum_C, mask=in_n)
            # Ranks are dealt out to the programs.
            constant_a = pair_pointer(pairs, entry, 4, TYPE)
            da = matrix(matrices, entry, 2, tl.float32, 1)
            dd = pair_pointer(pairs, entry, 2, tl.float32)
            stride_a = tl.load(strides + entry * 3 + 1).to(tl.int64)
            for r in range(tl.program_id(1), ranks, tl.num_programs(1)):
                total_C = tl.full((C,), 0.0, tl.float32)
                for k in range(0, K, C):
                    k_C = k + tl.arange(0, C)
                    a_C = tl.load(constant_a + r * stride_a + k_C, mask=k_C < K, other=0.0).to(tl.float32)
                    da_at = da + r * K + k_C
                    total_C += tl.load(da_at, mask=k_C < K, other=0.0) * a_C
                    tl.store(da_at, tl.full((C,), 0.0, tl.float32), mask=k_C < K)
                tl.store(dd + r, tl.load(dd + r) + tl.sum(total_C, axis=0))
