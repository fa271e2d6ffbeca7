"""A sweep from the start of a process to the best adapter on disk: `weftune train`, and PEFT by its rule.

A base with random weights in a real shape is written to files, and rows of random tokens. One job with the
key `sweep` searches ranks from 4 to 64 and learning rates, with synchronous halving at a tenth and three
tenths of the steps. `weftune train` runs it twice, with empty caches and again. PEFT trains the same trials
(`benchmarks.peft_sweep`) on the same samples in the same order, and they are stopped by the same rule: one
trial after another in one process, and with the trials of each rung dealt to eight processes.

    python -m benchmarks.gpu_sweep [--shape tinyllama|8b] [--trials 32] [--steps 300] [--batch 4x64]
        [--lengths real] [--sides weftune,peft,processes] [--peft-steps N] [--processes 8] [--runs 2]
        [--caches FOLDER] [--json FILE]

With `--peft-steps N` PEFT times N steps of every rank, and its wall time is extrapolated to the steps that
halving asked of Weftune's trials. `--lengths real` draws the lengths as `benchmarks.gpu_lengths` does;
`--runs 1` leaves out Weftune's second run. With `--caches FOLDER` compiled kernels are kept there; where an
earlier call has kept some, the run with empty caches is left out.
Python's compiled modules are made before anything is measured, as an installation makes them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.commands import (
    COLD,
    WARM,
    Run,
    compile_modules,
    has_kernels,
    output_of,
    room,
    split_table,
    timed,
    train,
)
from benchmarks.folder import write_base, write_jobs, write_lengths
from benchmarks.peft_sweep import PeftTrial, SweepTask, dealt
from weftune.bench.gpu_lengths import draw_rounds
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, base_bytes
from weftune.bench.table import aligned, number, ratio
from weftune.bench.timing import Hardware, bench_hardware, reset_memory
from weftune.core.clock import Phase
from weftune.data.samples import SampleOrder
from weftune.jobs.spec.read import read_run
from weftune.jobs.spec.spec import JobSpec, RunSpec, to_steps
from weftune.jobs.sweeps.record import SweepRecord, TrialRecord, read_record
from weftune.run.training.schedule import Recipe, learning_rate

SHAPES = {"tinyllama": "1b", "8b": "8b"}
TRIALS = {"tinyllama": 32, "8b": 16}
ALL = ("weftune", "peft", "processes")
PLAIN = "PEFT, one after another"
HALVING = {"at": [0.1, 0.3], "keep": 0.33}
RANKS = (4, 8, 16, 32, 64)
RATES = {"min": 2e-5, "max": 5e-3, "log": True}
WARMUP = 0.03
SAMPLES, HELD_OUT = 1024, 32
VOCABULARY = 64
"""Tokens that the rows are made of: of all of the base's nothing could be learned, and no loss would fall."""
SWEEP = "trial"
BARS: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("tinyllama", "4x64"): {"peft": 15.0, "processes": 4.0},
    ("tinyllama", "real"): {"peft": 9.0},
    ("8b", "4x64"): {"peft": 3.0},
}
"""Shape and lengths → how many times Weftune's wall time each side must take at least."""


# -- what is searched -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shape: str
    size: Size
    trials: int
    steps: int
    batch_size: int
    length: int
    """Of every sample, unless lengths are real."""
    real: bool
    processes: int
    peft_steps: int | None
    """That PEFT is timed for; all of them where it is None."""
    ranks: tuple[int, ...] = RANKS

    @property
    def lengths(self) -> str:
        return "real" if self.real else f"{self.batch_size}x{self.length}"

    @property
    def over(self) -> dict[str, Any]:
        return {
            "adapter": [{"rank": rank, "alpha": 2 * rank} for rank in self.ranks],
            "learning_rate": dict(RATES),
        }


@dataclass(frozen=True, slots=True)
class Work:
    """The folder with everything in it."""

    folder: Path
    caches: Path
    hardware: Hardware
    case: Case
    run: RunSpec

    @property
    def job(self) -> JobSpec:
        """Any of the trials: they differ in rank and learning rate only."""
        return self.run.jobs[0]


def write_work(folder: Path, case: Case, hardware: Hardware, caches: Path | None = None) -> Work:
    write_base(folder / "base", case.size, hardware)
    reset_memory(hardware.device)
    lengths = sample_lengths(case)
    rng = np.random.default_rng(0)
    for name, some in (("rows", lengths[:SAMPLES]), ("held_out", lengths[SAMPLES:])):
        write_lengths(folder / f"{name}.jsonl", some, VOCABULARY, rng)
    sweep = {"search": "random", "trials": case.trials, "over": case.over, "halving": HALVING}
    write_jobs(
        folder / "jobs.yaml",
        folder / "base",
        hardware,
        [{"name": SWEEP, "sweep": sweep}],
        data=str(folder / "rows.jsonl"),
        eval={"path": str(folder / "held_out.jsonl")},
        steps=case.steps,
        batch_size=case.batch_size,
        warmup=WARMUP,
    )
    return Work(folder, caches or folder, hardware, case, read_run(folder / "jobs.yaml"))


def sample_lengths(case: Case) -> list[int]:
    """Of the rows, then of those held out."""
    count = SAMPLES + HELD_OUT
    if not case.real:
        return [case.length] * count
    rounds = draw_rounds(-(-count // 16), jobs=4, batch_size=4)
    return [length for batches in rounds for batch in batches for length in batch][:count]


def peft_task(work: Work, name: str, processes: int) -> SweepTask:
    job, case = work.job, work.case
    order = SampleOrder(SAMPLES, case.batch_size, job.seed)
    recipe = Recipe(case.steps, 1.0, job.schedule, to_steps(job.warmup, case.steps))
    steps = range(1, case.steps + 1)
    assert job.clip is not None
    return SweepTask(
        model=str(work.folder / "base"),
        device=str(work.hardware.device),
        dtype=str(work.hardware.dtype).removeprefix("torch."),
        output=str(output_of(name, work.folder)),
        processes=processes,
        rows=str(work.folder / "rows.jsonl"),
        held_out=str(work.folder / "held_out.jsonl"),
        batches=[order.batch(step).tolist() for step in steps],
        rates=[learning_rate(recipe, step) for step in steps],
        clip=job.clip,
        weight_decay=job.weight_decay,
        at=HALVING["at"],
        keep=HALVING["keep"],
        trials=[peft_trial(trial) for trial in work.run.jobs],
        probe_steps=case.peft_steps,
    )


def peft_trial(job: JobSpec) -> PeftTrial:
    return PeftTrial(
        name=job.name, rank=job.adapter.rank, alpha=job.adapter.alpha, learning_rate=job.learning_rate
    )


# -- sides ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to make the sweep."""

    key: str
    run: Run
    trial_steps: int | None = None
    best: str | None = None
    best_loss: float | None = None
    decisions: Sequence[Sequence[str]] = ()
    """The trials that went on from each rung."""

    @property
    def seconds(self) -> float | None:
        return self.run.seconds if self.run.exit_code == 0 and self.run.seconds > 0 else None


def with_weftune(name: str, work: Work) -> Side:
    print(f"measuring: {name}", flush=True)
    run = train(name, work.folder, ["--device", work.hardware.device.type], caches=work.caches)
    record = record_of(name, work)
    if record is None or not record.best:
        return Side(key="weftune", run=replace(run, exit_code=run.exit_code or 1))
    scores = {trial.name: trial.score for trial in record.trials}
    return Side(
        key="weftune",
        run=run,
        trial_steps=sum(steps_made(trial) for trial in record.trials),
        best=record.best[0],
        best_loss=scores[record.best[0]],
        decisions=[decision.kept for decision in record.decisions],
    )


def record_of(name: str, work: Work) -> SweepRecord | None:
    return read_record(output_of(name, work.folder) / SWEEP)


def steps_made(trial: TrialRecord) -> int:
    return trial.steps if trial.left_at is None else trial.left_at


def with_peft(key: str, name: str, work: Work, processes: int, record: SweepRecord | None) -> Side:
    """As a process; `record` is that of Weftune's sweep, which an extrapolation goes by."""
    print(f"measuring: {name}", flush=True)
    task = peft_task(work, name, processes)
    options, answer = (work.folder / f"{key}-{kind}.json" for kind in ("task", "result"))
    task.write(options)
    command = [sys.executable, "-m", "benchmarks.peft_sweep", str(options), str(answer)]
    exit_code, seconds = timed([command], work.caches)
    found = json.loads(answer.read_text()) if answer.exists() else {"phases": {}}
    run = Run(
        name=name,
        exit_code=exit_code,
        seconds=seconds,
        phases=found["phases"],
        peak_bytes=found.get("peak_bytes"),
    )
    if work.case.peft_steps is None or exit_code:
        told = {key: found.get(key) for key in ("trial_steps", "best", "best_loss")}
        return Side(key=key, run=run, decisions=found.get("decisions", ()), **told)
    assert record is not None
    rungs = rung_steps_made(record, {trial.name: trial.rank for trial in task.trials})
    training = extrapolated_seconds(found["probes"], rungs, processes)
    return Side(
        key=key,
        run=with_training(run, training, f"extrapolated from {work.case.peft_steps} steps"),
        trial_steps=sum(steps for rung in rungs for _, steps in rung.values()),
    )


def with_training(run: Run, seconds: float, note: str) -> Run:
    """The run as it would have been with so many seconds of training."""
    whole = run.seconds - run.phases[Phase.TRAINING] + seconds
    return replace(run, seconds=whole, phases={**run.phases, Phase.TRAINING: seconds}, note=note)


def absent(key: str, name: str, note: str) -> Side:
    return Side(key=key, run=Run(name=name, exit_code=0, seconds=0.0, note=note))


def fits(work: Work, processes: int, one_peak: int | None) -> bool:
    """Whether so many bases fit on the GPU, with what else a process takes."""
    if work.hardware.device.type != "cuda":
        return True
    return room(work.hardware, one_peak or base_bytes(work.case.size)) >= processes


# -- extrapolation ----------------------------------------------------------------------------------------

RungSteps = Mapping[str, tuple[int, int]]
"""Trial → its rank, and the steps that it made towards a rung."""


def rung_steps_made(record: SweepRecord, ranks: Mapping[str, int]) -> list[RungSteps]:
    """For every rung, the last step included, who trained towards it."""
    starts = (0, *record.rungs[:-1])
    return [
        {
            trial.name: (ranks[trial.name], min(end, made) - start)
            for trial in record.trials
            if (made := steps_made(trial)) > start
        }
        for start, end in zip(starts, record.rungs, strict=True)
    ]


def extrapolated_seconds(
    probes: Mapping[str, Mapping[str, Any]], rungs: Sequence[RungSteps], processes: int
) -> float:
    """Training with PEFT: at every rung the process with the longest share is waited for.

    `probes` has what so many processes at once measured. A trial begins once, and is evaluated at every rung.
    """
    whole = 0.0
    for number_of_rung, rung in enumerate(rungs):
        if not rung:
            continue
        probe = _probe(probes, min(processes, len(rung)))
        once = probe["evaluation"] + (probe["begin"] if number_of_rung == 0 else 0.0)
        whole += max(
            sum(once + rung[name][1] * probe["steps"][str(rung[name][0])] for name in share)
            for share in dealt(list(rung), {}, processes)
        )
    return whole


def _probe(probes: Mapping[str, Mapping[str, Any]], busy: int) -> Mapping[str, Any]:
    """Of so many processes, or of the next larger number where trials have left between rungs."""
    counts = sorted(map(int, probes))
    return probes[str(next((count for count in counts if count >= busy), counts[-1]))]


# -- told -------------------------------------------------------------------------------------------------


def table(sides: Sequence[Side]) -> str:
    own = weftune_seconds(sides)
    titles = ("", "wall, s", "trial steps", "× Weftune", "best loss", "")
    return aligned(
        titles,
        [
            (
                side.run.name,
                number(side.seconds),
                number(side.trial_steps, ",.0f"),
                number(ratio(side.seconds, own), ".2f"),
                number(side.best_loss, ".4f"),
                f"failed with exit code {side.run.exit_code}" if side.run.exit_code else side.run.note,
            )
            for side in sides
        ],
    )


def weftune_seconds(sides: Sequence[Side]) -> float | None:
    """Of the last run, which found the kernels of the first compiled."""
    found = [side.seconds for side in sides if side.key == "weftune" and side.seconds is not None]
    return found[-1] if found else None


def ratios(sides: Sequence[Side]) -> dict[str, dict[str, float]]:
    """Side of PEFT → over each run of Weftune."""
    own = [side for side in sides if side.key == "weftune" and side.seconds is not None]
    others = [side for side in sides if side.key != "weftune" and side.seconds is not None]
    return {
        other.key: {one.run.name: other.seconds / one.seconds for one in own}  # type: ignore[operator]
        for other in others
    }


def sentences(found: Mapping[str, Mapping[str, float]], bars: Mapping[str, float]) -> list[str]:
    names = {"peft": PLAIN, "processes": "PEFT, processes at once"}
    told = []
    for key, over in found.items():
        for name, value in over.items():
            told.append(f"{names[key]} takes {value:.2f} × {name}{verdict(value, bars.get(key))}")
    return told


def verdict(value: float, bar: float | None) -> str:
    return "" if bar is None else f" (bar {bar:g}: {'reached' if value >= bar else 'missed'})"


# -- the command ------------------------------------------------------------------------------------------


def measure(work: Work, options: Sequence[str], names: Sequence[str]) -> list[Side]:
    """The sides; `names` are those of Weftune's runs."""
    case = work.case
    sides = [told(with_weftune(name, work)) for name in names] if "weftune" in options else []
    record = record_of(sides[-1].run.name, work) if sides and sides[-1].seconds is not None else None
    if case.peft_steps is not None and record is None:
        return sides
    one_peak = None
    if "peft" in options:
        sides.append(told(with_peft("peft", PLAIN, work, 1, record)))
        one_peak = sides[-1].run.peak_bytes
    if "processes" in options:
        name = f"PEFT, {case.processes} processes at once"
        if fits(work, case.processes, one_peak):
            sides.append(told(with_peft("processes", name, work, case.processes, record)))
        else:
            sides.append(absent("processes", name, f"{case.processes} bases do not fit"))
    return sides


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    sides = options.sides.split(",")
    if unknown := set(sides) - set(ALL):
        parser.error(f"--sides takes some of {','.join(ALL)}, not {', '.join(sorted(unknown))}")
    if options.peft_steps is not None and "weftune" not in sides:
        parser.error("--peft-steps needs weftune among the sides: its sweep says who made how many steps")
    hardware = bench_hardware(options.toy)
    if hardware is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    case = _case(options)
    names = weftune_runs(options.caches, options.runs)
    with tempfile.TemporaryDirectory() as name:
        work = write_work(Path(name), case, hardware, options.caches)
        if not options.toy:
            compile_modules(work.caches)
        found = measure(work, sides, names)
    tell(case, found, options.json)
    sys.exit(max(side.run.exit_code for side in found))


def weftune_runs(caches: Path | None, count: int) -> list[str]:
    """What Weftune's runs are called: where kernels are kept already, none has empty caches."""
    return [WARM] if caches is not None and has_kernels(caches) else [COLD, WARM][:count]


def told(side: Side) -> Side:
    """At once: what follows may be cut short."""
    print(f"{side.run.name}: {number(side.seconds)} s", flush=True)
    return side


def tell(case: Case, sides: Sequence[Side], where: Path | None) -> None:
    print(f"\n{case.size.name}: {case.trials} trials of {case.steps} steps, {case.lengths} tokens\n")
    print(f"{table(sides)}\n")
    print(split_table([side.run for side in sides if side.seconds is not None]), end="\n\n")
    found = ratios(sides)
    bars = BARS.get((case.shape, case.lengths), {})
    print("\n".join(sentences(found, bars)))
    about = asdict(case) | {"lengths": case.lengths, "halving": HALVING}
    finish({"case": about, "ratios": found, "bars": bars, "sides": [asdict(side) for side in sides]}, where)


def _case(options: argparse.Namespace) -> Case:
    batch, length = map(int, (options.batch or ("2x8" if options.toy else "4x64")).lower().split("x"))
    whole = Case(
        shape=options.shape,
        size=SIZES[SHAPES[options.shape]],
        trials=options.trials or TRIALS[options.shape],
        steps=options.steps or 300,
        batch_size=batch,
        length=length,
        real=options.lengths == "real",
        processes=options.processes or 8,
        peft_steps=options.peft_steps,
    )
    if not options.toy:
        return whole
    return replace(
        whole,
        shape="toy",
        size=SIZES["toy"],
        trials=options.trials or 6,
        steps=options.steps or 10,
        processes=options.processes or 2,
        ranks=(4, 8),
    )


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", choices=list(SHAPES), default="tinyllama")
    parser.add_argument("--trials", type=int, help="32 unless told, 16 on 8b")
    parser.add_argument("--steps", type=int, help="of a trial that nobody stops: 300 unless told")
    parser.add_argument("--batch", help="samples of a step × tokens of a sample: 4x64 unless told")
    parser.add_argument("--lengths", choices=["real"], help="samples as long as those of real datasets")
    parser.add_argument("--sides", default=",".join(ALL), help=f"some of {','.join(ALL)}")
    parser.add_argument("--peft-steps", type=int, metavar="N", help="time N steps of PEFT, and extrapolate")
    parser.add_argument("--runs", type=int, choices=[1, 2], default=2, help="of Weftune")
    parser.add_argument("--caches", type=Path, metavar="FOLDER", help="where compiled kernels are kept")
    parser.add_argument("--processes", type=int, help="PEFT's at once: 8 unless told")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU: does it run at all")
    return parser


if __name__ == "__main__":
    main()
