"""One optimizer step of many jobs on one GPU: Weftune, the frozen base alone, and the ways of PEFT.

All linears carry adapters, those of experts too, all tokens are supervised, the weights are random in the
real shapes. Every number of a table comes from the same run, since cards of one name differ. The time is that
of a round: one step of every job. ρ is the arithmetic floor, at the rate of a large product measured first,
over the measured time.

    python -m benchmarks.gpu_step [--shape NAME] [--layers N] [--jobs N] [--batch BxL] [--rank R]
                                  [--baselines a,b] [--profile] [--deterministic] [--offload]
                                  [--ranks 16x7,128] [--dropouts 0x7,0.05] [--leave N] [--order NAME]
                                  [--quantize nf4,int8,fp8]

--ranks, --dropouts: one of each job, with commas, nx for n times the same. --leave: the last N jobs are
aboard while it warms up, and are not when the clock runs. --order: one order of the tiled route at all sites,
such as `wide`, which is what GPUs without copy engines take.
--baselines: of frozen, peft, peft-bf16, processes, liger; and qlora, PEFT on bitsandbytes' nf4, which has to
be installed.
--profile: one more round of Weftune's under torch's profiler, and where its time went by kind of work.
--deterministic: one more row, Weftune with torch's deterministic kernels and its own choices pinned, as
`deterministic: true` in a jobs file has them.
--offload: one more row, Weftune with master weights and moments in host memory.
--quantize: one more row for each of these formats, Weftune on a base whose layers are quantised to it; the
others' bases are in bfloat16, and so is the rate of every floor. With --profile it is the last of them that
is profiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import cast, get_args

from weftune.adapters.lora.spec import LoraSpec
from weftune.base.quant.linear import quantise_linears
from weftune.base.quant.stored import Quantised
from weftune.base.spec import Quantize
from weftune.base.weights import quantised_forms
from weftune.bench.baselines import EXPERTS, BaselineWork, frozen, peft_one_by_one
from weftune.bench.liger import peft_with_liger
from weftune.bench.processes import ProcessTask, peft_at_once
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, build, floor_seconds, toy_of
from weftune.bench.table import aligned, number, ratio
from weftune.bench.timing import (
    BenchPlace,
    Block,
    MeasuredStep,
    Repeats,
    attempted,
    fresh,
    gemm_rate,
    here,
    measure,
)
from weftune.bench.weftune_side import JobsAboard, resident
from weftune.bench.where import Spent, drawn, spent, traced
from weftune.core.deterministic import deterministic_kernels, set_workspace
from weftune.ops.lora.tiling import ProductPlan

WEFTUNE, FROZEN = "Weftune, together", "frozen base"
DETERMINISTIC = "Weftune, deterministic"
OFFLOADED = "Weftune, optimizer in host memory"
QUANTISED = {quantize: f"Weftune, base in {quantize}" for quantize in get_args(Quantize)}
BASELINES = ("frozen", "peft", "peft-bf16", "processes", "liger")
QLORA = "qlora"
"""A baseline that runs only on request, since it needs bitsandbytes."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class StepRow:
    name: str
    measured: MeasuredStep
    floor: float
    adapters: bool
    """Whether adapters are trained; False for the base alone."""


@dataclass(frozen=True, slots=True)
class OwnWay:
    """Options of Weftune's own row."""

    capacity: int
    order: ProductPlan | None = None
    leave: int = 0
    """Number of jobs that leave before the clock runs."""
    offloaded: bool = False
    """Whether master weights and moments are in host memory."""
    quantize: Quantize | None = None
    """Format of the layers' weights. None leaves them in the base's dtype."""


def aboard(task: ProcessTask, way: OwnWay) -> JobsAboard:
    """Attach every job to one executor."""
    work, model = task.work, build(task.size, task.place)
    if way.quantize is not None:
        quantise_linears(model, quantised_forms(model, Quantised(way.quantize), None))
    together = resident(model, task.place.device, way.offloaded)
    experts = tuple(EXPERTS) if task.size.experts else ()
    for at, (rank, dropout) in enumerate(zip(work.each_rank, work.each_dropout, strict=True)):
        adapter = LoraSpec(rank=rank, alpha=2.0 * rank, dropout=dropout, target_parameters=experts)
        together.join(f"job{at}", adapter, [[work.length] * work.batch], seed=at)
    return together


def started(together: JobsAboard, task: ProcessTask, way: OwnWay) -> Block:
    """Prepare the block to measure; jobs that leave do so after enough rounds for a captured graph."""
    if way.order is not None:
        together.executor.banks.force_order(way.order)
    block = together.block(max(way.capacity, task.work.length))
    if way.leave:
        block(max(2, task.pace.warmup))()
        for job in list(together.stocks)[-way.leave :]:
            together.leave(job)
    return block


def together(task: ProcessTask, way: OwnWay) -> MeasuredStep:
    jobs = aboard(task, way)
    held = sum(value.nbytes for value in jobs.base.model.parameters())
    return replace(measure(started(jobs, task, way), task.place, task.pace), base_bytes=held)


def profiled(task: ProcessTask, way: OwnWay) -> Spent:
    """Profile one round, after enough others that it replays a captured graph."""
    fresh(task.place.device)
    block = started(aboard(task, way), task, way)
    block(max(2, task.pace.warmup))()
    return spent(traced(lambda: block(1)(), task.place.device))


def rows(
    task: ProcessTask,
    baselines: Sequence[str],
    way: OwnWay,
    rate: float,
    deterministic: bool = False,
    offloads: bool = False,
    quantized: Sequence[Quantize] = (),
) -> Iterator[StepRow]:
    """Yield the measured rows, Weftune's last: it replaces the model's attention, so nothing may follow."""
    size, work, place, pace = task.size, task.work, task.place, task.pace
    bare = floor_seconds(size, rate, work.lengths, rank=0)
    floor = floor_seconds(size, rate, work.lengths, work.mean_rank)
    narrow = MeasuredStep(None, None)

    def row(name: str, run: Callable[[], MeasuredStep]) -> StepRow:
        print(f"{name} …", end=" ", flush=True)
        measured = attempted(run, place)
        print(f"{number(measured.seconds, scale=1e3)} ms {measured.note}", flush=True)
        return StepRow(name, measured, floor, adapters=True)

    if "frozen" in baselines:
        measured = row(FROZEN, lambda: frozen(size, work, place, pace)).measured
        yield StepRow(FROZEN, measured, bare, adapters=False)
    if "peft" in baselines:
        yield row("PEFT, one by one", lambda: peft_one_by_one(size, work, place, pace, wide=True))
    if {"peft-bf16", "processes"} & set(baselines):
        made = row("PEFT bf16, one by one", lambda: peft_one_by_one(size, work, place, pace, wide=False))
        narrow = made.measured
        yield made
    if QLORA in baselines:
        yield row(
            "PEFT QLoRA bf16, one by one",
            lambda: peft_one_by_one(size, work, place, pace, wide=False, nf4=True),
        )
    if "processes" in baselines:
        yield row("PEFT bf16, processes", lambda: peft_at_once(task, narrow.peak_bytes))
    if "liger" in baselines:
        yield row("PEFT bf16 + Liger + compile", lambda: peft_with_liger(task))
    if deterministic:
        with deterministic_kernels():
            made = row(DETERMINISTIC, lambda: together(task, way))
        yield made
    if offloads:
        yield row(OFFLOADED, lambda: together(task, replace(way, offloaded=True)))
    for quantize in quantized:
        yield row(QUANTISED[quantize], partial(together, task, replace(way, quantize=quantize)))
    yield row(WEFTUNE, lambda: together(task, way))


def strongest(made: Sequence[StepRow]) -> StepRow | None:
    """Return the fastest way to train without Weftune."""
    others = [
        row
        for row in made
        if row.adapters
        and row.name not in (WEFTUNE, DETERMINISTIC, OFFLOADED, *QUANTISED.values())
        and row.measured.seconds is not None
    ]
    return min(others, key=lambda row: row.measured.seconds or 0.0, default=None)


def table(made: Sequence[StepRow], tokens: int) -> str:
    seconds = {row.name: row.measured.seconds for row in made}
    titles = ("", "ms a step", "× frozen", "× Weftune", "tokens/s", "peak GB", "base GB", "ρ", "")
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
                number(ratio(row.floor, row.measured.seconds), ".2f"),
                row.measured.note,
            )
            for row in made
        ],
    )


def main() -> None:
    parser = step_arguments()
    asked = parser.parse_args()
    if asked.deterministic:
        set_workspace()
    place = here(asked.toy)
    if place is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    baselines = [] if asked.baselines in ("none", "") else asked.baselines.split(",")
    if unknown := set(baselines) - {*BASELINES, QLORA}:
        known = ", ".join((*BASELINES, QLORA))
        parser.error(f"--baselines: {min(unknown)} is none of {known}; for no other write none")
    if QLORA in baselines and find_spec("bitsandbytes") is None:
        parser.error("--baselines qlora needs bitsandbytes: pip install 'weftune[bitsandbytes]'")
    if asked.ranks and asked.dropouts and len(asked.ranks) != len(asked.dropouts):
        parser.error("--ranks and --dropouts must have one word for each job, and as many as each other")
    task = task_of(asked, place)
    work = task.work
    if (work.ranks or work.dropouts) and set(baselines) - {"frozen"}:
        parser.error(
            "PEFT's rows are of jobs that are alike: with --ranks or --dropouts write --baselines none"
        )
    way = OwnWay(asked.capacity, ProductPlan(asked.order) if asked.order else None, asked.leave)
    rate = gemm_rate(place)
    made = list(rows(task, baselines, way, rate, asked.deterministic, asked.offload, asked.quantize))
    ranks = ", ".join(map(str, work.ranks or (work.rank,)))
    each = f"rank {ranks}, {work.batch}×{work.length} tokens each"
    print(f"\n{task.size.name}, {task.size.layers} layers: {work.jobs} jobs, {each}")
    print(f"large product: {rate / 1e12:,.3f} TFLOP/s\n")
    print(table(made, work.tokens))
    best = strongest(made)
    last = asked.quantize[-1] if asked.quantize else None
    where = profiled(task, replace(way, quantize=last)) if asked.profile else None
    if where is not None:
        name = WEFTUNE if last is None else QUANTISED[last]
        print(f"\nOne round of {name}, under the profiler:\n{drawn(where)}")
    finish(
        {
            "shape": task.size.name,
            "layers": task.size.layers,
            "jobs": work.jobs,
            "batch": f"{work.batch}x{work.length}",
            "rank": work.rank,
            "ranks": work.each_rank,
            "dropouts": work.each_dropout,
            "left": way.leave,
            "order": way.order,
            "gemm_rate": rate,
            "strongest": best.name if best else None,
            "rows": [as_json(row) for row in made],
            "where": where and asdict(where),
        },
        asked.json,
    )


def as_json(row: StepRow) -> dict[str, object]:
    return {
        "name": row.name,
        "seconds": row.measured.seconds,
        "peak_bytes": row.measured.peak_bytes,
        "base_bytes": row.measured.base_bytes,
        "rho": ratio(row.floor, row.measured.seconds),
        "note": row.measured.note,
    }


def step_arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=[name for name in SIZES if name != "toy"], default="8b")
    parser.add_argument("--layers", type=int, help="only so many of the shape's")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--batch", default="1x1024", help="samples × tokens of each, of one job's step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--ranks", type=ranks_of, default=(), help="one of each job, such as 16x7,128, instead of --rank"
    )
    parser.add_argument("--dropouts", type=dropouts_of, default=(), help="one of each job, such as 0x7,0.05")
    parser.add_argument("--leave", type=int, default=0, help="so many of the last jobs leave once warmed up")
    parser.add_argument(
        "--order", choices=[*ProductPlan], help="of the tiled route at all sites, if not the best"
    )
    parser.add_argument("--baselines", default=",".join(BASELINES), help="some of them, with commas; or none")
    parser.add_argument("--capacity", type=int, default=8192, help="tokens of a microbatch, at most")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock runs")
    parser.add_argument("--blocks", type=int, default=5, help="the median of so many blocks")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--profile", action="store_true", help="say where the time of Weftune's round goes")
    parser.add_argument("--deterministic", action="store_true", help="also Weftune with the same bits twice")
    parser.add_argument("--offload", action="store_true", help="also with the optimizer in host memory")
    parser.add_argument(
        "--quantize", type=formats_of, default=(), help="also on a base in these formats, with commas"
    )
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU: does it run at all")
    return parser


def task_of(asked: argparse.Namespace, place: BenchPlace) -> ProcessTask:
    size = SIZES[asked.shape]
    if asked.toy:
        work = work_of(asked, jobs=2, batch=2, length=16, rank=4)
        return ProcessTask(toy_of(size), work, place, Repeats(1, 2, 1))
    batch, length = (int(word) for word in asked.batch.lower().split("x"))
    work = work_of(asked, asked.jobs, batch, length, asked.rank)
    size = replace(size, layers=min(asked.layers or size.layers, size.layers))
    return ProcessTask(size, work, place, Repeats(asked.warmup, asked.blocks, asked.steps))


def work_of(asked: argparse.Namespace, jobs: int, batch: int, length: int, rank: int) -> BaselineWork:
    ranks, dropouts = asked.ranks, asked.dropouts
    return BaselineWork(
        jobs=len(ranks or dropouts) or jobs,
        batch=batch,
        length=length,
        rank=max(ranks, default=rank),
        ranks=ranks,
        dropouts=dropouts,
    )


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
