"""Adapters at one site, with inputs that take turns so that the cache does not help, timed in CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weftune.ops.dropout import step_key
from weftune.ops.lora.rows import Rows, SlotRows
from weftune.ops.lora.table import Group, LowRank, SlotTable, required_bands
from weftune.ops.lora.tiled import backward, forward
from weftune.ops.lora.tiling import ProductPlan, SiteCall, choose_tiling

SLOTS = 64
ROTATION_BYTES = 512 << 20
"""The inputs of one rotation are together several times the cache of any GPU."""


@dataclass(frozen=True, slots=True)
class SiteAdapters:
    """The adapters at the site: rows shared out evenly."""

    name: str
    ranks: tuple[int, ...]
    dropout: float = 0.0
    rows: int = 8192


@dataclass(frozen=True, slots=True)
class SiteCase:
    adapters: SiteAdapters
    weight_NK: Tensor
    x: tuple[Tensor, ...]
    """Inputs [T, K] that take turns, and gradients [T, N] beside them."""
    dy: tuple[Tensor, ...]
    seats: tuple[SlotRows, ...]
    entries: tuple[LowRank, ...]
    group: Group

    @property
    def turns(self) -> int:
        return len(self.x)

    @property
    def shares(self) -> int:
        """In how many a band of ds is made before they are summed up; none where dy is read twice instead."""
        call = self.call()
        return sum(call.blocks(call.tiling.ds_db.columns)) if call.tiling.reads_dy_once else 0

    def call(self, plan: ProductPlan = ProductPlan.wide, tile: int = 64, piece: int = 1024) -> SiteCall:
        x = self.x[0]
        rows = Rows.empty(x.shape[0], SLOTS, x.device, tile=tile, piece=piece)
        rows.fill(self.seats, np.arange(x.shape[0], dtype=np.int32))
        return SiteCall(self.group, rows, True, choose_tiling(rows, self.group, x.shape[1], x.dtype), plan)

    def nobody(self) -> SiteCall:
        """The fused plan with no job aboard."""
        call = self.call(ProductPlan.fused)
        call.rows.fill((), np.zeros(0, dtype=np.int32))
        return call

    def frozen(self, turn: int) -> tuple[Tensor, Tensor]:
        return self.x[turn] @ self.weight_NK.T, self.dy[turn] @ self.weight_NK

    def tiled(self, call: SiteCall, turn: int) -> Tensor | None:
        _, s, _ = forward(self.x[turn], self.weight_NK, None, None, call)
        return backward(self.dy[turn], self.x[turn], self.weight_NK, s, call, needs_dx=True)


def site_case(adapters: SiteAdapters, features: int, outputs: int) -> SiteCase:
    turns = max(2, -(-ROTATION_BYTES // (2 * adapters.rows * (features + outputs))))
    return made_up_case(adapters, features, outputs, turns, torch.device("cuda"), torch.bfloat16)


def made_up_case(
    adapters: SiteAdapters, features: int, outputs: int, turns: int, device: torch.device, dtype: torch.dtype
) -> SiteCase:

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    table = SlotTable.empty(["site"], SLOTS, device, bands=required_bands(max(adapters.ranks)))
    group = Group(((0, outputs),), table, max(adapters.ranks), adapters.dropout > 0)
    length = adapters.rows // len(adapters.ranks)
    seats, entries = [], []
    for slot, rank in enumerate(adapters.ranks):
        a, b = normal(rank, features) / features**0.5, normal(rank, outputs)
        gradients = torch.zeros_like(a, dtype=torch.float32), torch.zeros_like(b, dtype=torch.float32)
        entries.append(LowRank(a, b, *gradients, scale=2.0, dropout=adapters.dropout))
        group.write(slot, entries[-1:])
        seats.append(SlotRows(slot * length, slot * length + length, slot, step_key(slot, 1)))
    return SiteCase(
        adapters,
        normal(outputs, features) / features**0.5,
        tuple(normal(adapters.rows, features) for _ in range(turns)),
        tuple(normal(adapters.rows, outputs) for _ in range(turns)),
        tuple(seats),
        tuple(entries),
        group,
    )


def captured(step: Callable[[int], object], turns: int) -> torch.cuda.CUDAGraph:
    """All turns in one graph; warmed up first, so that nothing compiles while it is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            step(turn)
    return graph


def microseconds(
    steps: Mapping[str, Callable[[int], object]], turns: int, replays: int = 30
) -> dict[str, float]:
    """The median time of each step; the steps alternate, so that a change of clocks meets them all, and take
    turns in being the first, which finds the device rested."""
    graphs = {name: captured(step, turns) for name, step in steps.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for graph in graphs.values():
        graph.replay()
    names = list(graphs)
    for replay in range(replays):
        marks = {}
        first = replay % len(names)
        for name in names[first:] + names[:first]:
            marks[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[name][0].record()
            graphs[name].replay()
            marks[name][1].record()
        torch.cuda.synchronize()
        for name, (began, ended) in marks.items():
            taken[name].append(began.elapsed_time(ended) * 1000 / turns)
    return {name: statistics.median(values) for name, values in taken.items()}
