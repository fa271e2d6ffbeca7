"""What a job costs beyond its arithmetic: many small jobs on a small base, a process for each number of them.

Wall is the time from reading the jobs file to the last file written, imports and the base's check included;
arithmetic is what passes and steps took by the run's own clocks. What is left is divided by the number of
jobs. With `--profile` the runs are profiled, which makes them slower, and the seconds are split by place.

    python -m benchmarks.many_jobs [--jobs 64 256 1024 4096] [--steps 1] [--own-data] [--model FOLDER]
                                   [--profile] [--json FILE]

With `--gpu` many jobs are measured against a few with the same tokens, on a GPU (`many_gpu.py`).

    python -m benchmarks.many_jobs --gpu tinyllama|8b|toy [--steps 12] [--json FILE]
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
import yaml
from rich.console import Console

from benchmarks import many_gpu
from benchmarks.folder import Rows, write_base, write_rows
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import Size
from weftune.bench.timing import Hardware
from weftune.jobs.spec.read import read_run
from weftune.jobs.store.status import State
from weftune.jobs.store.store import Store
from weftune.plan.cost.time import StateTime
from weftune.report.terminal import LiveView
from weftune.run.events import Event, Passed
from weftune.trainer.engine import Engine
from weftune.trainer.journal import Journal
from weftune.trainer.loop import Callback, Loop
from weftune.trainer.trainer import Trainer

CPU = Hardware(torch.device("cpu"), torch.float32)
SMALL = Size(
    name="small",
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    intermediate=128,
    vocabulary=32000,
    context=512,
    rope_theta=10000.0,
)
ROWS = Rows(samples=64, shortest=24, longest=32)
PLACES: Mapping[str, tuple[str, str]] = {
    "reading the jobs file": ("jobs/spec/read.py", "read_run"),
    "tokenising": ("data/prepare.py", "prepare"),
    "of it the fingerprint": ("data/encode.py", "fingerprint"),
    "loading the base": ("trainer/engine.py", "open_engine"),
    "admission": ("jobs/store/scheduler.py", "admit_jobs"),
    "boarding": ("trainer/loop.py", "_attach_job"),
    "planning": ("plan/window/window.py", "plan_window"),
    "prediction of a window": ("plan/cost/fitted.py", "predict_window"),
    "refitting": ("plan/cost/fitted.py", "record_outcome"),
    "running windows": ("run/executor.py", "run"),
    "laying out": ("trainer/job.py", "collate_plan"),
    "retiring": ("trainer/loop.py", "_detach_ended"),
    "waiting for the results": ("trainer/loop.py", "_wait_for_delivery"),
    "status.json": ("jobs/store/store.py", "write_status"),
    "metrics.jsonl": ("jobs/store/store.py", "append_metrics"),
    "terminal": ("report/terminal.py", "update"),
    "report.html": ("report/page.py", "write_report"),
}
"""A function for every place: its file's end, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run."""

    jobs: int
    wall_seconds: float
    arithmetic_seconds: float
    peak_bytes: int
    places: Mapping[str, float]

    @property
    def job_seconds(self) -> float:
        """Beyond the arithmetic, for each job."""
        return (self.wall_seconds - self.arithmetic_seconds) / self.jobs


class TimedLoop(Loop):
    """Adds up what its passes and steps took."""

    arithmetic_seconds = 0.0

    def _handle_event(self, event: Event, callback: Callback | None) -> None:
        if isinstance(event, Passed | StateTime):
            timed = event.time if isinstance(event, Passed) else event
            self.arithmetic_seconds += timed.seconds
        super()._handle_event(event, callback)


class TimedTrainer(Trainer):
    timed: TimedLoop

    def _create_loop(self, engine: Engine, store: Store, journal: Journal) -> Loop:
        self.timed = TimedLoop(engine, self.tokenizer, store, journal)
        return self.timed


def write_many(folder: Path, jobs: int, steps: int, own_data: bool, model: str | None) -> Path:
    """A jobs file with everything that it names, in the folder."""
    if model is None:
        write_base(folder / "base", SMALL, CPU)
    count = jobs if own_data else 1
    for number in range(count):
        write_rows(folder / f"rows{number}.jsonl", SMALL, ROWS, seed=number)
    spec = {
        "base": {"model": model or str(folder / "base"), "dtype": "float32"},
        "output": str(folder / "out"),
        "defaults": {
            "adapter": {"rank": 8, "targets": ["q_proj", "v_proj"]},
            "batch_size": 1,
            "steps": steps,
        },
        "jobs": [
            {"name": f"job-{number}", "seed": number, "data": str(folder / f"rows{number % count}.jsonl")}
            for number in range(jobs)
        ],
    }
    path = folder / "jobs.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


class Watched(threading.Thread):
    """The most memory that this process held. What the kernel records is reset before every window."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._process, self._over = psutil.Process(), threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)

    def __enter__(self) -> Watched:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def measure_here(path: Path, profiled: bool) -> Measured:
    """Train a jobs file in this process, before a terminal that nobody looks at."""
    profile = cProfile.Profile() if profiled else None
    began = time.perf_counter()
    with Watched() as watched, profile or nullcontext(), Path(os.devnull).open("w") as nowhere:
        run = read_run(path)
        with LiveView(Console(file=nowhere, force_terminal=True, width=120, height=40), []) as view:
            trainer = TimedTrainer(run.base, output=run.output, view=view, place=run.locate)
            for job in run.jobs:
                trainer.add(job)
            results = trainer.run()
    wall = time.perf_counter() - began
    assert all(result.state is State.SUCCEEDED for result in results.values()), "not all jobs have succeeded"
    return Measured(
        jobs=len(results),
        wall_seconds=wall,
        arithmetic_seconds=trainer.timed.arithmetic_seconds,
        peak_bytes=watched.peak_bytes,
        places={} if profile is None else _places(profile),
    )


def _places(profile: cProfile.Profile) -> dict[str, float]:
    """Seconds inside each place, what it calls included."""
    found = dict.fromkeys(PLACES, 0.0)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, function), (_, _, _, cumulative, _) in stats.items():
        for place, (end, name) in PLACES.items():
            if function == name and file.endswith(end):
                found[place] += cumulative
    return found


def measure_apart(path: Path, profiled: bool) -> Measured:
    """The same in a process of its own, so that its peak is its own, and with an empty cache."""
    asked = [sys.executable, "-m", "benchmarks.many_jobs", "--file", str(path)]
    fresh = {**os.environ, "WEFTUNE_CACHE": str(path.parent / "cache")}
    profile = ["--profile"] if profiled else []
    done = subprocess.run([*asked, *profile], stdout=subprocess.PIPE, text=True, env=fresh)
    assert done.returncode == 0, f"the run of {path} failed"
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def _line(measured: Measured) -> str:
    return (
        f"{measured.jobs:6d}  {measured.wall_seconds:8.1f}  {measured.arithmetic_seconds:10.1f}"
        f"  {1e3 * measured.job_seconds:14.1f}  {measured.peak_bytes / 2**20:8.0f}"
    )


def _show_places(runs: Sequence[Measured]) -> None:
    print("\nms a job, profiled" + "".join(f"{run.jobs:10d}" for run in runs))
    for place in PLACES:
        cells = "".join(f"{1e3 * run.places[place] / run.jobs:10.2f}" for run in runs)
        print(f"{place:22}{cells[4:]}")


def run(options: Namespace) -> list[Measured]:
    print("  jobs    wall s  arithmetic  beyond, ms/job  peak MiB", flush=True)
    found = []
    for jobs in options.jobs:
        with tempfile.TemporaryDirectory() as folder:
            path = write_many(Path(folder), jobs, options.steps, options.own_data, options.model)
            found.append(measure_apart(path, options.profile))
        print(_line(found[-1]), flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, nargs="+", default=[64, 256, 1024, 4096], metavar="N")
    parser.add_argument("--steps", type=int, help="of every job: 1 unless told, 12 with --gpu")
    parser.add_argument("--own-data", action="store_true", help="a file of rows for every job")
    parser.add_argument("--model", help="another base than a small one with random weights")
    parser.add_argument("--profile", action="store_true", help="split the seconds by place")
    parser.add_argument("--gpu", choices=list(many_gpu.CASES), help="many jobs against a few, on a GPU")
    parser.add_argument("--file", type=Path, help="train this jobs file here, and print the numbers")
    options = parser.parse_args()
    options.steps = options.steps or (12 if options.gpu else 1)
    if options.gpu is not None:
        many_gpu.run(options)
        return
    if options.file is not None:
        print(json.dumps(asdict(measure_here(options.file, options.profile))))
        return
    runs = run(options)
    if options.profile:
        _show_places(runs)
    finish({"runs": [asdict(one) for one in runs]}, options.json)


if __name__ == "__main__":
    main()
