"""Jobs whose A and B are computed: A = d ⊙ the rows of one constant, B = e ⊙ the columns of another (VeRA).

The kernels write A and B to the addresses in the job's slot table entry at every forward and again for every
backward, so that all layers share their memory; and they compute the gradients of d and e from dA and dB.

Shapes: R ranks, K inputs, N outputs of a site.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weftune.ops.lora.addresses import AddressTable
from weftune.ops.lora.scales import Columns

RANKS, COLUMNS = 16, 256
"""Block of A and B that a program processes at a time."""
RANK_COLUMNS = 2048
"""Columns of dA that a program processes at a time to sum over a rank."""


@dataclass(frozen=True, slots=True)
class ComputedPair:
    """One job's computed A and B at one site. The kernels keep only the addresses: the job keeps the tensors
    alive."""

    d_R: Tensor
    e_N: Tensor
    dd_R: Tensor
    de_N: Tensor
    """Accumulators of the gradients of d and e."""
    a_RK: Tensor
    """Constant of A, at least as wide as the site's inputs."""
    b_RN: Tensor
    """Constant of B, at least as wide as the site's outputs."""


def computed_table(sites: int, slots: int, device: torch.device) -> AddressTable:
    """Return an empty table of the addresses of d, e, their accumulators and the constants, and of three
    numbers: the ranks, 0 if a slot has no such job, and the row stride of either constant."""
    return AddressTable.empty(sites, slots, device, addresses=6, numbers=3)


def put_computed(table: AddressTable, slot: int, found: Sequence[ComputedPair | None]) -> None:
    """Set a slot's entries, one per site."""
    table.put(slot, [None if one is None else (_addresses(one), _numbers(one)) for one in found])


def _addresses(one: ComputedPair) -> list[int]:
    return [each.data_ptr() for each in (one.d_R, one.e_N, one.dd_R, one.de_N, one.a_RK, one.b_RN)]


def _numbers(one: ComputedPair) -> tuple[int, int, int]:
    return len(one.d_R), one.a_RK.stride(0), one.b_RN.stride(0)


def write_pairs(like_TK: Tensor, table: AddressTable, matrices_PS4: Tensor, columns: Columns) -> None:
    """Write A and B of all slots that have them computed, for inputs like these."""
    from weftune.ops.triton import computed

    computed.write_pairs[(len(columns) * table.slots, _blocks(like_TK, columns))](
        *_given(like_TK, table, matrices_PS4), **_constants(table, columns)
    )


def add_pair_gradients(like_TK: Tensor, table: AddressTable, matrices_PS4: Tensor, columns: Columns) -> None:
    """Add the gradients that follow from dA and dB to the accumulators of d and e, and set dA and dB to
    zero."""
    from weftune.ops.triton import computed

    computed.add_pair_gradients[(len(columns) * table.slots, _blocks(like_TK, columns))](
        *_given(like_TK, table, matrices_PS4), WIDE=RANK_COLUMNS, **_constants(table, columns)
    )


def _blocks(like_TK: Tensor, columns: Columns) -> int:
    """Return the number of column blocks of the widest matrix."""
    widest = max(like_TK.shape[1], *(high - low for low, high in columns))
    return -(-widest // COLUMNS)


def _given(like_TK: Tensor, table: AddressTable, matrices_PS4: Tensor) -> tuple[Tensor | int, ...]:
    return like_TK, table.address_PSA, table.number_PSn, matrices_PS4, like_TK.shape[1]


def _constants(table: AddressTable, columns: Columns) -> dict[str, Any]:
    widths = tuple(high - low for low, high in columns)
    blocks = {"R": RANKS, "C": COLUMNS, "num_warps": 4}
    return {"WIDTHS": widths, "S": table.slots, "P": len(columns), **blocks}
