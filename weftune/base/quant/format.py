"""What a format of quantised weights is: tensors that stand for a matrix, and the way there and back.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weftune.base.spec import Quantize

PIECE_VALUES = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Values that are dequantised at a time, where plain torch does it: what lies between a weight's bytes and
its matrix stays in a CPU's caches, or keeps a GPU busy, and is little beside the matrix."""


def piece_values(device: torch.device) -> int:
    return PIECE_VALUES.get(device.type, PIECE_VALUES["cpu"])


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the tensors that stand for a matrix."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFormat(Protocol):
    @property
    def name(self) -> Quantize: ...

    def parts(self, outputs: int, inputs: int) -> Mapping[str, StoredPart]:
        """The tensors of a matrix of that shape, by name; the largest is `weight`."""

    def quantise(self, weight_NK: Tensor) -> dict[str, Tensor]:
        """These tensors, on the device of the matrix."""

    def write(self, parts: Mapping[str, Tensor], out_NK: Tensor) -> None:
        """Write the matrix, in the dtype of `out_NK`, which lies in memory row by row."""
