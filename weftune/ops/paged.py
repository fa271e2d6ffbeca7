"""Attention of one new row per sequence to all rows of the sequence in a paged key/value cache.

Shapes: B sequences, P pages of a page table, C rows of the cache, H query heads, G key heads, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weftune.ops import triton as kernels
from weftune.ops.fallback import run_with_fallback
from weftune.ops.triton import kernels_available

ROWS = 64
"""Number of cached rows that a program reads at a time."""
PROGRAMS = 512
"""Number of kernel programs that keep a GPU busy. If there are fewer pairs of a sequence and a key head, the
rows of each sequence are split among several programs."""
MAX_SHARES = 16


def paged_attention(
    q_BHD: Tensor,
    keys_CGD: Tensor,
    values_CGD: Tensor,
    tables_BP: Tensor,
    lengths_B: Tensor,
    page_rows: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the attention of each sequence's last row, [B, H, D]. The rows of sequence b are the first
    `lengths_B[b]` rows of the pages `tables_BP[b]`, which have `page_rows` rows each; the last of these rows
    is the new row itself. If `window` is given, attention is limited to that many last rows."""
    scale = q_BHD.shape[-1] ** -0.5 if scale is None else scale
    arguments = q_BHD, keys_CGD, values_CGD, tables_BP, lengths_B, page_rows, scale, window, softcap
    same_width = keys_CGD.shape == values_CGD.shape
    if not same_width or not kernels_available(q_BHD):
        return _run_torch(*arguments)
    attention_BHD: Tensor = run_with_fallback(
        "paged attention", q_BHD.device, _run_kernel, _run_torch, *arguments
    )
    return attention_BHD


def _run_torch(
    q_BHD: Tensor,
    keys_CGD: Tensor,
    values_CGD: Tensor,
    tables_BP: Tensor,
    lengths_B: Tensor,
    page_rows: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    position_L = torch.arange(tables_BP.shape[1] * page_rows, device=q_BHD.device)
    row_BL = tables_BP.long()[:, position_L // page_rows] * page_rows + position_L % page_rows
    q_BGRD = q_BHD.unflatten(1, (keys_CGD.shape[1], -1))
    score_BGRL = torch.einsum("bgrd,blgd->bgrl", q_BGRD, keys_CGD[row_BL]) * scale
    if softcap is not None:
        score_BGRL = softcap * torch.tanh(score_BGRL / softcap)
    is_seen_BL = position_L < lengths_B[:, None]
    if window is not None:
        is_seen_BL &= position_L >= lengths_B[:, None] - window
    score_BGRL = score_BGRL.masked_fill(~is_seen_BL[:, None, None], -torch.inf)
    precise = torch.promote_types(score_BGRL.dtype, torch.float32)
    weight_BGRL = score_BGRL.softmax(dim=-1, dtype=precise).to(values_CGD.dtype)
    # Rows that hold no values yet may be anything, and 0 · NaN is NaN.
    v_BLGD = torch.where(is_seen_BL[:, :, None, None], values_CGD[row_BL], 0.0)
    return torch.einsum("bgrl,blgd->bgrd", weight_BGRL, v_BLGD).flatten(1, 2)


def _run_kernel(
    q_BHD: Tensor,
    keys_CGD: Tensor,
    values_CGD: Tensor,
    tables_BP: Tensor,
    lengths_B: Tensor,
    page_rows: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    (sequences, heads, width), groups = q_BHD.shape, keys_CGD.shape[1]
    q_BHD = q_BHD.contiguous()
    # The longest length is not known to the host, but no sequence has more rows than its page table.
    longest = tables_BP.shape[1] * page_rows
    shares = min(MAX_SHARES, -(-PROGRAMS // (sequences * groups)), -(-longest // ROWS))
    sums = torch.empty(sequences, heads, shares, width, dtype=torch.float32, device=q_BHD.device)
    norms = torch.empty(sequences, heads, shares, 2, dtype=torch.float32, device=q_BHD.device)
    out_BHD = torch.empty_like(q_BHD)
    block = _next_power_of_two(width)
    with torch.cuda.device_of(q_BHD):
        kernels.paged.attend_share[(sequences, groups, shares)](
            q_BHD,
            keys_CGD,
            values_CGD,
            tables_BP,
            lengths_B,
            sums,
            norms,
            scale,
            window or 0,
            softcap or 1.0,
            tables_BP.stride(0),
            HEADS=heads,
            GROUPS=groups,
            WIDTH=width,
            SHARES=shares,
            PAGE=page_rows,
            R=max(16, _next_power_of_two(heads // groups)),
            N=ROWS,
            D=max(16, block),
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap is not None,
            PRECISION="ieee" if q_BHD.dtype is torch.float32 else "tf32",
            num_warps=4,
            num_stages=2,
        )
        kernels.paged.combine_shares[(sequences * heads,)](
            sums,
            norms,
            out_BHD,
            WIDTH=width,
            SHARES=shares,
            S=_next_power_of_two(shares),
            D=max(16, block),
            num_warps=1,
        )
    return out_BHD


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
