"""What training on a base in fp8 does to validation losses: LoRA jobs on the demo base, plain and in fp8.

Runs on a CPU, where fp8 is emulated in plain torch: the products are of the very values that fp8 tensor cores
multiply, summed in float32. The plain base is in float32, which holds the bfloat16 weights of its files
exactly. Every base trains the same jobs on the same rows in the same order.

    python -m benchmarks.fp8_quality [--steps 16] [--batch-size 8] [--formats fp8] [--json FILE]
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from transformers import PreTrainedModel

from benchmarks.cpu_quickstart import JOBS as QUICKSTART
from benchmarks.folder import read_lines
from weftune.base.load import load_plain, load_tokenizer
from weftune.base.model import Base
from weftune.base.quant.linear import quantise_linears
from weftune.base.quant.stored import Quantised
from weftune.base.spec import DEMO, BaseSpec, Quantize
from weftune.base.weights import quantised_forms
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.jobs.spec.spec import JobSpec
from weftune.trainer.trainer import Trainer

CPU = torch.device("cpu")
ROWS = QUICKSTART.parent
JOBS: Mapping[str, tuple[str, int, float]] = {
    "gsm8k-r8": ("gsm8k.jsonl", 8, 1e-3),
    "gsm8k-r32": ("gsm8k.jsonl", 32, 3e-4),
    "openbookqa-r16": ("openbookqa.jsonl", 16, 1e-3),
}
"""Rows, rank, learning rate."""
HELD_OUT = 0.2
CLOSE = 0.005


@dataclass(frozen=True, slots=True)
class Judged:
    """The validation losses of one job before its first step and after its last."""

    job: str
    base: str
    first: float
    last: float
    apart: float
    """The last one from that on the plain base, relative."""


def spec_of(name: str, steps: int, batch_size: int) -> JobSpec:
    rows, rank, rate = JOBS[name]
    return JobSpec(
        name=name,
        data=str(ROWS / rows),
        steps=steps,
        batch_size=batch_size,
        learning_rate=rate,
        adapter={"rank": rank},
        eval={"fraction": HELD_OUT, "every": steps},
    )


def base_in(model: PreTrainedModel, quantize: Quantize | None, spec: BaseSpec) -> Base:
    """The model is taken over."""
    if quantize is not None:
        quantise_linears(model, quantised_forms(model, Quantised(quantize), None))
    return Base.from_model(model, spec, CPU)


def validated(base: Base, tokenizer: Any, jobs: Sequence[JobSpec]) -> dict[str, list[float]]:
    """The validation losses of every job, in their order."""
    with tempfile.TemporaryDirectory() as name:
        trainer = Trainer(base, output=Path(name) / "out", tokenizer=tokenizer)
        for job in jobs:
            trainer.add(job)
        ended = trainer.run()
        assert all(one.state == "succeeded" for one in ended.values()), ended
        lines = [one for one in read_lines(Path(name) / "out" / "metrics.jsonl") if "eval_loss" in one]
    return {job.name: [one["eval_loss"] for one in lines if one["job"] == job.name] for job in jobs}


def judged(found: Mapping[str, Mapping[str, Sequence[float]]], plain: str) -> list[Judged]:
    return [
        Judged(job, base, losses[0], losses[-1], losses[-1] / found[plain][job][-1] - 1)
        for base, by_job in found.items()
        for job, losses in by_job.items()
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--jobs", default=",".join(JOBS), help=f"some of {','.join(JOBS)}")
    parser.add_argument("--formats", default="fp8", help=f"some of {','.join(get_args(Quantize))}")
    parser.add_argument("--model", default=DEMO, help="another base than the demo one")
    asked = parser.parse_args()
    jobs = [spec_of(name, asked.steps, asked.batch_size) for name in asked.jobs.split(",")]
    spec = BaseSpec(model=asked.model, dtype="float32")
    tokenizer, plain = load_tokenizer(spec), "plain"
    found = {}
    for form in (None, *cast(list[Quantize], asked.formats.split(","))):
        found[form or plain] = validated(base_in(load_plain(spec, CPU), form, spec), tokenizer, jobs)
    rows = judged(found, plain)
    print("\n" + aligned(("job", "base", "first", "last", "from plain"), [_cells(one) for one in rows]))
    worst = max((abs(one.apart) for one in rows if one.base == "fp8"), default=0.0)
    verdict = "reached" if worst <= CLOSE else "missed"
    print(f"fp8 is at most {worst:.2%} from the plain base (bar {CLOSE:.1%}: {verdict})")
    finish(
        {"steps": asked.steps, "batch_size": asked.batch_size, "jobs": [asdict(one) for one in rows]},
        asked.json,
    )


def _cells(one: Judged) -> tuple[str, ...]:
    return one.job, one.base, f"{one.first:.4f}", f"{one.last:.4f}", f"{one.apart:+.2%}"


if __name__ == "__main__":
    main()
