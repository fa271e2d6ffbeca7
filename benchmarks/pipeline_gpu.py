"""Stages of one base in several processes that share one GPU, over gloo, against one process.

A base with random weights in a real shape is written to files; jobs of different rank train on random tokens,
by `weftune train` alone, by `weftune train --pipeline N`, and alone with microbatches of another size:
how far those two differ is the noise that the pipeline's losses are held to.

    python -m benchmarks.pipeline_gpu [--shape 1b|8b] [--stages N] [--steps N] [--toy] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.folder import Rows, ranked_jobs, read_lines, write_base, write_jobs, write_rows
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size
from weftune.bench.table import aligned
from weftune.bench.timing import Hardware, bench_hardware, reset_memory
from weftune.launch.api import train
from weftune.plan.layout.choose import MAX_TOKENS
from weftune.trainer.options import Options

RANKS = (8, 16, 4, 32)
SAMPLES, TOKENS, BATCH = 64, 256, 8
NOISE = 3.0
"""Times the difference between two ways of one process."""


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=[name for name in SIZES if name != "toy"], default="1b")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU: does it run at all")
    asked = parser.parse_args()
    hardware = bench_hardware(asked.toy)
    if hardware is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    size = SIZES["toy" if asked.toy else asked.shape]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, size, hardware, asked.steps)
        found = compare(folder, hardware, asked.stages)
    print(aligned(("", "seconds", "first losses", "last losses"), [row(*one) for one in found.items()]))
    noise = largest(found["alone"][1], found["alone, other microbatches"][1])
    gap = largest(found["alone"][1], found["pipeline"][1])
    print(f"\nlosses: the pipeline is {gap:.2e} from one process, two ways of one process {noise:.2e} apart")
    print("within noise" if gap <= NOISE * max(noise, 1e-6) else f"over {NOISE:.0f} × the noise")
    finish({"shape": size.name, "stages": asked.stages, "gap": gap, "noise": noise}, asked.json)


Run = tuple[float, dict[str, list[float]]]
"""Seconds, and the losses of every job."""


def compare(folder: Path, hardware: Hardware, stages: int) -> dict[str, Run]:
    device = hardware.device.type
    most = MAX_TOKENS[device == "cuda"]
    found = {}
    for name, capacity in (("alone", most), ("alone, other microbatches", most // 4)):
        began = time.perf_counter()
        train(folder / "jobs.yaml", output=folder / name, options=Options(device=device, capacity=capacity))
        found[name] = time.perf_counter() - began, losses(folder / name)
        reset_memory(hardware.device)
    began = time.perf_counter()
    words = ["train", str(folder / "jobs.yaml"), "--output", str(folder / "pipeline")]
    subprocess.run(
        [sys.executable, "-m", "weftune", *words, "--pipeline", str(stages), "--device", device], check=True
    )
    return found | {"pipeline": (time.perf_counter() - began, losses(folder / "pipeline"))}


def write(folder: Path, size: Size, hardware: Hardware, steps: int) -> None:
    """A base with its tokenizer, rows of tokens, and a jobs file."""
    write_base(folder / "base", size, hardware)
    write_rows(folder / "rows.jsonl", size, Rows(samples=SAMPLES, shortest=TOKENS // 4, longest=TOKENS))
    settings = dict(data="rows.jsonl", steps=steps, batch_size=BATCH, learning_rate=1e-3)
    write_jobs(folder / "jobs.yaml", folder / "base", hardware, ranked_jobs(RANKS), **settings)


def losses(output: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in read_lines(output / "metrics.jsonl"):
        if "loss" in one:
            found.setdefault(one["job"], []).append(one["loss"])
    return found


def largest(first: dict[str, list[float]], second: dict[str, list[float]]) -> float:
    """The largest relative difference of any job's loss at any step."""
    return max(abs(a - b) / abs(a) for job in first for a, b in zip(first[job], second[job], strict=True))


def row(name: str, run: Run) -> Sequence[str]:
    seconds, by_job = run
    firsts = " ".join(f"{by_job[job][0]:.4f}" for job in sorted(by_job))
    lasts = " ".join(f"{by_job[job][-1]:.4f}" for job in sorted(by_job))
    return name, f"{seconds:.1f}", firsts, lasts


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
