"""Kernels that scale the inputs or outputs of a site (an adapted linear) by the jobs' vectors g, and that
compute the factors of these vectors for DoRA. A slot is the table index of a job. A program that scales works
on rows of one slot only.

Shapes: M rows of a program, C columns of a program, G slots of a program, R ranks of one of them up to a
power of two, Z ranks of all G slots, P sites, S slots, N columns of a row.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from weftune.ops.triton.slots import column_block


@triton.jit
def scale_at(address, entry, column_C, inside_C, TYPE: tl.constexpr):
    """Return the scales g of a job in the columns `column_C`: its trained vector, multiplied by DoRA's factor
    if the job uses DoRA."""
    value = tl.load(address + entry * 3).to(tl.pointer_type(TYPE))
    g_C = tl.load(value + column_C, mask=inside_C, other=0.0).to(tl.float32)
    return g_C * inverse_at(address, entry, column_C, inside_C)


@triton.jit
def inverse_at(address, entry, column_C, inside_C):
    where = tl.load(address + entry * 3 + 2)
    inverse_C = tl.full(column_C.shape, 1.0, tl.float32)
    if where != 0:
        inverse = where.to(tl.pointer_type(tl.float32))
        inverse_C = tl.load(inverse + column_C, mask=inside_C, other=0.0)
    return inverse_C


@triton.jit
def is_scaled(address, entry):
    return tl.load(address + entry * 3) != 0


@triton.jit
def scale(
    x, out, tiles, address, N,
    COLUMNS: tl.constexpr, S: tl.constexpr, P: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute out = x ⊙ g for a tile of rows, where g are the scales of the tile's job. x is copied if the
    job has no scales."""
    site, low, high, origin = column_block(tl.program_id(0), COLUMNS, P, C)
    tile = tl.program_id(1)
    start = tl.load(tiles + tile * 3)
    stop = tl.load(tiles + tile * 3 + 1)
    slot = tl.load(tiles + tile * 3 + 2)
    if start == stop:
        return
    row_M = (start + tl.arange(0, M)).to(tl.int64)
    n_C = low + tl.arange(0, C)
    inside_C = n_C < high
    at_MC = row_M[:, None] * N + n_C[None, :]
    inside_MC = (row_M < stop)[:, None] & inside_C[None, :]
    x_MC = tl.load(x + at_MC, mask=inside_MC, other=0.0).to(tl.float32)
    if slot >= 0:
        entry = site * S + slot
        if is_scaled(address, entry):
            x_MC = x_MC * scale_at(address, entry, n_C - origin, inside_C, x.dtype.element_ty)[None, :]
    tl.store(out + at_MC, x_MC.to(out.dtype.element_ty), mask=inside_MC)


@triton.jit
def unscale(
    dy, u, bias, du, partial_sums, pieces, address, scales_bias, N,
    IN_PLACE: tl.constexpr, COLUMNS: tl.constexpr, S: tl.constexpr, P: tl.constexpr, M: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Compute du = dy ⊙ g, the gradient of the unscaled values u, for a piece (range of a job's rows), or
    copy dy if the job has no scales g. If IN_PLACE, du is dy. The piece's part of the gradient of the trained
    vector, Σ dy · u · inverse (DoRA's factor), is added to the accumulator if the job has no other piece, and
    written to `partial_sums` otherwise."""
    site, low, high, origin = column_block(tl.program_id(0), COLUMNS, P, C)
    piece = tl.program_id(1)
    start = tl.load(pieces + piece * 4)
    stop = tl.load(pieces + piece * 4 + 1)
    slot = tl.load(pieces + piece * 4 + 2)
    if start == stop:
        return
    n_C = low + tl.arange(0, C)
    inside_C = n_C < high
    entry = site * S + tl.maximum(slot, 0)
    scaled = (slot >= 0) & is_scaled(address, entry)
    if (not scaled) & IN_PLACE:
        return
    g_C = tl.full((C,), 1.0, tl.float32)
    bias_C = tl.full((C,), 0.0, tl.float32)
    if scaled:
        g_C = scale_at(address, entry, n_C - origin, inside_C, dy.dtype.element_ty)
        if bias is not None:
            is_bias_scaled = tl.load(scales_bias + entry) != 0
            bias_C = tl.load(bias + n_C, mask=inside_C & is_bias_scaled, other=0.0).to(tl.float32)
    sum_C = tl.full((C,), 0.0, tl.float32)
    for row in range(start, stop, M):
        row_M = (row + tl.arange(0, M)).to(tl.int64)
        at_MC = row_M[:, None] * N + n_C[None, :]
        inside_MC = (row_M < stop)[:, None] & inside_C[None, :]
        dy_MC = tl.load(dy + at_MC, mask=inside_MC, other=0.0).to(tl.float32)
        u_MC = tl.load(u + at_MC, mask=inside_MC & scaled, other=0.0).to(tl.float32)
        sum_C += tl.sum(dy_MC * (u_MC + bias_C[None, :]), axis=0)
        tl.store(du + at_MC, (dy_MC * g_C[None, :]).to(du.dtype.element_ty), mask=inside_MC)
    if scaled:
        gradient_C = sum_C * inverse_at(address, entry, n_C - origin, inside_C)
        if tl.load(pieces + piece * 4 + 3) != 0:
            add_to_total(address, entry, gradient_C, n_C - origin, inside_C)
        else:
            tl.store(partial_sums + piece * N + n_C, gradient_C, mask=inside_C)


@triton.jit
def add_to_total(address, entry, gradient_C, column_C, inside_C):
    total = tl.load(address + entry * 3 + 1).to(tl.pointer_type(tl.float32))
    before_C = tl.load(total + column_C, mask=inside_C, other=0.0)
    tl.store(total + column_C, before_C + gradient_C, mask=inside_C)


@triton.jit
def add_shares(
    partial_sums, sums, address, N,
    COLUMNS: tl.constexpr, S: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add the partial gradients of jobs with several pieces (ranges of rows) from `partial_sums` to the jobs'
    gradient accumulators."""
    site, low, high, origin = column_block(tl.program_id(0), COLUMNS, P, C)
    which = tl.program_id(1)
    slot = tl.load(sums + which * 3)
    if slot < 0:
        return
    entry = site * S + slot
    if is_scaled(address, entry):
        n_C = low + tl.arange(0, C)
        inside_C = n_C < high
        sum_C = tl.full((C,), 0.0, tl.float32)
        for piece in range(tl.load(sums + which * 3 + 1), tl.load(sums + which * 3 + 2)):
            sum_C += tl.load(partial_sums + piece * N + n_C, mask=inside_C, other=0.0)
        add_to_total(address, entry, sum_C, n_C - origin, inside_C)


@triton.jit
def nth_slots(scales, site, nth_Z, S: tl.constexpr):
    """Return, for each element n of `nth_Z`, the n-th slot (table index of a job) among the slots with DoRA's
    factor, or −1 if there are fewer."""
    slot_S = tl.arange(0, S)
    asks_S = tl.load(scales + (site * S + slot_S) * 3 + 2) != 0
    number_S = tl.cumsum(asks_S.to(tl.int32), axis=0) - 1
    match_ZS = asks_S[None, :] & (number_S[None, :] == nth_Z[:, None])
    return tl.sum(tl.where(match_ZS, slot_S[None, :] + 1, 0), axis=1) - 1


@triton.jit
def row_lengths(
    weight, matrices, factor, rank, scales, K, stride_n, stride_k,
    COLUMNS: tl.constexpr, S: tl.constexpr, P: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DoRA's factor 1 / ‖W + scale · BA‖ of M rows of W, for G of the slots (table indices of jobs)
    that use DoRA: W is read once for all of these. The squared norm follows from products of rank R: ‖w‖² + 2
    scale w·(BA) + scale² ‖BA‖².

    The ranks of the slots are stacked. Products of two different slots are removed by selection. In these
    products, non-finite values of B are set to zero, so that they cannot reach another slot. The elementwise
    product with B that follows makes the result of their own slot non-finite.
    """
    Z: tl.constexpr = G * R
    site, low, high, origin = column_block(tl.program_id(1), COLUMNS, P, M)
    first = tl.program_id(0) * G
    slot_G = nth_slots(scales, site, first + tl.arange(0, G), S)
    if tl.max(slot_G, axis=0) < 0:
        return
    z_Z = tl.arange(0, Z)
    slot_Z = nth_slots(scales, site, first + z_Z // R, S)
    entry_Z = site * S + tl.maximum(slot_Z, 0)
    owned_Z = (slot_Z >= 0) & (z_Z % R < tl.load(rank + entry_Z))
    TYPE: tl.constexpr = weight.dtype.element_ty
    a_Z = tl.load(matrices + entry_Z * 4).to(tl.pointer_type(TYPE)) + z_Z % R * K
    b_Z = tl.load(matrices + entry_Z * 4 + 1).to(tl.pointer_type(TYPE)) + z_Z % R * (high - origin)
    n_M = low + tl.arange(0, M)
    inside_M = n_M < high
    weight_M = weight + n_M.to(tl.int64) * stride_n
    own_M = tl.full((M,), 0.0, tl.float32)
    across_MZ = tl.full((M, Z), 0.0, tl.float32)
    gram_ZZ = tl.full((Z, Z), 0.0, tl.float32)
    for k in range(0, K, C):
        k_C = k + tl.arange(0, C)
        inside_C = k_C < K
        block_MC = tl.load(
            weight_M[:, None] + k_C.to(tl.int64)[None, :] * stride_k,
            mask=inside_M[:, None] & inside_C[None, :],
            other=0.0,
        )
        a_at_ZC = tl.multiple_of(a_Z[:, None] + k_C[None, :], (1, ALIGNMENT))
        a_ZC = tl.load(a_at_ZC, mask=owned_Z[:, None] & inside_C[None, :], other=0.0)
        across_MZ = tl.dot(block_MC, tl.trans(a_ZC), across_MZ, input_precision=PRECISION)
        gram_ZZ = tl.dot(a_ZC, tl.trans(a_ZC), gram_ZZ, input_precision=PRECISION)
        wide_MC = block_MC.to(tl.float32)
        own_M += tl.sum(wide_MC * wide_MC, axis=1)
    b_at_ZM = b_Z[:, None] + (n_M - origin)[None, :]
    b_ZM = tl.load(b_at_ZM, mask=owned_Z[:, None] & inside_M[None, :], other=0.0).to(tl.float32)
    finite_ZM = tl.where(tl.abs(b_ZM) < float("inf"), b_ZM, 0.0)
    same_ZZ = (z_Z[:, None] // R) == (z_Z[None, :] // R)
    gram_ZZ = tl.where(same_ZZ, gram_ZZ, 0.0)
    scale_Z = tl.load(factor + entry_Z * 2 + 1)
    square_ZM = scale_Z[:, None] * tl.dot(gram_ZZ, finite_ZM, input_precision="ieee")
    added_ZM = scale_Z[:, None] * b_ZM * (2.0 * tl.trans(across_MZ) + square_ZM)
    length_GM = own_M[None, :] + tl.sum(tl.reshape(added_ZM, (G, R, M)), axis=1)
    inverse_GM = 1.0 / tl.sqrt(tl.where(inside_M[None, :], tl.maximum(length_GM, 0.0), 1.0))
    where_G = tl.load(scales + (site * S + tl.maximum(slot_G, 0)) * 3 + 2).to(tl.pointer_type(tl.float32))
    at_GM = where_G[:, None] + (n_M - origin)[None, :]
    tl.store(at_GM, inverse_GM, mask=(slot_G >= 0)[:, None] & inside_M[None, :])
