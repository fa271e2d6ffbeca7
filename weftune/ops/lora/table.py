"""The adapters of a group of sites as the tiled kernels read them: the addresses of each slot, in device
memory.

Sizes and addresses never change: jobs join and leave by changing entries, so that a captured graph sees it.

A rank above BAND is cut into bands. A and B are stored by ranks, so a band of either is a run of whole rows:
the kernels treat it as a separate part at the address of its first row, with at most BAND ranks and the same
columns and masks as the site's other bands. Parts are the first bands of all sites, then the second bands.

Shapes: S slots, P parts (the bands of the sites of a group; for an `AddressTable` its sites), R ranks of one
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
from weftune.ops.dropout import signed, threshold
from weftune.ops.lora.rows import views, words

ALIGNMENT = 16
"""Bytes that a kernel loads at a time if all widths allow it."""
BAND = 128
"""Maximum ranks of a part: as many as a tile of 64 rows or 128 columns has registers for."""
NEVER = -(1 << 31)
"""Threshold that keeps every value."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """One job's A and B at one site, with the accumulators of their gradients. The kernels keep only the
    addresses: the job keeps the tensors alive."""

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
        """Scale, including dropout's factor for the kept values: applied once, to rank-sized tensors."""
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
        """Offset in bytes to the next BAND ranks of A, B, dA and dB."""
        return tuple(BAND * matrix.shape[-1] * matrix.element_size() for matrix in self.matrices)


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The address of each slot's adapter at each site of a group."""

    aligned: bool
    """Whether every address is a multiple of ALIGNMENT."""
    bands: int
    """Bands of every site, whether or not a job has ranks in all of them."""
    host: Tensor
    host_views: tuple[np.ndarray, ...]
    """The five sections below on the host."""
    buffer: Tensor
    address_PS4: Tensor
    """int64 addresses of A, B, dA, dB."""
    factor_PS2: Tensor
    """float32 factors of s when training (dropout included) and when evaluating."""
    rank_PS: Tensor
    """Ranks; 0 if the slot is empty or its job has no adapter at the site, or no ranks in the band."""
    threshold_PS: Tensor
    crc_P: Tensor

    @staticmethod
    def empty(
        sites: Sequence[str], slots: int, device: torch.device, aligned: bool = True, bands: int = 1
    ) -> SlotTable:
        parts = bands * len(sites)
        # Sizes in 32-bit words; the 64-bit addresses come first, so that they are aligned.
        shapes = [(parts, slots, 8), (parts, slots, 2), (parts, slots), (parts, slots), (parts,)]
        host = torch.zeros(words(shapes), dtype=torch.int32)
        host_views = tuple(view.numpy() for view in _table_views(host, shapes))
        buffer = torch.empty_like(host, device=device)
        table = SlotTable(aligned, bands, host, host_views, buffer, *_table_views(buffer, shapes))
        *_, threshold_PS, crc_P = host_views
        threshold_PS[:] = NEVER
        crc_P[:] = [signed(zlib.crc32(site.encode())) for site in sites] * bands
        table.send()
        return table

    def write(self, slot: int, entries: Sequence[LowRank | None]) -> None:
        """Put a job into a slot: one entry per site, None if it has no adapter there."""
        self.put(slot, entries)
        self.send()

    def put(self, slot: int, entries: Sequence[LowRank | None]) -> None:
        """Put a job into a slot on the host only, until `send`, which serves many jobs at once."""
        address_PS4, factor_PS2, rank_PS, threshold_PS, _ = self.host_views
        assert len(entries) * self.bands == len(rank_PS)
        for site, entry in enumerate(entries):
            bands = slice(site, None, len(entries))
            rank_PS[bands, slot] = 0
            if entry is None:
                continue
            assert entry.rank <= self.bands * BAND
            addresses = entry.addresses
            assert not self.aligned or all(address % ALIGNMENT == 0 for address in addresses), addresses
            factor_PS2[bands, slot] = entry.factor, entry.scale
            threshold_PS[bands, slot] = threshold(entry.dropout)
            for band in range(bands_for(entry.rank)):
                part = band * len(entries) + site
                rank_PS[part, slot] = min(BAND, entry.rank - band * BAND)
                address_PS4[part, slot] = addresses
                if band:
                    address_PS4[part, slot] += [band * step for step in entry.band_bytes]

    def put_experts(self, first: int, entry: LowRank) -> None:
        """Put a job's adapters at all experts of the only site into the slots from `first` on: its matrices
        are stacked, [experts, R, K] and [experts, R, N]."""
        address_PS4, factor_PS2, rank_PS, _, _ = self.host_views
        experts, rank, _ = entry.a_RK.shape
        assert rank <= self.bands * BAND == len(rank_PS) * BAND
        own = slice(first, first + experts)
        strides = [matrix[0].numel() * matrix.element_size() for matrix in entry.matrices]
        assert not self.aligned or all(stride % ALIGNMENT == 0 for stride in strides)
        factor_PS2[:, own], rank_PS[:, own] = entry.scale, 0
        for band in range(bands_for(rank)):
            begin = np.array(entry.addresses) + band * np.array(entry.band_bytes)
            address_PS4[band, own] = begin + np.arange(experts)[:, None] * np.array(strides)
            rank_PS[band, own] = min(BAND, rank - band * BAND)

    def send(self) -> None:
        """Copy the host's table to the device."""
        copy_to(self.buffer, self.host)


def bands_for(rank: int) -> int:
    """Return the number of bands that `rank` ranks need."""
    return max(1, -(-rank // BAND))


def _table_views(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    address, factor, *others = views(buffer, shapes)
    return address.view(torch.int64), factor.view(torch.float32), *others


AddressEntry = tuple[Sequence[int], Sequence[int]]
"""Addresses and numbers of one slot at one site."""


@dataclass(frozen=True, slots=True)
class AddressTable:
    """Addresses of the jobs' tensors at the sites of a group, by slot."""

    host: Tensor
    host_address_PSA: np.ndarray
    host_number_PSn: np.ndarray
    buffer: Tensor
    address_PSA: Tensor
    """int64 addresses; all are 0 if a slot has nothing at a site."""
    number_PSn: Tensor

    @staticmethod
    def empty(sites: int, slots: int, device: torch.device, *, addresses: int, numbers: int) -> AddressTable:
        # Sizes in 32-bit words; the 64-bit addresses come first, so that they are aligned.
        shapes = [(sites, slots, 2 * addresses), (sites, slots, numbers)]
        host = torch.zeros(words(shapes), dtype=torch.int32)
        buffer = host.to(device, copy=True)
        (host_address, host_number), (address, number) = views(host, shapes), views(buffer, shapes)
        host_views = host_address.view(torch.int64).numpy(), host_number.numpy()
        return AddressTable(host, *host_views, buffer, address.view(torch.int64), number)

    @property
    def slots(self) -> int:
        return self.address_PSA.shape[1]

    def put(self, slot: int, entries: Sequence[AddressEntry | None]) -> None:
        """Set a slot's entries, one per site. They stay on the host until `send`."""
        for site, entry in enumerate(entries):
            addresses, numbers = (0, 0) if entry is None else entry
            self.host_address_PSA[site, slot], self.host_number_PSn[site, slot] = addresses, numbers

    def send(self) -> None:
        copy_to(self.buffer, self.host)


@dataclass(frozen=True, slots=True)
class Group:
    """Sites that share their input; their frozen weights are stacked."""

    columns: tuple[tuple[int, int], ...]
    """The columns of the output that belong to each site."""
    table: SlotTable
    rank: int
    """Upper bound of the jobs' ranks."""
    drops: bool
    """Whether any job drops values here."""
    g_out: AddressTable | None = None
    """Scales of outputs (`ops.lora.scales`). None if no job has had any."""
    g_in: AddressTable | None = None
    """Scales of inputs, if the group is a single site."""
    lengths: bool = False
    """Whether scales of outputs may have to be divided by the norms of rows."""
    computed: AddressTable | None = None
    """Vectors and constants of computed matrices (`ops.lora.computed`). None if no job has had any."""

    @property
    def bands(self) -> int:
        return self.table.bands

    def write(self, slot: int, entries: Sequence[LowRank | None]) -> None:
        """Put a job into a slot: one entry per site, None if it has no adapter there."""
        present = [entry for entry in entries if entry is not None]
        assert all(entry.rank <= self.rank for entry in present)
        assert self.drops or all(entry.dropout == 0.0 for entry in present)
        self.table.write(slot, entries)
