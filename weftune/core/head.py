"""The frozen output layer of a base, as a record that `base` fills and `ops` uses.

Shapes: S rows, D hidden width, V vocabulary, n tokens with rows of a job's own.
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

    def logits(self, h_SD: Tensor, own: HeadRows | None = None) -> Tensor:
        """Return the logits in at least float32. The rows in `own` replace those of the head."""
        logits_SV = torch.nn.functional.linear(h_SD, self.weight_VD, self.bias_V)
        if own is not None:
            logits_SV[:, own.ids_n] = torch.nn.functional.linear(h_SD, own.rows_nD, self._bias_of(own))
        if logits_SV.dtype in (torch.bfloat16, torch.float16):
            logits_SV = logits_SV.float()
        if self.multiplier != 1.0:
            logits_SV = logits_SV * self.multiplier
        if self.softcap is not None:
            logits_SV = torch.tanh(logits_SV / self.softcap) * self.softcap
        return logits_SV

    def _bias_of(self, own: HeadRows) -> Tensor | None:
        return None if self.bias_V is None else self.bias_V[own.ids_n]


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows with which one job replaces some of the head's."""

    ids_n: Tensor
    rows_nD: Tensor
