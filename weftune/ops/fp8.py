"""Matrix products of 8-bit floats on the fp8 tensor cores of a GPU. `core.weights` has the references in
plain torch.

torch's product with a scale per row rounds to bfloat16, which loses digits if another tensor is added to the
result. The product with one scale per matrix returns float32, and the row scales are multiplied in
afterwards.

Shapes: T rows, M columns that are summed over, L rows of the frozen operand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weftune.core import weights
from weftune.core.weights import CODES, WholeMaxima, multiply_codes
from weftune.ops import triton as kernels
from weftune.ops.fallback import run_with_fallback
from weftune.ops.triton import kernels_available

VALUES = 1 << 14
"""Number of values that a program of the kernel `row_codes` converts, 64 per thread. A row with more values
is also converted by a single program."""
MULTIPLE = 16
"""Number of which both dimensions of the weight must be multiples for `torch._scaled_mm`."""


def row_codes(
    x_TM: Tensor, scale_M: Tensor | None = None, whole_maxima: WholeMaxima | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise the rows of x ⊙ scale to 8-bit floats with one scale per row, with the result of
    `core.weights.quantise_rows`. One Triton kernel does this where Triton is available, unless x has only a
    shard's part of each row; `whole_maxima` then finds the maxima of whole rows."""
    if whole_maxima is not None:
        return weights.quantise_rows(x_TM.contiguous(), scale_M, whole_maxima)
    if x_TM.is_cuda and kernels_available(x_TM):
        by_torch = weights.quantise_rows
        return run_with_fallback("rounding to fp8", x_TM.device, launch_row_codes, by_torch, x_TM, scale_M)
    return weights.quantise_rows(x_TM, scale_M)


def launch_row_codes(x_TM: Tensor, scale_M: Tensor | None) -> tuple[Tensor, Tensor]:
    x_TM = x_TM.contiguous()
    rows, width = x_TM.shape
    codes_TM = torch.empty(rows, width, dtype=CODES, device=x_TM.device)
    scale_T = torch.empty(rows, device=x_TM.device)
    columns = 1 << (width - 1).bit_length()
    together = max(1, VALUES // columns)
    with torch.cuda.device_of(x_TM):
        kernels.fp8.row_codes[(-(-rows // together),)](
            x_TM,
            scale_M,
            codes_TM,
            scale_T,
            rows,
            WIDTH=width,
            R=together,
            C=columns,
            num_warps=8 if columns <= VALUES else 16,
        )
    return codes_TM, scale_T


def multiply(
    left_TM: Tensor,
    codes_LM: Tensor,
    scale_M: Tensor | None,
    scale_L: Tensor | None,
    dtype: torch.dtype,
    whole_maxima: WholeMaxima | None = None,
) -> Tensor:
    """Multiply `left_TM` by the transpose of an 8-bit weight, given as codes and scales, on a GPU. This
    function implements `core.weights.MultiplyCodes`."""
    if left_TM.dtype is torch.float64 or not supports_library_product(codes_LM):
        return multiply_codes(left_TM, codes_LM, scale_M, scale_L, dtype, whole_maxima)
    left_TM, scale_T = row_codes(left_TM, scale_M, whole_maxima)
    # Linears that share their input are stored in one tensor, of which a slice of columns is not
    # contiguous.
    codes_LM = codes_LM.contiguous()
    if dtype is torch.bfloat16:
        scale_L = torch.ones(len(codes_LM), device=codes_LM.device) if scale_L is None else scale_L
        return torch._scaled_mm(
            left_TM, codes_LM.T, scale_a=scale_T[:, None], scale_b=scale_L[None, :], out_dtype=dtype
        )
    sum_TL = unscaled_code_product(left_TM, codes_LM).mul_(scale_T[:, None])
    return (sum_TL if scale_L is None else sum_TL.mul_(scale_L)).to(dtype)


def unscaled_code_product(left_TM: Tensor, codes_LM: Tensor) -> Tensor:
    """Return left · codesᵀ, the product of two matrices of 8-bit floats, in float32. The caller multiplies it
    by their scales."""
    if not supports_library_product(codes_LM):
        return left_TM.float() @ codes_LM.float().T
    one = torch.ones((), device=left_TM.device)
    return torch._scaled_mm(left_TM, codes_LM.T, scale_a=one, scale_b=one, out_dtype=torch.float32)


def supports_library_product(codes_LM: Tensor) -> bool:
    return codes_LM.is_cuda and all(size % MULTIPLE == 0 for size in codes_LM.shape)
