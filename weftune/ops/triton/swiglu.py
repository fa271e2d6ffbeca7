"""Kernels of SwiGLU and GEGLU: act = gate · σ(z) · up, where z is the gate, or for GELU's approximation
2·√(2/π)·(gate + 0.044715·gate³), since 1 + tanh(z/2) = 2·σ(z).

Shapes: B columns of a program, all in one row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid_pair(gate: tl.tensor) -> tuple:
    """Return σ(gate) and 1 − σ(gate), both without overflow or cancellation."""
    small = tl.exp(-tl.abs(gate))
    large = 1.0 / (1.0 + small)
    small *= large
    return tl.where(gate < 0.0, small, large), tl.where(gate < 0.0, large, small)


@triton.jit
def gelu_exponent(gate: tl.tensor) -> tuple:
    """Return z = 2·√(2/π)·(gate + 0.044715·gate³) and its derivative with respect to gate."""
    square = gate * gate
    z = gate * (1.5957691216057308 + 0.07135481627260025 * square)
    return z, 1.5957691216057308 + 0.21406444881780076 * square


@triton.jit
def swiglu_forward(
    gate_up: tl.tensor,
    act: tl.tensor,
    gate_up_stride: tl.tensor,
    GELU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column_B = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside_B = column_B < WIDTH
    gate_at_B = gate_up + row * gate_up_stride + column_B
    gate_B = tl.load(gate_at_B, mask=inside_B, other=0.0).to(tl.float32)
    up_B = tl.load(gate_at_B + WIDTH, mask=inside_B, other=0.0).to(tl.float32)
    if GELU:
        z_B, _ = gelu_exponent(gate_B)
        passes_B, _ = sigmoid_pair(z_B)
    else:
        passes_B, _ = sigmoid_pair(gate_B)
    act_B = gate_B * passes_B * up_B
    tl.store(act + row * WIDTH + column_B, act_B.to(act.dtype.element_ty), mask=inside_B)


@triton.jit
def swiglu_backward(
    dact: tl.tensor,
    gate_up: tl.tensor,
    dgate_up: tl.tensor,
    dact_stride: tl.tensor,
    gate_up_stride: tl.tensor,
    GELU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column_B = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside_B = column_B < WIDTH
    gate_at_B = gate_up + row * gate_up_stride + column_B
    gate_B = tl.load(gate_at_B, mask=inside_B, other=0.0).to(tl.float32)
    up_B = tl.load(gate_at_B + WIDTH, mask=inside_B, other=0.0).to(tl.float32)
    dact_B = tl.load(dact + row * dact_stride + column_B, mask=inside_B, other=0.0).to(tl.float32)
    if GELU:
        z_B, dz_B = gelu_exponent(gate_B)
        passes_B, stays_B = sigmoid_pair(z_B)
        dgate_B = dact_B * up_B * passes_B * (1.0 + gate_B * stays_B * dz_B)
    else:
        passes_B, stays_B = sigmoid_pair(gate_B)
        dgate_B = dact_B * up_B * passes_B * (1.0 + gate_B * stays_B)
    dup_B = dact_B * gate_B * passes_B
    dgate_at_B = dgate_up + row * (2 * WIDTH) + column_B
    tl.store(dgate_at_B, dgate_B.to(dgate_up.dtype.element_ty), mask=inside_B)
    tl.store(dgate_at_B + WIDTH, dup_B.to(dgate_up.dtype.element_ty), mask=inside_B)
