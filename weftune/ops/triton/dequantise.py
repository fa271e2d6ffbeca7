"""Kernels that write the matrix of a quantised weight.

NF4: code[bits] · maximum of the block of 64 values, and that is nested_code[absmax] · nested_absmax + offset,
where the maxima are quantised in turn, 256 to a block. int8 and fp8: codes · the row's scale.

Shapes: B blocks of a program, of 64 values each in 32 bytes; C values of a program, all in one row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_nf4(
    packed: tl.tensor,
    absmax: tl.tensor,
    nested_absmax: tl.tensor,
    nested_code: tl.tensor,
    code: tl.tensor,
    offset: tl.tensor,
    out: tl.tensor,
    values: tl.tensor,
    NESTED: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    block_B = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside_B = block_B * 64 < values
    scale_B = tl.load(absmax + block_B, mask=inside_B, other=0)
    if NESTED:
        scale_B = tl.load(nested_code + scale_B.to(tl.int32))
        scale_B *= tl.load(nested_absmax + block_B // 256, mask=inside_B, other=0.0)
        scale_B += tl.load(offset)
    byte_B32 = block_B[:, None] * 32 + tl.arange(0, 32)[None, :]
    bits_B32 = tl.load(packed + byte_B32, mask=byte_B32 * 2 < values, other=0).to(tl.int32)
    first_B32 = tl.load(code + (bits_B32 >> 4)) * scale_B[:, None]
    second_B32 = tl.load(code + (bits_B32 & 15)) * scale_B[:, None]
    place_B64 = block_B[:, None] * 64 + tl.arange(0, 64)[None, :]
    value_B64 = tl.interleave(first_B32, second_B32)
    tl.store(out + place_B64, value_B64.to(out.dtype.element_ty), mask=place_B64 < values)


@triton.jit
def write_rows(
    codes: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column_C = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside_C = column_C < WIDTH
    code_C = tl.load(codes + row * WIDTH + column_C, mask=inside_C).to(tl.float32)
    value_C = code_C * tl.load(scale + row)
    tl.store(out + row * WIDTH + column_C, value_C.to(out.dtype.element_ty), mask=inside_C)
