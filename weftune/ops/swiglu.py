"""The gated activation (SwiGLU or GEGLU) of a feed-forward block. A row of the input holds the columns of
gate, then the columns of up, in the order of the fused linear's output.

Shapes: T rows, I width of the activation, F = 2I.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from weftune.ops import triton as kernels
from weftune.ops.fallback import run_with_fallback
from weftune.ops.triton import kernels_available, with_contiguous_rows

OP = "the gated activation"
BLOCK = 1024
WARPS = 4
"""Number of warps per program. Each thread then processes eight values, one 16-byte access per tensor in half
precision. Up to five tensors are live at once, so more values per thread would lower the occupancy and the
memory bandwidth."""


def swiglu(gate_up_TF: Tensor) -> Tensor:
    """Return silu(gate) · up, where gate is the first half of the columns."""
    return _apply_gate(gate_up_TF, gelu=False)


def geglu(gate_up_TF: Tensor) -> Tensor:
    """Return gelu(gate) · up, where gate is the first half of the columns. GELU is computed by its tanh
    approximation, as in Gemma."""
    return _apply_gate(gate_up_TF, gelu=True)


def _apply_gate(gate_up_TF: Tensor, gelu: bool) -> Tensor:
    assert gate_up_TF.shape[1] % 2 == 0
    if not kernels_available(gate_up_TF):
        return gated_reference(gate_up_TF, gelu)
    return _Gated.apply(gate_up_TF, gelu)


def gated_reference(gate_up_TF: Tensor, gelu: bool) -> Tensor:
    wide = torch.promote_types(gate_up_TF.dtype, torch.float32)
    gate_TI, up_TI = gate_up_TF.to(wide).chunk(2, dim=-1)
    act_TI = functional.gelu(gate_TI, approximate="tanh") if gelu else functional.silu(gate_TI)
    return (act_TI * up_TI).to(gate_up_TF.dtype)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TF: Tensor, gelu: bool) -> Tensor:
        gate_up_TF = with_contiguous_rows(gate_up_TF)
        ctx.gelu = gelu
        ctx.save_for_backward(gate_up_TF)
        return _forward(gate_up_TF, gelu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dact_TI: Tensor) -> tuple[Tensor, None]:
        (gate_up_TF,) = ctx.saved_tensors
        return _backward(with_contiguous_rows(dact_TI), gate_up_TF, ctx.gelu), None


def _forward(gate_up_TF: Tensor, gelu: bool) -> Tensor:
    return run_with_fallback(OP, gate_up_TF.device, _launch_forward, gated_reference, gate_up_TF, gelu)


def _backward(dact_TI: Tensor, gate_up_TF: Tensor, gelu: bool) -> Tensor:
    return run_with_fallback(OP, dact_TI.device, _launch_backward, _plain_backward, dact_TI, gate_up_TF, gelu)


def _plain_backward(dact_TI: Tensor, gate_up_TF: Tensor, gelu: bool) -> Tensor:
    with torch.enable_grad():
        leaf = gate_up_TF.detach().requires_grad_()
        (dgate_up_TF,) = torch.autograd.grad(gated_reference(leaf, gelu), leaf, dact_TI)
    return dgate_up_TF


def _launch_forward(gate_up_TF: Tensor, gelu: bool) -> Tensor:
    rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    act_TI = torch.empty((rows, width), dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    with torch.cuda.device_of(gate_up_TF):
        kernels.swiglu.swiglu_forward[(rows * -(-width // BLOCK),)](
            gate_up_TF,
            act_TI,
            gate_up_TF.stride(0),
            GELU=gelu,
            WIDTH=width,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return act_TI


def _launch_backward(dact_TI: Tensor, gate_up_TF: Tensor, gelu: bool) -> Tensor:
    rows, width = dact_TI.shape
    dgate_up_TF = torch.empty((rows, 2 * width), dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    with torch.cuda.device_of(gate_up_TF):
        kernels.swiglu.swiglu_backward[(rows * -(-width // BLOCK),)](
            dact_TI,
            gate_up_TF,
            dgate_up_TF,
            dact_TI.stride(0),
            gate_up_TF.stride(0),
            GELU=gelu,
            WIDTH=width,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return dgate_up_TF
