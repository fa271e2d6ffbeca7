"""Many small jobs against a few with the same tokens, on a GPU, each as a process of `weftune train`.

A base with random weights in a real shape is written to files. Eight jobs share the tokens of a round, then
many do; every sample has 32 tokens, so that a round of either computes the same rows on the base. What a
round takes is the time between the last steps of one and of the next, as metrics.jsonl has it; the median
leaves out the first one, in which kernels are compiled.
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.commands import Run, compile_modules, split_table, train
from benchmarks.folder import Rows, read_lines, write_base, write_jobs, write_rows
from weftune.bench.result import finish
from weftune.bench.sizes import SIZES, Size
from weftune.bench.table import number
from weftune.bench.timing import Hardware, bench_hardware, reset_memory
from weftune.jobs.store.status import read_status

SAMPLES, LENGTH = 1024, 32
FEW, MANY = "few", "many"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Adapters on a base, and how many jobs train them."""

    size: Size
    many: int
    """Jobs of one sample a step."""
    few: int
    """Jobs that share as many samples."""
    rank: int
    targets: str | tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The few first: what they compile the many find ready."""
        return {FEW: self.few, MANY: self.many}


CASES = {
    "tinyllama": Case(size=SIZES["1b"], many=1024, few=8, rank=8, targets=("q_proj", "v_proj")),
    "8b": Case(size=SIZES["8b"], many=256, few=8, rank=4, targets="all-linear"),
    "toy": Case(size=SIZES["toy"], many=12, few=4, rank=4, targets=("q_proj", "v_proj")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One process."""

    jobs: int
    finished: int
    rounds: tuple[float, ...]
    """Seconds of each round, without what came before its first step."""
    run: Run

    @property
    def round_seconds(self) -> float | None:
        return statistics.median(self.rounds[1:]) if len(self.rounds) > 1 else None


def write_case(folder: Path, case: Case, hardware: Hardware, steps: int) -> None:
    """The base, the rows, and a jobs file for either number of jobs."""
    write_base(folder / "base", case.size, hardware)
    reset_memory(hardware.device)
    rows = Rows(samples=max(SAMPLES, case.many), shortest=LENGTH, longest=LENGTH)
    write_rows(folder / "rows.jsonl", case.size, rows)
    targets = case.targets if isinstance(case.targets, str) else list(case.targets)
    for name, count in case.counts.items():
        jobs: list[dict[str, Any]] = [{"name": f"job-{at}", "seed": at} for at in range(count)]
        defaults = {
            "data": str(folder / "rows.jsonl"),
            "steps": steps,
            "batch_size": case.many // count,
            "adapter": {"rank": case.rank, "targets": targets},
        }
        write_jobs(folder / f"{name}.yaml", folder / "base", hardware, jobs, **defaults)


def round_ends(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """When the last job made each step."""
    ends: dict[int, float] = {}
    for line in lines:
        if "loss" in line:
            ends[line["step"]] = max(line["time"], ends.get(line["step"], line["time"]))
    return [ends[step] for step in sorted(ends)]


def side(name: str, jobs: int, folder: Path, words: Sequence[str]) -> Side:
    run = train(name, folder, words, jobs=f"{name}.yaml")
    output = folder / name
    ends = round_ends(list(read_lines(output / "metrics.jsonl")))
    states = Counter(str(job.state) for job in read_status(output).jobs.values())
    return Side(
        jobs=jobs,
        finished=states["succeeded"],
        rounds=tuple(end - begin for begin, end in pairwise(ends)),
        run=run,
    )


def measure(case: Case, hardware: Hardware, steps: int) -> dict[str, Side]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_case(folder, case, hardware, steps)
        compile_modules(folder)
        words = ["--device", hardware.device.type]
        return {name: side(name, count, folder, words) for name, count in case.counts.items()}


def ratio(sides: Mapping[str, Side]) -> float | None:
    few, many = sides[FEW].round_seconds, sides[MANY].round_seconds
    return many / few if few and many else None


def tell(sides: Mapping[str, Side]) -> None:
    print("\n" + split_table([one.run for one in sides.values()]))
    for name, one in sides.items():
        median = "none" if one.round_seconds is None else f"{1e3 * one.round_seconds:.1f} ms"
        print(f"{name}: {one.finished} of {one.jobs} jobs finished, a round takes {median}")
        print(f"  each of them: {' '.join(f'{1e3 * seconds:.0f}' for seconds in one.rounds)} ms")
        print(
            f"  {number(one.run.after_last_step)} s behind the last step, peak {_gib(one.run.peak_bytes)} GiB"
        )
    if (found := ratio(sides)) is not None:
        print(f"a round of the many over one of the few: {found:.3f}")


def _gib(count: int | None) -> str:
    return number(None if count is None else count / 2**30)


def run(options: Namespace) -> None:
    hardware = bench_hardware(toy=options.gpu == "toy")
    if hardware is None:
        raise SystemExit("no CUDA device that torch can use; --gpu toy runs on the CPU")
    sides = measure(CASES[options.gpu], hardware, options.steps)
    tell(sides)
    about = {"case": options.gpu, "steps": options.steps, "ratio": ratio(sides)}
    found = {name: asdict(one) | {"round_seconds": one.round_seconds} for name, one in sides.items()}
    finish({**about, "sides": found}, options.json)
    if any(one.finished < one.jobs for one in sides.values()):
        raise SystemExit(1)
