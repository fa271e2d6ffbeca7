"""What the planner foresees for bases that are streamed through one GPU: the cut, and what a round takes.

Predictions only, for a link of 55 GB/s each way and forward passes at 650 TFLOP/s; every job has rank 16 on
all linears and samples of 1024 tokens. Beside each choice stand the best one that keeps inputs of stages on
the GPU, and the bytes of the same cut, were they kept.

    python -m benchmarks.plan_stream [--toy] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.streamed_side import choose
from weftune.base.shape import model_shape
from weftune.bench.baselines import BaselineWork
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, build_frozen
from weftune.bench.table import aligned
from weftune.core.shapes import ModelShape
from weftune.errors import PlanError
from weftune.plan.layout.need import gpu_device
from weftune.plan.layout.stream_choice import HOST_STATES, HostState, StreamChoice
from weftune.plan.program.layout import padded_rows

GIB = 1 << 30
HOST = int(120e9)
LARGE_HOST = int(200e9)
KEPT = [way for way in HOST_STATES if not way.offloads_inputs]


@dataclass(frozen=True, slots=True)
class Case:
    shape: str
    gib: float
    jobs: int
    batch: int = 1
    host: int = HOST

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.gib:g} GiB, {self.jobs} × {self.batch}"

    @property
    def work(self) -> BaselineWork:
        return BaselineWork(jobs=self.jobs, batch=self.batch, length=1024, rank=16)


CASES = (
    Case("8b", 10, 16),
    Case("8b", 10, 4, batch=8),
    *(Case("32b", 24, jobs) for jobs in (1, 2, 4, 8, 16)),
    Case("32b", 24, 16, batch=4),
    Case("32b", 24, 8, batch=16),
    Case("70b", 139, 8),
    Case("70b", 48, 8, host=LARGE_HOST),
    Case("70b", 24, 4, batch=4, host=LARGE_HOST),
)
TOY = (Case("8b", 10, 1),)
TITLES = (
    "jobs × samples", "stages", "stay", "slots", "adapters", "inputs", "tokens", "GPU GiB", "host GB",
    "s a round", "waits", "plan s", "kept: s", "this cut, kept: GiB",
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--toy", action="store_true", help="one case only: does it run at all")
    options = parser.parse_args()
    rows, found = [], []
    for case in TOY if options.toy else CASES:
        shape = model_shape(
            build_frozen(SIZES[case.shape], torch.device("meta"), torch.bfloat16), torch.bfloat16
        )
        began = time.perf_counter()
        chosen = foreseen(case, shape)
        seconds = time.perf_counter() - began
        kept = kept_seconds(case, shape)
        whole = chosen.device_bytes + saved_bytes(case, shape, chosen)
        rows.append([case.name, *cells(chosen), f"{seconds:.1f}", told(kept), f"{whole / GIB:.1f}"])
        found.append(
            {
                "shape": case.shape,
                "jobs": case.jobs,
                "batch": case.batch,
                "seconds": chosen.round_seconds,
                "kept_seconds": kept,
            }
        )
    print(aligned(TITLES, rows))
    finish({"cases": found}, options.json)


def foreseen(case: Case, shape: ModelShape, ways: Sequence[HostState] = HOST_STATES) -> StreamChoice:
    device = gpu_device(int(case.gib * GIB), case.host, bandwidth=55e9, flops=650e12, memory_bandwidth=4e12)
    return choose(shape, case.work, device, 8192, "chosen", ways)


def kept_seconds(case: Case, shape: ModelShape) -> float | None:
    """Of a round where inputs may not leave the GPU; None if the jobs do not fit so."""
    try:
        return foreseen(case, shape, KEPT).round_seconds
    except PlanError:
        return None


def told(seconds: float | None) -> str:
    return "does not fit" if seconds is None else f"{seconds:.2f}"


def saved_bytes(case: Case, shape: ModelShape, chosen: StreamChoice) -> int:
    """What the same cut would need more, were inputs kept."""
    part = chosen.layout.for_worker(0)
    padded = padded_rows(case.work.jobs * case.work.batch * case.work.length, captures_graphs=True)
    rows = (
        len(chosen.layout.stages) - part.rounds_on_device
    ) * padded - part.extra_microbatches_on_device * chosen.capacity
    return rows * shape.hidden * shape.bytes_per_value


def cells(chosen: StreamChoice) -> Iterator[str]:
    cut = chosen.layout
    yield str(len(cut.stages))
    yield str(sum(stage.is_resident for stage in cut.stages))
    yield str(cut.slot_counts[0])
    yield "travel" if cut.adapters_travel else "stay"
    yield "offloaded" if cut.offloads_inputs else "kept"
    yield str(chosen.capacity)
    yield f"{chosen.device_bytes / GIB:.1f}"
    yield f"{chosen.host_bytes / 1e9:.0f}"
    yield f"{chosen.round_seconds:.2f}"
    yield f"{chosen.waiting_fraction:.0%}"


if __name__ == "__main__":
    main()
