"""Kernels that split queries, keys and values and rotate queries and keys, and kernels that rotate the
gradients back. If heads of queries and keys have a norm, it is applied before the rotation.

A program processes some heads of one row. These may be queries, keys and values at once: every tile is stored
to all three outputs, each with its own mask, so the code does not depend on which heads the program has.

Shapes: C heads of a program, B columns: one half of the rotary width (near or far), or the columns that are
not rotated.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_angles(cos_at_B: tl.tensor, sin_at_B: tl.tensor, inside_B: tl.tensor, HALF: tl.constexpr) -> tuple:
    """Load the cosines and sines of the near (first) half of the rotary width, then those of the far (second)
    half."""
    near_cos_B = tl.load(cos_at_B, mask=inside_B, other=0.0).to(tl.float32)
    near_sin_B = tl.load(sin_at_B, mask=inside_B, other=0.0).to(tl.float32)
    far_cos_B = tl.load(cos_at_B + HALF, mask=inside_B, other=0.0).to(tl.float32)
    far_sin_B = tl.load(sin_at_B + HALF, mask=inside_B, other=0.0).to(tl.float32)
    return near_cos_B, near_sin_B, far_cos_B, far_sin_B


@triton.jit
def store_parts(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    row: tl.tensor,
    head_C: tl.tensor,
    column_B: tl.tensor,
    values_CB: tl.tensor,
    inside_B: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write every head of a tile to the output that it belongs to: queries, keys or values."""
    values_CB = values_CB.to(q.dtype.element_ty)
    q_CB = (head_C < HEADS)[:, None] & inside_B[None, :]
    q_at_CB = (row * HEADS + head_C)[:, None] * WIDTH + column_B[None, :]
    tl.store(q + q_at_CB, values_CB, mask=q_CB)
    k_C = head_C - HEADS
    k_CB = ((k_C >= 0) & (k_C < GROUPS))[:, None] & inside_B[None, :]
    k_at_CB = (row * GROUPS + k_C)[:, None] * WIDTH + column_B[None, :]
    tl.store(k + k_at_CB, values_CB, mask=k_CB)
    v_C = k_C - GROUPS
    v_CB = ((v_C >= 0) & (v_C < GROUPS))[:, None] & inside_B[None, :]
    v_at_CB = (row * GROUPS + v_C)[:, None] * WIDTH + column_B[None, :]
    tl.store(v + v_at_CB, values_CB, mask=v_CB)


@triton.jit
def load_part(
    part: tl.tensor,
    row: tl.tensor,
    head_C: tl.tensor,
    column_B: tl.tensor,
    inside_B: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """Return the heads of a tile that belong to one part (queries, keys or values), and zeros for all other
    heads of the tile."""
    owned_CB = ((head_C >= 0) & (head_C < COUNT))[:, None] & inside_B[None, :]
    at_CB = row * row_stride + (head_C * head_stride)[:, None] + column_B[None, :]
    return tl.load(part + at_CB, mask=owned_CB, other=0.0).to(tl.float32)


@triton.jit
def load_parts(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    row: tl.tensor,
    head_C: tl.tensor,
    column_B: tl.tensor,
    inside_B: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return every head of a tile, loaded from queries, keys or values. If one of these tensors is None, its
    heads are zero."""
    k_C = head_C - HEADS
    v_C = k_C - GROUPS
    values_CB = tl.zeros((CHUNK, BLOCK), dtype=tl.float32)
    if q is not None:
        values_CB += load_part(q, row, head_C, column_B, inside_B, q_row, q_head, HEADS)
    if k is not None:
        values_CB += load_part(k, row, k_C, column_B, inside_B, k_row, k_head, GROUPS)
    if v is not None:
        values_CB += load_part(v, row, v_C, column_B, inside_B, v_row, v_head, GROUPS)
    return values_CB


@triton.jit
def load_weights(
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    head_C: tl.tensor,
    column_B: tl.tensor,
    inside_B: tl.tensor,
    offset: tl.tensor,
    HEADS: tl.constexpr,
) -> tl.tensor:
    """Load the norm's weights for every head of a tile. Heads of values have no norm; the weights loaded for
    them are not used."""
    q_B = tl.load(q_weight + column_B, mask=inside_B, other=0.0).to(tl.float32) + offset
    k_B = tl.load(k_weight + column_B, mask=inside_B, other=0.0).to(tl.float32) + offset
    return tl.where((head_C < HEADS)[:, None], q_B[None, :], k_B[None, :])


@triton.jit
def rotary_forward(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    qkv_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    CHUNK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:
    CHUNKS: tl.constexpr = (HEADS + 2 * GROUPS + CHUNK - 1) // CHUNK
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    head_C = tl.program_id(0) % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    turns_C1 = (head_C < HEADS + GROUPS)[:, None]
    known_C1 = (head_C < HEADS + 2 * GROUPS)[:, None]
    column_B = tl.arange(0, HALF_BLOCK)
    inside_B = column_B < HALF
    near_cos_B, near_sin_B, far_cos_B, far_sin_B = load_angles(
        cos + row * cos_stride + column_B, sin + row * sin_stride + column_B, inside_B, HALF
    )
    at_CB = qkv + row * qkv_stride + head_C[:, None] * WIDTH + column_B[None, :]
    near_CB = tl.load(at_CB, mask=known_C1 & inside_B[None, :], other=0.0).to(tl.float32)
    far_CB = tl.load(at_CB + HALF, mask=known_C1 & inside_B[None, :], other=0.0).to(tl.float32)
    if 2 * HALF < WIDTH:
        rest_B = 2 * HALF + tl.arange(0, REST_BLOCK)
        at_CB = qkv + row * qkv_stride + head_C[:, None] * WIDTH + rest_B[None, :]
        rest_CB = tl.load(at_CB, mask=known_C1 & (rest_B < WIDTH)[None, :], other=0.0)
    if q_weight is not None:
        near_weight_CB = load_weights(q_weight, k_weight, head_C, column_B, inside_B, offset, HEADS)
        far_weight_CB = load_weights(q_weight, k_weight, head_C, column_B + HALF, inside_B, offset, HEADS)
        squares_C = tl.sum(near_CB * near_CB + far_CB * far_CB, axis=1)
        if 2 * HALF < WIDTH:
            rest_CB = rest_CB.to(tl.float32)
            squares_C += tl.sum(rest_CB * rest_CB, axis=1)
        rstd_C1 = tl.rsqrt(squares_C / WIDTH + eps)[:, None]
        near_CB = tl.where(turns_C1, near_CB * rstd_C1 * near_weight_CB, near_CB)
        far_CB = tl.where(turns_C1, far_CB * rstd_C1 * far_weight_CB, far_CB)
        if 2 * HALF < WIDTH:
            rest_weight_CB = load_weights(q_weight, k_weight, head_C, rest_B, rest_B < WIDTH, offset, HEADS)
            rest_CB = tl.where(turns_C1, rest_CB * rstd_C1 * rest_weight_CB, rest_CB)
    turned_CB = near_CB * near_cos_B[None, :] - far_CB * near_sin_B[None, :]
    turned_CB = tl.where(turns_C1, turned_CB, near_CB)
    store_parts(q, k, v, row, head_C, column_B, turned_CB, inside_B, HEADS, GROUPS, WIDTH)
    turned_CB = far_CB * far_cos_B[None, :] + near_CB * far_sin_B[None, :]
    turned_CB = tl.where(turns_C1, turned_CB, far_CB)
    store_parts(q, k, v, row, head_C, column_B + HALF, turned_CB, inside_B, HEADS, GROUPS, WIDTH)
    if 2 * HALF < WIDTH:
        store_parts(q, k, v, row, head_C, rest_B, rest_CB, rest_B < WIDTH, HEADS, GROUPS, WIDTH)


@triton.jit
def rotary_backward(
    dq: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    dqkv: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    qkv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    CHUNK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:
    """Rotate the gradients of queries and keys back, and write them with the gradient of values to `dqkv`. If
    the heads have a norm, also compute the gradient of its input x (a part of `qkv`): dx = rstd · (w · dn − x
    · rstd² · mean(w · dn · x)), where w is the norm's weight, dn the gradient of its output and rstd the
    inverse root of the mean square of x."""
    CHUNKS: tl.constexpr = (HEADS + 2 * GROUPS + CHUNK - 1) // CHUNK
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    head_C = tl.program_id(0) % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    turns_C1 = (head_C < HEADS + GROUPS)[:, None]
    known_C1 = (head_C < HEADS + 2 * GROUPS)[:, None]
    column_B = tl.arange(0, HALF_BLOCK)
    inside_B = column_B < HALF
    near_cos_B, near_sin_B, far_cos_B, far_sin_B = load_angles(
        cos + row * cos_stride + column_B, sin + row * sin_stride + column_B, inside_B, HALF
    )
    near_CB = load_parts(
        dq, dk, dv, q_row, q_head, k_row, k_head, v_row, v_head,
        row, head_C, column_B, inside_B, HEADS, GROUPS, CHUNK, HALF_BLOCK,
    )  # fmt: skip
    far_CB = load_parts(
        dq, dk, dv, q_row, q_head, k_row, k_head, v_row, v_head,
        row, head_C, column_B + HALF, inside_B, HEADS, GROUPS, CHUNK, HALF_BLOCK,
    )  # fmt: skip
    if 2 * HALF < WIDTH:
        rest_B = 2 * HALF + tl.arange(0, REST_BLOCK)
        rest_CB = load_parts(
            dq, dk, dv, q_row, q_head, k_row, k_head, v_row, v_head,
            row, head_C, rest_B, rest_B < WIDTH, HEADS, GROUPS, CHUNK, REST_BLOCK,
        )  # fmt: skip
    turned_CB = near_CB * near_cos_B[None, :] + far_CB * far_sin_B[None, :]
    turned_far_CB = far_CB * far_cos_B[None, :] - near_CB * near_sin_B[None, :]
    near_CB = tl.where(turns_C1, turned_CB, near_CB)
    far_CB = tl.where(turns_C1, turned_far_CB, far_CB)
    if q_weight is not None:
        at_CB = qkv + row * qkv_stride + head_C[:, None] * WIDTH + column_B[None, :]
        near_x_CB = tl.load(at_CB, mask=known_C1 & inside_B[None, :], other=0.0).to(tl.float32)
        far_x_CB = tl.load(at_CB + HALF, mask=known_C1 & inside_B[None, :], other=0.0).to(tl.float32)
        near_weight_CB = load_weights(q_weight, k_weight, head_C, column_B, inside_B, offset, HEADS)
        far_weight_CB = load_weights(q_weight, k_weight, head_C, column_B + HALF, inside_B, offset, HEADS)
        near_dunit_CB = near_CB * near_weight_CB
        far_dunit_CB = far_CB * far_weight_CB
        squares_C = tl.sum(near_x_CB * near_x_CB + far_x_CB * far_x_CB, axis=1)
        along_C = tl.sum(near_dunit_CB * near_x_CB + far_dunit_CB * far_x_CB, axis=1)
        if 2 * HALF < WIDTH:
            at_CB = qkv + row * qkv_stride + head_C[:, None] * WIDTH + rest_B[None, :]
            rest_x_CB = tl.load(at_CB, mask=known_C1 & (rest_B < WIDTH)[None, :], other=0.0).to(tl.float32)
            rest_weight_CB = load_weights(q_weight, k_weight, head_C, rest_B, rest_B < WIDTH, offset, HEADS)
            rest_dunit_CB = rest_CB * rest_weight_CB
            squares_C += tl.sum(rest_x_CB * rest_x_CB, axis=1)
            along_C += tl.sum(rest_dunit_CB * rest_x_CB, axis=1)
        rstd_C = tl.rsqrt(squares_C / WIDTH + eps)
        along_C1 = (along_C * rstd_C * rstd_C / WIDTH)[:, None]
        rstd_C1 = rstd_C[:, None]
        near_CB = tl.where(turns_C1, rstd_C1 * (near_dunit_CB - near_x_CB * along_C1), near_CB)
        far_CB = tl.where(turns_C1, rstd_C1 * (far_dunit_CB - far_x_CB * along_C1), far_CB)
        if 2 * HALF < WIDTH:
            rest_CB = tl.where(turns_C1, rstd_C1 * (rest_dunit_CB - rest_x_CB * along_C1), rest_CB)
    at_CB = dqkv + (row * (HEADS + 2 * GROUPS) + head_C)[:, None] * WIDTH + column_B[None, :]
    tl.store(at_CB, near_CB.to(dqkv.dtype.element_ty), mask=known_C1 & inside_B[None, :])
    tl.store(at_CB + HALF, far_CB.to(dqkv.dtype.element_ty), mask=known_C1 & inside_B[None, :])
    if 2 * HALF < WIDTH:
        at_CB = dqkv + (row * (HEADS + 2 * GROUPS) + head_C)[:, None] * WIDTH + rest_B[None, :]
        tl.store(at_CB, rest_CB.to(dqkv.dtype.element_ty), mask=known_C1 & (rest_B < WIDTH)[None, :])
