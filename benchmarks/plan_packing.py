"""How close packing comes to the lower bound, and how long it takes.

Lengths are token counts of real samples (lengths.json), drawn with replacement, and lognormal ones like those
of summarisation sets, cut at 4096 tokens. XSum's are fitted to 500 counted samples (median 472, 95th
percentile 1395); for CNN/DailyMail and WikiSum, which were not at hand, medians of 850 and 1600 tokens with
sigma 0.45 and 0.55 are assumed. `mixed` takes a quarter of each global batch from each of four of the seven.

    python -m benchmarks.plan_packing [--batches N] [--processes N] [--json FILE]
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import weftune
from benchmarks.studies.milp import pack_with_solver
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.plan.pack.best import BEST_FIT_ONLY, Limits, Packing, pack_instance
from weftune.plan.pack.instance import Instance, make_instance
from weftune.plan.pack.merge import BatchSample, MergeRules, merge

LENGTHS = Path(weftune.__file__).parent / "bench" / "lengths.json"
LIKE = {"xsum": (472, 0.66), "cnn_dailymail": (850, 0.45), "wikisum": (1600, 0.55)}
LONGEST = 4096
SIZES = (32, 64, 128)
CAPACITIES = {"short": (2048, 4096, 8192), "long": (8192, 16384)}
TIGHT = {"gsm8k": 512, "xsum": 2048, "cnn_dailymail": 4096, "wikisum": 4096, "mixed": 4096}
"""Capacities that two to five samples fill: smaller than a user would take, shown because they are hard."""
TIMED = ((640, 64, 8192), (640, 640, 8192), (25_600, 64, 8192), (25_600, 128, 8192), (25_600, 64, 4096))
"""Samples in all and in a global batch, and the capacity; the last is a hard one."""
Packer = Callable[[Instance], Packing]
ROOMY: Packer = partial(pack_instance, leaves_room=True)
ABLATION: Mapping[str, Packer] = {
    "best fit": partial(pack_instance, limits=BEST_FIT_ONLY),
    "+ exchanges": partial(pack_instance, limits=Limits(max_repackings=0)),
    "+ repacking a few": pack_instance,
    "+ solver": pack_with_solver,
}
ABLATED = (8, 16, 32, 64)
GROUPS = (("gsm8k", "wikisum"), ("xsum", "cnn_dailymail"))
"""Head-tail groups of four jobs."""
FOUND_BY = {
    "greedy": "best fit",
    "swap": "exchanging samples between microbatches",
    "shake": "packing a few microbatches anew",
}


def explain(packing: Packing) -> str:
    """Return one sentence on how a packing was found."""
    known = "fewer cannot do" if packing.is_optimal else f"the bound is {packing.lower_bound}"
    return (
        f"{packing.count} microbatches, found by {FOUND_BY[packing.method]}; "
        f"best fit alone needs {packing.greedy_bin_count}, and {known}"
    )


def pack_many(
    cases: Sequence[Instance], pack: Packer = pack_instance, pool: Executor | None = None
) -> list[Packing]:
    """Return one packing per global batch; with a `pool`, several are packed at a time."""
    if pool is None:
        return [pack(case) for case in cases]
    # Small chunks, because a batch that needs the solver takes a thousand times as long as one that does not.
    return list(pool.map(pack, cases, chunksize=max(1, len(cases) // 64)))


def packers(count: int) -> ProcessPoolExecutor:
    """Return processes for `pack_many`. Create them once and use them for every window.

    They are spawned, not forked, since the caller may hold threads and a GPU.
    """
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


@dataclass(frozen=True, slots=True)
class Row:
    """All global batches of one kind."""

    source: str
    capacity: int
    size: int
    packings: tuple[Packing, ...]

    @property
    def near(self) -> int:
        """How many are at the bound or within 2 % of it."""
        return sum(one.count <= 1.02 * one.lower_bound for one in self.packings)


def draw(source: str, count: int, random: Random, capacity: int) -> list[int]:
    if source == "mixed":
        parts = ("gsm8k", "xsum", "cnn_dailymail", "wikisum")
        return [n for part in parts for n in draw(part, count // len(parts), random, capacity)]
    if source in LIKE:
        median, sigma = LIKE[source]
        drawn = (int(random.lognormvariate(math.log(median), sigma)) for _ in range(count))
        return [max(32, min(length, LONGEST, capacity)) for length in drawn]
    return random.choices(json.loads(LENGTHS.read_text())[source], k=count)


def cases(source: str, capacity: int, size: int, batches: int) -> list[Instance]:
    random = Random(f"{source} {capacity} {size}")
    return [make_instance(draw(source, size, random, capacity), capacity) for _ in range(batches)]


def rows(batches: int, pool: Executor) -> list[Row]:
    sources = {**dict.fromkeys(json.loads(LENGTHS.read_text()), "short"), **dict.fromkeys(LIKE, "long")}
    sources["mixed"] = "long"
    return [
        Row(name, capacity, size, tuple(pack_many(cases(name, capacity, size, batches), ROOMY, pool)))
        for name, kind in sources.items()
        for capacity in CAPACITIES[kind]
        for size in SIZES
    ]


def tight_rows(batches: int, pool: Executor) -> list[Row]:
    return [
        Row(name, capacity, size, tuple(pack_many(cases(name, capacity, size, batches), ROOMY, pool)))
        for name, capacity in TIGHT.items()
        for size in SIZES
    ]


def table(found: Sequence[Row]) -> str:
    titles = ("lengths", "capacity", "samples", "batches", "greedy above", "above", "within 2 %", "found by")
    lines = []
    for row in found:
        ways = Counter(one.method for one in row.packings)
        lines.append(
            (
                row.source,
                str(row.capacity),
                str(row.size),
                str(len(row.packings)),
                str(sum(one.greedy_bin_count > one.lower_bound for one in row.packings)),
                str(sum(one.count > one.lower_bound for one in row.packings)),
                f"{row.near / len(row.packings):.0%}",
                ", ".join(f"{way} {count}" for way, count in sorted(ways.items())),
            )
        )
    return aligned(titles, lines)


def rest(found: Sequence[Row]) -> list[str]:
    """Every global batch that is more than 2 % above the bound."""
    return [
        f"{row.source}, capacity {row.capacity}, {row.size} samples, batch {number}: {explain(one)}"
        for row in found
        for number, one in enumerate(row.packings)
        if one.count > 1.02 * one.lower_bound
    ]


def timings(pool: Executor) -> list[dict[str, Any]]:
    """Wall time to pack so many samples, in this process and in the pool's."""
    took = []
    for total, size, capacity in TIMED:
        for source in ("xsum", "wikisum", "mixed"):
            given = cases(source, capacity, size, total // size)
            one = {"samples": total, "batch": size, "capacity": capacity, "lengths": source}
            started = time.perf_counter()
            alone = pack_many(given, ROOMY)
            between = time.perf_counter()
            shared = pack_many(given, ROOMY, pool)
            assert alone == shared, "processes must not change a packing"
            took.append(one | {"alone": between - started, "pool": time.perf_counter() - between})
    return took


def show_timings(took: Sequence[dict[str, Any]]) -> None:
    titles = ("lengths", "samples", "to a batch", "capacity", "one process", "pool")
    lines = [
        (
            one["lengths"],
            str(one["samples"]),
            str(one["batch"]),
            str(one["capacity"]),
            f"{one['alone']:.2f} s",
            f"{one['pool']:.2f} s",
        )
        for one in took
    ]
    print(f"Time\n{aligned(titles, lines)}\n")


def ablation(batches: int, pool: Executor) -> list[dict[str, Any]]:
    """What each way of packing adds, where few samples fill a microbatch."""
    found = []
    for size in ABLATED:
        given = [case for name, capacity in TIGHT.items() for case in cases(name, capacity, size, batches)]
        for way, pack in ABLATION.items():
            started = time.perf_counter()
            packings = pack_many(given, pack, pool)
            found.append(
                {
                    "size": size,
                    "way": way,
                    "microbatches": sum(one.count for one in packings),
                    "proven": sum(one.is_optimal for one in packings) / len(packings),
                    "seconds": time.perf_counter() - started,
                }
            )
    return found


def show_ablation(found: Sequence[dict[str, Any]]) -> None:
    titles = ("way", "samples", "microbatches", "known fewest", "time")
    lines = [
        (
            one["way"],
            str(one["size"]),
            str(one["microbatches"]),
            f"{one['proven']:.0%}",
            f"{one['seconds']:.2f} s",
        )
        for one in found
    ]
    print(f"What each way adds, at the capacities that two to five samples fill\n{aligned(titles, lines)}\n")


def merging(batches: int) -> list[dict[str, int]]:
    """Places in a pipeline, with and without samples moving into the round before theirs."""
    random = Random(0)
    rounds = [
        [
            BatchSample(job, number, hardware, length)
            for job in members
            for hardware, length in enumerate(draw(job, 16, random, 8192))
        ]
        for number in range(batches)
        for members in GROUPS
    ]
    found = []
    for stages in (1, 2, 4, 8):
        rules = MergeRules(8192, stages)
        plain, merged = merge(rounds, rules, moves_samples=False), merge(rounds, rules)
        found.append(
            {
                "stages": stages,
                "plain": len(plain.microbatches),
                "plain_no_ops": plain.no_ops,
                "merged": len(merged.microbatches),
                "merged_no_ops": merged.no_ops,
                "moved": merged.moved_samples,
            }
        )
    return found


def show_merging(found: Sequence[dict[str, int]]) -> None:
    titles = ("stages", "without", "no-ops", "merged", "no-ops", "samples moved")
    lines = [[str(value) for value in one.values()] for one in found]
    print(f"Merge, four jobs in two groups, 16 samples to a batch, capacity 8192\n{aligned(titles, lines)}\n")


def summary(found: Sequence[Row]) -> dict[str, Any]:
    packings = [one for row in found for one in row.packings]
    return {
        "batches": len(packings),
        "greedy_above_bound": sum(one.greedy_bin_count > one.lower_bound for one in packings),
        "above_bound": sum(one.count > one.lower_bound for one in packings),
        "proven": sum(one.is_optimal for one in packings),
        "within_2_percent": sum(row.near for row in found) / len(packings),
        "worse_than_greedy": sum(one.count > one.greedy_bin_count for one in packings),
        "rest": rest(found),
    }


def show(title: str, found: Sequence[Row]) -> dict[str, Any]:
    numbers = summary(found)
    print(f"{title}\n{table(found)}\n")
    print(
        f"{numbers['batches']} global batches: greedy above the bound in {numbers['greedy_above_bound']}, "
        f"best in {numbers['above_bound']}; {numbers['within_2_percent']:.1%} at the bound or within 2 %; "
        f"worse than greedy: {numbers['worse_than_greedy']}; known to be the fewest: {numbers['proven']}\n"
    )
    return numbers


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--batches", type=int, default=40, help="global batches of each kind")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with packers(options.processes) as pool:
        started = time.perf_counter()
        pack_many(cases("gsm8k", 2048, 8, 64), pool=pool)
        print(f"{options.processes} processes started in {time.perf_counter() - started:.1f} s\n")
        took = timings(pool)
        show_timings(took)
        usual = show("Usual capacities", rows(options.batches, pool))
        print("\n".join(usual["rest"]) or "None is more than 2 % above the bound.", end="\n\n")
        tight = show("A capacity that two to five samples fill", tight_rows(options.batches, pool))
        print("\n".join(tight["rest"]), end="\n\n")
        ways = ablation(options.batches, pool)
    show_ablation(ways)
    merged = merging(options.batches)
    show_merging(merged)
    numbers = {"usual": usual, "tight": tight, "timings": took, "ablation": ways, "merge": merged}
    finish(numbers, options.json)


if __name__ == "__main__":
    main()
