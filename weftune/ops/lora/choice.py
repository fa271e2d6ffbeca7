"""The fastest product plan of the tiled route for a site: measured on this device, then cached in a file.

Whether dA and dB are better computed beside the frozen product of the backward or before it depends on what
the product leaves idle, how much of dy a cache holds and how the kernels fill the device. No formula predicts
that for an unknown GPU, but a trial of a few passes does. All plans compute the same sums and differ in the
last bits only; two runs that find the same file choose the same, and give the same bits.

Shapes: T rows, K inputs, N outputs of all parts.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weftune.core.clock import Phase, phase
from weftune.core.files import cache_folder
from weftune.core.weights import CODES
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import Group
from weftune.ops.lora.tiling import ProductPlan, rank_block

TIE = 1.01
"""Ratio to the fastest time within which a plan counts as equal, so that noise does not decide."""
MAX_ROWS = 1 << 14
"""Maximum number of rows in a trial. More rows keep a device no busier."""
MAX_THREADS = 8
"""Maximum number of concurrent compilations: more would wait for the interpreter's lock."""


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """Everything that the outcome of a trial depends on, except the machine."""

    plans: tuple[ProductPlan, ...]
    """Plans that the trial decides between."""
    dtype: torch.dtype
    features: int
    widths: tuple[int, ...]
    """Outputs of each part."""
    rows: int
    """Rows, rounded up to a power of two, so that trials are few."""
    ranks: int
    """Ranks of one part, rounded up to a power of two that a tensor core takes."""
    bands: int
    """Number of parts of each site."""
    slots: int
    """Number of slots in the group's table, for which kernels are compiled."""
    drops: bool
    residual: bool
    transposed: bool
    """Whether the frozen weight is stored as [K, N]."""
    aligned: bool
    coded: bool = False
    """Whether the frozen weight is stored as 8-bit floats that products read directly."""

    @classmethod
    def at(
        cls,
        plans: tuple[ProductPlan, ...],
        dtype: torch.dtype,
        weight_NK: Tensor,
        residual: bool,
        group: Group,
        rows: Rows,
    ) -> PlanTrial:
        """Return the trial for a site."""
        return cls(
            plans=plans,
            dtype=dtype,
            features=weight_NK.shape[1],
            widths=tuple(high - low for low, high in group.columns),
            rows=min(MAX_ROWS, 1 << (max(1, len(rows.token_index_T)) - 1).bit_length()),
            ranks=rank_block(group.rank),
            bands=group.bands,
            slots=len(rows.key_S),
            drops=group.drops,
            residual=residual,
            transposed=weight_NK.stride(0) < weight_NK.stride(1),
            aligned=group.table.aligned,
            coded=weight_NK.dtype is CODES,
        )

    @property
    def key(self) -> str:
        """Readable key of the trial in the file."""
        words = [str(self.dtype).removeprefix("torch."), f"{self.rows} rows", f"{self.features} inputs"]
        words += [f"{'+'.join(map(str, self.widths))} outputs", f"rank {self.ranks}", f"{self.slots} slots"]
        words += [f"{self.bands} bands"] if self.bands > 1 else []
        words += [name for name in ("drops", "residual", "transposed", "aligned") if getattr(self, name)]
        words += ["fp8"] if self.coded else []
        return f"{', '.join(words)}: {' or '.join(self.plans)}"


Measure = Callable[[PlanTrial], Mapping[ProductPlan, float]]
"""A function that returns the microseconds of every plan that the device can run, and raises
`torch.OutOfMemoryError` if a trial does not fit."""
Compile = Callable[[PlanTrial, ProductPlan], None]
"""A function that compiles the kernels of a plan."""


class Choices:
    def __init__(
        self,
        measure: Measure,
        file: ChoiceFile | None,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        compile: Compile | None = None,
        pinned: bool = False,
    ) -> None:
        """`file` caches the measured plans. None disables measuring: an interpreter's times say nothing
        about a GPU. If `pinned`, the first allowed plan is used without measuring, and the file is not
        read."""
        self._measure = measure
        self._file = file
        self._capturing = capturing
        self._compile = compile
        self.pinned = pinned
        self.forced: ProductPlan | None = None
        """Product plan of every site, for measurements, whether or not it is the best. None disables it."""
        self._compiled: set[PlanTrial] = set()
        self._plans: dict[PlanTrial, ProductPlan] = {}

    @property
    def compiles(self) -> bool:
        """Whether `compile_ahead` has any effect."""
        return self._file is not None and self._compile is not None

    def compile_ahead(self, trials: Iterable[PlanTrial]) -> None:
        """Compile the kernels of all undecided trials in parallel.

        Errors are left to the pass that needs the kernel.
        """
        new = {trial for trial in trials if len(trial.plans) > 1} - self._compiled - self._plans.keys()
        if self._file is None or self._compile is None or not new or self._capturing():
            return
        self._compiled |= new
        known = {} if self.pinned or self.forced else self._file.read()
        pending = [
            (trial, plan) for trial in new if trial.key not in known for plan in self._eligible(trial.plans)
        ]
        if not pending:
            return

        def compiled(one: tuple[PlanTrial, ProductPlan], compile: Compile = self._compile) -> None:
            with suppress(Exception):
                compile(*one)

        with phase(Phase.COMPILING), ThreadPoolExecutor(min(MAX_THREADS, len(pending))) as threads:
            list(threads.map(compiled, pending))
        torch.cuda.empty_cache()

    def _eligible(self, plans: tuple[ProductPlan, ...]) -> tuple[ProductPlan, ...]:
        if self.forced is not None:
            return (self.forced,)
        return plans[:1] if self.pinned else plans

    def plan(
        self,
        x_TK: Tensor,
        weight_NK: Tensor,
        residual_TN: Tensor | None,
        group: Group,
        rows: Rows,
        plans: tuple[ProductPlan, ...],
    ) -> ProductPlan:
        """Return one of the allowed `plans`; the first if nothing can be measured."""
        if self.forced is not None:
            return self.forced
        if self._file is None or self.pinned or len(plans) == 1:
            return plans[0]
        trial = PlanTrial.at(plans, x_TK.dtype, weight_NK, residual_TN is not None, group, rows)
        if trial not in self._plans:
            if self._capturing():
                # Nothing may wait for the device now. The choice is not stored: the next pass may be able to
                # measure.
                return plans[0]
            self._plans[trial] = self._find(self._file, trial)
        return self._plans[trial]

    def _find(self, file: ChoiceFile, trial: PlanTrial) -> ProductPlan:
        known = file.read().get(trial.key)
        if known is not None and known.plan in trial.plans:
            return known.plan
        times: Mapping[ProductPlan, float] | None = None
        with phase(Phase.TRYING), suppress(torch.OutOfMemoryError):
            times = self._measure(trial)
        if times is None:
            # Another process may have more memory, so nothing is written to the file.
            torch.cuda.empty_cache()
            return trial.plans[0]
        if not times:
            # None of their kernels runs on this device. The library's product runs on all devices.
            return ProductPlan.wide
        return file.add(trial.key, MeasuredPlan(fastest(times), times), trial.plans).plan


def fastest(times: Mapping[ProductPlan, float]) -> ProductPlan:
    """Return the first plan, in the order of the enum, among those as good as the fastest."""
    enough = TIE * min(times.values())
    return next(plan for plan in ProductPlan if plan in times and times[plan] <= enough)


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    plan: ProductPlan
    microseconds: Mapping[ProductPlan, float]
    """Measured times, for readers of the file only."""


@dataclass(frozen=True, slots=True)
class ChoiceFile:
    """The cache file of measured plans: one per kind of device and version of its compiler.

    It can be deleted at any time: missing plans are measured again. Processes that write at the same time
    replace the whole file, so it is never half written; at worst one of them measures a site again later.
    """

    folder: Path
    device: str
    capability: str
    torch: str
    triton: str
    kernels: str
    """Checksum of the sources of the ops: a changed kernel has other times."""

    @property
    def path(self) -> Path:
        """Path of the file. The next version of the kernels replaces it, so its name does not have theirs."""
        words = (self.device, self.capability, "torch", self.torch, "triton", self.triton)
        return self.folder / f"{re.sub(r'[^a-z0-9.]+', '-', ' '.join(words).lower())}.json"

    @property
    def machine(self) -> dict[str, str]:
        """The machine that the measurements are valid for."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    def read(self) -> dict[str, MeasuredPlan]:
        """Return trial key → measured plan; empty if the file is missing or from another machine."""
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or content.get("machine") != self.machine:
            return {}
        shapes = content.get("shapes")
        entries = shapes.items() if isinstance(shapes, dict) else ()
        return {key: found for key, entry in entries if (found := _measured(entry)) is not None}

    def add(self, key: str, measured: MeasuredPlan, plans: tuple[ProductPlan, ...]) -> MeasuredPlan:
        """Store a measured plan and return the valid one, which another process may have written first."""
        known = self.read()
        if key not in known or known[key].plan not in plans:
            known[key] = measured
            self._write(known)
        return known[key]

    def _write(self, known: Mapping[str, MeasuredPlan]) -> None:
        shapes = {key: {"order": m.plan, "microseconds": m.microseconds} for key, m in known.items()}
        content = {"machine": self.machine, "shapes": shapes}
        # If the cache cannot be written, every process runs the trial again; training is not affected.
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / f".{self.path.name}.{uuid.uuid4().hex}"
            try:
                with partial.open("x") as stream:
                    json.dump(content, stream, indent=1, sort_keys=True)
                os.replace(partial, self.path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise


def _measured(entry: Any) -> MeasuredPlan | None:
    try:
        return MeasuredPlan(
            ProductPlan(entry["order"]),
            {ProductPlan(name): float(t) for name, t in entry["microseconds"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def file_for(device: torch.device) -> ChoiceFile | None:
    """Return the file of the device's plans, or None for a device on which nothing is measured."""
    if device.type != "cuda":
        return None
    import triton

    card = torch.cuda.get_device_properties(device)
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return ChoiceFile(
        folder=cache_folder() / "routes",
        device=card.name,
        capability=f"{card.major}.{card.minor}",
        torch=torch.__version__,
        triton=triton.__version__,
        kernels=f"{zlib.crc32(b''.join(source.read_bytes() for source in sources)):08x}",
    )
