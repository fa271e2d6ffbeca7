"""The cache file of measured orders: one per kind of device and version of its compiler.

It can be deleted at any time: missing orders are measured again. Processes that write at the same time
replace the whole file, so it is never half written; at worst one of them measures a shape again later.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weftune.core.files import cache_folder
from weftune.ops.lora.tiling import ProductPlan


@dataclass(frozen=True, slots=True)
class TrialMachine:
    """The machine that a measurement is valid for."""

    device: str
    capability: str
    torch: str
    triton: str
    kernels: str
    """Checksum of the sources of the ops: a changed kernel has other times."""


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    order: ProductPlan
    microseconds: Mapping[ProductPlan, float]
    """Measured times, for readers of the file only."""


@dataclass(frozen=True, slots=True)
class ChoiceFile:
    folder: Path
    machine: TrialMachine

    @property
    def path(self) -> Path:
        """Path of the file. Its name does not depend on the kernels, so that their next version replaces the
        file."""
        machine = self.machine
        words = (machine.device, machine.capability, "torch", machine.torch, "triton", machine.triton)
        return self.folder / f"{re.sub(r'[^a-z0-9.]+', '-', ' '.join(words).lower())}.json"

    def read(self) -> dict[str, MeasuredPlan]:
        """Return a map from shape and orders to the measured order; empty if the file is missing or from
        another machine."""
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or content.get("machine") != asdict(self.machine):
            return {}
        shapes = content.get("shapes")
        entries = shapes.items() if isinstance(shapes, dict) else ()
        return {contest: found for contest, entry in entries if (found := _measured(entry)) is not None}

    def add(self, contest: str, measured: MeasuredPlan, orders: Sequence[ProductPlan]) -> MeasuredPlan:
        """Store a measured order and return the valid one: that of another process if it has written one of
        the orders meanwhile."""
        known = self.read()
        if contest not in known or known[contest].order not in orders:
            known[contest] = measured
            self._write(known)
        return known[contest]

    def _write(self, known: Mapping[str, MeasuredPlan]) -> None:
        shapes = {contest: {"order": m.order, "microseconds": m.microseconds} for contest, m in known.items()}
        content = {"machine": asdict(self.machine), "shapes": shapes}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / f".{self.path.name}.{uuid.uuid4().hex}"
            try:
                with partial.open("x") as stream:
                    json.dump(content, stream, indent=1, sort_keys=True)
                os.replace(partial, self.path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        except OSError:
            # If the cache cannot be written, every process runs the trial again; training is not affected.
            return


def _measured(entry: Any) -> MeasuredPlan | None:
    try:
        return MeasuredPlan(
            ProductPlan(entry["order"]),
            {ProductPlan(name): float(t) for name, t in entry["microseconds"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def file_for(device: torch.device) -> ChoiceFile | None:
    """Return the file of the device's orders, or None for a device on which nothing is measured."""
    if device.type != "cuda":
        return None
    import triton

    card = torch.cuda.get_device_properties(device)
    machine = TrialMachine(
        card.name, f"{card.major}.{card.minor}", torch.__version__, triton.__version__, _kernels()
    )
    return ChoiceFile(cache_folder() / "routes", machine)


def _kernels() -> str:
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return f"{zlib.crc32(b''.join(source.read_bytes() for source in sources)):08x}"
