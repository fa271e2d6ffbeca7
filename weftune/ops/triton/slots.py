"""Functions that the kernels of a site (an adapted linear) share: the addresses of a slot's matrices, the
site that a column belongs to, and dropout masks. A slot is the table index of a job.

Shapes: M rows of a program, C columns of a program, R the ranks of one part up to a power of two, P parts. A
site's ranks are split into BANDS parts of R, and the first bands of all sites come before their second bands.

Parameters of a kernel have no annotations except tl.constexpr, since Triton evaluates annotations.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

FIRST = tl.constexpr(0x85EBCA6B)
SECOND = tl.constexpr(0xC2B2AE35)
STRIDE = tl.constexpr(0x9E3779B9)
NEVER = tl.constexpr(-(1 << 31))
DIRECT = tl.constexpr(64)
"""Maximum rank of the adapters that the fused kernel (frozen product plus adapters) adds. For jobs with
larger ranks, the kernels in the module `large` write the adapter's output."""


@triton.jit
def hash_bits(value):
    """Return the 32-bit finaliser of MurmurHash3 of each value, equal to `ops.dropout.hash_bits` in torch."""
    value = value ^ (value >> 16)
    value = value * FIRST
    value = value ^ (value >> 13)
    value = value * SECOND
    return value ^ (value >> 16)


@triton.jit
def site_key(key, crc, slot, part):
    """Return the dropout key of a job at one linear, given the key of the job's seed and step. It equals
    `ops.dropout.mask_key`."""
    return hash_bits((tl.load(key + slot) ^ tl.load(crc + part)).to(tl.uint32, bitcast=True))


@triton.jit
def first_input(crc, P: tl.constexpr):
    """Return the index of this worker's first input among the inputs of the whole linear. Not 0 if the linear
    is divided into shards and this shard holds later inputs."""
    return tl.load(crc + P)


@triton.jit
def row_factor(token_M, site_key):
    """Return the hash of each row. Dropout's random bits are the products of a row's hash and a column's
    hash."""
    return hash_bits(token_M.to(tl.uint32, bitcast=True) ^ site_key) | 1


@triton.jit
def column_factor(column_C, site_key):
    """Return the hash of each column of the whole linear. Dropout's random bits are the products of a row's
    hash and a column's hash."""
    return hash_bits((column_C + 1).to(tl.uint32) * STRIDE ^ site_key) | 1


@triton.jit
def keep_mask(row, column, threshold):
    """Return the mask of the values that dropout keeps, from hashes of rows and columns, which are broadcast.
    It equals `ops.dropout.keep_mask_TK`."""
    return (row * column).to(tl.int32, bitcast=True) >= threshold


@triton.jit
def matrix_pointer(address, entry, MATRIX: tl.constexpr, TYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return the pointer to A (MATRIX 0), B (1), dA (2) or dB (3) of one job at one linear, from the table's
    entry."""
    pointer = tl.load(address + entry * 4 + MATRIX).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, ALIGNMENT)


@triton.jit
def padded_rank_mask(r_R, rank):
    """Return the mask of the ranks to load: a job's ranks, rounded up to a multiple of 8, so that no others
    are transferred and each load still has 16 bytes. Up to 16 ranks are all transferred: a mask would cost
    more than it saves."""
    if r_R.shape[0] > 16:
        return r_R // 8 * 8 < rank
    else:
        return r_R >= 0


@triton.jit
def largest_rank(rank, first_part, slot, S: tl.constexpr, PARTS: tl.constexpr):
    """Return the largest number of ranks that a job has in any of PARTS parts (bands of ranks of one
    linear)."""
    max_ranks = tl.load(rank + first_part * S + slot)
    for i in tl.static_range(1, PARTS):
        max_ranks = tl.maximum(max_ranks, tl.load(rank + (first_part + i) * S + slot))
    return max_ranks


@triton.jit
def has_dropout_in_any(threshold, first_part, slot, S: tl.constexpr, PARTS: tl.constexpr):
    """Return whether a job uses dropout in any of PARTS parts (bands of ranks of one linear)."""
    highest = tl.load(threshold + first_part * S + slot)
    for i in tl.static_range(1, PARTS):
        highest = tl.maximum(highest, tl.load(threshold + (first_part + i) * S + slot))
    return highest > NEVER


@triton.jit
def band_count(rank, site, slot, S: tl.constexpr, P: tl.constexpr, BANDS: tl.constexpr):
    """Return the number of bands (ranges of ranks, into which large ranks are split) in which a job has ranks
    at a linear."""
    bands = 0
    for band in tl.static_range(BANDS):
        bands += (tl.load(rank + (band * (P // BANDS) + site) * S + slot) > 0).to(tl.int32)
    return bands


@triton.jit
def is_large(rank, site, slot, S: tl.constexpr, P: tl.constexpr, BANDS: tl.constexpr, R: tl.constexpr):
    """Return whether a job has more ranks at a linear than the fused kernel (frozen product plus adapters)
    adds."""
    if BANDS > 1 and R <= DIRECT:
        return tl.load(rank + (P // BANDS + site) * S + slot) > 0
    else:
        return tl.load(rank + site * S + slot) > DIRECT


@triton.jit
def column_block(block, COLUMNS: tl.constexpr, P: tl.constexpr, C: tl.constexpr):
    """Return, for the block of C columns with the index `block`: the part (linear) that it belongs to, its
    first column, the end of the part, and the first column of the part."""
    part = 0
    low = 0
    high = 0
    origin = 0
    first = 0
    for p in tl.static_range(P):
        here = block >= first
        part = tl.where(here, p, part)
        low = tl.where(here, COLUMNS[2 * p] + (block - first) * C, low)
        high = tl.where(here, COLUMNS[2 * p + 1], high)
        origin = tl.where(here, COLUMNS[2 * p], origin)
        first += (COLUMNS[2 * p + 1] - COLUMNS[2 * p] + C - 1) // C
    return part, low, high, origin
