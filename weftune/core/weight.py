"""Frozen weights of the base that are not plain matrices: stored in fewer bits, for example.

A linear of the base with such a weight returns it from its method `frozen_weight`.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import linear

from weftune.core.coded import CodedWeight, MultiplyCodes, is_coded, joined, wide


class FrozenWeight(Protocol):
    @property
    def held_bytes(self) -> int: ...

    @property
    def like(self) -> Tensor:
        """An empty tensor [0, K] of the matrix's dtype, on its device."""

    def matrix(self) -> Tensor:
        """Return the matrix [N, K] that passes multiply by. It is computed at every call and kept no longer
        than a product."""

    def write(self, out_NK: Tensor) -> None:
        """Write the matrix to `out_NK`."""

    def part(self, low: int, high: int) -> FrozenWeight:
        """Return the weight of the outputs `low` to `high`."""


Weight = Tensor | FrozenWeight


@runtime_checkable
class HoldsWeight(Protocol):
    """A linear whose weight is not stored as a matrix."""

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
        return stacked([found], [high - low])


@dataclass(frozen=True, slots=True)
class CodedStack(StackedWeight):
    """A stack of weights that products read as they are stored. The stack is a view if their codes are
    adjacent in memory, otherwise a copy for one product."""

    @property
    def coded(self) -> list[CodedWeight]:
        return [weight for _, _, weight in self.parts if is_coded(weight)]

    def codes(self) -> Tensor:
        return joined([weight.codes() for weight in self.coded], dim=0)

    def turned(self) -> Tensor:
        return joined([weight.turned() for weight in self.coded], dim=1)

    def scale(self) -> Tensor:
        return joined([weight.scale() for weight in self.coded], dim=0)

    @property
    def multiply(self) -> MultiplyCodes:
        return self.coded[0].multiply


def stacked(weights: Sequence[Weight], outputs: Sequence[int]) -> StackedWeight:
    return (CodedStack if all(map(is_coded, weights)) else StackedWeight).of(weights, outputs)


def frozen_product(x_TK: Tensor, weight: Weight, bias_N: Tensor | None) -> Tensor:
    """Return xWᵀ + b."""
    if isinstance(weight, Tensor):
        return linear(x_TK, weight, bias_N)
    if not is_coded(weight):
        return frozen_product_by(linear, x_TK, weight, bias_N)
    if bias_N is None:
        return coded_product(x_TK, weight, x_TK.dtype)
    return (coded_product(x_TK, weight, wide(x_TK.dtype)) + bias_N).to(x_TK.dtype)


def coded_product(x_TK: Tensor, weight: CodedWeight, dtype: torch.dtype) -> Tensor:
    """Return xWᵀ rounded to the dtype. Forward and backward multiply codes; the weight gets no gradient."""
    product: Tensor
    if x_TK.ndim == 2:
        # Never a view: others add to it in place.
        product = _CodedProduct.apply(x_TK, weight, dtype)
    else:
        product = _CodedProduct.apply(x_TK.flatten(0, -2), weight, dtype).view(*x_TK.shape[:-1], -1)
    return product


class _CodedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: CodedWeight, dtype: torch.dtype) -> Tensor:
        ctx.weight, ctx.dtype = weight, x_TK.dtype
        return weight.multiply(x_TK, weight.codes(), None, weight.scale(), dtype)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, None, None]:
        weight: CodedWeight = ctx.weight
        return weight.multiply(dy_TN, weight.turned(), weight.scale(), None, ctx.dtype), None, None


def frozen_product_by(
    make: Callable[..., Tensor], x_TK: Tensor, weight: Weight, bias_N: Tensor | None
) -> Tensor:
    """Return xWᵀ + b, computed by `make`; the weight gets no gradient."""
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
