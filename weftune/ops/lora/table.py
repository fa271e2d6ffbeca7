"""The adapters of a group of sites as the tiled kernels read them: the addresses of each slot, in device
memory.

Sizes and addresses never change: jobs join and leave by changing entries, so that a captured graph sees it.

A rank above BAND is cut into bands. A and B are stored by ranks, so a band of either is a run of whole rows:
the kernels treat it as a separate part at the address of its first row, with at most BAND ranks and the same
columns and masks as the site's other bands. Parts are the first bands of all sites, then the second bands.

Shapes: S slots, P parts (the bands of the sites of a group), R ranks of one job, K inputs, N outputs of one
site.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weftune.ops.dropout import signed, threshold
from weftune.ops.lora.addresses import AddressTable
from weftune.ops.lora.rows import views, words

ALIGNMENT = 16
"""Bytes that a kernel loads at a time if all widths allow it."""
BAND = 128
"""Maximum ranks of a part: as many as a tile of 64 rows or 128 columns has registers for."""
NEVER = -(1 << 31)
"""Threshold that keeps every value."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One job's adapter at one site. The kernels keep only the addresses: the job keeps the tensors alive."""

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
        sections = _table_shapes(bands * len(sites), slots)
        host = torch.zeros(words(sections), dtype=torch.int32)
        buffer = torch.empty_like(host, device=device)
        table = SlotTable(aligned, bands, host, buffer, *_table_views(buffer, sections))
        *_, threshold_PS, crc_P = table.host_views()
        threshold_PS[:] = NEVER
        crc_P[:] = [signed(zlib.crc32(site.encode())) for site in sites] * bands
        table.send()
        return table

    def write(self, slot: int, entries: Sequence[Entry | None]) -> None:
        """Put a job into a slot: one entry per site, None if it has no adapter there."""
        self.put(self.host_views(), slot, entries)
        self.send()

    def put(self, views: Sequence[np.ndarray], slot: int, entries: Sequence[Entry | None]) -> None:
        """Put a job into a slot on the host only, until `send`, which serves many jobs at once. `views` are
        the `host_views`."""
        address_PS4, factor_PS2, rank_PS, threshold_PS, _ = views
        assert len(entries) * self.bands == len(rank_PS)
        for site, entry in enumerate(entries):
            bands = slice(site, None, len(entries))
            rank_PS[bands, slot] = 0
            if entry is None:
                continue
            assert entry.rank <= self.bands * BAND
            addresses = entry.addresses
            assert not self.aligned or all(address % ALIGNMENT == 0 for address in addresses), addresses
            factor_PS2[bands, slot] = entry.scale / (1.0 - entry.dropout), entry.scale
            threshold_PS[bands, slot] = threshold(entry.dropout)
            for band in range(bands_for(entry.rank)):
                part = band * len(entries) + site
                rank_PS[part, slot] = min(BAND, entry.rank - band * BAND)
                address_PS4[part, slot] = addresses
                if band:
                    address_PS4[part, slot] += [band * step for step in entry.band_bytes]

    def put_experts(self, views: Sequence[np.ndarray], first: int, entry: Entry) -> None:
        """Put a job's adapters at all experts of the only site into the slots from `first` on: its matrices
        are stacked, [experts, R, K] and [experts, R, N]."""
        address_PS4, factor_PS2, rank_PS, _, _ = views
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

    def clear(self, slot: int) -> None:
        self.write(slot, [None] * (len(self.crc_P) // self.bands))

    def host_views(self) -> tuple[np.ndarray, ...]:
        """Return views of the host's table: addresses, factors, ranks, thresholds, checksums of the sites'
        names."""
        parts, slots = self.rank_PS.shape
        return tuple(view.numpy() for view in _table_views(self.host, _table_shapes(parts, slots)))

    def send(self) -> None:
        """Copy the host's table to the device."""
        self.buffer.copy_(self.host.pin_memory() if self.buffer.is_cuda else self.host, non_blocking=True)


def bands_for(rank: int) -> int:
    """Return the number of bands that `rank` ranks need."""
    return max(1, -(-rank // BAND))


def _table_shapes(parts: int, slots: int) -> list[tuple[int, ...]]:
    """Return the shapes in 32-bit words; the 64-bit addresses come first, so that they are aligned."""
    return [(parts, slots, 8), (parts, slots, 2), (parts, slots), (parts, slots), (parts,)]


def _table_views(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    address, factor, *others = views(buffer, shapes)
    return address.view(torch.int64), factor.view(torch.float32), *others


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

    def write(self, slot: int, entries: Sequence[Entry | None]) -> None:
        """Put a job into a slot: one entry per site, None if it has no adapter there."""
        present = [entry for entry in entries if entry is not None]
        assert all(entry.rank <= self.rank for entry in present)
        assert self.drops or all(entry.dropout == 0.0 for entry in present)
        self.table.write(slot, entries)
