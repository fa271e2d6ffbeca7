"""Eight jobs of several kinds of adapter on one GPU: what a round takes, against eight LoRA jobs and PEFT.

The base has random weights in a real shape, all tokens are supervised. Every number comes from the same run:
eight LoRA jobs, eight DoRA jobs, and 2 LoRA, 2 DoRA, VeRA, IA³, bottleneck and prefix together. PEFT's time
is the sum over the jobs of one step of each, one after another; it has no bottleneck adapters, for which a
LoRA job of their width stands. Last, kinds join and leave among LoRA jobs, and captured graphs are counted.

    python -m benchmarks.gpu_kinds [--shape 8b] [--layers N] [--batch 1x1024] [--rank 16] [--size 64]
        [--tokens 16] [--no-peft] [--profile] [--toy] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, VeraConfig, get_peft_model

from benchmarks.where import Spent, drawn, spent, traced
from weftune.adapters.bottleneck.spec import BottleneckSpec
from weftune.adapters.dora.spec import DoraSpec
from weftune.adapters.ia3.spec import Ia3Spec
from weftune.adapters.kinds import AdapterSpec
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.prefix.spec import PrefixSpec
from weftune.adapters.registry import adapter_layout
from weftune.adapters.vera.spec import VeraSpec
from weftune.base.shape import model_shape
from weftune.bench.baselines import TARGETS, job_step
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, build, build_frozen, random_ids
from weftune.bench.table import aligned, number, ratio
from weftune.bench.timing import (
    Hardware,
    MeasuredStep,
    Repeats,
    bench_hardware,
    gemm_rate,
    measure,
    measure_or_explain,
    repeat_step,
    reset_memory,
)
from weftune.bench.weftune_side import AttachedJobs, resident_jobs
from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import MemoryModel

BAR = 1.15
"""How many times eight LoRA jobs a company may take at most."""
COMPANIES: Mapping[str, tuple[str, ...]] = {
    "8 LoRA": ("lora",) * 8,
    "8 DoRA": ("dora",) * 8,
    "mixed": ("lora", "lora", "dora", "dora", "vera", "ia3", "bottleneck", "prefix"),
}
JOINING = ("dora", "vera", "ia3", "bottleneck", "prefix")
"""Kinds that come and go among LoRA jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    size: Size
    batch: int
    length: int
    rank: int
    bottleneck: int
    prefix: int
    pace: Repeats
    capacity: int

    def spec(self, kind: str) -> AdapterSpec:
        return {
            "lora": LoraSpec(rank=self.rank, alpha=2.0 * self.rank),
            "dora": DoraSpec(rank=self.rank, alpha=2.0 * self.rank),
            "vera": VeraSpec(rank=self.rank),
            "ia3": Ia3Spec(),
            "bottleneck": BottleneckSpec(size=self.bottleneck),
            "prefix": PrefixSpec(num_virtual_tokens=self.prefix),
        }[kind]

    def peft_config(self, kind: str) -> Any:
        lora: dict[str, Any] = {"lora_alpha": 2 * self.rank, "target_modules": TARGETS}
        return {
            "lora": lambda: LoraConfig(r=self.rank, task_type="CAUSAL_LM", **lora),
            "dora": lambda: LoraConfig(r=self.rank, use_dora=True, task_type="CAUSAL_LM", **lora),
            "vera": lambda: VeraConfig(r=self.rank, target_modules=TARGETS, task_type="CAUSAL_LM"),
            "ia3": lambda: IA3Config(task_type="CAUSAL_LM"),
            "bottleneck": lambda: LoraConfig(r=self.bottleneck, task_type="CAUSAL_LM", **lora),
            "prefix": lambda: PrefixTuningConfig(num_virtual_tokens=self.prefix, task_type="CAUSAL_LM"),
        }[kind]()


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    measured: MeasuredStep
    predicted: int | None = None
    """Bytes of the peak, as a run would count them beforehand."""


def attached_jobs(case: Case, hardware: Hardware, kinds: Sequence[str]) -> AttachedJobs:
    together = resident_jobs(build(case.size, hardware), hardware.device)
    for at, kind in enumerate(kinds):
        together.join(f"{kind}{at}", case.spec(kind), [[case.length] * case.batch], seed=at)
    return together


def with_weftune(case: Case, hardware: Hardware, kinds: Sequence[str]) -> MeasuredStep:
    together = attached_jobs(case, hardware, kinds)
    measured = measure(together.block(case.capacity), hardware, case.pace)
    captures = together.executor.captures
    return replace(measured, note="" if captures is None else f"{captures} captured")


def predicted_bytes(case: Case, hardware: Hardware, kinds: Sequence[str]) -> int:
    """The peak of a company, as a run would count it beforehand."""
    shape = model_shape(build_frozen(case.size, torch.device("meta"), hardware.dtype), hardware.dtype)
    tokens, jobs = case.batch * case.length, []
    for at, kind in enumerate(kinds):
        spec = case.spec(kind)
        trainable, scaled = adapter_layout(spec, shape.sites).size, spec.scaled_outputs(shape.sites)
        jobs.append(JobShape(f"{kind}{at}", 0, at, trainable, case.length, tokens, scaled_outputs=scaled))
    memory = MemoryModel(shape, 0, uses_fused_ops=hardware.device.type == "cuda")
    return memory.peak_bytes(jobs, min(case.capacity, tokens * len(jobs)))


def profiled(case: Case, hardware: Hardware, kinds: Sequence[str]) -> Spent:
    """Where one round goes, after enough others that it replays a captured graph."""
    block = attached_jobs(case, hardware, kinds).block(case.capacity)
    block(max(2, case.pace.warmup))()
    return spent(traced(lambda: block(1)(), hardware.device))


def with_peft(case: Case, hardware: Hardware, kinds: Sequence[str]) -> MeasuredStep:
    """One step of each kind, times how often it is among `kinds`."""
    model, seconds, peak = build(case.size, hardware), 0.0, 0
    ids_BL = random_ids(case.size, case.batch, case.length, hardware)
    for kind, times in Counter(kinds).items():
        reset_memory(hardware.device)
        adapted = get_peft_model(model, case.peft_config(kind), autocast_adapter_dtype=False).train()
        step = measure(repeat_step(job_step(adapted, ids_BL)), hardware, case.pace)
        assert step.seconds is not None
        print(f"  PEFT, {kind}: {1e3 * step.seconds:.1f} ms", flush=True)
        seconds, peak = seconds + times * step.seconds, max(peak, step.peak_bytes or 0)
        if kind != "prefix":
            model = adapted.unload()
        del adapted, step
    return MeasuredStep(seconds, peak or None)


def rows(case: Case, hardware: Hardware, peft: bool) -> Iterator[Row]:
    ways = [(name, with_weftune, kinds) for name, kinds in COMPANIES.items()]
    if peft:
        ways += [(f"PEFT, {name}", with_peft, kinds) for name, kinds in COMPANIES.items()]
    for name, way, kinds in ways:
        measured = measure_or_explain(lambda way=way, kinds=kinds: way(case, hardware, kinds), hardware)  # type: ignore[misc]
        print(f"{name}: {number(measured.seconds, scale=1e3)} ms {measured.note}", flush=True)
        predicted = predicted_bytes(case, hardware, kinds) if way is with_weftune else None
        yield Row(name, measured, predicted)


def captures_of_joins(case: Case, hardware: Hardware) -> dict[str, list[int]]:
    """For every kind that comes twice and goes twice among LoRA jobs: graphs captured until it had come, by
    the time it had gone, when it had come again and when it had gone for good."""
    together = attached_jobs(case, hardware, ["lora"] * 3)
    counted = {"lora": [_settled(together, case)]}
    for kind in JOINING:
        found = []
        for turn in ("first", "second"):
            together.join(f"{kind}-{turn}", case.spec(kind), [[case.length] * case.batch], seed=9)
            found.append(_settled(together, case))
            together.leave(f"{kind}-{turn}")
            found.append(_settled(together, case))
        counted[kind] = found
    return counted


def _settled(together: AttachedJobs, case: Case) -> int:
    """Graphs captured so far, after rounds enough to capture whatever is going to be."""
    for _ in range(4):
        together.run(together.plan(1, case.capacity))
    return together.executor.captures or 0


def table(made: Sequence[Row]) -> str:
    seconds = {row.name: row.measured.seconds for row in made}
    lora = seconds["8 LoRA"]
    return aligned(
        ("", "ms per round", "× 8 LoRA", "peak GB", "predicted", ""),
        [
            (
                row.name,
                number(row.measured.seconds, scale=1e3),
                number(ratio(row.measured.seconds, lora), ".3f"),
                number(row.measured.peak_bytes, ".1f", 1e-9),
                number(row.predicted, ".1f", 1e-9),
                row.measured.note,
            )
            for row in made
        ],
    )


def main() -> None:
    options = _parser().parse_args()
    hardware = bench_hardware(options.toy)
    if hardware is None:
        raise SystemExit("no CUDA device that torch can use; --toy runs on the CPU")
    case, rate = _case(options), gemm_rate(hardware)
    made = list(rows(case, hardware, options.peft))
    print(f"\n{case.size.name}, {case.size.layers} layers: 8 jobs, {case.batch}×{case.length} tokens each\n")
    print(f"large product: {rate / 1e12:,.3f} TFLOP/s\n")
    print(table(made))
    print(f"\nThe bar of 8 DoRA and of the mixed company is {BAR} × 8 LoRA.")
    reset_memory(hardware.device)
    if options.profile:
        for name, kinds in COMPANIES.items():
            print(f"\nOne round of {name}, under the profiler:\n{drawn(profiled(case, hardware, kinds))}\n")
            reset_memory(hardware.device)
    counted = captures_of_joins(case, hardware)
    print(f"Graphs captured so far as kinds come, go, come again and go: {counted}")
    finish({"case": asdict(case), "rows": [asdict(row) for row in made], "captures": counted}, options.json)


def _case(options: argparse.Namespace) -> Case:
    size, pace = SIZES[options.shape], Repeats(options.warmup, options.blocks, options.steps)
    batch, length = (int(word) for word in options.batch.lower().split("x"))
    if options.toy:
        size, batch, length, pace = SIZES["toy"], 2, 12, Repeats(1, 1, 1)
    return Case(
        size=replace(size, layers=min(options.layers or size.layers, size.layers)),
        batch=batch,
        length=length,
        rank=4 if options.toy else options.rank,
        bottleneck=8 if options.toy else options.size,
        prefix=3 if options.toy else options.tokens,
        pace=pace,
        capacity=max(8192, batch * length),
    )


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=[name for name in SIZES if name != "toy"], default="8b")
    parser.add_argument("--layers", type=int, help="only so many of the shape's")
    parser.add_argument("--batch", default="1x1024", help="samples × tokens of each, of one job's step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="of the bottleneck")
    parser.add_argument("--tokens", type=int, default=16, help="of the prefix")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock runs")
    parser.add_argument("--blocks", type=int, default=3, help="the median of so many blocks")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--no-peft", dest="peft", action="store_false", help="only Weftune's rows")
    parser.add_argument("--profile", action="store_true", help="say where the time of each company goes")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU: does it run at all")
    return parser


if __name__ == "__main__":
    main()
