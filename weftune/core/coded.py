"""Products of 8-bit floats (e4m3) with a scale per row, as fp8 tensor cores compute them, in plain torch.

Both operands have a scale per row, so that a row's codes and products depend on that row alone: a NaN stays
where it is, and no row depends on its neighbours. Gradients are e4m3, too: a scale per row gives them the
range that e5m2 would pay for with half of the digits.

Shapes: T rows, M columns that are summed over, L rows of the frozen operand, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

CODES = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest finite value of e4m3."""
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""A row with a smaller scale is zero: the inverse would be infinite."""
CODED_PARAMETERS = {"weight": 0, "scale": 0, "turned": 1}
"""Maps each parameter of a linear with a coded weight to the dimension of the outputs in it."""

MultiplyCodes = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, torch.dtype], Tensor]
"""(left_TM, codes_LM, scale_M, scale_L, dtype): ((left ⊙ scale_M) · codesᵀ) ⊙ scale_L, where the left operand
is rounded to codes; summed in at least float32 and rounded to the dtype once."""


@runtime_checkable
class CodedWeight(Protocol):
    """A frozen weight W = codes · scale per output, which passes multiply by as it is stored.

    The scales are outside the sum of xWᵀ but inside the sum of dyW, where they are multiplied into dy. The
    tensor cores read both operands along the sum, so the codes are held in both orders.
    """

    def codes(self) -> Tensor:
        """Return the codes as [N, K]."""

    def turned(self) -> Tensor:
        """Return the transposed codes, [K, N]."""

    def scale(self) -> Tensor:
        """Return the scale per output, float32 [N]."""

    @property
    def multiply(self) -> MultiplyCodes: ...


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A coded weight as its three tensors."""

    codes_NK: Tensor
    turned_KN: Tensor
    scale_N: Tensor

    @classmethod
    def of(cls, weight_NK: Tensor) -> CodedMatrix:
        codes_NK, scale_N = row_codes(weight_NK.float())
        return cls(codes_NK, codes_NK.T.contiguous(), scale_N)

    def codes(self) -> Tensor:
        return self.codes_NK

    def turned(self) -> Tensor:
        return self.turned_KN

    def scale(self) -> Tensor:
        return self.scale_N

    @property
    def multiply(self) -> MultiplyCodes:
        return multiply_codes


def is_coded(weight: object) -> TypeGuard[CodedWeight]:
    return not isinstance(weight, Tensor) and isinstance(weight, CodedWeight)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of values of `dtype` are accumulated: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def row_codes(x_TM: Tensor, scale_M: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (codes_TM, scale_T): x ⊙ scale_M ≈ codes · scale, and each row's largest code is LARGEST."""
    x_TM = x_TM.to(wide(x_TM.dtype))
    if scale_M is not None:
        x_TM = x_TM * scale_M
    # Not a division, which torch replaces by a product on a GPU: this way all devices give the same bits.
    scale_T = x_TM.abs().amax(dim=1) * (1.0 / LARGEST)
    inverse_T = torch.where(scale_T < LEAST_SCALE, 0.0, 1.0 / scale_T)
    return (x_TM * inverse_T[:, None]).clamp_(-LARGEST, LARGEST).to(CODES), scale_T


def multiply_codes(
    left_TM: Tensor, codes_LM: Tensor, scale_M: Tensor | None, scale_L: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Implement `MultiplyCodes` on any device, with exactly the values that the tensor cores multiply."""
    left_TM, scale_T = row_codes(left_TM, scale_M)
    sum_TL = left_TM.to(scale_T.dtype) @ codes_LM.to(scale_T.dtype).T
    sum_TL *= scale_T[:, None]
    if scale_L is not None:
        sum_TL *= scale_L
    return sum_TL.to(dtype)


def multiply_unrounded(
    left_TM: Tensor, codes_LM: Tensor, scale_M: Tensor | None, scale_L: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Implement `MultiplyCodes` without rounding the left operand. Rounding to few digits turns a difference
    in the last of many digits into one in the last of few, which hinders comparing two ways to the same
    result."""
    left_TM = left_TM.to(wide(left_TM.dtype))
    left_TM = left_TM if scale_M is None else left_TM * scale_M
    sum_TL = left_TM @ codes_LM.to(left_TM.dtype).T
    return (sum_TL if scale_L is None else sum_TL * scale_L).to(dtype)


def side_by_side(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return a view that joins the parts along a dimension, or None if they are not adjacent in memory as the
    parts of one contiguous tensor."""
    first, shape = parts[0], list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    whole = torch.empty(shape, device="meta")
    place = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        strides = zip(part.shape, part.stride(), whole.stride(), strict=True)
        if not (same and part.data_ptr() == place and all(n == 1 or own == want for n, own, want in strides)):
            return None
        place += part.shape[dim] * whole.stride(dim) * part.element_size()
    return first.as_strided(shape, whole.stride())


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the parts as one tensor: a view if they are adjacent in memory, otherwise a copy."""
    if len(parts) == 1:
        return parts[0]
    lying = side_by_side(parts, dim)
    if lying is not None:
        return lying
    # Torch does not concatenate 8-bit floats on every device, but it does concatenate their bytes.
    narrow = parts[0].element_size() == 1
    together = torch.cat([part.view(torch.uint8) if narrow else part for part in parts], dim)
    return together.view(parts[0].dtype)
