"""Dequantisation of a weight to a matrix by one kernel. The result is bit-identical to the dequantisation in
plain torch.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from weftune.ops import triton as kernels

NF4_WORDS = 512
"""Number of 32-bit words, with eight 4-bit codes each, that one program of the kernel dequantises. It divides
2048, the number of words that share one value of `nested_absmax`."""
ROWS_BLOCK = 4096
WARPS = 4

Write = Callable[[Mapping[str, Tensor], Tensor], None]
"""Type of a function that dequantises the tensors of a weight, given by name, into the contiguous matrix
`out_NK`."""


def write_nf4(parts: Mapping[str, Tensor], out_NK: Tensor) -> None:
    assert out_NK.is_contiguous()
    absmax, code, values = parts["absmax"], parts["code"], out_NK.numel()
    with torch.cuda.device_of(out_NK):
        kernels.dequantise.write_nf4[(-(-values // (8 * NF4_WORDS)),)](
            parts["weight"],
            absmax,
            parts.get("nested_absmax", code),
            parts.get("nested_code", code),
            code,
            parts.get("offset", code),
            out_NK,
            values,
            HAS_NESTED_MAXIMA="nested_absmax" in parts,
            WORDS=NF4_WORDS,
            num_warps=WARPS,
            # Plain torch rounds the product before it adds the offset.
            enable_fp_fusion=False,
        )


def write_rows(parts: Mapping[str, Tensor], out_NK: Tensor) -> None:
    """Write the matrix of an int8 or fp8 weight to `out_NK`: each row's codes times the row's scale."""
    assert out_NK.is_contiguous()
    outputs, inputs = out_NK.shape
    with torch.cuda.device_of(out_NK):
        kernels.dequantise.write_rows[(outputs * -(-inputs // ROWS_BLOCK),)](
            parts["weight"],
            parts["scale"],
            out_NK,
            WIDTH=inputs,
            BLOCK=ROWS_BLOCK,
            num_warps=WARPS,
        )


KERNELS: Mapping[str, Write] = {"nf4": write_nf4, "int8": write_rows, "fp8": write_rows}
"""Maps each quantisation format to the function that dequantises it."""
