"""Addresses of what jobs have at the sites of a group, by slot, in device memory: content that a captured
graph reads anew at every replay.

Shapes: P sites, S slots, A addresses and n numbers of an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.ops.lora.rows import views, words

AddressEntry = tuple[Sequence[int], Sequence[int]]
"""Addresses and numbers."""


@dataclass(frozen=True, slots=True)
class AddressTable:
    host: Tensor
    buffer: Tensor
    address_PSA: Tensor
    """int64; all are 0 where a slot has nothing at a site."""
    number_PSn: Tensor

    @staticmethod
    def empty(sites: int, slots: int, device: torch.device, *, addresses: int, numbers: int) -> AddressTable:
        # In 32-bit words; the 64-bit addresses come first, where they are aligned.
        shapes = [(sites, slots, 2 * addresses), (sites, slots, numbers)]
        host = torch.zeros(words(shapes), dtype=torch.int32)
        buffer = host.to(device, copy=True)
        address, number = views(buffer, shapes)
        return AddressTable(host, buffer, address.view(torch.int64), number)

    @property
    def slots(self) -> int:
        return self.address_PSA.shape[1]

    def put(self, slot: int, entries: Sequence[AddressEntry | None]) -> None:
        """One for every site, on the host until `send`."""
        sites, slots, addresses = self.address_PSA.shape
        shapes = [(sites, slots, 2 * addresses), tuple(self.number_PSn.shape)]
        address, number = views(self.host, shapes)
        address_PSA, number_PSn = address.view(torch.int64).numpy(), number.numpy()
        for site, entry in enumerate(entries):
            address_PSA[site, slot], number_PSn[site, slot] = (0, 0) if entry is None else entry

    def send(self) -> None:
        """Bring the host's table to the device, in one copy."""
        self.buffer.copy_(self.host.pin_memory() if self.buffer.is_cuda else self.host, non_blocking=True)
