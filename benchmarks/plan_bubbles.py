"""Bubbles of pipeline orders in the simulator, beside what the papers' formulas and figures say.

mLoRA's ratio max{(D−1+N−L·N)/(D+N−1), 0} counts one steady region with equal stages, any ratio of forward to
backward, and nothing but passes; here it is every device's idle share between two Steps of the first job.

    python -m benchmarks.plan_bubbles [--figure20] [--toy] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import figure20
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.plan.program.prices import Link, PassPrice, PricedCluster, Prices
from weftune.plan.program.program import GlobalBatch, MicrobatchPlan, PlacedSample, Program, SegmentPlan
from weftune.plan.program.simulate import simulate
from weftune.plan.window.orders import Work, gpipe, multi_job, one_forward_one_backward

DEVICES, JOBS, MICROBATCHES = range(2, 9), range(1, 11), range(1, 9)
RATIOS = (1.0, 2.0)
"""Backward over forward."""
EQUAL = 1e-9
SHOWN = 6
HOP = 0.1
"""In the table of what cannot attain the formula: a hop, and what the last stage takes more, over a pass."""


def even_prices(microbatches: int, stages: int, forward: float = 1.0, backward: float = 1.0) -> Prices:
    """Return prices with identical passes, in which only passes take time."""
    return Prices(((PassPrice(forward, backward, kept_bytes=1),) * stages,) * microbatches)


@dataclass(frozen=True, slots=True)
class Region:
    """Global batches of every job, and the Steps of the first job between which it is measured."""

    steps: int
    first: int
    last: int


ONE_PERIOD, LONG = Region(3, 1, 2), Region(10, 4, 9)
"""Where passes are all alike the pattern repeats from the first Step on; with hops it takes some more."""


@dataclass(frozen=True, slots=True)
class Case:
    devices: int
    jobs: int
    microbatches: int

    @property
    def mlora(self) -> float:
        slots = self.devices + self.microbatches - 1
        return max((slots - self.jobs * self.microbatches) / slots, 0.0)

    @property
    def gpipe(self) -> float:
        return (self.devices - 1) / (self.microbatches + self.devices - 1)

    def work(self, region: Region) -> Work:
        samples = tuple(PlacedSample(number, 1, number) for number in range(self.microbatches))
        batches = tuple(
            GlobalBatch(f"job{job}", step, samples, len(samples))
            for step in range(1, region.steps + 1)
            for job in range(self.jobs)
        )
        held = tuple(
            MicrobatchPlan((SegmentPlan(batch.job, batch.step, (one,)),))
            for batch in batches
            for one in samples
        )
        return Work(1, held, batches)


def cases(devices: int) -> Iterator[Case]:
    for jobs in JOBS:
        for microbatches in MICROBATCHES:
            yield Case(devices, jobs, microbatches)


def steady(
    program: Program, prices: Prices, region: Region, cluster: PricedCluster | None = None
) -> list[float]:
    """Every device's bubbles in whole periods."""
    devices = len(program.devices)
    timeline = simulate(program, prices, cluster or PricedCluster(devices))
    spans = [
        timeline.span_between_steps(device, "job0", region.first, region.last) for device in range(devices)
    ]
    return [1 - timeline.busy_fraction(device, span) for device, span in enumerate(spans)]


def deviation(found: list[float], formula: float) -> float:
    return max(abs(one - formula) for one in found)


def formula_rows(tried: Iterable[int]) -> list[dict[str, Any]]:
    rows = []
    for devices in tried:
        few = list(cases(devices))
        for ratio in RATIOS:
            apart = {"many": 0.0, "fixed": 0.0, "gpipe": 0.0}
            missed: list[str] = []
            equal = {"many": 0, "fixed": 0}
            for case in few:
                work = case.work(ONE_PERIOD)
                prices = even_prices(len(work.microbatches), devices, 1.0, ratio)
                orders = {
                    "many": multi_job(work, devices, prices),
                    "fixed": one_forward_one_backward(work, devices),
                }
                for name, program in orders.items():
                    off = deviation(steady(program, prices, ONE_PERIOD), case.mlora)
                    apart[name] = max(apart[name], off)
                    equal[name] += off < EQUAL
                    if off >= EQUAL and name == "fixed":
                        missed.append(f"{case.jobs}x{case.microbatches}")
                if case.jobs == 1:
                    off = deviation(steady(gpipe(work, devices), prices, ONE_PERIOD), case.gpipe)
                    apart["gpipe"] = max(apart["gpipe"], off)
            rows.append(
                {"devices": devices, "ratio": ratio, "cases": len(few), "equal": equal, "apart": apart}
                | {"missed": missed}
            )
    return rows


def print_formulas(rows: list[dict[str, Any]]) -> None:
    print("Steady bubbles against the formula, jobs 1 to 10 by microbatches 1 to 8; greatest deviation\n")
    cells = [
        [
            f"{row['devices']} devices",
            f"1:{row['ratio']:g}",
            f"{row['equal']['many']}/{row['cases']}",
            f"{row['apart']['many']:.1e}",
            f"{row['equal']['fixed']}/{row['cases']}",
            f"{row['apart']['fixed']:.3f}",
            f"{row['apart']['gpipe']:.1e}",
            _few(row["missed"]),
        ]
        for row in rows
    ]
    titles = ["", "fwd:bwd", "multi-job equal", "apart", "fixed 1F1B equal", "apart", "GPipe apart"]
    print(aligned([*titles, "fixed 1F1B misses (jobs x microbatches)"], cells))


def _few(missed: list[str]) -> str:
    return " ".join(missed[:SHOWN]) + (f" and {len(missed) - SHOWN} more" if len(missed) > SHOWN else "")


def unattained() -> list[dict[str, Any]]:
    """Four devices, two microbatches: where hops take time or stages differ, the formula is out of reach."""
    rows = []
    for jobs in range(1, 9):
        case = Case(4, jobs, 2)
        work = case.work(LONG)
        one = PassPrice(1.0, 1.0, activation_bytes=1, gradient_bytes=1)
        slow = PassPrice(1 + HOP, 1 + HOP)
        count = len(work.microbatches)
        links = PricedCluster(4, Link(1 / HOP))
        hops, last = Prices(((one,) * 4,) * count), Prices(((one,) * 3 + (slow,),) * count)
        rows.append(
            {
                "jobs": jobs,
                "formula": case.mlora,
                "hops": max(steady(multi_job(work, 4, hops), hops, LONG, links)),
                "spare": max(steady(multi_job(work, 4, hops, spare_microbatches=3), hops, LONG, links)),
                "last": max(steady(multi_job(work, 4, last), last, LONG)),
            }
        )
    return rows


def print_unattained(rows: list[dict[str, Any]]) -> None:
    print(
        f"\nOut of the formula's reach (4 devices, 2 microbatches), most idle device, hop or excess {HOP:g}\n"
    )
    cells = [
        [str(row["jobs"]), *(f"{100 * row[name]:.1f} %" for name in ("formula", "hops", "spare", "last")), ""]
        for row in rows
    ]
    print(aligned(["jobs", "formula", "hops take time", "3 more in flight", "last stage slower", ""], cells))


def print_figure(rows: list[figure20.Row], draws: int) -> None:
    print(
        "\nLoRAFusion's figure 20, percent of bubbles, mean ± deviation (least to most) over "
        f"{draws} draws;\nthe global batch is fitted on the 1F1B bar alone, the rest is predicted\n"
    )
    names = list(figure20.PAPER)
    titles = ["", *(f"{row.size} samples a microbatch" for row in rows), "paper", "bound, kept in draws"]
    cells = [
        ["global batch", *(str(row.batch) for row in rows), "not given", ""],
        ["capacity", *(str(row.capacity) for row in rows), "", ""],
    ]
    for name in names:
        bound = "fitted"
        if name in figure20.BOUNDED:
            bound = f"within {figure20.NEAR:g} points: " + _kept(rows, name, draws)
        elif name == "4":
            bound = f"at most {figure20.PAPER[name]}: " + _kept(rows, name, draws)
        label = f"{name} adapter{'s' if name != '1' else ''}" if name.isdecimal() else name
        cells.append([label, *(_bar(row.bars[name]) for row in rows), f"{figure20.PAPER[name]:.2f}", bound])
    below = f"below {figure20.BELOW:g}: " + _kept(rows, "balanced", draws)
    cells.append(["4, head counted", *(_bar(row.balanced) for row in rows), "", below])
    print(aligned(titles, cells))


def _bar(bar: figure20.Bar) -> str:
    return f"{bar.mean:.1f} ± {bar.deviation:.1f} ({bar.least:.1f} to {bar.most:.1f})"


def _kept(rows: list[figure20.Row], name: str, draws: int) -> str:
    return ", ".join(f"{row.kept[name]}/{draws}" for row in rows)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--figure20", action="store_true", help="only the figure")
    parser.add_argument("--toy", action="store_true", help="few cases and two draws, to see that it runs")
    options = parser.parse_args()
    began = time.perf_counter()
    numbers: dict[str, Any] = {}
    if not options.figure20:
        devices = (2,) if options.toy else DEVICES
        numbers |= {"formula": formula_rows(devices), "unattained": unattained()}
        print_formulas(numbers["formula"])
        print_unattained(numbers["unattained"])
    seeds = figure20.SEEDS[:2] if options.toy else figure20.SEEDS
    sizes = list(figure20.SIZES)[:1] if options.toy else list(figure20.SIZES)
    rows = [figure20.row(size, seeds) for size in sizes]
    print_figure(rows, len(seeds))
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    finish(numbers | {"figure20": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()
