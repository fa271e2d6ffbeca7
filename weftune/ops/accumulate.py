"""A trained weight as autograd sees it, where its gradient is added up in a vector of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def accumulated(weight: Tensor, total: Tensor, anchor: Tensor) -> Tensor:
    """The weight, to compute with; what it would get as its gradient is added to `total`.

    `anchor` is a scalar that requires a gradient and gets none: it has autograd record what is made of it.
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
