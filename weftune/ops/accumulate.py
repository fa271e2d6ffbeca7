"""Accumulation of the gradient of a trained weight in a given tensor instead of the weight's `.grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def accumulate_gradient(weight: Tensor, total: Tensor, anchor: Tensor) -> Tensor:
    """Return a copy of the weight for use in a forward, whose gradient the backward adds to `total` instead
    of `weight.grad`. `anchor` is a scalar with `requires_grad` that never gets a gradient: it makes autograd
    record the graph."""
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
