"""A base larger than the GPU: streamed from host memory under a cap, beside what a user would do today.

Random weights are made in memory, all linears carry adapters, all tokens are supervised. The cap is kept by
torch's own allocator. For every number of jobs: seconds and tokens of a round, the most memory that was
taken, the share of the time in which the device waited for the host (predicted and measured), and ρ: the
floor (the arithmetic with every layer's forward made twice, or the transfers, whichever is longer) over the
measured time. `same` is a resident run with the microbatches and the passes of the streamed one, which should
give its losses to the last bit; `resident` is one as a user would have it, with captured passes.

    python -m benchmarks.gpu_stream --shape 8b --cap 10 --jobs 16 --compare same,resident,fsdp
    python -m benchmarks.gpu_stream --shape 32b --cap 24 --jobs 16,8,4,2,1 --compare resident --plot x.html
    python -m benchmarks.gpu_stream --shape 70b --jobs 8
    python -m benchmarks.gpu_stream --shape 70b --cap 24 --jobs 16 --quantize nf4 --compare resident
    python -m benchmarks.gpu_stream --shape 8b --cap 10 --jobs 16 --cuts chosen,largest,smallest
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from benchmarks.fsdp import peft_offloaded
from benchmarks.streamed_side import Streamed, random_base, resident_choice, streamed_jobs_aboard
from weftune.adapters.lora.spec import LoraSpec
from weftune.base.spec import Quantize
from weftune.bench.baselines import BaselineWork
from weftune.bench.processes import first_line
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, base_bytes, floor_seconds
from weftune.bench.table import aligned, number, ratio
from weftune.bench.timing import (
    Hardware,
    MeasuredStep,
    Repeats,
    bench_hardware,
    gemm_rate,
    measure,
    measure_or_explain,
)
from weftune.bench.weftune_side import AttachedJobs
from weftune.plan.cost.ring import TRAVEL_ROUNDS
from weftune.plan.layout.choose import LayoutChoice
from weftune.report.svg import Figure, LineStyle, Point, ReferenceLine, Series, log_axis, value_axis
from weftune.report.template import chart_page
from weftune.run.assemble import resident_executor
from weftune.run.measure.link import HostLink, measure_link
from weftune.run.measure.memory import resident_bytes

STREAMED, RESIDENT, SAME = "Weftune, streamed", "Weftune, resident", "Weftune, resident, same passes"
COMPARED = ("same", "resident", "fsdp")
CUTS = ("chosen", "largest", "smallest")
GIB = 1 << 30
FEW = 3
"""Rounds of runs that are compared with."""
TOY_CAP = 520 << 10
TITLES = ("", "jobs", "s a round", "tokens/s", "peak GiB", "ρ", "waits, predicted", "measured", "")


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    jobs: int
    tokens: int
    measured: MeasuredStep
    floor: float | None = None
    predicted_wait: float | None = None
    measured_wait: float | None = None
    losses: tuple[tuple[float, ...], ...] = ()
    """Of every job, round by round."""
    cut: str = ""
    capacity: int = 0
    """Tokens of a microbatch."""


@dataclass(frozen=True, slots=True)
class Case:
    size: Size
    hardware: Hardware
    pace: Repeats
    cap: int | None
    """Bytes; None: all that the device has."""
    most: int
    rate: float
    link: HostLink
    quantize: Quantize | None = None
    """What the weights of the layers are stored in."""

    @property
    def held(self) -> tuple[Size, Hardware, Quantize | None]:
        """The base that it is about, and where."""
        return self.size, self.hardware, self.quantize


def join_all(together: AttachedJobs, work: BaselineWork) -> None:
    for at in range(work.jobs):
        adapter = LoraSpec(rank=work.rank, alpha=2.0 * work.rank)
        together.join(f"job{at}", adapter, [[work.length] * work.batch], seed=at)


def streamed_row(case: Case, work: BaselineWork, how: str) -> Row:
    """One number of jobs, with the base cut as `how` says."""
    found: list[Streamed] = []

    def run() -> MeasuredStep:
        with capped(case):
            made = streamed_jobs_aboard(
                case.size, case.hardware, work, case.cap, case.most, case.link, how, case.quantize
            )
            found.append(made)
            join_all(made.together, work)
            block = made.together.block(made.choice.capacity)
            # Passes that can be captured are so in the second round.
            captured = made.together.executor.captures is not None
            block(max(2 if captured else 1, case.pace.warmup))()
            made.forget_waits()
            return measure(block, case.hardware, replace(case.pace, warmup=0))

    measured = measure_or_explain(run, case.hardware)
    name = f"Weftune, {how} cut" if how != "chosen" else STREAMED
    if not found:
        return Row(name, work.jobs, work.tokens, measured)
    made = found.pop()
    steps = case.pace.blocks * case.pace.steps
    taken = None if measured.seconds is None else measured.seconds * steps
    row = Row(
        name,
        work.jobs,
        work.tokens,
        measured,
        floor=streamed_floor(case, work, made),
        predicted_wait=made.choice.waiting_fraction,
        measured_wait=None if taken is None else made.waited.total_seconds() / taken,
        losses=all_losses(made.together),
        cut=made.described,
        capacity=made.choice.capacity,
    )
    del made
    gc.collect()
    return row


def streamed_floor(case: Case, work: BaselineWork, made: Streamed) -> float:
    """Every stage but the last goes forward twice; every streamed stage comes for each direction unless it is
    still there, and so does what Steps need."""
    cut = made.choice.layout
    last = cut.stages[-1].stop - cut.stages[-1].start
    arithmetic = floor_seconds(
        case.size, case.rate, work.lengths, work.rank, recomputed_fraction=1 - last / case.size.layers
    )
    return max(arithmetic, (made.loaded_bytes + made.stepped_bytes) / case.link.bandwidth)


def resident_row(case: Case, work: BaselineWork, passes: int | None = None) -> Row:
    """The same run with all of the base on the device, and no cap; with plain passes of so many tokens."""
    losses: tuple[tuple[float, ...], ...] = ()
    described = ""

    def run() -> MeasuredStep:
        nonlocal losses, described
        choice = None if passes else resident_choice(*case.held, work, case.most, case.link)
        base = random_base(*case.held)
        part = choice.layout.for_worker(0) if choice else None
        together = AttachedJobs(resident_executor(base, graphs=passes is None, part=part))
        capacity = roomy(together, choice, case.most) if choice else passes or work.length
        described = (
            f"{capacity} tokens a microbatch, {together.recompute.recomputed_layers} layers recomputed"
        )
        join_all(together, work)
        if choice:
            # Said before anything is computed, so that a shortage says where it came from.
            attached_bytes = resident_bytes(case.hardware.device)
            predicted = choice.peak_device_bytes / GIB
            described += f", {predicted:.1f} GiB predicted, {attached_bytes / GIB:.1f} before the first pass"
            if choice.layout.offloads_optimizer:
                described += f", optimizer in host memory ({choice.host_bytes / GIB:.1f} GiB)"
            print(described, flush=True)
        measured = measure(together.block(capacity), case.hardware, few(case.pace))
        losses = all_losses(together)
        return measured

    measured = measure_or_explain(run, case.hardware)
    floor = floor_seconds(case.size, case.rate, work.lengths, work.rank)
    name = RESIDENT if passes is None else SAME
    return Row(name, work.jobs, work.tokens, measured, floor, losses=losses, cut=described)


def roomy(together: AttachedJobs, choice: LayoutChoice, most: int) -> int:
    """Tokens of a microbatch, with what must be recomputed for so many to fit, as a run would choose them."""
    together.recompute = choice.memory.choose_recompute(choice.attached_jobs, most)
    return choice.memory.choose_capacity(choice.attached_jobs, most, together.recompute)


def streamed_capacity(rows: Sequence[Row], work: BaselineWork) -> int:
    """That the streamed run of this work had; a sample's length where there was none."""
    found = (row.capacity for row in rows if row.name == STREAMED and row.jobs == work.jobs)
    return next(found, 0) or work.length


def fsdp_row(case: Case, work: BaselineWork) -> Row:
    try:
        measured = measure_or_explain(
            lambda: peft_offloaded(case.size, work, case.hardware, few(case.pace), capped(case)),
            case.hardware,
        )
    except RuntimeError as error:
        # Of all rows this one alone hangs on libraries of others: what they say is its finding.
        measured = MeasuredStep(None, None, first_line(error))
    return Row("PEFT + FSDP2 offload, one by one", work.jobs, work.tokens, measured)


def few(pace: Repeats) -> Repeats:
    """For runs whose rounds are alike: nothing is left to the end of a window."""
    return replace(pace, steps=min(pace.steps, FEW))


def all_losses(together: AttachedJobs) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, together.losses.values()))


@contextmanager
def capped(case: Case) -> Iterator[None]:
    """Torch's allocator refuses what is above the cap while this lasts."""
    device = case.hardware.device
    if case.cap is None or device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(case.cap / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def table(rows: Sequence[Row]) -> str:
    return aligned(TITLES, [cells(row) for row in rows])


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        str(row.jobs),
        number(row.measured.seconds, ".3f"),
        number(ratio(row.tokens, row.measured.seconds), ",.0f"),
        number(row.measured.peak_bytes, ".1f", 1 / GIB),
        number(ratio(row.floor, row.measured.seconds), ".2f"),
        number(row.predicted_wait, ".1%"),
        number(row.measured_wait, ".1%"),
        row.measured.note or row.cut,
    )


def loss_gap(rows: Sequence[Row], other: str) -> float | None:
    """The largest difference between the losses of any job in any round, streamed and in that row."""
    most_jobs = max(row.jobs for row in rows)
    by_name = {row.name: row.losses for row in rows if row.jobs == most_jobs and any(row.losses)}
    if not {STREAMED, other} <= by_name.keys():
        return None
    # Those that are compared with have fewer rounds, and so has one that ran out of memory.
    jobs = zip(by_name[STREAMED], by_name[other], strict=True)
    return max(abs(a - b) for one, other in jobs for a, b in zip(one, other, strict=False))


def plot(rows: Sequence[Row], size: Size, path: Path) -> None:
    """How sharing pays for the transfers."""
    streamed = [row for row in rows if row.name == STREAMED and row.measured.seconds]
    streamed.sort(key=lambda row: row.jobs)
    points = [Point(row.jobs, row.tokens / (row.measured.seconds or 1.0)) for row in streamed]
    levels = [
        ReferenceLine(row.tokens / row.measured.seconds, f"all of the base on the GPU, {row.jobs} jobs")
        for row in rows
        if row.name == RESIDENT and row.measured.seconds
    ]
    speeds = [*(point.y or 0.0 for point in points), *(level.value for level in levels)]
    x = log_axis(
        "jobs", min((point.x for point in points), default=1), max((point.x for point in points), default=2)
    )
    series = [Series(name="streamed", points=points, line_style=LineStyle("#3b7ddd"), has_dots=True)]
    figure = Figure(
        x=x,
        y=value_axis("tokens per second", speeds, starts_at_zero=True),
        series=series,
        reference_lines=levels,
    )
    title = f"{size.name}, streamed from host memory: tokens per second by jobs"
    path.write_text(chart_page(title, figure), encoding="utf-8")


def main() -> None:
    parser = stream_arguments()
    options = parser.parse_args()
    hardware = bench_hardware(options.toy)
    if hardware is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    compared, cuts = _listed(parser, options.compare, COMPARED), _listed(parser, options.cuts, CUTS)
    case = case_of(options, hardware)
    stored = f", of which those of layers are stored in {case.quantize}" if case.quantize else ""
    print(f"{case.size.name}: {base_bytes(case.size) / 1e9:.1f} GB of weights in bf16{stored}")
    print(
        f"large product {case.rate / 1e12:,.1f} TFLOP/s, host → device {case.link.bandwidth / 1e9:.1f} GB/s"
    )
    rows: list[Row] = []

    def add(row: Row) -> None:
        # The whole row at once: a run that is cut off has then said what it knew.
        rows.append(row)
        print(", ".join(f"{title} {cell}".strip() for title, cell in zip(TITLES, cells(row), strict=True)))
        sys.stdout.flush()

    counts = [2] if options.toy else [int(word) for word in options.jobs.split(",")]
    for count in counts:
        for how in cuts:
            add(streamed_row(case, pass_work(options, count), how))
    most = pass_work(options, max(counts))
    others: dict[str, Callable[[], Row]] = {
        "same": lambda: resident_row(case, most, passes=streamed_capacity(rows, most)),
        "resident": lambda: resident_row(case, most),
        "fsdp": lambda: fsdp_row(case, most),
    }
    for name in compared:
        add(others[name]())
    print("\n" + table(rows))
    gaps = {name: gap for name in (SAME, RESIDENT) if (gap := loss_gap(rows, name)) is not None}
    for name, gap in gaps.items():
        print(f'\nlosses of all jobs, in rounds of both, streamed against "{name}": {gap:.2e} apart at most')
    if options.plot is not None:
        plot(rows, case.size, options.plot)
    finish(
        {
            "shape": case.size.name,
            "quantize": case.quantize,
            "cap": case.cap,
            "loss_gaps": gaps,
            "rows": [as_json(r) for r in rows],
        },
        options.json,
    )


def as_json(row: Row) -> dict[str, object]:
    return {
        "name": row.name,
        "jobs": row.jobs,
        "tokens": row.tokens,
        "seconds": row.measured.seconds,
        "peak_bytes": row.measured.peak_bytes,
        "rho": ratio(row.floor, row.measured.seconds),
        "predicted_wait": row.predicted_wait,
        "measured_wait": row.measured_wait,
        "losses": row.losses,
        "cut": row.cut,
        "note": row.measured.note,
    }


def _listed(parser: argparse.ArgumentParser, text: str, known: Sequence[str]) -> list[str]:
    words = [word for word in text.split(",") if word]
    if unknown := set(words) - set(known):
        parser.error(f"{min(unknown)} is none of {', '.join(known)}")
    return words


def stream_arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=[name for name in SIZES if name != "toy"], default="8b")
    parser.add_argument("--cap", type=float, metavar="GIB", help="what the run may take of the GPU")
    parser.add_argument("--jobs", default="16", help="how many, or several numbers with commas")
    parser.add_argument("--batch", default="1x1024", help="samples × tokens of each, of one job's step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--capacity", type=int, default=8192, help="tokens of a microbatch, at most")
    parser.add_argument("--quantize", choices=get_args(Quantize), help="what the layers are stored in")
    parser.add_argument("--compare", default="", help=f"some of {', '.join(COMPARED)}, with commas")
    parser.add_argument("--cuts", default="chosen", help=f"some of {', '.join(CUTS)}, with commas")
    parser.add_argument("--plot", type=Path, metavar="HTML", help="draw tokens/s over the number of jobs")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before the clock runs")
    parser.add_argument("--blocks", type=int, default=1, help="the median of so many blocks")
    parser.add_argument(
        "--steps", type=int, default=TRAVEL_ROUNDS, help="rounds of a block, which is a window"
    )
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU: does it run at all")
    return parser


def case_of(options: argparse.Namespace, hardware: Hardware) -> Case:
    if options.toy:
        size = replace(SIZES["toy"], layers=4)
        # Not enough for its four layers, of 31 KiB each in float32, beside what else there is.
        link = measure_link(*_where(hardware))
        return Case(
            size, hardware, Repeats(1, 1, 1), TOY_CAP, 32, gemm_rate(hardware), link, options.quantize
        )
    pace = Repeats(options.warmup, options.blocks, options.steps)
    cap = None if options.cap is None else int(options.cap * GIB)
    link = measure_link(*_where(hardware))
    rate = gemm_rate(hardware)
    return Case(SIZES[options.shape], hardware, pace, cap, options.capacity, rate, link, options.quantize)


def _where(hardware: Hardware) -> tuple[torch.device, torch.dtype]:
    return hardware.device, hardware.dtype


def pass_work(options: argparse.Namespace, jobs: int) -> BaselineWork:
    if options.toy:
        return BaselineWork(jobs=jobs, batch=2, length=16, rank=4)
    batch, length = (int(word) for word in options.batch.lower().split("x"))
    return BaselineWork(jobs=jobs, batch=batch, length=length, rank=options.rank)


if __name__ == "__main__":
    main()
