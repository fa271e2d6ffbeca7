"""The operands of a frozen product as kernels and the library multiply them: left · rightᵀ, summed in
float32, then multiplied by scales where the operands are 8-bit floats.

Shapes: T rows, K inputs, N outputs, M columns that are summed over, L rows of the right operand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.core.weights import CODES, CodedWeight
from weftune.ops.fp8 import codes_in_float32, row_codes

Right = Tensor | CodedWeight
"""A weight [N, K] that products read as it is stored."""


@dataclass(frozen=True, slots=True)
class Operands:
    left_TM: Tensor
    right_LM: Tensor
    scale_T: Tensor | None = None
    scale_L: Tensor | None = None

    @property
    def coded(self) -> bool:
        return self.right_LM.dtype is CODES

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the product."""
        return len(self.left_TM), len(self.right_LM)

    def summed(self, low: int, high: int) -> Tensor:
        """Return some columns of the product in float32, without the scales."""
        right_LM = self.right_LM[low:high]
        if self.coded:
            return codes_in_float32(self.left_TM, right_LM)
        return in_float32(self.left_TM, right_LM.T)


def forward_operands(x_TK: Tensor, weight: Right) -> Operands:
    """Return the operands of xWᵀ."""
    if isinstance(weight, Tensor):
        return Operands(x_TK, weight)
    codes_TK, scale_T = row_codes(x_TK)
    return Operands(codes_TK, weight.codes(), scale_T, weight.scale())


def backward_operands(dy_TN: Tensor, weight: Right) -> Operands:
    """Return the operands of dyW."""
    if isinstance(weight, Tensor):
        return Operands(dy_TN, weight.T)
    codes_TN, scale_T = row_codes(dy_TN, weight.scale())
    return Operands(codes_TN, weight.turned(), scale_T)


def matrix_like(like: Tensor, weight: Right) -> Tensor:
    """Return the weight as a matrix of `like`'s dtype."""
    if isinstance(weight, Tensor):
        return weight
    return (weight.codes().to(torch.float32) * weight.scale()[:, None]).to(like.dtype)


def in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Return left · right in float32; torch has no such product of 16-bit numbers on a CPU."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
