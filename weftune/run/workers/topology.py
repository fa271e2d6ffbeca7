"""The PCIe root complex of each GPU, and the assignment of GPUs to workers that stream a base together. GPUs
are ordered such that stages that are loaded at the same time share no root complex, as section 3.3 of the
Mobius paper proposes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from weftune.plan.layout.mapping import Topology, least_contention_order

PCI = Path("/sys/bus/pci/devices")
STAGES = 4
"""Assumed number of stages per GPU when possible orders of the GPUs are compared. The real number is not
known yet at that time."""


def assign_gpus(count: int) -> tuple[int, ...]:
    """Return, for each of `count` workers of this machine, the index of its GPU."""
    addresses = [_pci_address(number) for number in range(count)]
    return order_gpus([None if address is None else find_root_complex(address) for address in addresses])


def order_gpus(root_complexes: Sequence[str | None]) -> tuple[int, ...]:
    """Return the indices of the GPUs in the order in which workers use them, which keeps GPUs of the same
    root complex apart. `root_complexes` contains the root complex of each GPU. If one of them is unknown, the
    order is 0, 1, 2, ..."""
    known = [root for root in root_complexes if root is not None]
    names = list(dict.fromkeys(known))
    if len(known) < len(root_complexes) or len(names) < 2:
        return tuple(range(len(root_complexes)))
    grouped = [number for name in names for number, root in enumerate(root_complexes) if root == name]
    topology = Topology(tuple(known.count(name) for name in names))
    return tuple(grouped[place] for place in least_contention_order(topology, STAGES * len(root_complexes)))


def find_root_complex(address: str, devices: Path = PCI) -> str | None:
    """Return the PCIe root complex above a PCI device in the kernel's device tree. None if the device is not
    found."""
    path = (devices / address).resolve()
    return next((part for part in path.parts if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", part)), None)


def _pci_address(gpu: int) -> str | None:
    """Return the PCI address of a GPU as the kernel writes it. None if this version of torch does not provide
    the address."""
    properties = torch.cuda.get_device_properties(gpu)
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in numbers:
        return None
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
