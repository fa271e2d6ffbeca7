"""One optimizer step of many jobs on one GPU, as `weftune bench` measures it, with more options.

    python -m benchmarks.gpu_step [--shape NAME] [--layers N] [--jobs N] [--batch BxL] [--rank R]
                                  [--baselines a,b] [--profile] [--deterministic] [--offload]
                                  [--ranks 16x7,128] [--dropouts 0x7,0.05] [--leave N] [--order NAME]
                                  [--quantize nf4,int8,fp8]

--ranks and --dropouts take one value per job, separated by commas; `16x7` stands for seven jobs of rank 16.
--leave N: the last N jobs are attached during the warm-up and leave before the clock runs. --order: use one
order of products at all sites, such as `wide`, which GPUs without copy engines use.
--baselines: frozen, peft, peft-bf16, processes, liger; and qlora, PEFT on bitsandbytes' nf4, which has to be
installed.
--profile: run one more round of Weftune under torch's profiler and print the time by kind of work.
--deterministic: one more row, Weftune with torch's deterministic kernels and its own choices pinned, as with
`deterministic: true` in a jobs file.
--offload: one more row, Weftune with master weights and moments in host memory.
--quantize: one more row per format, Weftune on a base whose layers are quantised to it. The baselines keep
their bases in bfloat16, and every floor assumes the bfloat16 rate. --profile then profiles the last format.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import cast, get_args

from benchmarks.where import Spent, drawn, spent, traced
from weftune.base.quant.linear import quantise_linears
from weftune.base.quant.stored import Quantised
from weftune.base.spec import Quantize
from weftune.base.weights import quantised_formats
from weftune.bench.baselines import BaselineWork, peft_one_by_one
from weftune.bench.gpu_step import (
    BASELINES,
    CAPACITY,
    WEFTUNE,
    StepRow,
    attach_jobs,
    baseline_rows,
    measured_row,
    numbers,
    parse_baselines,
    parse_task,
    print_rows,
    step_arguments,
)
from weftune.bench.processes import ProcessTask
from weftune.bench.result import finish
from weftune.bench.sizes import build, floor_seconds
from weftune.bench.timing import Block, MeasuredStep, gemm_rate, measure, reset_memory
from weftune.bench.weftune_side import AttachedJobs, resident_jobs
from weftune.core.deterministic import deterministic_kernels, set_workspace
from weftune.ops.lora.tiling import ProductPlan

DETERMINISTIC = "Weftune, deterministic"
OFFLOADED = "Weftune, optimizer in host memory"
QUANTISED = {quantize: f"Weftune, base in {quantize}" for quantize in get_args(Quantize)}
QLORA = "qlora"
"""A baseline that runs only on request, since it needs bitsandbytes."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of one of Weftune's rows."""

    capacity: int = CAPACITY
    order: ProductPlan | None = None
    leave: int = 0
    """Number of jobs that leave before the clock runs."""
    offloaded: bool = False
    """Whether master weights and moments are in host memory."""
    quantize: Quantize | None = None
    """Format of the layers' weights. None leaves them in the base's dtype."""


def attached(task: ProcessTask, options: RowOptions) -> AttachedJobs:
    """Return an executor with every job attached."""
    model = build(task.size, task.hardware)
    if options.quantize is not None:
        quantise_linears(model, quantised_formats(model, Quantised(options.quantize), None))
    jobs = resident_jobs(model, task.hardware.device, options.offloaded)
    attach_jobs(jobs, task.size, task.work)
    return jobs


def started(jobs: AttachedJobs, task: ProcessTask, options: RowOptions) -> Block:
    """Return the block to measure. Jobs that leave do so after enough rounds for a captured graph."""
    if options.order is not None:
        jobs.executor.banks.choices.forced_plan = options.order
    block = jobs.block(max(options.capacity, task.work.length))
    if options.leave:
        block(max(2, task.pace.warmup))()
        for job in list(jobs.samples_by_job)[-options.leave :]:
            jobs.leave(job)
    return block


def weftune_step(task: ProcessTask, options: RowOptions) -> MeasuredStep:
    jobs = attached(task, options)
    base_bytes = sum(value.nbytes for value in jobs.base.model.parameters())
    return replace(measure(started(jobs, task, options), task.hardware, task.pace), base_bytes=base_bytes)


def profiled(task: ProcessTask, options: RowOptions) -> Spent:
    """Profile one round, after enough others that it replays a captured graph."""
    reset_memory(task.hardware.device)
    block = started(attached(task, options), task, options)
    block(max(2, task.pace.warmup))()
    return spent(traced(lambda: block(1)(), task.hardware.device))


def rows(
    task: ProcessTask,
    baselines: Sequence[str],
    options: RowOptions,
    rate: float,
    deterministic: bool = False,
    offloads: bool = False,
    quantized: Sequence[Quantize] = (),
) -> Iterator[StepRow]:
    """Yield the measured rows, Weftune's last: it replaces the model's attention, so nothing may follow."""
    floor = floor_seconds(task.size, rate, task.work.lengths, task.work.mean_rank)
    row = partial(measured_row, task=task, min_seconds=floor)
    yield from baseline_rows(task, baselines, rate)
    if QLORA in baselines:
        run = partial(
            peft_one_by_one, task.size, task.work, task.hardware, task.pace, float32_adapters=False, nf4=True
        )
        yield row("PEFT QLoRA bf16, one by one", run=run)
    if deterministic:
        with deterministic_kernels():
            same_bits = row(DETERMINISTIC, run=partial(weftune_step, task, options))
        yield same_bits
    if offloads:
        yield row(OFFLOADED, run=partial(weftune_step, task, replace(options, offloaded=True)))
    for quantize in quantized:
        run = partial(weftune_step, task, replace(options, quantize=quantize))
        yield row(QUANTISED[quantize], run=run)
    yield row(WEFTUNE, run=partial(weftune_step, task, options))


def main() -> None:
    parser = all_arguments()
    options = parser.parse_args()
    if options.deterministic:
        set_workspace()
    baselines = parse_baselines(parser, options.baselines, (*BASELINES, QLORA))
    if QLORA in baselines and find_spec("bitsandbytes") is None:
        parser.error("--baselines qlora needs bitsandbytes: pip install 'weftune[bitsandbytes]'")
    if options.ranks and options.dropouts and len(options.ranks) != len(options.dropouts):
        parser.error("--ranks and --dropouts must have one value for each job, and as many as each other")
    if (options.ranks or options.dropouts) and set(baselines) - {"frozen"}:
        parser.error(
            "PEFT's rows assume jobs that are alike: with --ranks or --dropouts write --baselines none"
        )
    task = parse_task(parser, options)
    if options.ranks or options.dropouts:
        task = replace(task, work=with_each(task.work, options.ranks, options.dropouts))
    own = RowOptions(options.capacity, ProductPlan(options.order) if options.order else None, options.leave)
    rate = gemm_rate(task.hardware)
    measured = list(
        rows(task, baselines, own, rate, options.deterministic, options.offload, options.quantize)
    )
    print_rows(task, measured, rate)
    last = options.quantize[-1] if options.quantize else None
    where = profiled(task, replace(own, quantize=last)) if options.profile else None
    if where is not None:
        name = WEFTUNE if last is None else QUANTISED[last]
        print(f"\nOne round of {name}, under the profiler:\n{drawn(where)}")
    finish(
        {
            **numbers(task, measured, rate),
            "ranks": task.work.job_ranks,
            "dropouts": task.work.job_dropouts,
            "left": own.leave,
            "order": own.order,
            "where": where and asdict(where),
        },
        options.json,
    )


def all_arguments() -> argparse.ArgumentParser:
    parser = step_arguments(__doc__ or "")
    parser.add_argument("--ranks", type=ranks_of, default=(), help="rank of each job, such as 16x7,128")
    parser.add_argument("--dropouts", type=dropouts_of, default=(), help="dropout of each job: 0x7,0.05")
    parser.add_argument("--leave", type=int, default=0, help="number of jobs that leave after the warm-up")
    parser.add_argument("--order", choices=[*ProductPlan], help="order of products at all sites")
    parser.add_argument("--capacity", type=int, default=CAPACITY, help="maximum tokens per microbatch")
    parser.add_argument("--profile", action="store_true", help="print the time of a round by kind of work")
    parser.add_argument("--deterministic", action="store_true", help="also measure deterministic kernels")
    parser.add_argument("--offload", action="store_true", help="also with the optimizer in host memory")
    parser.add_argument("--quantize", type=formats_of, default=(), help="also with the base in these formats")
    return parser


def with_each(work: BaselineWork, ranks: tuple[int, ...], dropouts: tuple[float, ...]) -> BaselineWork:
    jobs, rank = len(ranks or dropouts), max(ranks, default=work.rank)
    return replace(work, jobs=jobs, rank=rank, ranks=ranks, dropouts=dropouts)


def ranks_of(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in for_each_job(text))


def dropouts_of(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in for_each_job(text))


def formats_of(text: str) -> tuple[Quantize, ...]:
    words = tuple(filter(None, text.split(",")))
    if unknown := set(words) - set(QUANTISED):
        raise argparse.ArgumentTypeError(f"{min(unknown)} is none of {', '.join(QUANTISED)}")
    return cast(tuple[Quantize, ...], words)


def for_each_job(text: str) -> list[str]:
    """Return one word per job: `16x7,128` is 16 seven times, then 128."""
    words = []
    for one in filter(None, text.split(",")):
        value, _, times = one.partition("x")
        words += [value] * int(times or 1)
    return words


if __name__ == "__main__":
    main()
