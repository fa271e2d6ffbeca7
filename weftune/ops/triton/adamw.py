"""Kernels of the optimizer update. A program processes a block of one job's parameters. The jobs are found
through a table of addresses, so that one launch updates all of them.

Shapes: J jobs, B values of a program.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

MASTER, EXP_AVG, EXP_AVG_SQ, GRADIENT, WEIGHTS, SIZE = (tl.constexpr(n) for n in range(6))
"""Columns of the table that the kernel `update` reads: addresses of a job's flat vectors, and their number of
parameters."""
FACTOR, KEPT, RATE, ROOT, REST1, BETA2, REST2, EPS = (tl.constexpr(n) for n in range(8))
"""Columns of the table of numbers that the kernel `update` reads: the clipping factor of the gradient (if
negative, no step is made), the factor by which weight decay multiplies the weights, lr / (1 − β₁ⁿ), √(1 −
β₂ⁿ), 1 − β₁, β₂, 1 − β₂, ε."""
VECTOR, LENGTH = (tl.constexpr(n) for n in range(2))
"""Columns of the table that the kernel `squares` reads: address and length of a vector."""


@triton.jit
def _vector_size(entry, SIZES_ALIGNED: tl.constexpr):
    """Return the number of values in each of a job's flat vectors. If SIZES_ALIGNED, all sizes are multiples
    of 16, which lets the compiler use wide memory accesses."""
    size = tl.load(entry)
    return tl.multiple_of(size, 16) if SIZES_ALIGNED else size


@triton.jit
def squares(table_J2, squares_JB, SIZES_ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of squares of each block of each vector. The last block of a vector may be shorter."""
    job, block = tl.program_id(1), tl.program_id(0)
    table_J2 += job * 2
    size = _vector_size(table_J2 + LENGTH, SIZES_ALIGNED)
    if block.to(tl.int64) * BLOCK >= size:
        return
    vector = tl.multiple_of(tl.load(table_J2 + VECTOR).to(tl.pointer_type(tl.float32)), 16)
    at_B = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g_B = tl.load(vector + at_B, mask=at_B < size, other=0.0).to(tl.float64)
    tl.store(squares_JB + job * tl.num_programs(0) + block, tl.sum(g_B * g_B, axis=0))


@triton.jit
def update(
    table_J6,
    factors_J8,
    finite_JB,
    WEIGHT: tl.constexpr,
    SIZES_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply one step of AdamW to a block of a job's parameters: update moments, master weights and the
    weights that passes read, and zero the gradient. Write whether the block's new weights are finite to
    `finite_JB`; blocks after a job's last parameter leave their value there unchanged."""
    job, block = tl.program_id(1), tl.program_id(0)
    table_J6 += job * 6
    factors_J8 += job * 8
    size = _vector_size(table_J6 + SIZE, SIZES_ALIGNED)
    # There are as many programs per job as the largest job has blocks, so most programs of a small job end
    # here.
    if block.to(tl.int64) * BLOCK >= size:
        return
    at_B = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside_B = at_B < size
    float_ptr = tl.pointer_type(tl.float32)
    master = tl.multiple_of(tl.load(table_J6 + MASTER).to(float_ptr), 16) + at_B
    exp_avg = tl.multiple_of(tl.load(table_J6 + EXP_AVG).to(float_ptr), 16) + at_B
    exp_avg_sq = tl.multiple_of(tl.load(table_J6 + EXP_AVG_SQ).to(float_ptr), 16) + at_B
    gradient = tl.multiple_of(tl.load(table_J6 + GRADIENT).to(float_ptr), 16) + at_B
    weights = tl.multiple_of(tl.load(table_J6 + WEIGHTS).to(tl.pointer_type(WEIGHT)), 16) + at_B
    factor = tl.load(factors_J8 + FACTOR)
    if factor < 0.0:
        tl.store(gradient, tl.zeros((BLOCK,), tl.float32), mask=inside_B)
        tl.store(finite_JB + job * tl.num_programs(0) + block, True)
        return
    g_B = tl.load(gradient, mask=inside_B, other=0.0) * factor
    m_B = tl.load(exp_avg, mask=inside_B, other=0.0)
    v_B = tl.load(exp_avg_sq, mask=inside_B, other=0.0)
    w_B = tl.load(master, mask=inside_B, other=0.0)
    m_B += tl.load(factors_J8 + REST1) * (g_B - m_B)
    v_B = tl.load(factors_J8 + BETA2) * v_B + tl.load(factors_J8 + REST2) * g_B * g_B
    bottom_B = tl.sqrt_rn(v_B) / tl.load(factors_J8 + ROOT) + tl.load(factors_J8 + EPS)
    w_B = w_B * tl.load(factors_J8 + KEPT) - tl.load(factors_J8 + RATE) * m_B / bottom_B
    tl.store(exp_avg, m_B, mask=inside_B)
    tl.store(exp_avg_sq, v_B, mask=inside_B)
    tl.store(master, w_B, mask=inside_B)
    tl.store(weights, w_B.to(WEIGHT), mask=inside_B)
    tl.store(gradient, tl.zeros_like(g_B), mask=inside_B)
    # Written so that a NaN, for which every comparison is false, counts as not finite.
    bounded_B = tl.abs(w_B) < float("inf")
    odd = tl.sum(tl.where(inside_B & (bounded_B == 0), 1, 0), axis=0)
    tl.store(finite_JB + job * tl.num_programs(0) + block, odd == 0)
