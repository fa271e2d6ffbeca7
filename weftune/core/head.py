"""The frozen output layer of a base, as a record that `base` fills and `ops` uses.

Shapes: S rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """logits = softcap · tanh((hWᵀ + b) · multiplier / softcap), each part optional."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    multiplier: float = 1.0

    def logits(self, h_SD: Tensor) -> Tensor:
        """In at least float32."""
        logits_SV = torch.nn.functional.linear(h_SD, self.weight_VD, self.bias_V)
        if logits_SV.dtype in (torch.bfloat16, torch.float16):
            logits_SV = logits_SV.float()
        if self.multiplier != 1.0:
            logits_SV = logits_SV * self.multiplier
        if self.softcap is not None:
            logits_SV = torch.tanh(logits_SV / self.softcap) * self.softcap
        return logits_SV
