"""Two checkouts on one GPU, one after the other: did a change of the code make anything slower?

Both checkouts run every case in turn, each time in a process of its own, so that both meet the same card,
clocks and temperature. The fastest run of each counts: whatever else the machine does only adds time.

    git worktree add ../before 1e26299
    python -m benchmarks.two_trees ../before [--runs N] [--only step,small,tiny,stream,train] [--toy]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.folder import Rows, ranked_jobs, write_base, write_jobs, write_rows
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES
from weftune.bench.table import aligned
from weftune.bench.timing import Hardware, bench_hardware, reset_memory

HERE = Path(__file__).parents[1]
STEP, STREAM, TRAIN = "benchmarks.gpu_step", "benchmarks.gpu_stream", "train"
CASES = {
    "step": ("8B, 8 jobs of 1×1024", [STEP, "--shape", "8b", "--batch", "1x1024"]),
    "small": ("8B, 8 jobs of 4×64", [STEP, "--shape", "8b", "--batch", "4x64"]),
    "tiny": ("1B, 8 jobs of 4×64", [STEP, "--shape", "1b", "--batch", "4x64"]),
    "stream": ("8B under 10 GiB, 8 jobs", [STREAM, "--shape", "8b", "--cap", "10", "--jobs", "8"]),
    "train": ("`weftune train`, repeated, 8B, 8 jobs", [TRAIN, "8b"]),
}
TOY = {
    "step": ("a step", [STEP, "--toy"]),
    "stream": ("streamed", [STREAM, "--toy"]),
    "train": ("`weftune train`, repeated", [TRAIN, "toy"]),
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--runs", type=int, default=2, help="runs of each case and checkout")
    parser.add_argument("--only", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--toy", action="store_true", help="tiny shapes on the CPU: does it run at all")
    options = parser.parse_args()
    cases = TOY if options.toy else CASES
    rows = []
    for name, case in (cases[key] for key in options.only.split(",") if key in cases):
        before, now = fastest(case, (options.before.resolve(), HERE), options.runs, options.toy)
        rows.append({"case": name, "before": before, "now": now, "ratio": now / before})
        print(name, *numbers_of(rows[-1]), flush=True)
    print()
    print(aligned(["", "ms before", "ms now", "ratio"], [[row["case"], *numbers_of(row)] for row in rows]))
    finish({"rows": rows}, options.json)


def numbers_of(row: dict[str, Any]) -> list[str]:
    return [f"{row['before'] * 1000:.1f}", f"{row['now'] * 1000:.1f}", f"{row['ratio']:.3f}"]


def fastest(case: list[str], trees: tuple[Path, Path], runs: int, toy: bool) -> tuple[float, float]:
    """Return the seconds of the fastest run of each tree."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case[0] == TRAIN:
            hardware = bench_hardware(toy)
            assert hardware is not None, "no CUDA device that torch can use; --toy runs on the CPU"
            write_training(folder, case[1], hardware)
            for tree in trees:  # fills the caches of kernels and tokens
                train_seconds(tree, folder)
        seconds = [
            [train_seconds(tree, folder) if case[0] == TRAIN else step_seconds(tree, case) for tree in trees]
            for _ in range(runs)
        ]
    before, now = (min(found) for found in zip(*seconds, strict=True))
    return before, now


def step_seconds(tree: Path, case: list[str]) -> float:
    """Return the seconds of a round in that checkout."""
    alone = ["--baselines", "none"] if case[0] == STEP else []
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", *case, *alone, "--json", str(found)]
        subprocess.run(command, cwd=tree, env=environment(tree), check=True, stdout=sys.stderr)
        return float(json.loads(found.read_text())["rows"][0]["seconds"])


def write_training(folder: Path, shape: str, hardware: Hardware) -> None:
    """Write a base, rows and jobs: eight jobs of six steps of two samples of 128 to 1024 tokens."""
    size, longest = SIZES[shape], 16 if shape == "toy" else 1024
    write_base(folder / "base", size, hardware)
    reset_memory(hardware.device)
    write_rows(folder / "rows.jsonl", size, Rows(samples=64, shortest=longest // 8, longest=longest))
    defaults = {"data": "rows.jsonl", "steps": 6, "batch_size": 2}
    write_jobs(folder / "jobs.yaml", folder / "base", hardware, ranked_jobs([16] * 8), **defaults)


def train_seconds(tree: Path, folder: Path) -> float:
    """Return the wall seconds of `weftune train` in that checkout, from its start to its end."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        command = [sys.executable, "-m", "weftune", "train", "jobs.yaml", "--output", f"{output}/run"]
        caches = {"WEFTUNE_CACHE": str(folder / tree.name / "cache")}
        began = time.perf_counter()
        subprocess.run(
            command, cwd=folder, env=environment(tree) | caches, check=True, stdout=subprocess.DEVNULL
        )
        return time.perf_counter() - began


def environment(tree: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": paths}


if __name__ == "__main__":
    main()
