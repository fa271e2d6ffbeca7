"""What training on a base in fp8 does to validation losses: LoRA jobs on the demo base, plain and in fp8.

Runs on a CPU, where fp8 is emulated in plain torch: the products are of the very values that fp8 tensor cores
multiply, summed in float32. The plain base is in float32, which holds the bfloat16 weights of its files
exactly. Every base trains the same jobs on the same rows in the same order. Adapters are judged on the base
that they were trained on, and on the plain one, which they may be served on.

    python -m benchmarks.fp8_quality [--steps 16] [--batch-size 8] [--formats fp8] [--json FILE]
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from weftune.base.weights import quantised_formats
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
PLAIN = "plain"
TITLES = ("job", "base", "first", "last", "from plain", "on the plain base", "from plain")


@dataclass(frozen=True, slots=True)
class Judged:
    """The validation losses of one job before its first step and after its last."""

    job: str
    base: str
    first: float
    last: float
    apart: float
    """The last one from that on the plain base, relative."""
    served: float
    """The last one, of the same adapter on the plain base."""
    served_apart: float


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
        quantise_linears(model, quantised_formats(model, Quantised(quantize), None))
    return Base.from_model(model, spec, CPU)


def validated(base: Base, tokenizer: Any, jobs: Sequence[JobSpec], output: Path) -> dict[str, list[float]]:
    """The validation losses of every job, in their order; adapters stay in `output`."""
    trainer = Trainer(base, output=output, tokenizer=tokenizer)
    for job in jobs:
        trainer.add(job)
    ended = trainer.run()
    assert all(one.state == "succeeded" for one in ended.values()), ended
    lines = [one for one in read_lines(output / "metrics.jsonl") if "eval_loss" in one]
    return {job.name: [one["eval_loss"] for one in lines if one["job"] == job.name] for job in jobs}


def on_plain(
    plain: Base, tokenizer: Any, jobs: Sequence[JobSpec], trained: Path, output: Path
) -> dict[str, float]:
    """The validation losses of trained adapters on the plain base: those before the first step of jobs that
    go on from them."""
    again = []
    for job in jobs:
        adapter = replace(job.adapter, init_from=str(trained / job.name))
        again.append(replace(job, adapter=adapter, steps=1))
    found = validated(plain, tokenizer, again, output)
    return {name: losses[0] for name, losses in found.items()}


def judged(
    found: Mapping[str, Mapping[str, Sequence[float]]], served: Mapping[str, Mapping[str, float]]
) -> list[Judged]:
    """Losses by base and job: as trained, and of the adapters of other bases on the plain one."""
    plain = {job: losses[-1] for job, losses in found[PLAIN].items()}
    rows = []
    for base, by_job in found.items():
        for job, losses in by_job.items():
            last, there = losses[-1], served[base][job] if base != PLAIN else plain[job]
            rows.append(
                Judged(job, base, losses[0], last, last / plain[job] - 1, there, there / plain[job] - 1)
            )
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--jobs", default=",".join(JOBS), help=f"some of {','.join(JOBS)}")
    parser.add_argument("--formats", default="fp8", help=f"some of {','.join(get_args(Quantize))}")
    parser.add_argument("--model", default=DEMO, help="another base than the demo one")
    options = parser.parse_args()
    jobs = [spec_of(name, options.steps, options.batch_size) for name in options.jobs.split(",")]
    spec = BaseSpec(model=options.model, dtype="float32")
    tokenizer = load_tokenizer(spec)
    found, served = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        plain = base_in(load_plain(spec, CPU), None, spec)
        found[PLAIN] = validated(plain, tokenizer, jobs, Path(folder) / PLAIN)
        for form in cast(list[Quantize], options.formats.split(",")):
            base, trained = base_in(load_plain(spec, CPU), form, spec), Path(folder) / form
            found[form] = validated(base, tokenizer, jobs, trained)
            served[form] = on_plain(plain, tokenizer, jobs, trained, Path(folder) / f"{form}-served")
    rows = judged(found, served)
    print("\n" + aligned(TITLES, [_cells(one) for one in rows]))
    quantised = [one for one in rows if one.base == "fp8"]
    for where, parts in (
        ("On fp8 losses", [one.apart for one in quantised]),
        ("On the plain base losses of adapters trained on fp8", [one.served_apart for one in quantised]),
    ):
        worst = max(map(abs, parts), default=0.0)
        verdict = "reached" if worst <= CLOSE else "missed"
        print(f"{where} are at most {worst:.2%} from those of the plain base (bar {CLOSE:.1%}: {verdict})")
    finish(
        {"steps": options.steps, "batch_size": options.batch_size, "jobs": [asdict(one) for one in rows]},
        options.json,
    )


def _cells(one: Judged) -> tuple[str, ...]:
    losses = f"{one.first:.4f}", f"{one.last:.4f}", f"{one.apart:+.2%}"
    return one.job, one.base, *losses, f"{one.served:.4f}", f"{one.served_apart:+.2%}"


if __name__ == "__main__":
    main()
