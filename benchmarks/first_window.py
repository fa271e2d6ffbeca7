"""What `weftune plan` predicts of a run's first window, what `weftune train` predicts, what is measured.

python -m benchmarks.first_window [--base BASE] [--cases 12] [--modes ...] [--json FILE]

The profiles are fresh: one with all threads for a single process, one with as many as each of two workers
has. Every case is two commands in processes of their own, with the same options: jobs of drawn ranks, lengths
and batch sizes on the whole base, on a base that is streamed, in a pipeline, and streamed by two workers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from weftune.base.load import inspect
from weftune.base.spec import BaseSpec
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.plan.cost.profile import cpu_threads

BAR = 0.15
STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories15m"
MODES = ("one device", "streamed", "pipeline", "streamed workers")
WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A first window: predicted by the plan, predicted by the run, measured."""

    mode: str
    jobs: int
    same: bool
    """Whether plan and run predict the same layout, capacity, jobs aboard, seconds and bytes."""
    planned_seconds: float
    predicted_seconds: float
    seconds: float
    planned_bytes: int
    predicted_bytes: int
    peak_bytes: int

    @property
    def error(self) -> float:
        return self.planned_seconds / self.seconds - 1

    @property
    def byte_error(self) -> float:
        return self.planned_bytes / self.peak_bytes - 1


def weftune(folder: Path, *words: str, threads: int | None = None) -> None:
    """A command in a process of its own."""
    around = os.environ | {"WEFTUNE_CACHE": str(folder / "cache"), "COLUMNS": "200"}
    if threads is not None:
        around["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, "-m", "weftune", *words]
    ended = subprocess.run(command, cwd=folder, env=around, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"weftune {' '.join(words)}\n{ended.stdout}{ended.stderr}")


def drawn(seed: int, folder: Path, vocabulary: int, scale: int) -> list[dict[str, Any]]:
    """Jobs whose rows are tokens, so that lengths are what was drawn."""
    dice = random.Random(seed)
    jobs = []
    for number in range(dice.randint(2, 4)):
        least = dice.choice((16, 32, 64))
        path = folder / f"rows-{seed}-{number}.jsonl"
        with path.open("w") as stream:
            for _ in range(48):
                tokens = [
                    dice.randrange(3, vocabulary) for _ in range(scale * dice.randint(least, 3 * least))
                ]
                prompt = len(tokens) // 4
                row = {"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]}
                stream.write(json.dumps(row) + "\n")
        jobs.append(
            {
                "name": f"job{number}",
                "data": str(path),
                "steps": 8,
                "batch_size": dice.choice((2, 4, 8)),
                "adapter": {"rank": dice.choice((4, 8, 16, 32))},
            }
        )
    return jobs


def options(mode: str, base_bytes: int) -> list[str]:
    """A streamed base gets room for itself alone, without its passes."""
    limit = ["--gpu-memory", f"{base_bytes >> 10}KiB"]
    workers = ["--pipeline", str(WORKERS)]
    by_mode = {"one device": [], "streamed": limit, "pipeline": workers, "streamed workers": workers + limit}
    return by_mode[mode]


def measured(folder: Path, seed: int, mode: str, words: list[str], steps: int) -> Row:
    output, plan = folder / f"out-{seed}", folder / f"plan-{seed}.json"
    common = [str(folder / f"jobs-{seed}.yaml"), *words, "--max-steps", str(steps), "--device", "cpu"]
    weftune(folder, "plan", *common, "--json", str(plan))
    weftune(folder, "train", *common, "--output", str(output))
    told = json.loads(plan.read_text())["first_window"]
    said = json.loads((output / "promise.json").read_text())
    window = json.loads((output / "windows.jsonl").read_text().splitlines()[0])
    return Row(
        mode=mode,
        jobs=len(told["aboard"]),
        same=all(told[key] == said[key] for key in told if key != "process_bytes"),
        planned_seconds=told["seconds"] or 0.0,
        predicted_seconds=said["seconds"] or 0.0,
        seconds=window["seconds"],
        planned_bytes=told["bytes"] + told["process_bytes"],
        predicted_bytes=said["bytes"] + said["process_bytes"],
        peak_bytes=window["peak_bytes"],
    )


def table(rows: list[Row]) -> str:
    titles = (
        "mode",
        "jobs",
        "plan",
        "run",
        "measured",
        "off",
        "plan MiB",
        "run MiB",
        "measured",
        "off",
        "same",
    )
    return aligned(
        titles,
        [
            (
                row.mode,
                str(row.jobs),
                f"{row.planned_seconds:.2f} s",
                f"{row.predicted_seconds:.2f} s",
                f"{row.seconds:.2f} s",
                f"{row.error:+.0%}",
                f"{row.planned_bytes / 2**20:.0f}",
                f"{row.predicted_bytes / 2**20:.0f}",
                f"{row.peak_bytes / 2**20:.0f}",
                f"{row.byte_error:+.0%}",
                "yes" if row.same else "no",
            )
            for row in rows
        ],
    )


def main() -> None:
    asked = _arguments().parse_args()
    config = json.loads((Path(asked.base) / "config.json").read_text())
    weights = inspect(BaseSpec(model=str(asked.base), dtype="float32"), torch.device("cpu")).base_bytes
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="weftune-first-window-") as name:
        folder = Path(name)
        weftune(folder, "doctor", "--profile", "--base", str(asked.base), "--device", "cpu")
        threads = cpu_threads(WORKERS)
        if any(mode not in MODES[:2] for mode in asked.modes):
            weftune(
                folder, "doctor", "--profile", "--base", str(asked.base), "--device", "cpu", threads=threads
            )
        for seed in range(asked.cases):
            mode = asked.modes[seed % len(asked.modes)]
            jobs = drawn(seed, folder, config["vocab_size"], asked.scale)
            whole = {"base": {"model": str(asked.base), "dtype": "float32"}, "jobs": jobs}
            (folder / f"jobs-{seed}.yaml").write_text(yaml.safe_dump(whole))
            rows.append(measured(folder, seed, mode, options(mode, weights), asked.steps))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print("\n" + table(rows), "\n")
    kept = [row for row in rows if abs(row.error) <= BAR and abs(row.byte_error) <= BAR]
    alike = sum(row.same for row in rows)
    print(f"Plan and run predict the same in {alike} of {len(rows)} cases.")
    print(
        f"Seconds and bytes of the plan are within {BAR:.0%} of the measured in {len(kept)} of {len(rows)}."
    )
    numbers = [asdict(row) | {"error": row.error, "byte_error": row.byte_error} for row in rows]
    finish({"bar": BAR, "cases": numbers}, asked.json)


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "")
    parser.add_argument("--base", type=Path, default=STORIES, help="a folder with a base")
    parser.add_argument("--cases", type=int, default=12, help="how many are drawn")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--steps", type=int, default=4, help="of every job")
    parser.add_argument("--scale", type=int, default=1, help="all samples so many times as long")
    return parser


if __name__ == "__main__":
    main()
