"""One optimizer step of many jobs on one GPU: Weftune, the frozen base alone, and PEFT.

All linears have adapters, including those of experts, all tokens are supervised, and the weights are random
in the real shapes. All numbers of a table come from the same run, since GPUs of one model differ. Times are
per round, which is one step of every job. ρ is the minimum time of the arithmetic, at the measured rate of a
large matrix product, divided by the measured time. `python -m benchmarks.gpu_step` has more options.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from weftune.adapters.lora.spec import LoraSpec
from weftune.bench.baselines import EXPERTS, BaselineWork, measure_frozen_base, peft_one_by_one
from weftune.bench.liger import peft_with_liger
from weftune.bench.processes import ProcessTask, peft_in_processes
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, build, floor_seconds, toy_size
from weftune.bench.table import aligned, number, ratio
from weftune.bench.timing import MeasuredStep, Repeats, bench_hardware, gemm_rate, measure, measure_or_explain
from weftune.bench.weftune_side import AttachedJobs, resident_jobs

WEFTUNE, FROZEN = "Weftune, together", "frozen base"
BASELINES = ("frozen", "peft", "peft-bf16", "processes", "liger")
CAPACITY = 8192
"""Maximum number of tokens in a microbatch."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class StepRow:
    name: str
    measured: MeasuredStep
    min_seconds: float
    """Minimum seconds that the arithmetic of the row's step can take."""
    trains_adapters: bool = True
    """Whether adapters are trained; False for the base alone."""


def attach_jobs(attached: AttachedJobs, size: Size, work: BaselineWork) -> None:
    """Attach all jobs of the benchmark to one executor, each with a LoRA adapter and random samples."""
    experts = tuple(EXPERTS) if size.experts else ()
    for at, (rank, dropout) in enumerate(zip(work.job_ranks, work.job_dropouts, strict=True)):
        adapter = LoraSpec(rank=rank, alpha=2.0 * rank, dropout=dropout, target_parameters=experts)
        attached.join(f"job{at}", adapter, [[work.length] * work.batch], seed=at)


def weftune_step(task: ProcessTask) -> MeasuredStep:
    jobs = resident_jobs(build(task.size, task.hardware), task.hardware.device)
    attach_jobs(jobs, task.size, task.work)
    block = jobs.block(max(CAPACITY, task.work.length))
    base_bytes = sum(value.nbytes for value in jobs.base.model.parameters())
    return replace(measure(block, task.hardware, task.pace), base_bytes=base_bytes)


def measured_row(
    name: str, task: ProcessTask, min_seconds: float, run: Callable[[], MeasuredStep]
) -> StepRow:
    """Measure one row of the benchmark's table and print its time. The row has the given name and minimum
    seconds."""
    print(f"{name} …", end=" ", flush=True)
    measured = measure_or_explain(run, task.hardware)
    print(f"{number(measured.seconds, scale=1e3)} ms {measured.note}", flush=True)
    return StepRow(name, measured, min_seconds)


def rows(task: ProcessTask, baselines: Sequence[str], rate: float) -> Iterator[StepRow]:
    """Yield the measured rows of the benchmark's table. Weftune's row is last, because Weftune replaces the
    model's attention."""
    yield from baseline_rows(task, baselines, rate)
    floor = floor_seconds(task.size, rate, task.work.lengths, task.work.mean_rank)
    yield measured_row(WEFTUNE, task, floor, lambda: weftune_step(task))


def baseline_rows(task: ProcessTask, baselines: Sequence[str], rate: float) -> Iterator[StepRow]:
    size, work, hardware, pace = task.size, task.work, task.hardware, task.pace
    floor = floor_seconds(size, rate, work.lengths, work.mean_rank)
    if "frozen" in baselines:
        bare = floor_seconds(size, rate, work.lengths, rank=0)
        row = measured_row(FROZEN, task, bare, lambda: measure_frozen_base(size, work, hardware, pace))
        yield replace(row, trains_adapters=False)
    one_by_one = partial(peft_one_by_one, size, work, hardware, pace)
    if "peft" in baselines:
        yield measured_row("PEFT, one by one", task, floor, partial(one_by_one, float32_adapters=True))
    if {"peft-bf16", "processes"} & set(baselines):
        narrow = measured_row(
            "PEFT bf16, one by one", task, floor, partial(one_by_one, float32_adapters=False)
        )
        yield narrow
    if "processes" in baselines:
        run = partial(peft_in_processes, task, narrow.measured.peak_bytes)
        yield measured_row("PEFT bf16, processes", task, floor, run)
    if "liger" in baselines:
        yield measured_row("PEFT bf16 + Liger + compile", task, floor, partial(peft_with_liger, task))


def fastest_baseline(rows: Sequence[StepRow]) -> StepRow | None:
    """Return the fastest row that trains adapters with another tool than Weftune."""
    others = [
        row
        for row in rows
        if row.trains_adapters and not row.name.startswith("Weftune") and row.measured.seconds is not None
    ]
    return min(others, key=lambda row: row.measured.seconds or 0.0, default=None)


def table(rows: Sequence[StepRow], tokens: int) -> str:
    seconds = {row.name: row.measured.seconds for row in rows}
    titles = ("", "ms per step", "× frozen", "× Weftune", "tokens/s", "peak GB", "base GB", "ρ", "")
    return aligned(
        titles,
        [
            (
                row.name,
                number(row.measured.seconds, scale=1e3),
                number(ratio(row.measured.seconds, seconds.get(FROZEN)), ".2f"),
                number(ratio(row.measured.seconds, seconds.get(WEFTUNE)), ".2f"),
                number(ratio(tokens, row.measured.seconds), ",.0f"),
                number(row.measured.peak_bytes, ".1f", 1 / GB),
                number(row.measured.base_bytes, ".1f", 1 / GB),
                number(ratio(row.min_seconds, row.measured.seconds), ".2f"),
                row.measured.note,
            )
            for row in rows
        ],
    )


def main() -> None:
    parser = step_arguments(__doc__ or "")
    options = parser.parse_args()
    task, baselines = parse_task(parser, options), parse_baselines(parser, options.baselines)
    rate = gemm_rate(task.hardware)
    measured = list(rows(task, baselines, rate))
    print_rows(task, measured, rate)
    finish(numbers(task, measured, rate), options.json)


def print_rows(task: ProcessTask, rows: Sequence[StepRow], rate: float) -> None:
    work = task.work
    ranks = ", ".join(map(str, work.ranks or (work.rank,)))
    each = f"rank {ranks}, {work.batch}×{work.length} tokens each"
    print(f"\n{task.size.name}, {task.size.layers} layers: {work.jobs} jobs, {each}")
    print(f"large product: {rate / 1e12:,.3f} TFLOP/s\n")
    print(table(rows, work.tokens))


def numbers(task: ProcessTask, rows: Sequence[StepRow], rate: float) -> dict[str, object]:
    best = fastest_baseline(rows)
    return {
        "shape": task.size.name,
        "layers": task.size.layers,
        "jobs": task.work.jobs,
        "batch": f"{task.work.batch}x{task.work.length}",
        "rank": task.work.rank,
        "gemm_rate": rate,
        "strongest": best.name if best else None,
        "rows": [
            {
                "name": row.name,
                "seconds": row.measured.seconds,
                "peak_bytes": row.measured.peak_bytes,
                "base_bytes": row.measured.base_bytes,
                "rho": ratio(row.min_seconds, row.measured.seconds),
                "note": row.measured.note,
            }
            for row in rows
        ],
    }


def step_arguments(description: str) -> argparse.ArgumentParser:
    parser = arguments(description)
    parser.add_argument("--shape", choices=[name for name in SIZES if name != "toy"], default="8b")
    parser.add_argument("--layers", type=int, help="number of the shape's layers to use")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--batch", default="1x1024", help="samples × tokens per sample in one job's step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--baselines", default=",".join(BASELINES), help="separated by commas, or none")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock runs")
    parser.add_argument("--blocks", type=int, default=5, help="blocks to take the median of")
    parser.add_argument("--steps", type=int, default=4, help="steps per block")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU: does it run at all")
    return parser


def parse_baselines(
    parser: argparse.ArgumentParser, names: str, known: Sequence[str] = BASELINES
) -> list[str]:
    baselines = [] if names in ("none", "") else names.split(",")
    if unknown := set(baselines) - {*known}:
        parser.error(f"--baselines: {min(unknown)} is none of {', '.join(known)}; write none for no baseline")
    return baselines


def parse_task(parser: argparse.ArgumentParser, options: argparse.Namespace) -> ProcessTask:
    hardware = bench_hardware(options.toy)
    if hardware is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    size = SIZES[options.shape]
    if options.toy:
        work = BaselineWork(jobs=2, batch=2, length=16, rank=4)
        return ProcessTask(toy_size(size), work, hardware, Repeats(1, 2, 1))
    batch, length = (int(word) for word in options.batch.lower().split("x"))
    work = BaselineWork(jobs=options.jobs, batch=batch, length=length, rank=options.rank)
    size = replace(size, layers=min(options.layers or size.layers, size.layers))
    return ProcessTask(size, work, hardware, Repeats(options.warmup, options.blocks, options.steps))


if __name__ == "__main__":
    main()
