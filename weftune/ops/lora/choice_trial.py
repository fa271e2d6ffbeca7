"""A trial that times the orders of the tiled route, forward and backward, on a synthetic site of the same
shape.

Nothing of the base or of the running jobs is read or written, not even torch's random state.

Shapes: T rows, K inputs, N outputs of all parts, R ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from weftune.core.deterministic import are_kernels_deterministic
from weftune.core.weights import CodedMatrix
from weftune.ops.dropout import step_key
from weftune.ops.lora.choice import Choices, Shape
from weftune.ops.lora.choice_file import file_for
from weftune.ops.lora.operands import Right
from weftune.ops.lora.rows import Rows, Seat
from weftune.ops.lora.table import Entry, Group, SlotTable
from weftune.ops.lora.tiled import backward, forward
from weftune.ops.lora.tiling import ProductPlan, SiteCall, choose_tiling

JOBS = 8
DROPOUT = 0.1
"""Dropout of the trial; the cost of masks does not depend on it."""
BUDGET = 60_000.0
"""Microseconds that all rounds may take together, unless `FEWEST` rounds take more."""
FEWEST, MOST = 3, 9
"""Minimum and maximum number of timed rounds."""
HEAD_START = 4_000_000
"""Device cycles, some milliseconds, that the host needs to launch one round."""


def choices_on(device: torch.device) -> Choices:
    """Return the choices for the sites of a base on this device; pinned if kernels must be deterministic."""
    return Choices(
        partial(time_orders, device=device),
        file_for(device),
        compile=partial(compile_order, device=device),
        pinned=are_kernels_deterministic(),
    )


@torch.no_grad()
def compile_order(shape: Shape, order: ProductPlan, device: torch.device) -> None:
    with torch.cuda.device(device):
        made_up_site(shape, device).step(order)
        torch.cuda.current_stream().synchronize()


@torch.no_grad()
def time_orders(
    shape: Shape, orders: Sequence[ProductPlan], device: torch.device
) -> dict[ProductPlan, float]:
    """Return the microseconds of one forward and backward in each order that the device can run."""
    with torch.cuda.device(device):
        site = made_up_site(shape, device)
        scratch = torch.empty(2 * _cache_bytes(device), dtype=torch.int8, device=device)
        runnable = [order for order in orders if _runs(site, order)]
        if not runnable:
            return {}
        # The first round stabilises clocks and caches, and determines how many rounds fit the budget.
        first = _round(site, runnable, scratch)
        rounds = max(FEWEST, min(MOST, int(BUDGET / sum(first.values()))))
        taken = [_round(site, runnable, scratch) for _ in range(rounds)]
    return {order: statistics.median(times[order] for times in taken) for order in runnable}


@dataclass(frozen=True, slots=True)
class Site:
    """A synthetic site with eight jobs, in place of one of the base."""

    x_TK: Tensor
    dy_TN: Tensor
    weight_NK: Right
    residual_TN: Tensor | None
    group: Group
    rows: Rows
    entries: list[list[Entry]]
    """Adapters, kept alive here: the group's table has only their addresses."""

    def step(self, order: ProductPlan) -> None:
        chosen = choose_tiling(self.rows, self.group, self.x_TK.shape[1], self.x_TK.dtype)
        call = SiteCall(self.group, self.rows, True, chosen, order)
        _, s_TPR, _ = forward(self.x_TK, self.weight_NK, None, self.residual_TN, call)
        backward(self.dy_TN, self.x_TK, self.weight_NK, s_TPR, call, wants_dx=True)


def _runs(site: Site, order: ProductPlan) -> bool:
    """Compile and warm up, and return whether the order runs. A kernel that needs more than this device has
    excludes the order and does not fail the job."""
    from triton.errors import TritonError

    try:
        site.step(order)
    except TritonError:
        return False
    return True


def _round(site: Site, orders: Sequence[ProductPlan], scratch: Tensor) -> dict[ProductPlan, float]:
    """Time all orders in turn, so that a change of clocks affects them all.

    The device's cache is overwritten before each, as the other layers of a model would do.
    """
    marks = {order: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for order in orders}
    # During this sleep of the device the host gets ahead of it, so that launches are not part of the times:
    # in training a captured graph launches everything.
    torch.cuda._sleep(HEAD_START)
    for order, (began, ended) in marks.items():
        scratch.zero_()
        began.record()
        site.step(order)
        ended.record()
    torch.cuda.current_stream().synchronize()
    return {order: 1000.0 * began.elapsed_time(ended) for order, (began, ended) in marks.items()}


def made_up_site(shape: Shape, device: torch.device) -> Site:
    generator = torch.Generator(device).manual_seed(0)

    def normal(high: int, wide: int) -> Tensor:
        return torch.randn(high, wide, generator=generator, device=device, dtype=shape.dtype)

    outputs = sum(shape.widths)
    names = [f"site{site}" for site in range(len(shape.widths))]
    table = SlotTable.empty(names, shape.slots, device, shape.aligned, shape.bands)
    columns = tuple(pairwise(accumulate(shape.widths, initial=0)))
    group = Group(columns, table, shape.bands * shape.ranks, shape.drops)
    rows = Rows.empty(shape.rows, shape.slots, device)
    jobs = min(JOBS, shape.slots, shape.rows)
    edges = [job * shape.rows // jobs for job in range(jobs + 1)]
    seats = [Seat(low, high, slot, step_key(slot, 1)) for slot, (low, high) in enumerate(pairwise(edges))]
    rows.fill(seats, np.arange(shape.rows, dtype=np.int32))
    entries = [[_entry(shape, width, normal) for width in shape.widths] for _ in seats]
    for slot, seated in enumerate(entries):
        group.write(slot, seated)
    weight_NK = normal(shape.features, outputs).T if shape.transposed else normal(outputs, shape.features)
    return Site(
        x_TK=normal(shape.rows, shape.features),
        dy_TN=normal(shape.rows, outputs),
        weight_NK=CodedMatrix.of(weight_NK) if shape.coded else weight_NK,
        residual_TN=normal(shape.rows, outputs) if shape.residual else None,
        group=group,
        rows=rows,
        entries=entries,
    )


def _entry(shape: Shape, width: int, normal: Callable[[int, int], Tensor]) -> Entry:
    rank = shape.bands * shape.ranks
    a_RK, b_RN = normal(rank, shape.features), normal(rank, width)
    da_RK, db_RN = (torch.zeros_like(weight, dtype=torch.float32) for weight in (a_RK, b_RN))
    return Entry(a_RK, b_RN, da_RK, db_RN, scale=1.0, dropout=DROPOUT if shape.drops else 0.0)


def _cache_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size
