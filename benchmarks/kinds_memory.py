"""Peak memory of a job of every kind on the demo base: as predicted for its first two windows, and measured.

Each kind is a process of its own on the CPU. The first window is predicted by counting, on the safe side for
all families of models; the second with what the first has taught. All numbers are of the whole process, base
included.

    python -m benchmarks.kinds_memory [--kinds lora,dora,…] [--batch-size 16] [--json FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.folder import read_lines
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned

CLOSE = 0.1


@dataclass(frozen=True, slots=True)
class Peak:
    """Of one window, in bytes."""

    predicted: int
    measured: int

    @property
    def apart(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of one kind."""

    kind: str
    first: Peak
    second: Peak


def train(kind: str, batch_size: int) -> Peaks:
    """Train a job of this kind in this process."""
    from benchmarks.nine_kinds import ADAPTERS, ROWS
    from weftune import JobSpec, Trainer

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        trainer = Trainer("demo", output=output)
        adapter = {"kind": kind, **ADAPTERS[kind]}
        trainer.add(JobSpec(name="job", data=str(ROWS), steps=2, batch_size=batch_size, adapter=adapter))
        assert all(result.state == "succeeded" for result in trainer.run().values())
        lines = list(read_lines(output / "windows.jsonl"))
    first, second, *_ = (Peak(line["predicted_peak_bytes"], line["peak_bytes"]) for line in lines)
    return Peaks(kind, first, second)


def in_process(kind: str, batch_size: int) -> Peaks:
    options = ["--train", kind, "--batch-size", str(batch_size)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kinds_memory", *options], check=True, stdout=subprocess.PIPE
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return Peaks(kind, Peak(**found["first"]), Peak(**found["second"]))


def table(found: Sequence[Peaks]) -> str:
    rows = [(one.kind, *_cells(one.first), *_cells(one.second)) for one in found]
    titles = ("predicted GB", "measured", "apart")
    return aligned(("kind", *titles, *titles), rows)


def _cells(peak: Peak) -> tuple[str, str, str]:
    return f"{peak.predicted / 1e9:.3f}", f"{peak.measured / 1e9:.3f}", f"{peak.apart:+.1%}"


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--kinds", help="some of them, with commas; all if left out")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--train", metavar="KIND", help="in this process; used by the benchmark itself")
    options = parser.parse_args()
    if options.train:
        print(json.dumps(asdict(train(options.train, options.batch_size))))
        return
    from benchmarks.nine_kinds import ADAPTERS

    found = []
    for kind in options.kinds.split(",") if options.kinds else ADAPTERS:
        found.append(in_process(kind, options.batch_size))
        print(f"{kind}: {found[-1].first.apart:+.1%}, then {found[-1].second.apart:+.1%}", flush=True)
    print(f"\n{table(found)}\n")
    for name in ("first", "second"):
        worst = max(abs(getattr(one, name).apart) for one in found)
        print(f"The {name} window: at most {worst:.1%} apart (bar {CLOSE:.0%}).")
    finish({"kinds": [asdict(one) for one in found]}, options.json)


if __name__ == "__main__":
    main()
