"""`weftune train` and other commands as processes of a benchmark: their wall time, and how it was spent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.folder import read_lines
from weftune.bench.table import aligned, number
from weftune.bench.timing import Hardware, reset_memory
from weftune.core.clock import Phase
from weftune.report.effort import phase_label
from weftune.report.read import read_wall_times

COLD, WARM = "Weftune, empty caches", "Weftune, again"
CONTEXT_BYTES = 1 << 30
SLACK = 1.1
"""What a process takes of a GPU beside its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process, or several at once, from the start of the first to the end of the last."""

    name: str
    exit_code: int
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """As the process itself measured them."""
    windows: tuple[float, ...] = ()
    after_last_step: float | None = None
    tokens: int = 0
    peak_bytes: int | None = None
    note: str = ""

    @property
    def untold(self) -> float:
        """Seconds of the process that it could not measure: its end, mostly."""
        return self.seconds - sum(self.phases.values())


KERNELS = "triton"
"""The folder of the caches that Triton keeps its kernels in."""


def kept(caches: Path) -> dict[str, str]:
    """What a user's machine keeps from one run to the next, in a place of its own: Python's compiled modules,
    Triton's kernels, our caches."""
    places = {"WEFTUNE_CACHE": "cache", "TRITON_CACHE_DIR": KERNELS, "PYTHONPYCACHEPREFIX": "modules"}
    return {
        "PYTHONDONTWRITEBYTECODE": "",
        **{name: str(caches / folder) for name, folder in places.items()},
    }


def has_kernels(caches: Path) -> bool:
    """Whether an earlier run has kept compiled kernels there."""
    folder = caches / KERNELS
    return folder.is_dir() and any(folder.iterdir())


def compile_modules(caches: Path) -> None:
    """As an installation does."""
    code = "import weftune.trainer.trainer, weftune.cli.main, weftune.report.page, peft"
    subprocess.run([sys.executable, "-c", code], env=os.environ | kept(caches), check=True)


def timed(commands: Sequence[Sequence[str]], caches: Path) -> tuple[int, float]:
    """Run commands at once: the worst exit code, and the seconds from the first's start to the last's end."""
    began = time.perf_counter()
    started = [subprocess.Popen(one, env=os.environ | kept(caches)) for one in commands]
    codes = [one.wait() for one in started]
    return max(map(abs, codes)), time.perf_counter() - began


def output_of(name: str, folder: Path) -> Path:
    return folder / name.replace(" ", "-")


def train(
    name: str, folder: Path, words: Sequence[str], jobs: str = "jobs.yaml", caches: Path | None = None
) -> Run:
    """`weftune train` of a jobs file in the folder, which has the caches too unless they are elsewhere."""
    output = output_of(name, folder)
    options = [sys.executable, "-m", "weftune", "train", str(folder / jobs), "--output", str(output)]
    began = time.perf_counter()
    ended = subprocess.run([*options, *words], env=os.environ | kept(caches or folder), check=False)
    seconds, ended_at = time.perf_counter() - began, time.time()
    walls = read_wall_times(output)
    windows, steps = (_lines(output / file) for file in ("windows.jsonl", "metrics.jsonl"))
    return Run(
        name=name,
        exit_code=ended.returncode,
        seconds=seconds,
        phases=dict(walls[-1].phases) if walls else {},
        windows=tuple(one["seconds"] for one in windows),
        after_last_step=ended_at - steps[-1]["time"] if steps else None,
        tokens=sum(one["tokens"] for one in windows),
        peak_bytes=max((int(one["peak_bytes"]) for one in windows), default=None),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path)) if path.exists() else []


def room(hardware: Hardware, one_peak: int | None) -> int:
    """How many processes fit at once, where one by itself took `one_peak`."""
    if hardware.device.type != "cuda" or one_peak is None:
        return 2
    reset_memory(hardware.device)
    free, _ = torch.cuda.mem_get_info(hardware.device)
    return max(1, int(free // (one_peak * SLACK + CONTEXT_BYTES)))


def split_table(runs: Sequence[Run]) -> str:
    used = [name for name in Phase if any(run.phases.get(name, 0.0) >= 0.05 for run in runs)]
    titles = ("seconds", "wall", *(phase_label(name) for name in used), "end of the process", "")
    rows = [
        (
            run.name,
            number(run.seconds),
            *(number(run.phases.get(name)) for name in used),
            number(run.untold if run.phases else None),
            run.note if run.exit_code == 0 else f"failed with exit code {run.exit_code}",
        )
        for run in runs
    ]
    return aligned(titles, rows)
