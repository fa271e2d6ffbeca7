"""A trained weight for autograd whose gradient is accumulated in a given vector."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def accumulated(weight: Tensor, total: Tensor, anchor: Tensor) -> Tensor:
    """Return the weight for a computation; its gradient is added to `total` instead of `.grad`.

    `anchor` is a scalar that requires a gradient and gets none: it makes autograd record the computation.
    """
    return _Accumulated.apply(anchor, weight, total)


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        ctx.total = total
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.total.add_(gradient)
        return None, None, None
