"""The choice of the fastest product plan (method of the tiled kernels) for a linear: measured on this device,
then cached in a file.

dA and dB can be computed concurrently with the frozen product of the backward, or before it. Which order is
faster depends on the GPU: on idle multiprocessors, the cache size and the occupancy. No formula predicts
that, so a trial of a few passes measures it. All plans compute the same sums and differ in the last bits
only. Two runs that read the same file choose the same plans, and their results are bit-identical.

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
from weftune.core.device_class import get_device_class
from weftune.core.files import cache_folder
from weftune.core.weights import CODES
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import Group
from weftune.ops.lora.tiling import ProductPlan, rank_block

TIE = 1.01
"""Ratio to the time of the fastest plan up to which another plan counts as equally fast, so that noise does
not decide."""
MAX_ROWS = 1 << 14
"""Maximum number of rows with which a trial times product plans. With more rows, a device is not better
utilised."""
MAX_THREADS = 8
"""Maximum number of threads that compile kernels at the same time. More threads would wait for Python's
interpreter lock."""


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """The configuration of a trial, which times the product plans of a linear: everything on which its result
    depends, except the machine."""

    plans: tuple[ProductPlan, ...]
    """Candidate product plans (ways in which the tiled kernels compute a matrix product) that are timed and
    compared."""
    dtype: torch.dtype
    features: int
    widths: tuple[int, ...]
    """Number of outputs of each linear in the group (linears that share their input)."""
    rows: int
    """Number of rows of the microbatch that are timed, rounded up to a power of two to limit the number of
    trials."""
    ranks: int
    """Number of ranks that a kernel processes at a time, a power of two that tensor cores support."""
    bands: int
    """Number of bands of each linear. A band is a range of at most 128 ranks, which kernels treat as a
    separate adapter."""
    slots: int
    """Number of slots (entries for jobs in the kernels' tables) of the group of linears, a compile-time
    constant of the kernels."""
    has_dropout: bool
    has_residual: bool
    is_transposed: bool
    """Whether the frozen weight is stored as [inputs, outputs]."""
    is_aligned: bool
    has_codes: bool = False
    """Whether the frozen weight is stored as 8-bit floats, and multiplied without dequantisation."""

    @classmethod
    def for_linears(
        cls,
        plans: tuple[ProductPlan, ...],
        dtype: torch.dtype,
        weight_NK: Tensor,
        residual: bool,
        group: Group,
        rows: Rows,
    ) -> PlanTrial:
        """Return the trial that times `plans` for a group of linears and the rows of a microbatch. `residual`
        says whether a residual is added to the linears' output."""
        return cls(
            plans=plans,
            dtype=dtype,
            features=weight_NK.shape[1],
            widths=tuple(high - low for low, high in group.columns),
            rows=min(MAX_ROWS, 1 << (max(1, len(rows.token_index_T)) - 1).bit_length()),
            ranks=rank_block(group.rank),
            bands=group.bands,
            slots=len(rows.key_S),
            has_dropout=group.has_dropout,
            has_residual=residual,
            is_transposed=weight_NK.stride(0) < weight_NK.stride(1),
            is_aligned=group.table.is_aligned,
            has_codes=weight_NK.dtype is CODES,
        )

    @property
    def key(self) -> str:
        """Human-readable key under which the cache file stores the times that the trial has measured."""
        words = [str(self.dtype).removeprefix("torch."), f"{self.rows} rows", f"{self.features} inputs"]
        words += [f"{'+'.join(map(str, self.widths))} outputs", f"rank {self.ranks}", f"{self.slots} slots"]
        words += [f"{self.bands} bands"] if self.bands > 1 else []
        flags = {
            "drops": self.has_dropout,
            "residual": self.has_residual,
            "transposed": self.is_transposed,
            "aligned": self.is_aligned,
        }
        words += [name for name, is_set in flags.items() if is_set]
        words += ["fp8"] if self.has_codes else []
        return f"{', '.join(words)}: {' or '.join(self.plans)}"


Measure = Callable[[PlanTrial], Mapping[ProductPlan, float]]
"""A function that runs a trial and returns the time in microseconds of every plan that the device can run. It
raises `torch.OutOfMemoryError` if the trial does not fit into memory."""
Compile = Callable[[PlanTrial, ProductPlan], None]
"""A function that compiles the kernels of a product plan for the shapes of a trial, which will time the
plan."""


class Choices:
    def __init__(
        self,
        measure: Measure,
        file: ChoiceFile | None,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        compile: Compile | None = None,
        is_pinned: bool = False,
    ) -> None:
        """Create the choice of product plans on one device. `measure` is the function that times plans in a
        trial, and `compile` the function that compiles the kernels of a plan. `file` caches the measured
        plans; None disables trials, as for Triton's interpreter on a CPU, whose times do not apply to a GPU.
        If `is_pinned`, the first allowed plan is used: there are no trials, and the file is not read."""
        self._measure = measure
        self._file = file
        self._capturing = is_capturing
        self._compile = compile
        self.is_pinned = is_pinned
        self.forced_plan: ProductPlan | None = None
        """Product plan that a benchmark forces on every linear. If None, the fastest plan is measured for
        each linear."""
        self._compiled_trials: set[PlanTrial] = set()
        self._plans: dict[PlanTrial, ProductPlan] = {}

    @property
    def can_compile(self) -> bool:
        """Whether `compile_ahead` can compile kernels before the passes that launch them."""
        return self._file is not None and self._compile is not None

    def compile_ahead(self, trials: Iterable[PlanTrial]) -> None:
        """Compile in parallel the kernels of product plans that these trials would time. Trials whose result
        is known are skipped.

        Errors are suppressed: they are raised again by the pass that launches the kernel.
        """
        new = {trial for trial in trials if len(trial.plans) > 1} - self._compiled_trials - self._plans.keys()
        if self._file is None or self._compile is None or not new or self._capturing():
            return
        self._compiled_trials |= new
        known = {} if self.is_pinned or self.forced_plan else self._file.read()
        pending = [
            (trial, plan)
            for trial in new
            if trial.key not in known
            for plan in self._eligible_plans(trial.plans)
        ]
        if not pending:
            return

        def try_compile(candidate: tuple[PlanTrial, ProductPlan], compile: Compile = self._compile) -> None:
            with suppress(Exception):
                compile(*candidate)

        with phase(Phase.COMPILING), ThreadPoolExecutor(min(MAX_THREADS, len(pending))) as threads:
            list(threads.map(try_compile, pending))
        torch.cuda.empty_cache()

    def _eligible_plans(self, plans: tuple[ProductPlan, ...]) -> tuple[ProductPlan, ...]:
        if self.forced_plan is not None:
            return (self.forced_plan,)
        return plans[:1] if self.is_pinned else plans

    def choose_plan(
        self,
        x_TK: Tensor,
        weight_NK: Tensor,
        residual_TN: Tensor | None,
        group: Group,
        rows: Rows,
        plans: tuple[ProductPlan, ...],
    ) -> ProductPlan:
        """Return the product plan (method of the tiled kernels) with which a linear is computed: the fastest
        of `plans` as measured in a trial, or the first of them if they cannot be timed."""
        if self.forced_plan is not None:
            return self.forced_plan
        if self._file is None or self.is_pinned or len(plans) == 1:
            return plans[0]
        trial = PlanTrial.for_linears(plans, x_TK.dtype, weight_NK, residual_TN is not None, group, rows)
        if trial not in self._plans:
            if self._capturing():
                # During capture the host must not synchronise with the device. This choice is not stored: a
                # later pass may run the trial.
                return plans[0]
            self._plans[trial] = self._find_plan(self._file, trial)
        return self._plans[trial]

    def _find_plan(self, file: ChoiceFile, trial: PlanTrial) -> ProductPlan:
        known = file.read().get(trial.key)
        if known is not None and known.plan in trial.plans:
            return known.plan
        plan_times: Mapping[ProductPlan, float] | None = None
        with phase(Phase.TRYING), suppress(torch.OutOfMemoryError):
            plan_times = self._measure(trial)
        if plan_times is None:
            # Another process may have more memory, so nothing is written to the file.
            torch.cuda.empty_cache()
            return trial.plans[0]
        if not plan_times:
            # The kernels of these plans do not run on this device. `torch.mm` runs on all devices.
            return ProductPlan.wide
        return file.add(trial.key, MeasuredPlan(fastest_plan(plan_times), plan_times), trial.plans).plan


def fastest_plan(plan_times: Mapping[ProductPlan, float]) -> ProductPlan:
    """Return the first product plan, in the order of `ProductPlan`, whose time is at most `TIE` times the
    shortest."""
    enough = TIE * min(plan_times.values())
    return next(plan for plan in ProductPlan if plan in plan_times and plan_times[plan] <= enough)


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    plan: ProductPlan
    microseconds: Mapping[ProductPlan, float]
    """Measured time in microseconds of each product plan (a way in which the tiled kernels compute a matrix
    product), stored for information only."""


@dataclass(frozen=True, slots=True)
class ChoiceFile:
    """The cache file of measured product plans. There is a file for each GPU model and each pair of versions
    of torch and Triton.

    The file can be deleted at any time: missing plans are measured again. Every write replaces the whole file
    atomically. If two processes write at the same time, one result may be lost and measured again later.
    """

    folder: Path
    device: str
    capability: str
    torch: str
    triton: str
    kernels: str
    """Checksum of the source files of `weftune.ops`. Plans are measured again if it differs, since the
    kernels may have changed."""

    @property
    def path(self) -> Path:
        """Path of the cache file. It does not depend on the checksum of the kernels, so that the measurements
        of changed kernels replace the old file."""
        words = (self.device, self.capability, "torch", self.torch, "triton", self.triton)
        return self.folder / f"{re.sub(r'[^a-z0-9.]+', '-', ' '.join(words).lower())}.json"

    @property
    def machine(self) -> dict[str, str]:
        """Device, software versions and checksum of the kernels for which the measurements are valid."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    def read(self) -> dict[str, MeasuredPlan]:
        """Return the measured plans in the cache file, by the key of their trial. Empty if the file is
        missing or from another machine or version."""
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or content.get("machine") != self.machine:
            return {}
        shapes = content.get("shapes")
        entries = shapes.items() if isinstance(shapes, dict) else ()
        return {key: found for key, entry in entries if (found := _parse_measured_plan(entry)) is not None}

    def add(self, key: str, measured: MeasuredPlan, plans: tuple[ProductPlan, ...]) -> MeasuredPlan:
        """Store a measured plan and return it. If another process has already stored a plan under this key,
        return that plan instead."""
        known = self.read()
        if key not in known or known[key].plan not in plans:
            known[key] = measured
            self._write(known)
        return known[key]

    def _write(self, known_plans: Mapping[str, MeasuredPlan]) -> None:
        shapes = {key: {"order": m.plan, "microseconds": m.microseconds} for key, m in known_plans.items()}
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


def _parse_measured_plan(entry: Any) -> MeasuredPlan | None:
    try:
        return MeasuredPlan(
            ProductPlan(entry["order"]),
            {ProductPlan(name): float(t) for name, t in entry["microseconds"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def choice_file(device: torch.device) -> ChoiceFile | None:
    """Return the cache file of measured product plans for the device, or None for a CPU, on which plans are
    not measured."""
    if device.type != "cuda":
        return None
    import triton

    card = torch.cuda.get_device_properties(device)
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return ChoiceFile(
        folder=cache_folder() / "routes",
        device=card.name,
        capability=".".join(map(str, get_device_class(device).capability)),
        torch=torch.__version__,
        triton=triton.__version__,
        kernels=f"{zlib.crc32(b''.join(source.read_bytes() for source in sources)):08x}",
    )
