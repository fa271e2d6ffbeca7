"""Kernels that write the matrix of a quantised weight.

NF4: a value is code[bits] times the maximum of its block of 64 values. If the maxima are quantised in turn,
256 per block, a maximum is nested_code[absmax] · nested_absmax + offset. int8 and fp8: a value is its code
times the scale of its row.

Shapes: W words of a program, C the 16 values of the NF4 code or, for int8 and fp8, the values of a program,
which are all in one row. A word is four bytes with eight codes: a thread reads one word and writes 16 bytes
in half precision.
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
    HAS_NESTED_MAXIMA: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    # All words of a program belong to one block of 256 maxima, so that offsets within it are small numbers.
    start = tl.program_id(0).to(tl.int64) * WORDS
    remaining = tl.minimum(values - start * 8, WORDS * 8).to(tl.int32)
    word_W = tl.arange(0, WORDS)
    scale_W = tl.load(absmax + start // 8 + word_W // 8, mask=word_W * 8 < remaining, other=0)
    if HAS_NESTED_MAXIMA:
        scale_W = tl.load(nested_code + scale_W.to(tl.int32))
        scale_W *= tl.load(nested_absmax + start // 2048)
        scale_W += tl.load(offset)
    byte_W4 = word_W[:, None] * 4 + tl.arange(0, 4)[None, :]
    bits_W4 = tl.load(packed + start * 4 + byte_W4, mask=byte_W4 * 2 < remaining, other=0).to(tl.int32)
    bits_W8 = tl.interleave(bits_W4 >> 4, bits_W4 & 15)
    code_C = tl.load(code + tl.arange(0, 16))
    value_W8 = tl.gather(code_C, tl.reshape(bits_W8, (WORDS * 8,)), 0).reshape(WORDS, 8) * scale_W[:, None]
    place_W8 = word_W[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out + start * 8 + place_W8, value_W8.to(out.dtype.element_ty), mask=place_W8 < remaining)


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
