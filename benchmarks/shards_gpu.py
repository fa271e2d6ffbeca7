"""Two shards of a base in two processes that share one GPU, over gloo, against one process.

Two cases: stories15M in float32, 50 steps, and the shape of Llama 3.1 8B with random weights in bfloat16, ten
steps, one of them with a microbatch of about 8,000 tokens. Losses are compared at every step, and the peak
memory of each worker with what was predicted. Without the files of stories15M, which are looked for in
`--stories` or the variable WEFTUNE_STORIES, random weights of its shape are trained.

    python -m benchmarks.shards_gpu [--stories FOLDER] [--only stories15m|8b] [--toy] [--json FILE]

It is meant to take less than four minutes on an H200. `--toy` runs tiny shapes on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.folder import read_lines, write_base, write_jobs, write_lengths
from benchmarks.forecast import STORIES
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size
from weftune.bench.table import aligned
from weftune.bench.timing import Hardware, bench_hardware

SHARDS = 2
LOSS_BAR = 2e-4
"""Largest difference of a loss, relative to the loss where it is above 1."""
PEAK_BAR = 0.05
"""Largest relative difference between predicted and measured peak memory."""
STORIES_SIZE = replace(
    SIZES["toy"],
    name="stories15m",
    hidden=288,
    layers=6,
    heads=6,
    kv_heads=6,
    intermediate=768,
    vocabulary=32000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedJob:
    """A job of a case: rows of one length, and how many of them a step has."""

    name: str
    steps: int
    batch_size: int
    tokens: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsCase:
    size: Size
    files: Path | None
    """Folder with a real base. None trains random weights."""
    hardware: Hardware
    jobs: Sequence[TrainedJob]
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    name: str
    seconds: Mapping[str, float]
    """Maps `alone` and `shards` to the seconds of their process."""
    largest_gap: float
    """Largest difference of a loss at any step, relative to the loss where it is above 1."""
    last_losses: Mapping[str, tuple[float, float]]
    """Maps each job to its last loss alone and on shards."""
    peak_bytes: Mapping[str, Sequence[int]]
    """Measured peak of each worker."""
    predicted_bytes: Mapping[str, int]
    """Predicted peak of the worker with the highest one, before the window with the highest peak."""

    def peak_errors(self, run: str) -> list[float]:
        """Return the relative errors of the prediction, worker by worker."""
        return [self.predicted_bytes[run] / measured - 1.0 for measured in self.peak_bytes[run]]

    @property
    def passed(self) -> bool:
        close = all(abs(error) <= PEAK_BAR for error in self.peak_errors("shards"))
        return self.largest_gap <= LOSS_BAR and close


def cases(hardware: Hardware, toy: bool, files: Path | None) -> dict[str, ShardsCase]:
    exact = Hardware(hardware.device, torch.float32)
    rate, last = 2e-4, 10
    small = TrainedJob(name="small", steps=50, batch_size=8, tokens=128, rank=8)
    large = TrainedJob(name="large", steps=50, batch_size=4, tokens=200, rank=16)
    short = TrainedJob(name="short", steps=last, batch_size=2, tokens=512, rank=16)
    long = TrainedJob(name="long", steps=1, batch_size=7, tokens=1000, rank=16)
    if toy:
        short, long = replace(short, tokens=32), replace(long, tokens=64)
        small, large = replace(small, steps=10, tokens=32), replace(large, steps=10, tokens=48)
    files = None if toy or files is None or not files.exists() else files
    stories = SIZES["toy"] if toy else STORIES_SIZE
    return {
        "stories15m": ShardsCase(
            size=stories, files=files, hardware=exact, jobs=(small, large), learning_rate=rate
        ),
        "8b": ShardsCase(
            size=SIZES["toy" if toy else "8b"],
            files=None,
            hardware=hardware,
            jobs=(short, long),
            learning_rate=rate,
        ),
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    usual = Path(os.environ.get("WEFTUNE_STORIES", STORIES))
    parser.add_argument("--stories", type=Path, default=usual, help="folder with the files of stories15M")
    parser.add_argument("--only", choices=["stories15m", "8b"])
    parser.add_argument("--toy", action="store_true", help="tiny shapes on the CPU: does it run at all")
    asked = parser.parse_args()
    hardware = bench_hardware(asked.toy)
    if hardware is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    began = time.perf_counter()
    found_cases = cases(hardware, asked.toy, asked.stories)
    wanted = {name: case for name, case in found_cases.items() if asked.only in (None, name)}
    for name, case in wanted.items():
        print(f"{name}: {case.files or 'random weights'}", flush=True)
    # At once: most of their time is that of imports and compilations, and the GPU has room for both.
    with ThreadPoolExecutor(len(wanted)) as threads:
        found = list(threads.map(run_case, wanted.keys(), wanted.values()))
    print(table(found))
    for one in found:
        print(f"{one.name}: {'within' if one.passed else 'NOT within'} {LOSS_BAR:g} and {PEAK_BAR:.0%}")
    seconds = time.perf_counter() - began
    print(f"{seconds:.0f} s in all")
    numbers = [{**asdict(one), "passed": one.passed} for one in found]
    finish({"shards": SHARDS, "seconds": seconds, "cases": numbers}, asked.json)


def run_case(name: str, case: ShardsCase) -> CaseResult:
    """Train a case alone and on shards, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        return compare_runs(name, case, Path(folder))


def compare_runs(name: str, case: ShardsCase, folder: Path) -> CaseResult:
    write_case(case, folder)
    words = {"alone": (), "shards": ("--shards", str(SHARDS))}
    seconds = {run: train(case, folder, run, more) for run, more in words.items()}
    losses = {run: read_losses(folder / run) for run in words}
    gaps = [
        abs(mine - theirs) / max(1.0, theirs)
        for job, whole in losses["alone"].items()
        for mine, theirs in zip(losses["shards"][job], whole, strict=True)
    ]
    peaks = {run: highest_peaks(folder / run) for run in words}
    return CaseResult(
        name=name,
        seconds=seconds,
        largest_gap=max(gaps),
        last_losses={job: (whole[-1], losses["shards"][job][-1]) for job, whole in losses["alone"].items()},
        peak_bytes={run: found for run, (found, _) in peaks.items()},
        predicted_bytes={run: predicted for run, (_, predicted) in peaks.items()},
    )


def write_case(case: ShardsCase, folder: Path) -> None:
    """Write the base, unless it is there, the rows and the jobs file."""
    base, rng = case.files or folder / "base", np.random.default_rng(0)
    if case.files is None:
        write_base(base, case.size, case.hardware)
        if case.hardware.device.type == "cuda":
            torch.cuda.empty_cache()
    for job in case.jobs:
        rows = min(64, job.steps * job.batch_size)
        write_lengths(folder / f"{job.name}.jsonl", [job.tokens] * rows, case.size.vocabulary, rng)
    jobs = [
        {
            "name": job.name,
            "steps": job.steps,
            "batch_size": job.batch_size,
            "adapter": {"rank": job.rank},
            "data": f"{job.name}.jsonl",
        }
        for job in case.jobs
    ]
    write_jobs(folder / "jobs.yaml", base, case.hardware, jobs, learning_rate=case.learning_rate)


def train(case: ShardsCase, folder: Path, name: str, words: Sequence[str]) -> float:
    """Run `weftune train`, and return the seconds of its process."""
    device, output = case.hardware.device.type, folder / name
    command = ["train", str(folder / "jobs.yaml"), "--output", str(output), "--device", device, *words]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "weftune", *command], check=True)
    return time.perf_counter() - began


def read_losses(output: Path) -> dict[str, list[float]]:
    losses: dict[str, list[float]] = {}
    for line in read_lines(output / "metrics.jsonl"):
        if "loss" in line:
            losses.setdefault(line["job"], []).append(line["loss"])
    return losses


def highest_peaks(output: Path) -> tuple[list[int], int]:
    """Return the highest measured peak of each worker, and the prediction of the window that reached it."""
    windows: list[dict[str, Any]] = list(read_lines(output / "windows.jsonl"))
    highest = max(windows, key=lambda one: int(one["peak_bytes"]))
    first = next(one for one in windows if one["peak_bytes"] == highest["peak_bytes"])
    return first.get("worker_peak_bytes", [first["peak_bytes"]]), first["predicted_peak_bytes"]


def table(found: Sequence[CaseResult]) -> str:
    rows = []
    for one in found:
        for run in one.seconds:
            measured = " ".join(f"{size / 2**30:.2f}" for size in one.peak_bytes[run])
            errors = " ".join(f"{error:+.1%}" for error in one.peak_errors(run))
            last = " ".join(f"{pair[run == 'shards']:.5f}" for pair in one.last_losses.values())
            rows.append(
                (
                    f"{one.name}, {run}",
                    f"{one.seconds[run]:.1f}",
                    last,
                    f"{one.largest_gap:.1e}" if run == "shards" else "",
                    measured,
                    f"{one.predicted_bytes[run] / 2**30:.2f}",
                    errors,
                )
            )
    titles = ("", "seconds", "last losses", "largest gap", "peak GiB", "predicted GiB", "error")
    return aligned(titles, rows)


if __name__ == "__main__":
    main()
