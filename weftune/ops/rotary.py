"""Split of a fused QKV projection into queries, keys and values, with rotary embedding of queries and keys.

The backward of a rotation is its transpose, so a fused autograd node saves only the cosines and sines, and
the input if queries and keys are normalised.

Shapes: T rows, H heads of queries, G groups (heads of keys and of values), D width of a head,
N = (H + 2G)·D, E rotary width (the first E columns of a head are rotated, the rest are copied).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weftune.ops import triton as kernels
from weftune.ops.fallback import run_with_fallback
from weftune.ops.norm import rms_norm_reference
from weftune.ops.triton import kernels_available, with_contiguous_rows

OP = "rotary embedding"
TILE = 1024
"""Number of values that a kernel program processes in each half of the rotary width."""
WARPS = 4
"""Number of warps per program. Each thread processes eight values of each half: 16-byte accesses in half
precision."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The weights of the RMSNorm applied to every query head and every key head before the rotation."""

    q_D: Tensor
    k_D: Tensor
    eps: float
    offset: float = 0.0
    """Number that is added to the weights: 1 in Gemma models, else 0."""


def rotary_split(
    qkv_TN: Tensor, cos_TE: Tensor, sin_TE: Tensor, heads: int, groups: int, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv into queries, keys and values (q_THD, k_TGD, v_TGD). q and k are rotated as in Llama: column
    i pairs with column i + E/2. If `norms` is given, their heads are normalised first."""
    rows, width = qkv_TN.shape[0], qkv_TN.shape[1] // (heads + 2 * groups)
    assert qkv_TN.shape[1] == (heads + 2 * groups) * width
    assert cos_TE.shape == sin_TE.shape == (rows, cos_TE.shape[1])
    assert cos_TE.shape[1] <= width
    assert cos_TE.shape[1] % 2 == 0
    assert norms is None or norms.q_D.shape == norms.k_D.shape == (width,)
    if not kernels_available(qkv_TN):
        return rotary_split_reference(qkv_TN, cos_TE, sin_TE, heads, groups, norms)
    return _RotarySplit.apply(qkv_TN, cos_TE, sin_TE, heads, groups, norms)


def rotary_split_reference(
    qkv_TN: Tensor, cos_TE: Tensor, sin_TE: Tensor, heads: int, groups: int, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    qkv_TLD = qkv_TN.unflatten(1, (heads + 2 * groups, -1))
    q_THD, k_TGD, v_TGD = qkv_TLD.split((heads, groups, groups), dim=1)
    if norms is not None:
        q_THD = rms_norm_reference(q_THD, norms.q_D, norms.eps, norms.offset)
        k_TGD = rms_norm_reference(k_TGD, norms.k_D, norms.eps, norms.offset)
    return (
        _rotate(q_THD, cos_TE, sin_TE),
        _rotate(k_TGD, cos_TE, sin_TE),
        v_TGD.contiguous(),
    )


def _rotate(x_THD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    width = cos_TE.shape[1]
    turning, rest = x_THD[..., :width].to(wide), x_THD[..., width:]
    near, far = turning.chunk(2, dim=-1)
    cos_T1E, sin_T1E = cos_TE.to(wide)[:, None], sin_TE.to(wide)[:, None]
    turned = turning * cos_T1E + torch.cat((-far, near), dim=-1) * sin_T1E
    return torch.cat((turned.to(x_THD.dtype), rest), dim=-1)


class _RotarySplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TN: Tensor,
        cos_TE: Tensor,
        sin_TE: Tensor,
        heads: int,
        groups: int,
        norms: HeadNorms | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_TN, cos_TE, sin_TE = map(with_contiguous_rows, (qkv_TN, cos_TE, sin_TE))
        ctx.heads, ctx.groups, ctx.norms = heads, groups, norms
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos_TE, sin_TE, None if norms is None else qkv_TN)
        return _forward(qkv_TN, cos_TE, sin_TE, heads, groups, norms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *parts: Tensor | None) -> tuple[Tensor | None, ...]:
        cos_TE, sin_TE, qkv_TN = ctx.saved_tensors
        if all(part is None for part in parts):
            return None, None, None, None, None, None
        whole = [None if part is None else with_contiguous_rows(part) for part in parts]
        dqkv_TN = _backward(whole, cos_TE, sin_TE, qkv_TN, ctx.heads, ctx.groups, ctx.norms)
        return dqkv_TN, None, None, None, None, None


def _forward(
    qkv_TN: Tensor, cos_TE: Tensor, sin_TE: Tensor, heads: int, groups: int, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    given = qkv_TN, cos_TE, sin_TE, heads, groups, norms
    return run_with_fallback(OP, qkv_TN.device, _launch_forward, rotary_split_reference, *given)


def _backward(
    parts: list[Tensor | None],
    cos_TE: Tensor,
    sin_TE: Tensor,
    qkv_TN: Tensor | None,
    heads: int,
    groups: int,
    norms: HeadNorms | None,
) -> Tensor:
    given = parts, cos_TE, sin_TE, qkv_TN, heads, groups, norms
    return run_with_fallback(OP, cos_TE.device, _launch_backward, _plain_backward, *given)


def _plain_backward(
    parts: list[Tensor | None],
    cos_TE: Tensor,
    sin_TE: Tensor,
    qkv_TN: Tensor | None,
    heads: int,
    groups: int,
    norms: HeadNorms | None,
) -> Tensor:
    some = next(part for part in parts if part is not None)
    if qkv_TN is None:
        # Without norms the output is linear in the input: the gradient does not depend on its values.
        qkv_TN = some.new_zeros(some.shape[0], (heads + 2 * groups) * some.shape[2])
    with torch.enable_grad():
        leaf = qkv_TN.detach().requires_grad_()
        outputs = rotary_split_reference(leaf, cos_TE, sin_TE, heads, groups, norms)
        known = [(y, dy) for y, dy in zip(outputs, parts, strict=True) if dy is not None]
        (dqkv_TN,) = torch.autograd.grad([y for y, _ in known], leaf, [dy for _, dy in known])
    return dqkv_TN


def _launch_forward(
    qkv_TN: Tensor, cos_TE: Tensor, sin_TE: Tensor, heads: int, groups: int, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = qkv_TN.shape[0], qkv_TN.shape[1] // (heads + 2 * groups)
    q_THD = torch.empty((rows, heads, width), dtype=qkv_TN.dtype, device=qkv_TN.device)
    k_TGD = torch.empty((rows, groups, width), dtype=qkv_TN.dtype, device=qkv_TN.device)
    v_TGD = torch.empty_like(k_TGD)
    programs, constants = _launch_constants(heads, groups, width, cos_TE.shape[1] // 2)
    with torch.cuda.device_of(qkv_TN):
        kernels.rotary.rotary_forward[(rows * programs,)](
            qkv_TN,
            cos_TE,
            sin_TE,
            q_THD,
            k_TGD,
            v_TGD,
            qkv_TN.stride(0),
            cos_TE.stride(0),
            sin_TE.stride(0),
            norms and norms.q_D,
            norms and norms.k_D,
            norms.eps if norms else 0.0,
            norms.offset if norms else 0.0,
            **constants,
        )
    return q_THD, k_TGD, v_TGD


def _launch_backward(
    parts: list[Tensor | None],
    cos_TE: Tensor,
    sin_TE: Tensor,
    qkv_TN: Tensor | None,
    heads: int,
    groups: int,
    norms: HeadNorms | None,
) -> Tensor:
    some = next(part for part in parts if part is not None)
    rows, width = some.shape[0], some.shape[2]
    dqkv_TN = torch.empty((rows, (heads + 2 * groups) * width), dtype=some.dtype, device=some.device)
    programs, constants = _launch_constants(heads, groups, width, cos_TE.shape[1] // 2)
    strides = [stride for part in parts for stride in ((0, 0) if part is None else part.stride()[:2])]
    with torch.cuda.device_of(some):
        kernels.rotary.rotary_backward[(rows * programs,)](
            *parts,
            cos_TE,
            sin_TE,
            dqkv_TN,
            *strides,
            cos_TE.stride(0),
            sin_TE.stride(0),
            qkv_TN,
            norms and norms.q_D,
            norms and norms.k_D,
            0 if qkv_TN is None else qkv_TN.stride(0),
            norms.eps if norms else 0.0,
            norms.offset if norms else 0.0,
            **constants,
        )
    return dqkv_TN


def _launch_constants(heads: int, groups: int, width: int, half: int) -> tuple[int, dict[str, int]]:
    """Return the number of programs per row, and the compile-time constants of the forward and the backward
    kernel. Block sizes are powers of two that cover the heads per program, half of the rotary width, and the
    columns that are not rotated."""
    all_heads, half_block = heads + 2 * groups, _next_power_of_two(half)
    chunk = max(1, min(TILE // half_block, _next_power_of_two(all_heads)))
    return -(-all_heads // chunk), {
        "HEADS": heads,
        "GROUPS": groups,
        "WIDTH": width,
        "HALF": half,
        "CHUNK": chunk,
        "HALF_BLOCK": half_block,
        "REST_BLOCK": _next_power_of_two(max(1, width - 2 * half)),
        "num_warps": WARPS,
    }


def _next_power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
