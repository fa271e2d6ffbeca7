"""`weftune train` with long samples on one GPU: seconds per round, and peak memory, measured and predicted.

    python -m benchmarks.long_train [--shape 8b] [--layers N] [--cases 1x8192,1x32768,8x8192,2x131072]
                                    [--steps N] [--gpu-memory SIZE] [--json FILE]

A base with random weights in a real shape is written to files. In a case JOBSxTOKENS every job, of rank 16 on
all linears, makes steps on one sample of that many tokens. With `:STEPS` behind it a case has its own number
of steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.commands import train
from benchmarks.folder import ranked_jobs, read_lines, write_base, write_jobs, write_lengths
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, toy_size
from weftune.bench.timing import Hardware, bench_hardware, reset_memory
from weftune.jobs.store.status import PREDICTION

RANK = 16
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """Jobs that all train samples of the same length, one sample per step."""

    jobs: int
    tokens: int
    steps: int

    @classmethod
    def of(cls, text: str, steps: int) -> Case:
        sizes, _, own_steps = text.partition(":")
        jobs, tokens = map(int, sizes.split("x"))
        return cls(jobs, tokens, int(own_steps or steps))


@dataclass(frozen=True, slots=True)
class LongRun:
    """The outcome of one case, taken from the records of the run."""

    case: Case
    exit_code: int
    seconds: float
    """Seconds of the process."""
    round_seconds: float | None
    """Seconds of one step of every job, in the fastest window."""
    peak_bytes: int | None
    predicted_bytes: int | None
    """Peak that was predicted for the first window, before anything was measured."""
    plan: str
    losses: tuple[float, ...]

    def line(self) -> str:
        start = f"{self.case.jobs} x {self.case.tokens:>7,}"
        if self.round_seconds is None or self.peak_bytes is None or self.predicted_bytes is None:
            return f"{start}  exit code {self.exit_code}"
        return (
            f"{start}  {self.round_seconds:8.3f} s per round  peak {self.peak_bytes / GIB:7.2f} GiB  "
            f"predicted {self.predicted_bytes / GIB:7.2f} ({self.predicted_bytes / self.peak_bytes - 1:+.1%})"
            f"  process {self.seconds:.0f} s  {self.plan}"
        )


def run(case: Case, folder: Path, size: Size, hardware: Hardware, words: list[str]) -> LongRun:
    name = f"{case.jobs}x{case.tokens}"
    rows, jobs = folder / f"{name}.jsonl", folder / f"{name}.yaml"
    write_lengths(rows, [case.tokens] * case.jobs, size.vocabulary, np.random.default_rng(0))
    defaults = {"data": {"path": rows.name, "max_length": case.tokens}, "steps": case.steps, "batch_size": 1}
    write_jobs(jobs, folder / "base", hardware, ranked_jobs([RANK] * case.jobs), **defaults)
    found = train(name, folder, words, jobs.name)
    output = folder / name
    windows = list(read_lines(output / "windows.jsonl")) if (output / "windows.jsonl").exists() else []
    losses = [line["loss"] for line in read_lines(output / "metrics.jsonl") if "loss" in line]
    if not windows:
        return LongRun(case, found.exit_code, found.seconds, None, None, None, "", ())
    promise = json.loads(next(output.rglob(PREDICTION)).read_text())
    plan = {key: promise[key] for key in ("recomputed_layers", "tile_rows", "offloaded_layers")}
    round_tokens = case.jobs * case.tokens
    return LongRun(
        case,
        found.exit_code,
        found.seconds,
        min(one["seconds"] * round_tokens / one["tokens"] for one in windows if one["tokens"]),
        max(int(one["peak_bytes"]) for one in windows),
        int(windows[0]["predicted_peak_bytes"]),
        json.dumps(plan),
        tuple(losses),
    )


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SIZES, default="8b")
    parser.add_argument("--layers", type=int, help="keep only so many layers")
    parser.add_argument("--cases", default="1x8192,1x32768")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--gpu-memory", metavar="SIZE", help="as of weftune train")
    parser.add_argument("--toy", action="store_true", help="a tiny base on the CPU, to try the script")
    options = parser.parse_args()
    if (hardware := bench_hardware(options.toy)) is None:
        sys.exit("no GPU is found here; --toy runs on the CPU")
    cases = [Case.of(text, options.steps) for text in options.cases.split(",")]
    size = SIZES[options.shape]
    size = toy_size(size) if options.toy else replace(size, layers=options.layers or size.layers)
    size = replace(size, context=max(size.context, *(case.tokens for case in cases)))
    words = [] if options.gpu_memory is None else ["--gpu-memory", options.gpu_memory]
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_base(folder / "base", size, hardware)
        reset_memory(hardware.device)
        for case in cases:
            runs.append(run(case, folder, size, hardware, words))
            print(runs[-1].line(), flush=True)
    finish({"size": asdict(size), "runs": [asdict(one) for one in runs]}, options.json)


if __name__ == "__main__":
    main()
