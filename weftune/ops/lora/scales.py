"""Per-job vectors that scale the outputs or inputs of a site (an adapted linear) in the tiled kernels: y =
residual + b + g_out ⊙ ((x ⊙ g_in)Wᵀ + sB), every job with its own g.

g is a trained vector (IA³), or for DoRA the product of a trained vector and 1 / ‖W + scale · BA‖, which has
no gradient and is computed in every forward. A slot is the table index of a job; the kernels find a slot's
vectors by addresses in a table, as they find its matrices.

Shapes: T rows, K inputs, N outputs, M columns that are scaled, Q pieces of slots with several pieces
(`ops.lora.rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.ops import triton as kernels
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import AddressTable

COLUMNS, ROWS = 128, 32
"""Numbers of columns and rows of the block that a kernel program scales at a time."""
Columns = tuple[tuple[int, int], ...]
"""For each linear of a group, its first column and the column after its last in the concatenated output."""


@dataclass(frozen=True, slots=True)
class SiteScale:
    """One job's scales g at one linear. The job must keep the tensors alive, since the kernels' table stores
    only their addresses."""

    value_M: Tensor
    total_M: Tensor
    """Accumulator of the gradient of `value_M`, the trained vector of scales."""
    inverse_M: Tensor | None = None
    """float32 buffer for DoRA's factor 1 / ‖W + scale · BA‖, written in every forward. None without DoRA."""
    scales_bias: bool = False


def scale_table(sites: int, slots: int, device: torch.device) -> AddressTable:
    """Return an empty table of the scales of jobs at linears. An entry has the addresses of `value_M`,
    `total_M` and `inverse_M` of a `SiteScale` (0 for None), and one number, `scales_bias`."""
    return AddressTable.empty(sites, slots, device, addresses=3, numbers=1)


def set_scales(table: AddressTable, slot: int, scales: Sequence[SiteScale | None]) -> None:
    """Set the scales of the job with the table index `slot`, one entry per linear. An entry is None if the
    job has no scales at the linear."""
    table.set_slot(slot, [None if one is None else (_addresses(one), (one.scales_bias,)) for one in scales])


def _addresses(scale: SiteScale) -> tuple[int, int, int]:
    assert scale.value_M.is_contiguous()
    assert scale.total_M.is_contiguous()
    assert scale.total_M.dtype == torch.float32
    inverse = 0 if scale.inverse_M is None else scale.inverse_M.data_ptr()
    return scale.value_M.data_ptr(), scale.total_M.data_ptr(), inverse


def scale_rows(x_TM: Tensor, table: AddressTable, columns: Columns, rows: Rows) -> Tensor:
    """Return x with each row multiplied by g, the scales of the row's job. Rows of jobs without scales are
    copied."""
    out_TM = torch.empty_like(x_TM)
    kernels.scales.scale[(_count_blocks(columns), len(rows.tiles_G3))](
        x_TM,
        out_TM,
        rows.tiles_G3,
        table.address_PSA,
        x_TM.shape[1],
        COLUMNS=column_edges(columns),
        S=table.slots,
        P=len(columns),
        M=rows.tile,
        C=COLUMNS,
        num_warps=4,
    )
    return out_TM


def unscale_rows(
    dy_TM: Tensor,
    u_TM: Tensor,
    bias_M: Tensor | None,
    table: AddressTable,
    columns: Columns,
    rows: Rows,
    in_place: bool,
) -> Tensor:
    """Compute the backward of g ⊙ u, where g are the scales of each row's job. Return g ⊙ dy, which
    overwrites dy if `in_place`, and add the sum of dy · u over each job's rows to the gradient accumulator of
    the job's g."""
    du_TM = dy_TM if in_place else torch.empty_like(dy_TM)
    partial_QM = dy_TM.new_empty(rows.max_pieces, dy_TM.shape[1], dtype=torch.float32)
    where = {
        "COLUMNS": column_edges(columns),
        "S": table.slots,
        "P": len(columns),
        "C": COLUMNS,
        "num_warps": 4,
    }
    kernels.scales.unscale[(_count_blocks(columns), len(rows.pieces_Q4))](
        dy_TM,
        u_TM,
        bias_M,
        du_TM,
        partial_QM,
        rows.pieces_Q4,
        table.address_PSA,
        table.number_PSn,
        dy_TM.shape[1],
        IN_PLACE=in_place,
        M=ROWS,
        **where,
    )
    kernels.scales.add_shares[(_count_blocks(columns), len(rows.sums_M3))](
        partial_QM, rows.sums_M3, table.address_PSA, dy_TM.shape[1], **where
    )
    return du_TM


def column_edges(columns: Columns) -> tuple[int, ...]:
    return tuple(edge for part in columns for edge in part)


def _count_blocks(columns: Columns) -> int:
    return sum(-(-(high - low) // COLUMNS) for low, high in columns)
