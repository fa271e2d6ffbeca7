"""The interface of a format of quantised weights: tensors that represent a matrix, and the conversion both
ways.

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
"""Device type → number of values that plain torch dequantises at a time: the intermediate values stay in a
CPU's caches, or keep a GPU busy, and are small beside the matrix."""


def piece_values(device: torch.device) -> int:
    return PIECE_VALUES.get(device.type, PIECE_VALUES["cpu"])


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the tensors that represent a matrix."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFormat(Protocol):
    @property
    def name(self) -> Quantize: ...

    def parts(self, outputs: int, inputs: int) -> Mapping[str, StoredPart]:
        """Return the tensors of a matrix of that shape, by name; the largest is `weight`."""

    def quantise(self, weight_NK: Tensor) -> dict[str, Tensor]:
        """Return these tensors, on the device of the matrix."""

    def write(self, parts: Mapping[str, Tensor], out_NK: Tensor) -> None:
        """Write the matrix, in the dtype of `out_NK`, which is contiguous in memory."""
