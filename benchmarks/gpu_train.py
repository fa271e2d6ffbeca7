"""`weftune train` as its user meets it: a process, from its start to the finished adapters; beside it PEFT.

A base with random weights in a real shape is written to files, with a real tokenizer. Eight jobs train on
eight real datasets, rank 16 on all linears: with `weftune train` twice, with empty caches, so that kernels
are compiled and tried, and again; and with PEFT (`benchmarks.peft_train`) on the same samples in the same
order, plain and as strong as it gets, one job after another in one process, and with a process for as many
jobs as fit at once. Every wall time is that of a process with its imports, loading, tokenising and saving.

    python -m benchmarks.gpu_train --data FOLDER --tokenizer FOLDER [--shape 8b] [--steps 25] [--batch 8]
        [--rows N] [--only weftune,peft,strong,processes] [--long N] [--json FILE]

FOLDER of `--data` holds the datasets as JSON lines of chats, found by the beginning of their names (gsm8k,
openbookqa, svamp, glaive, dolly, xsum, sst2, rte). Of each the first `--rows` rows are taken, of those that
have at most `--longest` tokens; `--cut FOLDER` writes what would be taken there and ends, to be carried to
another machine. With more `--steps` than `--peft-steps` PEFT makes only those, and its training time is
extrapolated. `--long N` has Weftune train once more, N steps, against PEFT's times extrapolated to as many.

Python's compiled modules are made before anything is measured, as an installation makes them.

Without `--data` only Weftune runs, on random tokens of random lengths, `--batch 2x1024`; so it does with
`--gpu-memory SIZE`, since nothing else can be given less than its GPU has.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.commands import COLD, WARM, Run, compile_modules, output_of, room, split_table, timed, train
from benchmarks.folder import Rows, lines_of, ranked_jobs, write_base, write_jobs, write_rows
from benchmarks.peft_train import PeftJob, PeftTask, encoded
from weftune.base.load import demo_folder
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, build
from weftune.bench.table import number, ratio
from weftune.bench.timing import Hardware, bench_hardware, reset_memory
from weftune.core.clock import Phase
from weftune.data.samples import SampleOrder
from weftune.data.template import template_source
from weftune.errors import MissingPackage

RANK = 16
SAMPLES = 64
DATASETS = ("gsm8k", "openbookqa", "svamp", "glaive", "dolly", "xsum", "sst2", "rte")
ALL = ("weftune", "peft", "strong", "processes")
PLAIN, STRONG = "PEFT, one after another", "PEFT without padding, Liger"


# -- what is trained ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """The folder with everything in it, and how it is trained."""

    folder: Path
    hardware: Hardware
    steps: int
    batch: int
    peft_steps: int
    files: Mapping[str, Path] = field(default_factory=dict)
    """Job → its rows; none where they are random."""

    @property
    def base(self) -> Path:
        return self.folder / "base"


def cut_rows(
    source: Path, target: Path, tokenizer: Any, rows: int, longest: int, jobs: int
) -> dict[str, Path]:
    """The rows of every dataset that are taken, in files of their own."""
    target.mkdir(parents=True, exist_ok=True)
    made = {}
    for name in DATASETS[:jobs]:
        found = sorted(source.glob(f"{name}*.jsonl"))
        if not found:
            raise SystemExit(f"{source} has no file {name}*.jsonl")
        lines = lines_of(found[0])
        kept = [line for line in lines if fits(json.loads(line), tokenizer, longest)][:rows]
        made[name] = target / f"{name}.jsonl"
        made[name].write_text("\n".join(kept) + "\n")
    return made


def fits(row: Mapping[str, Any], tokenizer: Any, longest: int) -> bool:
    """Whether Weftune and PEFT make one sample of the same tokens of it."""
    ends = row["messages"][-1]["role"] == "assistant"
    return ends and len(encoded(row, tokenizer).tokens) <= longest


def real_tokenizer(folder: Path | None) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder or demo_folder())
    except MissingPackage as error:
        raise SystemExit(f"name a model folder that has a tokenizer with --tokenizer, for: {error}") from None
    tokenizer.chat_template = template_source(tokenizer, None) or template_source(tokenizer, "chatml")
    return tokenizer


def jobs_of_data(work: Work) -> list[dict[str, Any]]:
    return [
        {"name": name, "seed": at, "data": {"path": str(path)}, "adapter": {"rank": RANK}}
        for at, (name, path) in enumerate(work.files.items())
    ]


def peft_jobs(work: Work) -> list[PeftJob]:
    """The same samples in the same order: every row is one sample."""
    made = []
    for seed, (name, path) in enumerate(work.files.items()):
        order = SampleOrder(len(lines_of(path)), work.batch, seed)
        steps = range(1, min(work.steps, work.peft_steps) + 1)
        made.append(PeftJob(name, str(path), [order.batch(step).tolist() for step in steps]))
    return made


# -- processes -------------------------------------------------------------------------------------------


def peft(name: str, work: Work, strong: bool, processes: int = 1) -> Run:
    """Every process has a share of the jobs; the phases are those of the longest."""
    jobs = peft_jobs(work)
    dtype, device = str(work.hardware.dtype).removeprefix("torch."), str(work.hardware.device)
    output = str(output_of(name, work.folder))
    commands, results = [], []
    for share in range(processes):
        task = PeftTask(str(work.base), device, dtype, output, strong, RANK, jobs[share::processes])
        files = [work.folder / f"{kind}{share}.json" for kind in ("task", "result")]
        files[1].unlink(missing_ok=True)
        task.write(files[0])
        commands.append([sys.executable, "-m", "benchmarks.peft_train", *map(str, files)])
        results.append(files[1])
    exit_code, seconds = timed(commands, work.folder)
    found = [json.loads(path.read_text()) for path in results if path.exists()]
    longest = max(found, key=lambda one: sum(one["phases"].values()), default={"phases": {}, "note": ""})
    return Run(
        name=name,
        exit_code=exit_code,
        seconds=seconds,
        phases=longest["phases"],
        tokens=sum(one["tokens"] for one in found),
        peak_bytes=sum(one["peak_bytes"] or 0 for one in found) or None,
        note=longest["note"],
    )


def peft_in_processes(work: Work, one_peak: int | None) -> Run:
    """As many processes as fit, each with its share of the jobs."""
    count = min(len(work.files), room(work.hardware, one_peak))
    while True:
        found = peft(f"PEFT, {count} processes at once", work, strong=False, processes=count)
        if found.exit_code == 0 or count == 1:
            return found
        count -= 1


def extrapolated(run: Run, work: Work) -> Run:
    """PEFT's run of fewer steps with the time that all of them would have taken."""
    times = work.steps / work.peft_steps
    if times <= 1.0:
        return run
    grown = (Phase.TRAINING, Phase.TOKENISING)
    phases = {name: one * (times if name in grown else 1.0) for name, one in run.phases.items()}
    more = sum(phases.values()) - sum(run.phases.values())
    words = f"extrapolated from {work.peft_steps} steps"
    note = f"{run.note}; {words}" if run.note else words
    return replace(run, seconds=run.seconds + more, phases=phases, tokens=int(run.tokens * times), note=note)


# -- told -------------------------------------------------------------------------------------------------


def ratios(runs: Sequence[Run]) -> dict[str, float]:
    """Weftune's wall over each of the others'."""
    whole = [run for run in runs if run.exit_code == 0]
    own = [run for run in whole if run.name in (COLD, WARM)]
    others = [run for run in whole if run.name.startswith("PEFT")]
    pairs = {
        f"{one.name} / {other.name}": ratio(one.seconds, other.seconds) for one in own for other in others
    }
    return {name: value for name, value in pairs.items() if value is not None}


def long_ratios(long: Run, runs: Sequence[Run], work: Work) -> dict[str, float]:
    """The wall of a long run of Weftune over those of PEFT, extrapolated to as many steps."""
    whole = [run for run in runs if run.exit_code == 0 and run.name.startswith("PEFT")]
    pairs = {
        f"{long.name} / {run.name}": ratio(long.seconds, extrapolated(run, work).seconds) for run in whole
    }
    return {name: value for name, value in pairs.items() if value is not None}


def tell(runs: Sequence[Run], found: Mapping[str, float], about: dict[str, Any], where: Path | None) -> None:
    print(split_table(runs))
    for run in runs:
        if run.windows:
            windows = " ".join(f"{one:.1f}" for one in run.windows)
            after = number(run.after_last_step)
            print(
                f"{run.name}: {run.tokens:,} tokens, windows of {windows} s, {after} s behind the last step"
            )
    for name, value in found.items():
        print(f"{name}: {value:.2f}")
    finish({**about, "ratios": found, "runs": [asdict(run) for run in runs]}, where)


# -- the command ------------------------------------------------------------------------------------------


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    if options.cut is not None:
        if options.data is None:
            parser.error("--cut goes with --data")
        cut_rows(
            options.data,
            options.cut,
            real_tokenizer(options.tokenizer),
            options.rows,
            options.longest,
            options.jobs,
        )
        return
    if options.long and options.data is None:
        parser.error("--long goes with --data")
    hardware = bench_hardware(options.toy)
    if hardware is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    words = ["--device", hardware.device.type]
    words += ["--gpu-memory", options.gpu_memory] if options.gpu_memory else []
    with tempfile.TemporaryDirectory() as name:
        work = (_real if options.data else _random)(options, Path(name), hardware)
        if not options.toy:
            compile_modules(work.folder)
        runs = _runs(options, work, words)
        found = ratios(runs)
        if options.long:
            long = replace(work, steps=options.long, peft_steps=work.steps)
            _write_real_jobs(long, "long.yaml", options.longest)
            longer = train(f"Weftune, {options.long} steps", work.folder, words, "long.yaml")
            found |= long_ratios(longer, runs, long)
            runs.append(longer)
    about = {"shape": "toy" if options.toy else options.shape, "gpu_memory": options.gpu_memory}
    about |= {"jobs": options.jobs, "steps": work.steps, "batch": work.batch}
    tell(runs, found, about, options.json)
    sys.exit(max(run.exit_code for run in runs))


def _runs(options: argparse.Namespace, work: Work, words: Sequence[str]) -> list[Run]:
    only = options.only.split(",") if work.files and not options.gpu_memory else ["weftune"]
    runs = [train(name, work.folder, words) for name in (COLD, WARM)] if "weftune" in only else []
    one_peak = None
    for key, name in (("peft", PLAIN), ("strong", STRONG)):
        if key in only:
            runs.append(extrapolated(peft(name, work, strong=key == "strong"), work))
            one_peak = one_peak or runs[-1].peak_bytes
    if "processes" in only:
        runs.append(extrapolated(peft_in_processes(work, one_peak), work))
    return runs


def _real(options: argparse.Namespace, folder: Path, hardware: Hardware) -> Work:
    tokenizer = real_tokenizer(options.tokenizer)
    size = replace(SIZES["toy"], vocabulary=len(tokenizer)) if options.toy else SIZES[options.shape]
    if len(tokenizer) > size.vocabulary:
        raise SystemExit(f"the tokenizer has {len(tokenizer)} tokens, and the shape {size.vocabulary}")
    build(size, hardware).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    reset_memory(hardware.device)
    rows = min(options.rows, 40) if options.toy else options.rows
    longest = min(options.longest, 64) if options.toy else options.longest
    files = cut_rows(options.data, folder / "data", tokenizer, rows, longest, options.jobs)
    steps, batch = options.steps or (3 if options.toy else 25), 2 if options.toy else int(options.batch or 8)
    work = Work(folder, hardware, steps, batch, options.peft_steps, files)
    _write_real_jobs(work, "jobs.yaml", longest)
    return work


def _write_real_jobs(work: Work, file: str, longest: int) -> None:
    defaults = {"steps": work.steps, "batch_size": work.batch, "data": {"max_length": longest}}
    write_jobs(work.folder / file, work.base, work.hardware, jobs_of_data(work), **defaults)


def _random(options: argparse.Namespace, folder: Path, hardware: Hardware) -> Work:
    size = SIZES["toy" if options.toy else options.shape]
    batch, longest = (4, 16) if options.toy else map(int, (options.batch or "2x1024").lower().split("x"))
    write_base(folder / "base", size, hardware)
    reset_memory(hardware.device)
    write_rows(folder / "rows.jsonl", size, Rows(samples=SAMPLES, shortest=longest // 8, longest=longest))
    work = Work(folder, hardware, options.steps or 6, batch, options.peft_steps)
    jobs = ranked_jobs([RANK] * options.jobs)
    defaults = {"data": "rows.jsonl", "steps": work.steps, "batch_size": batch}
    write_jobs(folder / "jobs.yaml", folder / "base", hardware, jobs, **defaults)
    return work


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", choices=[name for name in SIZES if name != "toy"], default="8b")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="the datasets")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a model folder; else SmolLM2's")
    parser.add_argument("--rows", type=int, default=1_000_000, help="at most so many rows of each dataset")
    parser.add_argument("--longest", type=int, default=2048, help="rows of more tokens are left out")
    parser.add_argument("--cut", type=Path, metavar="FOLDER", help="write the rows there, and end")
    parser.add_argument("--only", default=",".join(ALL), help=f"some of {','.join(ALL)}")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="as of weftune train")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--steps", type=int, help="of every job: 25 unless told, 6 on random tokens")
    parser.add_argument("--peft-steps", type=int, default=25, help="PEFT makes no more")
    parser.add_argument("--long", type=int, metavar="N", help="Weftune once more, for so many steps")
    parser.add_argument("--batch", help="samples of one job's step; on random tokens with × the longest")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU: does it run at all")
    return parser


if __name__ == "__main__":
    main()
