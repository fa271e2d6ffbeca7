"""The LoRA part of a site over mixed segments: y += scale · drop(x)AᵀBᵀ, each job with its own A and B.

Three routes compute the same thing:
- `reference`: plain autograd over one job after another. The truth.
- `segmented`: one autograd node that saves only x and rank-sized tensors, still one job after another, so
  that no reduction ever mixes rows of two jobs: a NaN stays with its owner.
- `concatenated`: the same node with the ranks of all jobs side by side and no loop over jobs. Its reductions
  meet 0 × NaN when a job's rows or weights are not finite; the executor then replays it segmented.

Shapes: T rows, K inputs, N outputs, R the ranks of all jobs in the bank side by side. B is held
transposed, so that a job's part of A and of B is a run of whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weft.ops.dropout import kept_TK


class Route(StrEnum):
    reference = "reference"
    segmented = "segmented"
    concatenated = "concatenated"


@dataclass(frozen=True, slots=True)
class Block:
    """One job at one site: its rows of the microbatch, its ranks in the bank, its scale and dropout."""

    start: int
    stop: int
    low: int
    high: int
    scale: float
    dropout: float
    key: int
    """`ops.dropout.key` of the job's seed, the step and the site."""

    @property
    def factor(self) -> float:
        """The scale, with what dropout scales the kept values up by: applied once, to rank-sized tensors."""
        return self.scale / (1.0 - self.dropout)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def ranks(self) -> slice:
        return slice(self.low, self.high)


@dataclass(frozen=True)
class Blocks:
    """All jobs at one site in one microbatch."""

    blocks: tuple[Block, ...]
    token_index_T: Tensor
    ranks: int
    """R of the bank, whether or not all of its jobs have rows here."""

    @cached_property
    def factor_TR(self) -> Tensor:
        """Each row's factor in its own job's columns and zero elsewhere."""
        rows = self.token_index_T.shape[0]
        factor_TR = torch.zeros(rows, self.ranks, dtype=torch.float64)
        for block in self.blocks:
            factor_TR[block.rows, block.ranks] = block.factor
        return factor_TR.to(self.token_index_T.device)

    @cached_property
    def owned_TR(self) -> Tensor:
        rows = self.token_index_T.shape[0]
        owned_TR = torch.zeros(rows, self.ranks, dtype=torch.bool)
        for block in self.blocks:
            owned_TR[block.rows, block.ranks] = True
        return owned_TR.to(self.token_index_T.device)

    def kept(self, block: Block, x_TK: Tensor) -> Tensor | None:
        """Which values of the block's rows of x survive its dropout; None where it has none."""
        if block.dropout == 0.0:
            return None
        return kept_TK(block.key, self.token_index_T[block.rows], x_TK.shape[1], block.dropout)


def add_lora(x_TK: Tensor, y_TN: Tensor, a_RK: Tensor, b_RN: Tensor, blocks: Blocks, route: Route) -> Tensor:
    """y with every job's part added to its own rows. Except by reference, y itself is overwritten."""
    if route is Route.reference:
        return _reference(x_TK, y_TN, a_RK, b_RN, blocks)
    node = _Segmented if route is Route.segmented else _Concatenated
    return node.apply(x_TK, y_TN, a_RK, b_RN, blocks)


def _reference(x_TK: Tensor, y_TN: Tensor, a_RK: Tensor, b_RN: Tensor, blocks: Blocks) -> Tensor:
    parts = []
    row = 0
    for block in blocks.blocks:
        parts.append(y_TN[row : block.start])
        kept = blocks.kept(block, x_TK)
        dropped = _masked(x_TK[block.rows], kept) / (1.0 - block.dropout)
        s = dropped @ a_RK[block.ranks].T
        parts.append(y_TN[block.rows] + block.scale * (s @ b_RN[block.ranks]))
        row = block.stop
    parts.append(y_TN[row:])
    return torch.cat(parts)


class _Segmented(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, y_TN: Tensor, a_RK: Tensor, b_RN: Tensor, blocks: Blocks) -> Tensor:
        s_by_block = []
        for block in blocks.blocks:
            masked = _masked(x_TK[block.rows], blocks.kept(block, x_TK))
            s = (masked @ a_RK[block.ranks].T).mul_(block.factor)
            y_TN[block.rows].addmm_(s, b_RN[block.ranks])
            s_by_block.append(s)
        ctx.blocks = blocks
        ctx.save_for_backward(x_TK, a_RK, b_RN, *s_by_block)
        ctx.mark_dirty(y_TN)
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, a_RK, b_RN, *s_by_block = ctx.saved_tensors
        dx_TK = _zero_outside(ctx.blocks, torch.empty_like(x_TK)) if ctx.needs_input_grad[0] else None
        da_RK, db_RN = torch.zeros_like(a_RK), torch.zeros_like(b_RN)
        for block, s in zip(ctx.blocks.blocks, s_by_block, strict=True):
            dy, kept = dy_TN[block.rows], ctx.blocks.kept(block, x_TK)
            ds = (dy @ b_RN[block.ranks].T).mul_(block.factor)
            torch.mm(s.T, dy, out=db_RN[block.ranks])
            torch.mm(ds.T, _masked(x_TK[block.rows], kept), out=da_RK[block.ranks])
            if dx_TK is not None:
                dx = torch.mm(ds, a_RK[block.ranks], out=dx_TK[block.rows])
                if kept is not None:
                    dx.masked_fill_(kept.logical_not_(), 0.0)
        return dx_TK, dy_TN, da_RK, db_RN, None


class _Concatenated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, y_TN: Tensor, a_RK: Tensor, b_RN: Tensor, blocks: Blocks) -> Tensor:
        s_TR = _own(_masked_by_owner(x_TK, x_TK, blocks) @ a_RK.T, blocks)
        y_TN.addmm_(s_TR, b_RN)
        ctx.blocks = blocks
        ctx.save_for_backward(x_TK, a_RK, b_RN, s_TR)
        ctx.mark_dirty(y_TN)
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, a_RK, b_RN, s_TR = ctx.saved_tensors
        ds_TR = _own(dy_TN @ b_RN.T, ctx.blocks)
        db_RN = s_TR.T @ dy_TN
        da_RK = ds_TR.T @ _masked_by_owner(x_TK, x_TK, ctx.blocks)
        dx_TK = _masked_by_owner(ds_TR @ a_RK, x_TK, ctx.blocks) if ctx.needs_input_grad[0] else None
        return dx_TK, dy_TN, da_RK, db_RN, None


def _own(s_TR: Tensor, blocks: Blocks) -> Tensor:
    """Scaled in the columns of each row's own job, zero elsewhere: by `where`, since 0 × NaN is NaN."""
    return torch.where(blocks.owned_TR, s_TR * blocks.factor_TR.to(s_TR.dtype), 0.0)


def _zero_outside(blocks: Blocks, values_TK: Tensor) -> Tensor:
    """Zero the rows that belong to no block; the others are about to be written."""
    row = 0
    for block in blocks.blocks:
        values_TK[row : block.start].zero_()
        row = block.stop
    values_TK[row:].zero_()
    return values_TK


def _masked(x_TK: Tensor, kept: Tensor | None) -> Tensor:
    """x with dropped values at exactly zero, even a NaN; not yet scaled up."""
    return x_TK if kept is None else torch.where(kept, x_TK, 0.0)


def _masked_by_owner(values_TK: Tensor, x_TK: Tensor, blocks: Blocks) -> Tensor:
    """Values (x, or its gradient) with each job's dropout on its own rows; as they are if nobody drops."""
    if all(block.dropout == 0.0 for block in blocks.blocks):
        return values_TK
    masked = values_TK.clone()
    for block in blocks.blocks:
        masked[block.rows] = _masked(values_TK[block.rows], blocks.kept(block, x_TK))
    return masked
