"""Tables in device memory by which the tiled kernels find the jobs' adapters. A table has the addresses of
the adapters for a group of sites (adapted linears) that share their input. A slot is the table index of a
job. A table is never reallocated: when a job starts or ends, entries change, so a captured graph remains
valid.

Ranks above BAND are split into bands. Ranks are the rows of A and B, so a band is contiguous in both. The
kernels treat each band of a site as a separate part, at the address of its first row, with at most BAND ranks
and the same columns and masks as the site's other bands. Parts are ordered by band, then by site.

Shapes: S slots, P parts (the bands of the sites of a group; for an `AddressTable` its sites), R rank of one
job, K inputs, N outputs of one site, A addresses and n numbers of an entry.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weftune.core.batch import copy_to
from weftune.ops.dropout import keep_threshold, to_signed
from weftune.ops.lora.rows import split_buffer, word_count

ALIGNMENT = 16
"""Number of bytes that a kernel loads with one instruction, if all addresses are multiples of this number."""
BAND = 128
"""Maximum number of ranks in a band, the unit in which kernels process ranks. It is limited by the registers
for a tile of 64 rows or 128 columns."""
NEVER = -(1 << 31)
"""Threshold for random bits with which dropout keeps every value."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """One job's LoRA at one linear: A, B, and the accumulators of their gradients. The job must keep these
    tensors alive, since the kernels' table stores only their addresses."""

    a_RK: Tensor
    b_RN: Tensor
    da_RK: Tensor
    db_RN: Tensor
    scale: float
    dropout: float

    @property
    def rank(self) -> int:
        return self.a_RK.shape[0]

    @property
    def factor(self) -> float:
        """Factor in s = factor · drop(x)Aᵀ in training: the LoRA scale divided by the probability that
        dropout keeps a value."""
        return self.scale / (1.0 - self.dropout)

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.a_RK, self.b_RN, self.da_RK, self.db_RN

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        assert all(tensor.is_contiguous() for tensor in self.matrices)
        assert all(tensor.dtype == torch.float32 for tensor in (self.da_RK, self.db_RN))
        return tuple(tensor.data_ptr() for tensor in self.matrices)  # type: ignore[return-value]

    @property
    def band_bytes(self) -> tuple[int, ...]:
        """Offsets in bytes from one band (range of BAND ranks) to the next in A, B, dA and dB."""
        return tuple(BAND * matrix.shape[-1] * matrix.element_size() for matrix in self.matrices)


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The table of the LoRA matrices of all jobs at linears that share their input. A job's entries have its
    slot (table index)."""

    is_aligned: bool
    """Whether every address in the table is a multiple of ALIGNMENT bytes."""
    bands: int
    """Number of bands (ranges of BAND ranks) for which the table has room at each linear: enough for the
    largest rank that a job may have."""
    host: Tensor
    host_views: tuple[np.ndarray, ...]
    """Views of `host`, the copy of the table in host memory. They correspond to the views of `buffer`:
    addresses, factors, ranks, dropout thresholds and checksums."""
    buffer: Tensor
    address_PS4: Tensor
    """Addresses of A, B, dA and dB of each job at each part (a band of ranks of one linear), as int64."""
    factor_PS2: Tensor
    """Factors in s = factor · xAᵀ, as float32: the factor in training (`LowRank.factor`), then the factor in
    evaluation (`LowRank.scale`)."""
    rank_PS: Tensor
    """Number of ranks of each job in each part (a band of ranks of one linear). 0 if no job has the table
    entry, or if the job has no adapter at the linear or no ranks in this band."""
    threshold_PS: Tensor
    crc_P: Tensor
    """Checksums of the names of the linears, followed by one more element: the index of this table's first
    input among the inputs of the whole linears, of which a shard may hold a part. Dropout masks depend on
    both."""

    @staticmethod
    def empty(
        sites: Sequence[str],
        slots: int,
        device: torch.device,
        aligned: bool = True,
        bands: int = 1,
        first_input: int = 0,
    ) -> SlotTable:
        parts = bands * len(sites)
        # Sizes in 32-bit words; the 64-bit addresses come first, so that they are aligned.
        shapes = [(parts, slots, 8), (parts, slots, 2), (parts, slots), (parts, slots), (parts + 1,)]
        host = torch.zeros(word_count(shapes), dtype=torch.int32)
        host_views = tuple(view.numpy() for view in _table_views(host, shapes))
        buffer = torch.empty_like(host, device=device)
        table = SlotTable(aligned, bands, host, host_views, buffer, *_table_views(buffer, shapes))
        *_, threshold_PS, crc_P = host_views
        threshold_PS[:] = NEVER
        crc_P[:-1] = [to_signed(zlib.crc32(site.encode())) for site in sites] * bands
        crc_P[-1] = first_input
        table.copy_to_device()
        return table

    def write(self, slot: int, entries: Sequence[LowRank | None]) -> None:
        """Write a job's entries, one per linear, to the table index `slot` on host and device. None means
        that the job has no adapter at the linear."""
        self.set_slot(slot, entries)
        self.copy_to_device()

    def set_slot(self, slot: int, entries: Sequence[LowRank | None]) -> None:
        """Write a job's entries, one per linear, to the table index `slot` on the host only; `copy_to_device`
        copies all changes. None means that the job has no adapter at the linear."""
        address_PS4, factor_PS2, rank_PS, threshold_PS, _ = self.host_views
        assert len(entries) * self.bands == len(rank_PS)
        for site, entry in enumerate(entries):
            bands = slice(site, None, len(entries))
            rank_PS[bands, slot] = 0
            if entry is None:
                continue
            assert entry.rank <= self.bands * BAND
            addresses = entry.addresses
            assert not self.is_aligned or all(address % ALIGNMENT == 0 for address in addresses), addresses
            factor_PS2[bands, slot] = entry.factor, entry.scale
            threshold_PS[bands, slot] = keep_threshold(entry.dropout)
            for band in range(required_bands(entry.rank)):
                part = band * len(entries) + site
                rank_PS[part, slot] = min(BAND, entry.rank - band * BAND)
                address_PS4[part, slot] = addresses
                if band:
                    address_PS4[part, slot] += [band * step for step in entry.band_bytes]

    def set_experts(self, first_slot: int, entry: LowRank) -> None:
        """Write one job's adapters of all experts to consecutive table indices from `first_slot` on, on the
        host only. The table must have one linear. The matrices of all experts are stacked, [experts, R, K]
        and [experts, R, N]."""
        address_PS4, factor_PS2, rank_PS, _, _ = self.host_views
        experts, rank, _ = entry.a_RK.shape
        assert rank <= self.bands * BAND == len(rank_PS) * BAND
        own = slice(first_slot, first_slot + experts)
        strides = [matrix[0].numel() * matrix.element_size() for matrix in entry.matrices]
        assert not self.is_aligned or all(stride % ALIGNMENT == 0 for stride in strides)
        factor_PS2[:, own], rank_PS[:, own] = entry.scale, 0
        for band in range(required_bands(rank)):
            begin = np.array(entry.addresses) + band * np.array(entry.band_bytes)
            address_PS4[band, own] = begin + np.arange(experts)[:, None] * np.array(strides)
            rank_PS[band, own] = min(BAND, rank - band * BAND)

    def copy_to_device(self) -> None:
        """Copy the table from the host to the device."""
        copy_to(self.buffer, self.host)


def required_bands(rank: int) -> int:
    """Return the number of bands (ranges of at most BAND ranks) that an adapter of this rank needs."""
    return max(1, -(-rank // BAND))


def _table_views(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    address, factor, *others = split_buffer(buffer, shapes)
    return address.view(torch.int64), factor.view(torch.float32), *others


AddressEntry = tuple[Sequence[int], Sequence[int]]
"""Type of a table entry: the addresses and the numbers of one job at one linear."""


@dataclass(frozen=True, slots=True)
class AddressTable:
    """A table with addresses of other tensors than LoRA's matrices, such as scales, for each linear and each
    job (by slot, the job's table index). An entry may also have numbers."""

    host: Tensor
    host_address_PSA: np.ndarray
    host_number_PSn: np.ndarray
    buffer: Tensor
    address_PSA: Tensor
    """Addresses of the tensors, as int64. All addresses of an entry are 0 if the job has no such tensors at
    the linear."""
    number_PSn: Tensor

    @staticmethod
    def empty(sites: int, slots: int, device: torch.device, *, addresses: int, numbers: int) -> AddressTable:
        # Sizes in 32-bit words; the 64-bit addresses come first, so that they are aligned.
        shapes = [(sites, slots, 2 * addresses), (sites, slots, numbers)]
        host = torch.zeros(word_count(shapes), dtype=torch.int32)
        buffer = host.to(device, copy=True)
        (host_address, host_number), (address, number) = (
            split_buffer(host, shapes),
            split_buffer(buffer, shapes),
        )
        host_views = host_address.view(torch.int64).numpy(), host_number.numpy()
        return AddressTable(host, *host_views, buffer, address.view(torch.int64), number)

    @property
    def slots(self) -> int:
        return self.address_PSA.shape[1]

    def set_slot(self, slot: int, entries: Sequence[AddressEntry | None]) -> None:
        """Write a job's entries, one per linear, to the table index `slot` on the host only. None means that
        the job has no such tensors at the linear."""
        for site, entry in enumerate(entries):
            addresses, numbers = (0, 0) if entry is None else entry
            self.host_address_PSA[site, slot], self.host_number_PSn[site, slot] = addresses, numbers

    def copy_to_device(self) -> None:
        copy_to(self.buffer, self.host)


@dataclass(frozen=True, slots=True)
class Group:
    """Linears that share their input and have concatenated frozen weights, such as q, k and v, with the
    tables of their adapters."""

    columns: tuple[tuple[int, int], ...]
    """First column, and the column after the last, of each linear in the concatenated output."""
    table: SlotTable
    rank: int
    """Upper bound on the rank of every job's adapter."""
    has_dropout: bool
    """Whether a job may use dropout at the group's linears."""
    g_out: AddressTable | None = None
    """Table of the vectors by which jobs scale the linears' outputs (`ops.lora.scales`). None until a job has
    such scales."""
    g_in: AddressTable | None = None
    """Table of the vectors by which jobs scale the linear's inputs. Only a group of a single linear can have
    it."""
    has_dora: bool = False
    """Whether a job may use DoRA, whose output scales include the inverse row norms of W + scale · BA."""
    computed_table: AddressTable | None = None
    """Table of the vectors and constants of VeRA (`ops.lora.computed`). None until a job uses VeRA."""

    @property
    def bands(self) -> int:
        return self.table.bands

    @property
    def launch_key(self) -> tuple[object, ...]:
        """Values that are compiled into the kernels, such as the rank. Groups with equal values use the same
        compiled kernels."""
        tables = self.g_out is None, self.g_in is None, self.has_dora, self.computed_table is None
        return self.columns, self.rank, self.has_dropout, self.bands, self.table.is_aligned, *tables

    def write(self, slot: int, entries: Sequence[LowRank | None]) -> None:
        """Write a job's LoRA entries, one per linear, to the table index `slot` on host and device. None
        means that the job has no adapter at the linear."""
        present = [entry for entry in entries if entry is not None]
        assert all(entry.rank <= self.rank for entry in present)
        assert self.has_dropout or all(entry.dropout == 0.0 for entry in present)
        self.table.write(slot, entries)
