"""int8: one byte per value and one scale per row, symmetric. Only weights are quantised: activations are not
rounded, so the result of a row of a microbatch does not depend on its neighbours, as it would if outlier
columns were split off.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.base.quant.format import StoredPart, piece_values
from weftune.base.spec import Quantize

LARGEST = 127
READ_VALUES = 1 << 24
"""Number of values that are quantised at a time, in whole rows."""


@dataclass(frozen=True, slots=True)
class Int8:
    """W = weight · scale."""

    @property
    def name(self) -> Quantize:
        return "int8"

    def parts(self, outputs: int, inputs: int) -> Mapping[str, StoredPart]:
        return {
            "weight": StoredPart((outputs, inputs), torch.int8),
            "scale": StoredPart((outputs,), torch.float32),
        }

    def quantise(self, weight_NK: Tensor) -> dict[str, Tensor]:
        rows = max(1, READ_VALUES // weight_NK.shape[1])
        pieces = [_rows(piece.float()) for piece in weight_NK.split(rows)]
        return {
            "weight": torch.cat([codes for codes, _ in pieces]),
            "scale": torch.cat([scale for _, scale in pieces]),
        }

    def write(self, parts: Mapping[str, Tensor], out_NK: Tensor) -> None:
        rows = max(1, piece_values(out_NK.device) // out_NK.shape[1])
        pieces = (tensor.split(rows) for tensor in (out_NK, parts["weight"], parts["scale"]))
        for out_RK, codes_RK, scale_R in zip(*pieces, strict=True):
            out_RK.copy_(codes_RK.float().mul_(scale_R[:, None]))


def _rows(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of some rows."""
    scale_N = weight_NK.abs().amax(dim=1) / LARGEST
    # A row of zeros has the scale 0, and its codes do not matter.
    codes_NK = (weight_NK / scale_N.where(scale_N != 0, 1)[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return codes_NK.to(torch.int8), scale_N
