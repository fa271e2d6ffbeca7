"""The fastest order of the tiled route for a site: measured on this device, then cached.

Whether dA and dB are better computed beside the frozen product of the backward or before it depends on what
the product leaves idle, how much of dy a cache holds and how the kernels fill the device. No formula predicts
that for an unknown GPU, but a trial of a few passes does. All orders compute the same sums and differ in the
last bits only; two runs that find the same file choose the same, and give the same bits.

Shapes: T rows, K inputs, N outputs of all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.core.clock import Phase, phase
from weftune.core.weights import CODES
from weftune.ops.lora.choice_file import ChoiceFile, MeasuredPlan
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import Group
from weftune.ops.lora.tiling import ProductPlan, rank_block

TIE = 1.01
"""Ratio to the fastest time within which an order counts as equal, so that noise does not decide."""
MOST_ROWS = 1 << 14
"""Maximum number of rows in a trial. More rows keep a device no busier and would only make the trial
longer."""
MOST_THREADS = 8
"""Maximum number of concurrent compilations: more would wait for the interpreter's lock."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything that a trial depends on, except the machine."""

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
    """Number of slots in the group's table: kernels are compiled for it, and not a second time for the
    trial."""
    drops: bool
    residual: bool
    transposed: bool
    """Whether the frozen weight is stored as [K, N]."""
    aligned: bool
    coded: bool = False
    """Whether the frozen weight is stored as 8-bit floats that products read directly."""

    @property
    def text(self) -> str:
        """Readable key of the shape in the file."""
        words = [str(self.dtype).removeprefix("torch."), f"{self.rows} rows", f"{self.features} inputs"]
        words += [f"{'+'.join(map(str, self.widths))} outputs", f"rank {self.ranks}", f"{self.slots} slots"]
        words += [f"{self.bands} bands"] if self.bands > 1 else []
        words += [name for name in ("drops", "residual", "transposed", "aligned") if getattr(self, name)]
        words += ["fp8"] if self.coded else []
        return ", ".join(words)


Measure = Callable[[Shape, Sequence[ProductPlan]], Mapping[ProductPlan, float]]
"""A function that returns the microseconds of every order that the device can run, and raises
`torch.OutOfMemoryError` if a trial does not fit."""
Compile = Callable[[Shape, ProductPlan], None]
"""A function that compiles the kernels of an order."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The orders that may be used at sites of one shape."""

    shape: Shape
    orders: tuple[ProductPlan, ...]

    @property
    def text(self) -> str:
        return f"{self.shape.text}: {' or '.join(self.orders)}"


class Choices:
    def __init__(
        self,
        measure: Measure,
        file: ChoiceFile | None,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        compile: Compile | None = None,
        pinned: bool = False,
    ) -> None:
        """`file` caches the measured orders. None disables measuring: an interpreter's times say nothing
        about a GPU. If `pinned`, the first allowed order is used without measuring, and the file is not
        read."""
        self._measure = measure
        self._file = file
        self._capturing = capturing
        self._compile = compile
        self.pinned = pinned
        self.forced: ProductPlan | None = None
        """Product plan of every site, for measurements, whether or not it is the best. None disables it."""
        self._compiled: set[Candidates] = set()
        self._orders: dict[Candidates, ProductPlan] = {}

    @property
    def compiles(self) -> bool:
        """Whether `compile_ahead` has any effect."""
        return self._file is not None and self._compile is not None

    def compile_ahead(self, contests: Iterable[Candidates]) -> None:
        """Compile the kernels of all undecided contests in parallel.

        Errors are left to the pass that needs the kernel.
        """
        new = {one for one in contests if len(one.orders) > 1} - self._compiled - self._orders.keys()
        if self._file is None or self._compile is None or not new or self._capturing():
            return
        self._compiled |= new
        known = {} if self.pinned or self.forced else self._file.read()
        asked = [(one.shape, order) for one in new if one.text not in known for order in self._taken(one)]
        if not asked:
            return

        def compiled(one: tuple[Shape, ProductPlan], compile: Compile = self._compile) -> None:
            with suppress(Exception):
                compile(*one)

        with phase(Phase.COMPILING), ThreadPoolExecutor(min(MOST_THREADS, len(asked))) as threads:
            list(threads.map(compiled, asked))
        torch.cuda.empty_cache()

    def _taken(self, contest: Candidates) -> tuple[ProductPlan, ...]:
        """Return the orders that a contest may choose."""
        if self.forced is not None:
            return (self.forced,)
        return contest.orders[:1] if self.pinned else contest.orders

    def order(
        self,
        x_TK: Tensor,
        weight_NK: Tensor,
        residual_TN: Tensor | None,
        group: Group,
        rows: Rows,
        orders: tuple[ProductPlan, ...],
    ) -> ProductPlan:
        """Return one of the allowed `orders`; the first if nothing can be measured."""
        if self.forced is not None:
            return self.forced
        if self._file is None or self.pinned or len(orders) == 1:
            return orders[0]
        contest = Candidates(shape_of(x_TK.dtype, weight_NK, residual_TN is not None, group, rows), orders)
        if contest not in self._orders:
            if self._capturing():
                # Nothing may wait for the device now. The choice is not stored: the next pass may be able to
                # measure.
                return orders[0]
            self._orders[contest] = self._find(self._file, contest)
        return self._orders[contest]

    def _find(self, file: ChoiceFile, contest: Candidates) -> ProductPlan:
        orders = contest.orders
        known = file.read().get(contest.text)
        if known is not None and known.order in orders:
            return known.order
        times: Mapping[ProductPlan, float] | None = None
        with phase(Phase.TRYING), suppress(torch.OutOfMemoryError):
            times = self._measure(contest.shape, orders)
        if times is None:
            # Another process may have more memory, so nothing is written to the file.
            torch.cuda.empty_cache()
            return orders[0]
        if not times:
            # None of their kernels runs on this device. The library's product runs on all devices.
            return ProductPlan.wide
        return file.add(contest.text, MeasuredPlan(fastest(times), times), orders).order


def shape_of(dtype: torch.dtype, weight_NK: Tensor, residual: bool, group: Group, rows: Rows) -> Shape:
    return Shape(
        dtype=dtype,
        features=weight_NK.shape[1],
        widths=tuple(high - low for low, high in group.columns),
        rows=min(MOST_ROWS, 1 << (max(1, len(rows.token_index_T)) - 1).bit_length()),
        ranks=rank_block(group.rank),
        bands=group.bands,
        slots=len(rows.key_S),
        drops=group.drops,
        residual=residual,
        transposed=weight_NK.stride(0) < weight_NK.stride(1),
        aligned=group.table.aligned,
        coded=weight_NK.dtype is CODES,
    )


def fastest(times: Mapping[ProductPlan, float]) -> ProductPlan:
    """Return the first order, in the order of the enum, among those as good as the fastest."""
    enough = TIE * min(times.values())
    return next(order for order in ProductPlan if order in times and times[order] <= enough)
