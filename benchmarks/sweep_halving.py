"""Halving against the full grid and against random search with as many samples: 24 trials on stories15M.

    python -m benchmarks.sweep_halving [--seeds 5] [--steps 120] [--at 0.1 0.3] [--keep 0.33] [--judge mean]
                                       [--only SEED ...] [--model FOLDER] [--data FILE] [--work FOLDER]
                                       [--toy] [--json FILE]

Every seed has its own held-out rows, order of rows and beginnings of adapters. The grid is trained to its end
once, then again with halving. Random search draws trials of the same grid and trains each to its end; what it
finds is not drawn but computed: the mean of the best loss over all choices of as many trials as the samples
of halving pay for, rounded up. `--work` keeps what is trained, and a call that was stopped goes on there when
it is called again: `--only` measures some of the seeds, such as one on each of several groups of cores.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

import weftune
from benchmarks.folder import Rows, lines_of, write_base, write_rows
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import Size
from weftune.bench.table import aligned
from weftune.bench.timing import Hardware
from weftune.errors import UserError
from weftune.jobs.store.status import State
from weftune.jobs.sweeps.record import SweepRecord, read_record
from weftune.jobs.sweeps.spec import Judge

SHARED = Path(__file__).parents[2] / "shared"
STORIES = SHARED / "models" / "stories15m"
DATA = SHARED / "data" / "svamp.jsonl"
NAME = "trial"
SHARE_BAR = 0.28
NEAR = 0.01
"""How far above the grid's best loss still counts as found."""
AT, KEEP = (0.1, 0.3), 0.33
TOY = Size(
    name="toy", hidden=32, layers=2, heads=2, kv_heads=2, intermediate=64, vocabulary=64, context=64,
    rope_theta=10000.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is searched, and how long a trial trains."""

    rates: tuple[float, ...] = (3e-5, 1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 1e-2, 3e-2)
    ranks: tuple[int, ...] = (4, 16, 64)
    steps: int = 120
    batch_size: int = 4
    warmup: float = 0.03
    """Of the steps, and short of the first rung: trials that still warm up are all alike."""
    held_out: int = 64

    @property
    def over(self) -> dict[str, Any]:
        adapters = [{"rank": rank, "alpha": 2 * rank} for rank in self.ranks]
        return {"learning_rate": list(self.rates), "adapter": adapters}


TOY_CASE = Case(rates=(1e-4, 3e-3, 1e-1), ranks=(4, 8), steps=10, batch_size=2, held_out=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One seed: the best loss of each way, and what it took."""

    seed: int
    grid: float
    halving: float
    random: float
    """Expected of as many trials as the samples of halving pay for."""
    random_trials: int
    share: float
    """Samples that halving trained, over the grid's."""
    apart: float
    """The largest difference of a trial's loss between the two runs, over the loss."""

    @property
    def near(self) -> bool:
        return self.halving <= (1 + NEAR) * self.grid


def expected_best(losses: Sequence[float], count: int) -> float:
    """The mean of the lowest loss over all choices of `count` trials."""
    ordered = sorted(losses)
    ways = math.comb(len(ordered), count)
    return math.fsum(
        loss * math.comb(len(ordered) - hardware - 1, count - 1) / ways
        for hardware, loss in enumerate(ordered)
    )


def compared(seed: int, grid: SweepRecord, halved: SweepRecord) -> Found:
    """A trial without a finite loss has not found anything: it counts as the worst of the others."""
    ends = {trial.name: trial.score for trial in grid.trials}
    known = [loss for loss in ends.values() if loss is not None]
    losses = [max(known) if loss is None else loss for loss in ends.values()]
    finished = [trial for trial in halved.trials if trial.state == "finished" and trial.score is not None]
    share = halved.samples.trained / grid.samples.all
    count = min(len(losses), max(1, math.ceil(share * len(losses))))
    apart = [abs(trial.score - ends[trial.name]) / ends[trial.name] for trial in finished]  # type: ignore[operator]
    return Found(
        seed=seed,
        grid=min(known),
        halving=min(trial.score for trial in finished if trial.score is not None),
        random=expected_best(losses, count),
        random_trials=count,
        share=share,
        apart=max(apart),
    )


def write_data(folder: Path, data: Path | None, held_out: int, seed: int) -> None:
    """Rows to train on and rows held out, drawn anew for every seed; without data random tokens."""
    if data is None:
        write_rows(folder / "all.jsonl", TOY, Rows(samples=48, shortest=6, longest=12), seed=seed)
    lines = lines_of(data or folder / "all.jsonl")
    random.Random(seed).shuffle(lines)
    (folder / "held_out.jsonl").write_text("".join(f"{line}\n" for line in lines[:held_out]))
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines[held_out:]))


def jobs(
    folder: Path, model: Path, case: Case, seed: int, halving: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What a jobs file would hold: one job with the sweep."""
    sweep: dict[str, Any] = {"search": "grid", "over": case.over}
    return {
        "base": {"model": str(model), "dtype": "float32"},
        "jobs": [
            {
                "name": NAME,
                "data": str(folder / "rows.jsonl"),
                "eval": {"path": str(folder / "held_out.jsonl"), "every": 0.5},
                "steps": case.steps,
                "batch_size": case.batch_size,
                "warmup": case.warmup,
                "seed": seed,
                "sweep": sweep | ({"halving": dict(halving)} if halving else {}),
            }
        ],
    }


def trained(
    folder: Path, model: Path, case: Case, seed: int, halving: Mapping[str, Any] | None
) -> SweepRecord:
    """Of a run that goes on where an earlier one in the folder was stopped."""
    output = folder / ("halved" if halving else "grid")
    ended = weftune.train(
        jobs(folder, model, case, seed, halving), output=output, resume=output.exists(), progress=False
    )
    if any(result.state == State.PAUSED for result in ended.values()):
        raise SystemExit("Stopped. With --work the next call goes on from here.")
    record = read_record(output / NAME)
    assert record is not None, f"{output} holds no sweep"
    return record


def measured(
    folder: Path, seed: int, model: Path, data: Path | None, case: Case, halving: Mapping[str, Any]
) -> Found:
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, data, case.held_out, seed)
    halved = trained(folder, model, case, seed, halving)
    grid = trained(folder, model, case, seed, None)
    return compared(seed, grid, halved)


TITLES = ("seed", "grid", "halving", "random", "within 1 %", "samples", "trials apart")


def row(found: Found) -> tuple[str, ...]:
    return (
        str(found.seed),
        f"{found.grid:.4f}",
        f"{found.halving:.4f}",
        f"{found.random:.4f}",
        "yes" if found.near else "no",
        f"{found.share:.3f}",
        f"{found.apart:.1e}",
    )


def summary(found: Sequence[Found]) -> str:
    near = sum(one.near for one in found)
    most = max(one.share for one in found)
    gain = statistics.mean(one.random - one.halving for one in found)
    return "\n".join(
        (
            f"Halving is within {100 * NEAR:.0f} % of the grid's best in {near} of {len(found)} seeds.",
            f"It trained at most {most:.3f} of the grid's samples; the bar is {SHARE_BAR}.",
            f"Random search with as many samples ends {gain:+.4f} above it on average.",
        )
    )


def run(options: Namespace) -> list[Found]:
    case = TOY_CASE if options.toy else replace(Case(), steps=options.steps)
    halving = {"at": list(options.at), "keep": options.keep, "judge": options.judge}
    found = []
    with tempfile.TemporaryDirectory() as name:
        work = options.work or Path(name)
        model, data = options.model, options.data
        if options.toy:
            model, data = Path(name) / "base", None
            write_base(model, TOY, Hardware(torch.device("cpu"), torch.float32))
        for seed in options.only or range(options.seeds):
            found.append(measured(work / f"seed-{seed}", seed, model, data, case, halving))
            print(json.dumps(asdict(found[-1])), flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these seeds instead of all")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="where a later call goes on")
    parser.add_argument("--steps", type=int, default=Case().steps, help="of a trial")
    parser.add_argument("--at", type=float, nargs="+", default=AT, metavar="SHARE", help="the rungs")
    parser.add_argument("--keep", type=float, default=KEEP, help="the share that goes on from each")
    parser.add_argument("--judge", choices=get_args(Judge), default="mean", help="what a rung evaluates")
    parser.add_argument("--model", type=Path, default=STORIES, metavar="FOLDER")
    parser.add_argument(
        "--data", type=Path, default=DATA, metavar="FILE", help="rows as `weftune train` takes them"
    )
    parser.add_argument("--toy", action="store_true", help="six trials of ten steps on random weights")
    options = parser.parse_args()
    rungs = ", ".join(f"{share:g}" for share in options.at)
    print(f"Rungs at {rungs} of the steps keep {options.keep:g}; judge: {options.judge}.", flush=True)
    try:
        found = run(options)
    except UserError as error:
        raise SystemExit(str(error)) from None
    print(f"\n{aligned(TITLES, [row(one) for one in found])}\n\n{summary(found)}")
    about = {"at": list(options.at), "keep": options.keep, "judge": options.judge}
    finish({"halving": about, "seeds": [asdict(one) | {"near": one.near} for one in found]}, options.json)


if __name__ == "__main__":
    main()
