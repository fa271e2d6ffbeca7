"""Two checkouts beside each other on one GPU: whether a change of the code made anything slower.

Every case is run by both in turn, each in a process of its own, so that both meet the same card, clocks and
temperature. The quickest run of each counts: whatever else the machine does only adds to one.

    git worktree add ../before 1e26299
    python -m benchmarks.two_trees ../before [--runs N] [--toy] [--json FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned

HERE = Path(__file__).parents[1]
CASES = {
    "8b, 8 jobs of 1×1024": ["benchmarks.gpu_step", "--shape", "8b", "--batch", "1x1024"],
    "8b, 8 jobs of 4×64": ["benchmarks.gpu_step", "--shape", "8b", "--batch", "4x64"],
    "1b, 8 jobs of 4×64": ["benchmarks.gpu_step", "--shape", "1b", "--batch", "4x64"],
    "8b under 10 GiB, 8 jobs": ["benchmarks.gpu_stream", "--shape", "8b", "--cap", "10", "--jobs", "8"],
}
TOY = {
    "a step": ["benchmarks.gpu_step", "--toy"],
    "streamed": ["benchmarks.gpu_stream", "--toy"],
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--runs", type=int, default=2, help="of each case and checkout")
    parser.add_argument("--toy", action="store_true", help="tiny shapes on the CPU: does it run at all")
    options = parser.parse_args()
    rows = []
    for name, case in (TOY if options.toy else CASES).items():
        seconds: dict[Path, list[float]] = {options.before.resolve(): [], HERE: []}
        for _ in range(options.runs):
            for tree, found in seconds.items():
                found.append(run(tree, case))
        before, now = (min(found) for found in seconds.values())
        rows.append({"case": name, "before": before, "now": now, "ratio": now / before})
        print(name, *numbers_of(rows[-1]), flush=True)
    print()
    print(aligned(["", "ms before", "ms now", "× before"], [[row["case"], *numbers_of(row)] for row in rows]))
    finish({"rows": rows}, options.json)


def numbers_of(row: dict[str, Any]) -> list[str]:
    return [f"{row['before'] * 1000:.1f}", f"{row['now'] * 1000:.1f}", f"{row['ratio']:.3f}"]


def run(tree: Path, case: list[str]) -> float:
    """Seconds of a round in that checkout."""
    alone = ["--baselines", "none"] if case[0].endswith("gpu_step") else []
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", *case, *alone, "--json", str(found)]
        paths = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": paths}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=sys.stderr)
        return float(json.loads(found.read_text())["rows"][0]["seconds"])


if __name__ == "__main__":
    main()
