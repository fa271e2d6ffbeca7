"""VeRA adapters for the tiled LoRA kernels: A is a constant random matrix whose rows are scaled by a trained
vector d, and B a constant random matrix whose columns are scaled by a trained vector e.

In every forward and every backward, kernels write A and B to the addresses in the slot table (which has the
addresses of each job's matrices), so that all layers can share the memory of A and B. Kernels also compute
the gradients of d and e from dA and dB.

Shapes: R rank, K inputs, N outputs of a site (an adapted linear).
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
"""Numbers of rows and columns of the block of A and B that a program of the kernel processes at a time."""
RANK_COLUMNS = 2048
"""Number of columns of dA that a program processes at a time for the gradient of one element of d."""


@dataclass(frozen=True, slots=True)
class ComputedPair:
    """One job's VeRA parameters and constants at one linear. The job must keep these tensors alive, since the
    kernels' table stores only their addresses."""

    d_R: Tensor
    e_N: Tensor
    dd_R: Tensor
    de_N: Tensor
    """Accumulator of the gradient of e, the vector that scales the columns of B."""
    a_RK: Tensor
    """Random constant from which A is computed, with at least as many columns as the linear has inputs."""
    b_RN: Tensor
    """Random constant from which B is computed, with at least as many columns as the linear has outputs."""


def computed_table(sites: int, slots: int, device: torch.device) -> AddressTable:
    """Return an empty table of jobs' VeRA parameters. An entry has the addresses of d, e, their accumulators
    and both constants, and three numbers: the rank (0 if the job has no VeRA) and the row strides of both
    constants."""
    return AddressTable.empty(sites, slots, device, addresses=6, numbers=3)


def set_computed_pairs(table: AddressTable, slot: int, pairs: Sequence[ComputedPair | None]) -> None:
    """Set the table entries of the job with the table index `slot`, one per linear. An entry is None if the
    job has no VeRA at the linear."""
    table.set_slot(slot, [None if pair is None else _table_entry(pair) for pair in pairs])


def _table_entry(pair: ComputedPair) -> AddressEntry:
    tensors = pair.d_R, pair.e_N, pair.dd_R, pair.de_N, pair.a_RK, pair.b_RN
    numbers = len(pair.d_R), pair.a_RK.stride(0), pair.b_RN.stride(0)
    return [tensor.data_ptr() for tensor in tensors], numbers


def write_pairs(like_TK: Tensor, table: AddressTable, group: Group) -> None:
    """Compute A and B of all VeRA adapters from their vectors and constants, and write them to the addresses
    in the group's table, in the dtype of `like_TK`."""
    _launch_kernel(kernels.computed.write_pairs, like_TK, table, group)


def add_pair_gradients(like_TK: Tensor, table: AddressTable, group: Group) -> None:
    """Compute the gradients of the vectors d and e, by which VeRA's constant matrices are multiplied, from dA
    and dB. Add the gradients to their accumulators, and set dA and dB to zero."""
    _launch_kernel(kernels.computed.add_pair_gradients, like_TK, table, group, WIDE=RANK_COLUMNS)


def _launch_kernel(kernel: Any, like_TK: Tensor, table: AddressTable, group: Group, **constants: int) -> None:
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
