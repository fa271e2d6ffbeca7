"""What the planner foresees for bases that are streamed through one GPU: the cut, and what a round takes.

Predictions only, for a link of 55 GB/s, passes at 600 TFLOP/s and a host that steps a billion adapter
parameters a second; every job has rank 16 on all linears and batches of 1×1024 tokens.

    python -m benchmarks.plan_stream [--toy] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.baselines import Work
from benchmarks.llama import SIZES, outline
from benchmarks.result import arguments, finish
from benchmarks.streamed_side import choose
from benchmarks.table import aligned
from weft.base.shape import model_shape
from weft.plan.memory import FUSED_SLACK_BYTES
from weft.plan.stream_choice import StreamChoice
from weft.plan.stream_need import STREAM_SLACK_BYTES, StreamDevice

GIB = 1 << 30
HOST = int(120e9)


@dataclass(frozen=True, slots=True)
class Case:
    shape: str
    gib: float
    jobs: int


CASES = (
    Case("8b", 10, 16),
    *(Case("32b", 24, jobs) for jobs in (1, 2, 4, 8, 16)),
    Case("70b", 139, 8),
)
TOY = (Case("8b", 10, 1),)
TITLES = (
    "", "stages", "stay", "slots", "adapters", "tokens", "GPU GiB", "host GB", "s a round", "waits", "plan s",
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--toy", action="store_true", help="one case only: does it run at all")
    asked = parser.parse_args()
    rows, found = [], []
    for case in TOY if asked.toy else CASES:
        began = time.perf_counter()
        chosen = foreseen(case)
        seconds = time.perf_counter() - began
        rows.append([f"{case.shape}, {case.gib:g} GiB, {case.jobs} jobs", *cells(chosen), f"{seconds:.1f}"])
        found.append({"shape": case.shape, "jobs": case.jobs, "seconds": chosen.step_seconds})
    print(aligned(TITLES, rows))
    finish({"cases": found}, asked.json)


def foreseen(case: Case) -> StreamChoice:
    shape = model_shape(outline(SIZES[case.shape], torch.device("meta"), torch.bfloat16), torch.bfloat16)
    device = StreamDevice(
        budget=int(case.gib * GIB),
        host_budget=HOST,
        bandwidth=55e9,
        flops=600e12,
        slack=STREAM_SLACK_BYTES,
        whole_slack=FUSED_SLACK_BYTES,
    )
    work = Work(jobs=case.jobs, batch=1, length=1024, rank=16)
    return choose(shape, work, device, 8192, "chosen")


def cells(chosen: StreamChoice) -> Iterator[str]:
    cut = chosen.cut
    yield str(len(cut.stages))
    yield str(len(cut.stages) - len(cut.streamed))
    yield str(cut.slots)
    yield "travel" if cut.travels else "stay"
    yield str(chosen.capacity)
    yield f"{chosen.device_bytes / GIB:.1f}"
    yield f"{chosen.host_bytes / 1e9:.0f}"
    yield f"{chosen.step_seconds:.2f}"
    yield f"{chosen.unhidden:.0%}"


if __name__ == "__main__":
    main()
