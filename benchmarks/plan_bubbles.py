"""Bubbles of pipeline orders in the simulator, beside what the papers' formulas and figures say.

mLoRA's ratio max{(D−1+N−L·N)/(D+N−1), 0} counts one steady region with equal stages, any ratio of forward to
backward, and nothing but passes; here it is every device's idle share between two Steps of the first job.

    python -m benchmarks.plan_bubbles [--figure20] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import figure20
from benchmarks.result import arguments, finish
from benchmarks.table import aligned
from weft.plan.pipeline import Work, gpipe, multi_job, one_forward_one_backward
from weft.plan.price import Link, PassPrice, PricedCluster, Prices, even_prices, free_cluster
from weft.plan.program import GlobalBatch, MicrobatchPlan, Placed, Program, SegmentPlan
from weft.plan.simulate import simulate

DEVICES, JOBS, MICROBATCHES = range(2, 9), range(1, 11), range(1, 9)
STEPS, FIRST, LAST = 10, 4, 9
"""Global batches of every job, and the Steps of the first between which it is measured."""
RATIOS = (1.0, 2.0)
"""Backward over forward."""
HOP = 0.1
"""In the table of what cannot attain the formula: a hop, and what the last stage takes more, over a pass."""


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

    def work(self) -> Work:
        samples = tuple(Placed(number, 1, number) for number in range(self.microbatches))
        batches = tuple(
            GlobalBatch(f"job{job}", step, samples, len(samples))
            for step in range(1, STEPS + 1)
            for job in range(self.jobs)
        )
        held = tuple(
            MicrobatchPlan((SegmentPlan(batch.job, batch.step, (one,)),))
            for batch in batches
            for one in samples
        )
        return Work(1, held, batches)


def cases() -> Iterator[Case]:
    for devices in DEVICES:
        for jobs in JOBS:
            for microbatches in MICROBATCHES:
                yield Case(devices, jobs, microbatches)


def steady(program: Program, prices: Prices, cluster: PricedCluster | None = None) -> list[float]:
    """Every device's bubbles in whole periods."""
    devices = len(program.devices)
    timeline = simulate(program, prices, cluster or free_cluster(devices))
    spans = [timeline.between_steps(device, "job0", FIRST, LAST) for device in range(devices)]
    return [1 - timeline.busy_share(device, span) for device, span in enumerate(spans)]


def deviation(found: list[float], formula: float) -> float:
    return max(abs(one - formula) for one in found)


def formula_rows() -> list[dict[str, Any]]:
    rows = []
    for devices in DEVICES:
        few = [case for case in cases() if case.devices == devices]
        for ratio in RATIOS:
            apart = {"many": 0.0, "fixed": 0.0, "gpipe": 0.0}
            equal = {"many": 0, "fixed": 0}
            for case in few:
                work = case.work()
                prices = even_prices(len(work.microbatches), devices, 1.0, ratio)
                orders = {
                    "many": multi_job(work, devices, prices),
                    "fixed": one_forward_one_backward(work, devices),
                }
                for name, program in orders.items():
                    off = deviation(steady(program, prices), case.mlora)
                    apart[name] = max(apart[name], off)
                    equal[name] += off < 1e-9
                if case.jobs == 1:
                    off = deviation(steady(gpipe(work, devices), prices), case.gpipe)
                    apart["gpipe"] = max(apart["gpipe"], off)
            rows.append(
                {"devices": devices, "ratio": ratio, "cases": len(few), "equal": equal, "apart": apart}
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
        ]
        for row in rows
    ]
    titles = ["", "fwd:bwd", "multi-job equal", "apart", "fixed 1F1B equal", "apart", "GPipe apart"]
    print(aligned(titles, cells))


def unattained() -> list[dict[str, Any]]:
    """Four devices, two microbatches: where hops take time or stages differ, the formula is out of reach."""
    rows = []
    for jobs in range(1, 9):
        case = Case(4, jobs, 2)
        work = case.work()
        one = PassPrice(1.0, 1.0, activation_bytes=1, gradient_bytes=1)
        slow = PassPrice(1 + HOP, 1 + HOP)
        count = len(work.microbatches)
        links = PricedCluster(free_cluster(4).devices, Link(1 / HOP))
        hops, last = Prices(((one,) * 4,) * count), Prices(((one,) * 3 + (slow,),) * count)
        rows.append(
            {
                "jobs": jobs,
                "formula": case.mlora,
                "hops": max(steady(multi_job(work, 4, hops), hops, links)),
                "spare": max(steady(multi_job(work, 4, hops, spare=3), hops, links)),
                "last": max(steady(multi_job(work, 4, last), last)),
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


def print_figure(rows: list[figure20.Row]) -> None:
    print("\nLoRAFusion's figure 20, percent; the global batch fitted on the 1F1B bar, the rest predicted\n")
    names = list(figure20.PAPER)
    cells = [["the paper", "", "", *(f"{figure20.PAPER[name]:.2f}" for name in names), ""]]
    cells += [
        [
            f"{row.size} samples",
            str(row.batch),
            str(row.capacity),
            *(f"{row.bubbles[name]:.2f}" for name in names),
            f"{row.balanced:.2f}",
        ]
        for row in rows
    ]
    titles = ["in a microbatch", "batch", "capacity", *names, "4, head counted"]
    print(aligned(titles, cells))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--figure20", action="store_true", help="only the figure")
    asked = parser.parse_args()
    numbers: dict[str, Any] = {}
    if not asked.figure20:
        numbers |= {"formula": formula_rows(), "unattained": unattained()}
        print_formulas(numbers["formula"])
        print_unattained(numbers["unattained"])
    rows = [figure20.row(size) for size in figure20.SIZES]
    print_figure(rows)
    finish(numbers | {"figure20": [asdict(row) for row in rows]}, asked.json)


if __name__ == "__main__":
    main()
