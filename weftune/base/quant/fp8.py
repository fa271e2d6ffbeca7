"""fp8: e4m3 with one scale per row, held in both orders, so that passes multiply by the codes as they are.

W = weight · scale; `turned` are the same codes as [K, N]: the tensor cores read both operands along the
summed dimension, which is the outputs in the backward.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.base.quant.format import StoredPart, piece_values
from weftune.base.spec import BaseSpec, Quantize
from weftune.core.weights import CODES, row_codes
from weftune.errors import BaseModelError

READ_VALUES = 1 << 24
"""Number of values that are quantised at a time, in whole rows."""
LEAST_CAPABILITY = (8, 9)
"""CUDA capability of the first GPUs with fp8 tensor cores: Ada, then Hopper."""


@dataclass(frozen=True, slots=True)
class Fp8:
    @property
    def name(self) -> Quantize:
        return "fp8"

    def parts(self, outputs: int, inputs: int) -> Mapping[str, StoredPart]:
        return {
            "weight": StoredPart((outputs, inputs), CODES),
            "scale": StoredPart((outputs,), torch.float32),
            "turned": StoredPart((inputs, outputs), CODES),
        }

    def quantise(self, weight_NK: Tensor) -> dict[str, Tensor]:
        outputs, inputs = weight_NK.shape
        codes_NK = torch.empty(outputs, inputs, dtype=CODES, device=weight_NK.device)
        scale_N = torch.empty(outputs, device=weight_NK.device)
        rows = max(1, READ_VALUES // inputs)
        for piece_RK, codes_RK, scale_R in zip(
            weight_NK.split(rows), codes_NK.split(rows), scale_N.split(rows), strict=True
        ):
            codes, scale = row_codes(piece_RK.float())
            codes_RK.copy_(codes)
            scale_R.copy_(scale)
        return {"weight": codes_NK, "scale": scale_N, "turned": codes_NK.T.contiguous()}

    def write(self, parts: Mapping[str, Tensor], out_NK: Tensor) -> None:
        rows = max(1, piece_values(out_NK.device) // out_NK.shape[1])
        pieces = (tensor.split(rows) for tensor in (out_NK, parts["weight"], parts["scale"]))
        for out_RK, codes_RK, scale_R in zip(*pieces, strict=True):
            out_RK.copy_(codes_RK.float().mul_(scale_R[:, None]))


def refuse_without_fp8(spec: BaseSpec, device: torch.device) -> None:
    """Raise BaseModelError if `spec` requests fp8 and the device cannot multiply it: emulating it would be
    slower than any other format."""
    if spec.quantize != "fp8" or multiplies_fp8(device):
        return
    raise BaseModelError(
        f"base.quantize: fp8 needs a GPU with fp8 tensor cores (Ada, Hopper or later), which {_told(device)} "
        "does not have: write nf4 or int8, or leave quantize out."
    )


def multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def _told(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the {device.type.upper()}"
