"""Frozen weights of the base that are not plain matrices: stored in fewer bits, for example.

A linear of the base that has such a weight offers it by a method `frozen_weight`.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import linear


class FrozenWeight(Protocol):
    @property
    def held_bytes(self) -> int: ...

    @property
    def like(self) -> Tensor:
        """An empty tensor [0, K] of the matrix's dtype, on its device."""

    def matrix(self) -> Tensor:
        """The matrix [N, K] that passes multiply by: computed at every call, kept no longer than a
        product."""

    def write(self, out_NK: Tensor) -> None:
        """Write the matrix there."""

    def part(self, low: int, high: int) -> FrozenWeight:
        """The weight of the outputs `low` to `high`."""


Weight = Tensor | FrozenWeight


@runtime_checkable
class HoldsWeight(Protocol):
    """A linear whose weight is no matrix."""

    def frozen_weight(self) -> FrozenWeight: ...


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """The weights of several linears, one below the other; only whole ones can be taken apart again."""

    parts: tuple[tuple[int, int, Weight], ...]
    """(low, high, weight)."""

    @classmethod
    def of(cls, weights: Sequence[Weight], outputs: Sequence[int]) -> StackedWeight:
        stops = [sum(outputs[: number + 1]) for number in range(len(outputs))]
        return cls(tuple(zip([0, *stops[:-1]], stops, weights, strict=True)))

    @property
    def held_bytes(self) -> int:
        return sum(held_bytes(weight) for _, _, weight in self.parts)

    @property
    def like(self) -> Tensor:
        weight = self.parts[0][2]
        return weight[:0] if isinstance(weight, Tensor) else weight.like

    def matrix(self) -> Tensor:
        like = self.like
        out_NK = like.new_empty(self.parts[-1][1], like.shape[1])
        self.write(out_NK)
        return out_NK

    def write(self, out_NK: Tensor) -> None:
        for low, high, weight in self.parts:
            if isinstance(weight, Tensor):
                out_NK[low:high] = weight
            else:
                weight.write(out_NK[low:high])

    def part(self, low: int, high: int) -> FrozenWeight:
        found = next(weight for first, end, weight in self.parts if (first, end) == (low, high))
        return StackedWeight(((0, high - low, found),))


def frozen_product(x_TK: Tensor, weight: Weight, bias_N: Tensor | None) -> Tensor:
    """xWᵀ + b."""
    if isinstance(weight, Tensor):
        return linear(x_TK, weight, bias_N)
    return frozen_product_by(linear, x_TK, weight, bias_N)


def frozen_product_by(
    make: Callable[..., Tensor], x_TK: Tensor, weight: Weight, bias_N: Tensor | None
) -> Tensor:
    """The same, where `make` multiplies; the weight gets no gradient."""
    product: Tensor = _Product.apply(x_TK, weight, bias_N, make)
    return product


class _Product(torch.autograd.Function):
    """The frozen weight gets no gradient; a matrix that was computed from it is recomputed in the
    backward."""

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, weight: Weight, bias_N: Tensor | None, make: Callable[..., Tensor]
    ) -> Tensor:
        ctx.weight = weight
        return make(x_TK, matrix_of(weight), bias_N)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, None, None, None]:
        weight_NK = matrix_of(ctx.weight)
        return dy_TN.to(weight_NK.dtype) @ weight_NK, None, None, None


def matrix_of(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.matrix()


def part_of(weight: Weight, low: int, high: int) -> Weight:
    return weight[low:high] if isinstance(weight, Tensor) else weight.part(low, high)


def held_bytes(weight: Weight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.held_bytes
