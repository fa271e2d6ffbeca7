"""LoRA of many jobs on one linear: y += scale · drop(x)AᵀB on the rows of each job, with its own A and B.

There are three implementations, called routes. Two are here, and `ops.lora.tiled` has the third, for GPUs.
The route `reference` is plain autograd, job by job; the other routes are tested against it. The route
`segmented` is one autograd node that saves only x and rank-sized tensors. It also computes job by job, so
that no reduction mixes rows of two jobs: a NaN in one job does not reach other jobs.

The backward adds the gradients of A and B to each job's accumulators; autograd tracks only x and y.

Shapes: T rows, K inputs, N outputs, R rank of one job. B is stored transposed, [R, N], so that a range of
ranks is contiguous in both A and B.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from weftune.ops.accumulate import accumulate_gradient
from weftune.ops.dropout import keep_mask_TK
from weftune.ops.lora.table import LowRank


class Route(StrEnum):
    reference = "reference"
    segmented = "segmented"
    tiled = "tiled"


@dataclass(frozen=True, slots=True)
class Block:
    """One job at one linear: its rows of the microbatch and its adapter."""

    start: int
    stop: int
    adapter: LowRank
    key: int
    """Key of the dropout mask, which `ops.dropout.mask_key` computes from the job's seed, the step and the
    linear's name."""
    first_feature: int = 0
    """Index of the first column of x among the inputs of the whole linear. Not 0 on a shard (a worker's part
    of the linear) that has later inputs."""

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Blocks:
    """All jobs with adapters at one linear in one microbatch, each with its rows."""

    blocks: tuple[Block, ...]
    token_index_T: Tensor
    anchor: Tensor
    """Scalar that requires a gradient but never gets one. It makes autograd record linears whose input needs
    no gradient."""

    def keep_mask(self, block: Block, features: int) -> Tensor | None:
        """Return the mask of the values that dropout keeps in the rows of one job; None without dropout."""
        dropout = block.adapter.dropout
        if dropout == 0.0:
            return None
        index_T = self.token_index_T[block.rows]
        return keep_mask_TK(block.key, index_T, features, dropout, block.first_feature)


def add_lora(x_TK: Tensor, y_TN: Tensor, blocks: Blocks, route: Route) -> Tensor:
    """Return y plus every job's LoRA output on its own rows, computed by the given route (implementation).
    The `reference` route returns a new tensor; all other routes overwrite y."""
    if route is Route.reference:
        return _reference_output(x_TK, y_TN, blocks)
    return _Segmented.apply(x_TK, y_TN, blocks.anchor, blocks)


def _reference_output(x_TK: Tensor, y_TN: Tensor, blocks: Blocks) -> Tensor:
    parts = []
    row = 0
    for block in blocks.blocks:
        adapter = block.adapter
        parts.append(y_TN[row : block.start])
        a_RK = accumulate_gradient(adapter.a_RK, adapter.da_RK, blocks.anchor)
        b_RN = accumulate_gradient(adapter.b_RN, adapter.db_RN, blocks.anchor)
        kept = blocks.keep_mask(block, x_TK.shape[1])
        dropped = _mask_dropped(x_TK[block.rows], kept) / (1.0 - adapter.dropout)
        parts.append(y_TN[block.rows] + adapter.scale * (dropped @ a_RK.T @ b_RN))
        row = block.stop
    parts.append(y_TN[row:])
    return torch.cat(parts)


class _Segmented(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, y_TN: Tensor, anchor: Tensor, blocks: Blocks) -> Tensor:
        s_by_block = []
        for block in blocks.blocks:
            masked = _mask_dropped(x_TK[block.rows], blocks.keep_mask(block, x_TK.shape[1]))
            s = (masked @ block.adapter.a_RK.T).mul_(block.adapter.factor)
            _add_product(y_TN[block.rows], s, block.adapter.b_RN)
            s_by_block.append(s)
        ctx.blocks = blocks
        ctx.save_for_backward(x_TK, *s_by_block)
        ctx.mark_dirty(y_TN)
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, *s_by_block = ctx.saved_tensors
        dx_TK = _zero_other_rows(ctx.blocks, torch.empty_like(x_TK)) if ctx.needs_input_grad[0] else None
        for block, s in zip(ctx.blocks.blocks, s_by_block, strict=True):
            # If the site also has adapters of other kinds, y is accumulated in float32.
            dy, kept = dy_TN[block.rows].to(s.dtype), ctx.blocks.keep_mask(block, x_TK.shape[1])
            ds = (dy @ block.adapter.b_RN.T).mul_(block.adapter.factor)
            _add_product(block.adapter.db_RN, s.T, dy)
            _add_product(block.adapter.da_RK, ds.T, _mask_dropped(x_TK[block.rows], kept))
            if dx_TK is not None:
                dx = torch.mm(ds, block.adapter.a_RK, out=dx_TK[block.rows])
                if kept is not None:
                    dx.masked_fill_(kept.logical_not_(), 0.0)
        return dx_TK, dy_TN, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _zero_other_rows(blocks: Blocks, values_TK: Tensor) -> Tensor:
    """Set the rows of `values_TK` that belong to no job in `blocks` to zero, in place, and return the
    tensor."""
    row = 0
    for block in blocks.blocks:
        values_TK[row : block.start].zero_()
        row = block.stop
    values_TK[row:].zero_()
    return values_TK


def _mask_dropped(x_TK: Tensor, keep_mask: Tensor | None) -> Tensor:
    """Return x with dropped values (even NaN) set to zero. Kept values are not divided by 1 − p."""
    return x_TK if keep_mask is None else torch.where(keep_mask, x_TK, 0.0)
