"""`weftune train` as its user meets it: a process, from its start to the finished adapters.

A base with random weights in a real shape is written to files. Jobs train on random tokens of random lengths,
twice: with empty caches, so that kernels are compiled and tried, and again. The wall time is split into what
came before the first window, the windows, and what came behind the last one.

    python -m benchmarks.gpu_train --shape 8b --gpu-memory 10GiB [--jobs 8] [--steps 6] [--batch 2x1024]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.folder import Rows, read_lines, write_base, write_jobs, write_rows
from weftune.bench.llama import SIZES
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.bench.timing import fresh, here

RANK = 16
SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    exit_code: int
    seconds: float
    """From the start of the process to its end."""
    before: float
    """Until the first window began."""
    windows: tuple[float, ...]

    @property
    def after(self) -> float:
        return self.seconds - self.before - sum(self.windows)


def train(name: str, folder: Path, words: Sequence[str]) -> Run:
    output = folder / name
    asked = [sys.executable, "-m", "weftune", "train", str(folder / "jobs.yaml"), "--output", str(output)]
    began_at, began = time.time(), time.perf_counter()
    ended = subprocess.run([*asked, *words], env=os.environ | kept(folder), check=False)
    seconds = time.perf_counter() - began
    file = output / "windows.jsonl"
    windows = list(read_lines(file)) if file.exists() else []
    taken = tuple(one["seconds"] for one in windows)
    first = windows[0]["time"] - taken[0] - began_at if windows else seconds
    return Run(name, ended.returncode, seconds, first, taken)


def kept(folder: Path) -> dict[str, str]:
    """What a user's machine keeps from one run to the next, in a place of its own: Python's compiled modules,
    Triton's kernels, our caches."""
    places = {"WEFTUNE_CACHE": "cache", "TRITON_CACHE_DIR": "triton", "PYTHONPYCACHEPREFIX": "modules"}
    return {"PYTHONDONTWRITEBYTECODE": "", **{name: str(folder / place) for name, place in places.items()}}


def row(run: Run) -> Sequence[str]:
    windows = " ".join(f"{one:.1f}" for one in run.windows)
    return (
        run.name,
        str(run.exit_code),
        f"{run.seconds:.1f}",
        f"{run.before:.1f}",
        windows,
        f"{run.after:.1f}",
    )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=[name for name in SIZES if name != "toy"], default="8b")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="as of weftune train")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", default="2x1024", help="samples of one job's step × tokens of the longest")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU: does it run at all")
    asked = parser.parse_args()
    place = here(asked.toy)
    if place is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    size = SIZES["toy" if asked.toy else asked.shape]
    batch, longest = (4, 16) if asked.toy else map(int, asked.batch.lower().split("x"))
    words = ["--device", place.device.type]
    words += ["--gpu-memory", asked.gpu_memory] if asked.gpu_memory else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_base(folder / "base", size, place)
        fresh(place.device)
        write_rows(folder / "rows.jsonl", size, Rows(samples=SAMPLES, shortest=longest // 8, longest=longest))
        write_jobs(
            folder / "jobs.yaml",
            folder / "base",
            place,
            [RANK] * asked.jobs,
            data="rows.jsonl",
            steps=asked.steps,
            batch_size=batch,
        )
        runs = [train(name, folder, words) for name in ("first", "second")]
    titles = ("", "exit code", "seconds", "before training", "windows", "behind them")
    print(aligned(titles, [row(run) for run in runs]))
    finish(
        {"shape": size.name, "gpu_memory": asked.gpu_memory, "runs": [asdict(r) for r in runs]}, asked.json
    )
    sys.exit(max(run.exit_code for run in runs))


if __name__ == "__main__":
    main()
