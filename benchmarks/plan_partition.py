"""Streaming partition against Mobius's maximum-stage and minimum-stage partitions, and cross mapping against
sequential mapping: all from layer costs counted from the models' shapes, nothing is run.

    python -m benchmarks.plan_partition [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from benchmarks.contention import Root, contended_seconds, fastest_order
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.plan.cost.estimate import LayerCost
from weftune.plan.layout.mapping import Topology, least_contention_order, sequential_order
from weftune.plan.layout.mobius_partition import largest_stages, search_partition, smallest_stages
from weftune.plan.layout.mobius_step import (
    Host,
    MobiusVisit,
    MobiusVisits,
    StreamPartition,
    step_seconds,
    visits,
)

BYTES = 2
RANK = 16
KEPT = 0.6
"""Values kept per token over the widths of a block's linears, while one microbatch is in its backward."""
LOGITS = 1024
"""Rows of logits that are there at once."""


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    layers: int
    hidden: int
    inner: int
    keys: int
    vocabulary: int
    gated: bool = True

    def linears(self) -> list[tuple[int, int]]:
        h, f, k = self.hidden, self.inner, self.keys
        return [(h, h), (h, k), (h, k), (h, h), (h, f), (f, h), *([(h, f)] if self.gated else [])]


SHAPES = (
    Shape("8B", 32, 4096, 14336, 1024, 128256),
    Shape("32B", 64, 5120, 27648, 1024, 152064),
    Shape("70B", 80, 8192, 28672, 1024, 128256),
)
PAPER = (
    Shape("GPT 8B", 40, 4096, 16384, 4096, 50257, gated=False),
    Shape("GPT 15B", 40, 5120, 20480, 5120, 50257, gated=False),
    Shape("GPT 51B", 50, 9216, 36864, 9216, 50257, gated=False),
)
"""Mobius's table 3, less its smallest model."""


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    host: Host
    rate: float
    """Floating-point operations per second that a GPU attains."""


MACHINES = (
    Machine("1 × 80 GB, 55 GB/s", Host(1, 72 << 30, 55e9), 3.5e14),
    Machine("4 × 80 GB, 55 GB/s", Host(4, 72 << 30, 55e9), 3.5e14),
    Machine("1 × 24 GB, 13 GB/s", Host(1, 22 << 30, 13e9), 0.7e14),
    Machine("4 × 24 GB, 13 GB/s", Host(4, 22 << 30, 13e9), 0.7e14),
)
TOPOLOGIES = (Topology((2, 2)), Topology((1, 3)), Topology((4, 4)))


def layer_costs(shape: Shape, tokens: int, rate: float) -> list[LayerCost]:
    """Matrix products only; a backward makes its forward again and has no weight gradients."""
    linears = shape.linears()
    weights = sum(rows * columns for rows, columns in linears)
    widths = sum(rows + columns for rows, columns in linears)
    passed = BYTES * shape.hidden * tokens
    forward = 2 * weights * tokens / rate
    state = widths * RANK * (BYTES + 16)
    kept = int(KEPT * BYTES * widths * tokens)
    block = LayerCost("block", forward, 2 * forward, BYTES * weights, passed, passed, state, kept)
    table = BYTES * shape.hidden * shape.vocabulary
    product = 2 * shape.hidden * shape.vocabulary * tokens / rate
    embedding = LayerCost("embedding", tokens * 1e-8, 0.0, table, passed)
    head = LayerCost("head", product, 2 * product, table, 0, passed, 0, 4 * LOGITS * shape.vocabulary)
    return [embedding, *[block] * shape.layers, head]


@dataclass(frozen=True, slots=True)
class PartitionRow:
    model: str
    machine: str
    tokens: int
    largest: float
    smallest: float
    searched: float
    bound: float
    stages: int
    resident: int
    planning: float


def partition_row(shape: Shape, machine: Machine, tokens: int, microbatches: int = 4) -> PartitionRow:
    layers, host = layer_costs(shape, tokens, machine.rate), machine.host
    began = time.perf_counter()
    found = search_partition(layers, host, microbatches)
    planning = time.perf_counter() - began
    largest, smallest = (
        step_seconds(partition, layers, host, microbatches)
        for partition in (largest_stages(layers, host), smallest_stages(layers, host))
    )
    resident = sum(found.partition.resident_stages)
    stages = len(found.partition.resident_stages)
    return PartitionRow(
        shape.name,
        machine.name,
        tokens,
        largest,
        smallest,
        found.seconds,
        found.bound,
        stages,
        resident,
        planning,
    )


@dataclass(frozen=True, slots=True)
class MappingRow:
    topology: str
    model: str
    stages: int
    shared: float
    """What cross mapping saves over sequential mapping: uploads under a root in equal shares,"""
    ordered: float
    """the earliest stage first,"""
    unfetched: float
    """in equal shares with no prefetch at all."""
    most_shared: float
    """What the best of all orders saves, in equal shares,"""
    most_ordered: float
    """and the earliest stage first."""


def mapping_rows(topology: Topology, tokens: int = 512) -> Iterator[MappingRow]:
    """The paper's models and microbatches, in even stages, all of them streamed."""
    machine = MACHINES[-1]
    host = replace(machine.host, gpus=topology.gpus)
    for shape in PAPER:
        layers = layer_costs(shape, tokens, machine.rate)
        for stages in (2 * host.gpus, 3 * host.gpus, 4 * host.gpus, 5 * host.gpus, len(layers)):
            partition = even(len(layers), stages)
            if step_seconds(partition, layers, host, host.gpus) == float("inf"):
                continue
            moved = visits(partition, layers, host)
            cross = least_contention_order(topology, stages)
            fair, first = Root(host.bandwidth), Root(host.bandwidth, ordered=True)
            most = [
                gain(moved, fastest_order(moved, topology, host, host.gpus, root), topology, host, root)
                for root in (fair, first)
            ]
            yield MappingRow(
                "+".join(map(str, topology.root_sizes)),
                shape.name,
                stages,
                gain(moved, cross, topology, host, fair),
                gain(moved, cross, topology, host, first),
                gain(unfetched(moved), cross, topology, host, fair),
                *most,
            )


def even(layers: int, stages: int) -> StreamPartition:
    cuts = [round(layers * number / stages) for number in range(stages + 1)]
    return StreamPartition(tuple(cuts), (False,) * stages)


def unfetched(moved: MobiusVisits) -> MobiusVisits:
    def late(direction: Sequence[MobiusVisit]) -> tuple[MobiusVisit, ...]:
        return tuple(replace(visit, delayed_bytes=visit.upload_bytes) for visit in direction)

    return MobiusVisits(late(moved.forward), late(moved.backward))


def gain(moved: MobiusVisits, order: tuple[int, ...], topology: Topology, host: Host, root: Root) -> float:
    """The share of sequential mapping's step that this order saves."""
    sequential, other = (
        contended_seconds(moved, one, topology, host, host.gpus, root)
        for one in (sequential_order(topology), order)
    )
    return 1 - other / sequential


def show_partitions(rows: Sequence[PartitionRow]) -> str:
    titles = (
        *("base", "tokens", "max-stage s", "min-stage s", "searched s", "vs better", "bound s"),
        *("stages", "resident", "planned in s", "GPUs"),
    )
    return aligned(titles, [_cells(row) for row in rows])


def _cells(row: PartitionRow) -> tuple[str, ...]:
    saved = 1 - row.searched / min(row.largest, row.smallest)
    times = (f"{row.largest:.3f}", f"{row.smallest:.3f}", f"{row.searched:.3f}", f"−{saved:.1%}")
    counts = (str(row.stages), str(row.resident), f"{row.planning:.1f}")
    return (row.model, str(row.tokens), *times, f"{row.bound:.3f}", *counts, row.machine)


def show_mappings(rows: Sequence[MappingRow]) -> str:
    """Gains over the models: of two stages to a GPU, as in the paper's figure 4, and of more."""
    lines = []
    for name in dict.fromkeys(row.topology for row in rows):
        mine = [row for row in rows if row.topology == name]
        fewest = min(row.stages for row in mine)
        for many, chosen in (
            ("2", [row for row in mine if row.stages == fewest]),
            ("3 and more", [row for row in mine if row.stages > fewest]),
        ):
            kinds = ("shared", "ordered", "unfetched", "most_shared", "most_ordered")
            gains = [[getattr(row, kind) for row in chosen] for kind in kinds]
            lines.append((name, many, *map(spread, gains)))
    titles = (
        "roots",
        "stages per GPU",
        "equal shares",
        "earliest first",
        "no prefetch",
        "best order, shares",
    )
    return aligned((*titles, "best order, earliest first"), lines)


def spread(gains: Sequence[float]) -> str:
    """Least, middle and greatest."""
    return f"{min(gains) * 100:.1f} / {median(gains) * 100:.1f} / {max(gains) * 100:.1f} %"


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    partitions = [
        partition_row(shape, machine, tokens)
        for shape in SHAPES
        for machine in MACHINES
        for tokens in (512, 2048)
    ]
    print(show_partitions(partitions))
    mappings = [row for topology in TOPOLOGIES for row in mapping_rows(topology)]
    print(
        "\nCross over sequential mapping, step time saved (least / median / greatest)\n"
        + show_mappings(mappings)
    )
    print(EXPLANATION)
    numbers: dict[str, Any] = {
        "partitions": [asdict(row) for row in partitions],
        "mappings": [asdict(row) for row in mappings],
    }
    finish(numbers, options.json)


EXPLANATION = """
Mobius's figure 10 has 11.3 to 18.1 % on 4+4 and does not say with how many stages. Two stages to a GPU
and the earliest upload first, as in its figure 4, come to about that share here. With more stages to a
GPU cross mapping saves less, and the last two columns show that no other order would save much more. On
1+3 every order is a rotation of the sequential one and only chooses which stages the GPU apart gets; Eq
13 does not see their bytes, so cross mapping can lose, which the best order by simulation does not. Not
simulated: gradients of the weights and optimizer state, which would cross the same roots and which a
frozen base does not move."""


if __name__ == "__main__":
    main()
