"""Addresses of the jobs' tensors at the sites of a group, by slot, in device memory: a captured graph reads
them anew at every replay.

Shapes: P sites, S slots, A addresses and n numbers of an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.ops.lora.rows import views, words

AddressEntry = tuple[Sequence[int], Sequence[int]]
"""Addresses and numbers of one slot at one site."""


@dataclass(frozen=True, slots=True)
class AddressTable:
    host: Tensor
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
        address, number = views(buffer, shapes)
        return AddressTable(host, buffer, address.view(torch.int64), number)

    @property
    def slots(self) -> int:
        return self.address_PSA.shape[1]

    def put(self, slot: int, entries: Sequence[AddressEntry | None]) -> None:
        """Set a slot's entries, one per site. They stay on the host until `send`."""
        sites, slots, addresses = self.address_PSA.shape
        shapes = [(sites, slots, 2 * addresses), tuple(self.number_PSn.shape)]
        address, number = views(self.host, shapes)
        address_PSA, number_PSn = address.view(torch.int64).numpy(), number.numpy()
        for site, entry in enumerate(entries):
            address_PSA[site, slot], number_PSn[site, slot] = (0, 0) if entry is None else entry

    def send(self) -> None:
        """Copy the host's table to the device."""
        self.buffer.copy_(self.host.pin_memory() if self.buffer.is_cuda else self.host, non_blocking=True)
