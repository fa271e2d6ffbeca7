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

from weftune.ops import triton as kernels
from weftune.ops.lora.table import AddressEntry, AddressTable, Group

RANKS, COLUMNS = 16, 256
"""Block of A and B that a program processes at a time."""
RANK_COLUMNS = 2048
"""Columns of dA that a program processes at a time to sum over a rank."""


@dataclass(frozen=True, slots=True)
class ComputedPair:
    """One job's computed A and B at one site. The kernels keep only addresses; the job keeps the tensors."""

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


def put_computed(table: AddressTable, slot: int, pairs: Sequence[ComputedPair | None]) -> None:
    """Set a slot's entries, one per site."""
    table.put(slot, [None if pair is None else _entry(pair) for pair in pairs])


def _entry(pair: ComputedPair) -> AddressEntry:
    tensors = pair.d_R, pair.e_N, pair.dd_R, pair.de_N, pair.a_RK, pair.b_RN
    numbers = len(pair.d_R), pair.a_RK.stride(0), pair.b_RN.stride(0)
    return [tensor.data_ptr() for tensor in tensors], numbers


def write_pairs(like_TK: Tensor, table: AddressTable, group: Group) -> None:
    """Write A and B of all slots that have them computed, for inputs like these."""
    _launch(kernels.computed.write_pairs, like_TK, table, group)


def add_pair_gradients(like_TK: Tensor, table: AddressTable, group: Group) -> None:
    """Add the gradients of d and e that follow from dA and dB to their accumulators; zero dA and dB."""
    _launch(kernels.computed.add_pair_gradients, like_TK, table, group, WIDE=RANK_COLUMNS)


def _launch(kernel: Any, like_TK: Tensor, table: AddressTable, group: Group, **constants: int) -> None:
    widths = tuple(high - low for low, high in group.columns)
    features = like_TK.shape[1]
    kernel[(len(widths) * table.slots, -(-max(features, *widths) // COLUMNS))](
        like_TK,
        table.address_PSA,
        table.number_PSn,
        group.table.address_PS4,
        features,
        WIDTHS=widths,
        S=table.slots,
        P=len(widths),
        R=RANKS,
        C=COLUMNS,
        num_warps=4,
        **constants,
    )
