"""Kernels of a mixture of experts: the assignment of rows to programs, the frozen products with all adapters
added in the epilogue, the gated activation weighted by the router, and the sum over a token's experts.

Rows are choices (a token and one of its experts), sorted by expert and then by job. The rows of a program
belong to one expert. A job's low-rank product is computed for all rows of a program, and added by selection
to the job's own rows only, so that no NaN reaches another job.

Shapes: M rows of a program, C columns of a program, H of them at a time, D of the inner dimension at a time,
R ranks up to a power of two, S slots (a job at an expert), B columns of a program, all in one row.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from weftune.ops.triton.product import low_rank_product, split_halves, tile_blocks
from weftune.ops.triton.swiglu import sigmoid_pair


@triton.jit
def assign_runs(
    edges,
    run_ends,
    tile_ends,
    block_ends,
    numbers,
    pieces,
    tiles,
    blocks,
    J,
    E,
    OWNERS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Assign rows to programs. The rows from `edges[g]` to `edges[g + 1]` − 1 form run g: the rows of the job
    g % J at the expert g // J. One program per run writes its piece and its tiles (ranges of its rows), and
    one per expert writes its blocks. `run_ends`, `tile_ends` and `block_ends` are cumulative counts."""
    if tl.program_id(0) < E * J:
        run = tl.program_id(0)
        start = tl.load(edges + run)
        stop = tl.load(edges + run + 1)
        if start < stop:
            number = tl.load(numbers + run % J)
            slot = tl.where(number >= 0, number * E + run // J, -1)
            piece = pieces + (tl.load(run_ends + run) - 1) * 4
            tl.store(piece, start)
            tl.store(piece + 1, stop)
            tl.store(piece + 2, slot)
            tl.store(piece + 3, 1)
            count = tl.cdiv(stop - start, TILE)
            first = tl.load(tile_ends + run) - count
            for done in range(0, count, STEP):
                tile_G = done + tl.arange(0, STEP)
                low_G = start + tile_G * TILE
                at_G = tiles + (first + tile_G) * 3
                tl.store(at_G, low_G, mask=tile_G < count)
                tl.store(at_G + 1, tl.minimum(low_G + TILE, stop), mask=tile_G < count)
                tl.store(at_G + 2, slot + tl.zeros_like(tile_G), mask=tile_G < count)
    else:
        expert = tl.program_id(0) - E * J
        owner_J = tl.arange(0, OWNERS)
        start_J = tl.load(edges + expert * J + owner_J, mask=owner_J < J, other=0)
        stop_J = tl.load(edges + expert * J + owner_J + 1, mask=owner_J < J, other=0)
        has_rows_J = start_J < stop_J
        start = tl.load(edges + expert * J)
        stop = tl.load(edges + expert * J + J)
        runs = tl.load(run_ends + expert * J + J - 1) - tl.sum(has_rows_J.to(tl.int32))
        count = tl.cdiv(stop - start, BLOCK)
        first = tl.load(block_ends + expert) - count
        for number in range(count):
            low = start + number * BLOCK
            high = tl.minimum(low + BLOCK, stop)
            at = blocks + (first + number) * 5
            tl.store(at, low)
            tl.store(at + 1, high)
            tl.store(at + 2, expert)
            tl.store(at + 3, runs + tl.sum((has_rows_J & (stop_J <= low)).to(tl.int32)))
            tl.store(at + 4, runs + tl.sum((has_rows_J & (start_J < high)).to(tl.int32)))


@triton.jit
def expert_product(
    lhs,
    rhs,
    target,
    s,
    runs,
    blocks,
    used_blocks,
    address,
    rank,
    N,
    K,
    BACKWARD: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute target [rows, N]: each row of lhs [rows, K] times the matrix of its expert, plus the adapters'
    products. In the forward, rhs is W of all experts as [experts · N, K], and the adapters add sB with s =
    xAᵀ. In the backward, rhs is W as [experts · K, N], and the adapters add ds · A, where `s` holds ds, the
    gradient of xAᵀ. If s is None, no adapters are added."""
    H: tl.constexpr = C // 2
    row_blocks = tl.load(used_blocks)
    column_blocks = tl.cdiv(N, C)
    tl.assume(K > 0)
    for tile in tl.range(tl.program_id(0), row_blocks * column_blocks, tl.num_programs(0), flatten=True):
        row_block, column_block = tile_blocks(tile, row_blocks, column_blocks, GROUP)
        start = tl.load(blocks + row_block * 5)
        expert = tl.load(blocks + row_block * 5 + 2)
        sum_MC = tl.zeros((M, C), tl.float32)
        for k in range(0, K, D):
            lhs_MD = lhs.load([start, k])
            if BACKWARD:
                rhs_DC = rhs.load([expert * K + k, column_block * C])
            else:
                rhs_DC = rhs.load([expert * N + column_block * C, k]).T
            sum_MC = tl.dot(lhs_MD, rhs_DC, sum_MC, input_precision=PRECISION)
        row_M = start + tl.arange(0, M)
        stop = tl.load(blocks + row_block * 5 + 1)
        first = tl.load(blocks + row_block * 5 + 3)
        end = tl.load(blocks + row_block * 5 + 4)
        sums = split_halves(sum_MC)
        # One after the other, so that there are registers for the adapters' products.
        for half in tl.static_range(2):
            n_H = column_block * C + half * H + tl.arange(0, H)
            y_MH = sums[half]
            if s is not None:
                turn = first
                # Not a for loop, which would be fused with the outer loop.
                while turn < end:
                    run = runs + turn * 4
                    slot = tl.load(run + 2)
                    ranks = 0
                    if slot >= 0:
                        ranks = tl.load(rank + slot)
                    # If a slot has no ranks, its s has not been written.
                    if ranks > 0:
                        is_own_M = (row_M >= tl.load(run)) & (row_M < tl.load(run + 1))
                        added_MH = low_rank_product(
                            s, None, None, address, ranks, None, None, slot, 0, row_M, is_own_M, n_H,
                            0, N, stop, 0 if BACKWARD else 1, S, 1, R, False, ALIGNMENT, PRECISION,
                        )  # fmt: skip
                        y_MH += tl.where(is_own_M[:, None], added_MH, 0.0)
                    turn += 1
            # The rows after these belong to another expert, so a copy engine must not write.
            at_MH = row_M.to(tl.int64)[:, None] * N + n_H[None, :]
            stored_MH = (row_M < stop)[:, None] & (n_H < N)[None, :]
            tl.store(target + at_MH, y_MH.to(target.dtype.element_ty), mask=stored_MH)


@triton.jit
def gate_and_up(gate_up, row, column_B, inside_B, WIDTH: tl.constexpr):
    """Load B columns of gate and of up from a row of `gate_up`, which holds first all of gate, then all of
    up."""
    at_B = gate_up + row * (2 * WIDTH) + column_B
    gate_B = tl.load(at_B, mask=inside_B, other=0.0).to(tl.float32)
    return gate_B, tl.load(at_B + WIDTH, mask=inside_B, other=0.0).to(tl.float32)


@triton.jit
def gated_forward(gate_up, weight, act, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute act = weight · silu(gate) · up for one row, where weight is the router's weight."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(weight + row).to(tl.float32)
    for low in tl.static_range(0, WIDTH, BLOCK):
        column_B = low + tl.arange(0, BLOCK)
        inside_B = column_B < WIDTH
        gate_B, up_B = gate_and_up(gate_up, row, column_B, inside_B, WIDTH)
        passes_B, _ = sigmoid_pair(gate_B)
        act_B = scale * (gate_B * passes_B * up_B)
        tl.store(act + row * WIDTH + column_B, act_B.to(act.dtype.element_ty), mask=inside_B)


@triton.jit
def gated_backward(dact, gate_up, weight, act, dgate_up, dweight, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradients of gate, up and the router's weight for one row, and recompute the row's
    activation."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(weight + row).to(tl.float32)
    total_B = tl.full((BLOCK,), 0.0, tl.float32)
    for low in tl.static_range(0, WIDTH, BLOCK):
        column_B = low + tl.arange(0, BLOCK)
        inside_B = column_B < WIDTH
        gate_B, up_B = gate_and_up(gate_up, row, column_B, inside_B, WIDTH)
        dact_B = tl.load(dact + row * WIDTH + column_B, mask=inside_B, other=0.0).to(tl.float32)
        passes_B, stays_B = sigmoid_pair(gate_B)
        act_B = gate_B * passes_B * up_B
        total_B += dact_B * act_B
        dact_B *= scale
        dgate_B = dact_B * up_B * passes_B * (1.0 + gate_B * stays_B)
        dgate_at_B = dgate_up + row * (2 * WIDTH) + column_B
        tl.store(act + row * WIDTH + column_B, (scale * act_B).to(act.dtype.element_ty), mask=inside_B)
        tl.store(dgate_at_B, dgate_B.to(dgate_up.dtype.element_ty), mask=inside_B)
        dup_B = dact_B * gate_B * passes_B
        tl.store(dgate_at_B + WIDTH, dup_B.to(dgate_up.dtype.element_ty), mask=inside_B)
    tl.store(dweight + row, tl.sum(total_B).to(dweight.dtype.element_ty))


@triton.jit
def summed_choices(y, sorted_index, total, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute B columns of the sum of the outputs of one token's experts, added in the order in which the
    router lists them."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column_B = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside_B = column_B < WIDTH
    sum_B = tl.full((BLOCK,), 0.0, tl.float32)
    for choice in tl.static_range(ACTIVE):
        row = tl.load(sorted_index + token * ACTIVE + choice).to(tl.int64)
        sum_B += tl.load(y + row * WIDTH + column_B, mask=inside_B, other=0.0).to(tl.float32)
    tl.store(total + token * WIDTH + column_B, sum_B.to(total.dtype.element_ty), mask=inside_B)
