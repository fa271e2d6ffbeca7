"""Peak memory of eight jobs together on the demo base, over that of one of them.

Each case is a process of its own; its peak resident set is what the kernel counted.

    python -m benchmarks.cpu_memory [--steps N] [--json FILE]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from weftune.bench.result import arguments, finish

ROWS = Path(__file__).parent.parent / "examples" / "quickstart" / "gsm8k.jsonl"
MANY = 8


def train(jobs: int, steps: int) -> None:
    """Train `jobs` adapters of rank 16 on all linears, batches of 16."""
    from weftune import JobSpec, Trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer("demo", output=Path(folder) / "out")
        for number in range(jobs):
            trainer.add(JobSpec(name=f"job{number}", data=str(ROWS), steps=steps, seed=number))
        assert all(result.state == "succeeded" for result in trainer.run().values())


def peak_bytes(jobs: int, steps: int) -> int:
    """The peak resident set of a process that trains so many jobs."""
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "benchmarks.cpu_memory", "--steps", str(steps), "--train", str(jobs)],
        os.environ,
    )
    _, status, usage = os.wait4(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the training process failed"
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--train", type=int, metavar="JOBS", help="train in this process; used by the benchmark itself"
    )
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps)
        return
    one, many = peak_bytes(1, options.steps), peak_bytes(MANY, options.steps)
    print(f"1 job  {one / 2**30:6.2f} GiB\n{MANY} jobs {many / 2**30:6.2f} GiB   {many / one:.2f} ×")
    finish({"one": one, "many": many, "jobs": MANY, "ratio": many / one}, options.json)


if __name__ == "__main__":
    main()
