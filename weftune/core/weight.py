"""Frozen weights of the base that are not plain matrices: stored in fewer bits, for example.

A linear of the base that has such a weight offers it by a method `frozen_weight`.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class FrozenWeight(Protocol):
    @property
    def held_bytes(self) -> int: ...

    def matrix(self) -> Tensor:
        """The matrix [N, K] that passes multiply by: computed at every call, kept no longer than a
        product."""

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

    def matrix(self) -> Tensor:
        return torch.cat([matrix_of(weight) for _, _, weight in self.parts])

    def part(self, low: int, high: int) -> FrozenWeight:
        found = next(weight for first, end, weight in self.parts if (first, end) == (low, high))
        return StackedWeight(((0, high - low, found),))


def matrix_of(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.matrix()


def part_of(weight: Weight, low: int, high: int) -> Weight:
    return weight[low:high] if isinstance(weight, Tensor) else weight.part(low, high)


def held_bytes(weight: Weight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.held_bytes
