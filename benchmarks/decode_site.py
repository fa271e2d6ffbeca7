"""Groups of adapted linears in a decode step on one GPU: the time of each way to compute them.

    python -m benchmarks.decode_site [--shape 8b] [--sequences 64] [--adapters 1,8,64] [--rank 16] [--toy]

For each group of sites of a layer: the library's product in the base's dtype (`bare`) and in float32
(`float32`), the kernels for few rows (`few rows`) and those of training passes (`tiled`), which both contain
the product in float32. `floor` is the time in which the device copies the bytes of weight and adapters. Every
number is the mean of a captured graph of `COPIES` layers, so that weights do not stay in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from benchmarks.decode import copy_rate
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, toy_size
from weftune.bench.table import aligned
from weftune.bench.timing import Hardware, bench_hardware, synchronise
from weftune.ops.lora.few_rows import TILE_ROWS, few_rows_linear
from weftune.ops.lora.products import product_in_float32
from weftune.ops.lora.rows import Rows, SlotRows
from weftune.ops.lora.table import Group, LowRank, SlotTable
from weftune.ops.lora.tiled import forward
from weftune.ops.lora.tiling import SiteCall, choose_tiling

COPIES = 8
"""Layers that a measured graph computes, each with weights and adapters of its own."""
REPLAYS = 20
BLOCKS = 5


@dataclass(frozen=True, slots=True)
class SiteTimes:
    """Microseconds of one group of sites with one number of adapters."""

    group: str
    adapters: int
    bare: float
    float32: float
    few_rows: float
    tiled: float
    floor: float
    difference: float
    """Largest difference between the outputs of both kernels, relative to the largest output."""

    def row(self) -> tuple[str, ...]:
        times = self.bare, self.float32, self.few_rows, self.tiled, self.floor
        return self.group, str(self.adapters), *(f"{one:.1f}" for one in times), f"{self.difference:.1e}"


@dataclass(frozen=True, slots=True)
class Layer:
    """One copy of a group of sites, with its adapters."""

    weight_NK: Tensor
    group: Group
    adapters: Sequence[LowRank]
    """Keeps the tensors alive: the group's table has only their addresses."""


def groups_of(size: Size) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Map the name of each group of a layer to its inputs and the outputs of its sites."""
    keys = size.head_width * size.kv_heads
    return {
        "q, k, v": (size.hidden, (size.query_width, keys, keys)),
        "o": (size.query_width, (size.hidden,)),
        "gate, up": (size.hidden, (size.intermediate, size.intermediate)),
        "down": (size.intermediate, (size.hidden,)),
    }


def layer(features: int, widths: Sequence[int], adapters: int, rank: int, hardware: Hardware) -> Layer:
    def normal(*shape: int) -> Tensor:
        return 0.02 * torch.randn(*shape, device=hardware.device, dtype=hardware.dtype)

    columns = tuple(pairwise(accumulate(widths, initial=0)))
    table = SlotTable.empty([f"site{index}" for index in range(len(widths))], adapters, hardware.device)
    none, made = torch.empty(0, device=hardware.device), []
    for slot in range(adapters):
        own = [
            LowRank(normal(rank, features), normal(rank, width), none, none, scale=2.0, dropout=0.0)
            for width in widths
        ]
        table.set_slot(slot, own)
        made += own
    table.copy_to_device()
    return Layer(normal(columns[-1][1], features), Group(columns, table, rank, False), made)


def decode_rows(sequences: int, adapters: int, tile: int, hardware: Hardware) -> Rows:
    """Return rows of which every adapter has as many as any other."""
    rows = Rows.empty(sequences, adapters, hardware.device, tile, max_runs=adapters + 1)
    edges = [index * sequences // adapters for index in range(adapters + 1)]
    rows.fill([SlotRows(*edge, slot, 0) for slot, edge in enumerate(pairwise(edges))], torch.empty(0).numpy())
    return rows


def microseconds(run: Callable[[], object], hardware: Hardware) -> float:
    """Return the median time of `run`, on a GPU as a captured graph, per copy."""
    replay, replays = run, 1
    if hardware.device.type == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay, replays = graph.replay, REPLAYS
    found = []
    for _ in range(BLOCKS):
        synchronise(hardware.device)
        began = time.perf_counter()
        for _ in range(replays):
            replay()
        synchronise(hardware.device)
        found.append((time.perf_counter() - began) / (replays * COPIES))
    return 1e6 * statistics.median(found)


def measure(
    name: str, size: Size, sequences: int, adapters: int, rank: int, rate: float, hardware: Hardware
) -> SiteTimes:
    features, widths = groups_of(size)[name]
    layers = [layer(features, widths, adapters, rank, hardware) for _ in range(COPIES)]
    x_TK = torch.randn(sequences, features, device=hardware.device, dtype=hardware.dtype)
    single = decode_rows(sequences, adapters, TILE_ROWS, hardware)
    rows = decode_rows(sequences, adapters, 64, hardware)
    tiling = choose_tiling(rows, layers[0].group, features, hardware.dtype)

    def few(one: Layer) -> Tensor:
        return few_rows_linear(x_TK, one.weight_NK, None, None, one.group, single)

    def tiled(one: Layer) -> Tensor:
        return forward(x_TK, one.weight_NK, None, None, SiteCall(one.group, rows, False, tiling))[0]

    def time_of(run: Callable[[Layer], object]) -> float:
        return microseconds(lambda: [run(one) for one in layers], hardware)

    y_TN = tiled(layers[0]).float()
    own = sum(one.a_RK.nbytes + one.b_RN.nbytes for one in layers[0].adapters)
    return SiteTimes(
        group=name,
        adapters=adapters,
        bare=time_of(lambda one: x_TK @ one.weight_NK.T),
        float32=time_of(lambda one: product_in_float32(x_TK, one.weight_NK.T)),
        few_rows=time_of(few),
        tiled=time_of(tiled),
        floor=1e6 * (layers[0].weight_NK.nbytes + own) / rate,
        difference=float((few(layers[0]).float() - y_TN).abs().max() / y_TN.abs().max()),
    )


@torch.no_grad()
def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=SIZES, default="8b")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--adapters", default="1,8,64", help="numbers of adapters, separated by commas")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--toy", action="store_true", help="a tiny base on the CPU, with TRITON_INTERPRET=1")
    options = parser.parse_args()
    if (hardware := bench_hardware(options.toy)) is None:
        parser.error("no GPU is found here; --toy runs on the CPU")
    size = toy_size(SIZES[options.shape]) if options.toy else SIZES[options.shape]
    rate, found = copy_rate(hardware), []
    for adapters in map(int, options.adapters.split(",")):
        for name in groups_of(size):
            found.append(measure(name, size, options.sequences, adapters, options.rank, rate, hardware))
            print(" ".join(found[-1].row()), flush=True)
    titles = ("µs", "adapters", "bare", "float32", "few rows", "tiled", "floor", "difference")
    print(aligned(titles, [one.row() for one in found]))
    finish({"size": asdict(size), "copy_rate": rate, "results": [asdict(one) for one in found]}, options.json)


if __name__ == "__main__":
    main()
