"""A week of tasks on 128 simulated GPUs (MuxTune §5.4): separate instances, batching only, Weftune's plans.

Tasks fine-tune LLaMA2-7B with LoRA of rank 16 in batches of 2, 4 or 8 (the paper's table 2), on A40s by
their data sheet. *Uniform*: all on OpenBookQA; *non-uniform*: SST-2, OpenBookQA or RTE. Separate instances
hold a task each, padded to its dataset's length (64, 128, 256: the paper's text lost them), piped by 1F1B.
Batching only puts up to 32 tasks into one batch, padded to the longest of them. Weftune packs what is there
without padding, in groups and the order of `weftune plan`. A round is a step of each task aboard; its time
comes from the planner for some sets of jobs and is interpolated by rows between them. Every way is given the
GPUs per instance that suit it best. Throughput counts tokens without padding.

    python -m benchmarks.plan_week [--toy] [--json FILE]
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import weftune
from benchmarks.rivals import at_its_best, greedily_packed, one_piped_after_another
from benchmarks.studies.placement import ClusterCase, cluster_case, placements
from benchmarks.studies.search import outlook
from benchmarks.trace import WEEK, Kind, Pace, Served, Service, trace
from weftune.base.architecture import model_shape
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.core.shapes import JobShape
from weftune.plan.cost.cluster import GIB, Device, make_cluster
from weftune.plan.cost.estimate import JobOutline

LENGTHS = json.loads((Path(weftune.__file__).parent / "bench" / "lengths.json").read_text())
GPUS, WIDTHS, MOST = 128, (1, 2, 4), 32
REFERENCE = 4
"""GPUs of the separate instance that durations are told for."""
PADDED = {"sst2": 64, "openbookqa": 128, "rte": 256}
CUT = {name: [min(length, most) for length in LENGTHS[name]] for name, most in PADDED.items()}
"""Samples longer than the paper's length are cut to it."""
MEANS = {name: fmean(lengths) for name, lengths in CUT.items()}
BATCHES, USUAL = (2, 4, 8), 4
ROUNDS = 4
TASK_COUNTS = (1, 2, 4, 8, 16, 32)
"""Tasks in the sets that are planned."""
A40 = Device("A40", int(44.5 * GIB), 149.7e12, 696e9, 56e9)
SHAPE = model_shape({"model_type": "llama", "max_position_embeddings": 4096}, "LLaMA2-7B", 2)
RANK = 16
COMBINATIONS = {"uniform": ("openbookqa",), "non-uniform": tuple(PADDED)}


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a round by its rows: straight lines between what was planned, and beyond the last."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: float) -> float:
        right = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        low, high = self.rows[right - 1], self.rows[right]
        share = (rows - low) / (high - low)
        return self.seconds[right - 1] + share * (self.seconds[right] - self.seconds[right - 1])


def kinds(combination: str) -> list[Kind]:
    return [Kind(dataset, batch) for dataset in COMBINATIONS[combination] for batch in BATCHES]


def mean_tokens(kind: Kind) -> float:
    """Of a step, without padding."""
    return kind.batch * MEANS[kind.dataset]


def job(number: int, batches: Sequence[Sequence[int]]) -> JobOutline:
    trainable = sum(RANK * (site.in_features + site.out_features) for site in SHAPE.sites)
    longest = max(max(lengths) for lengths in batches)
    ranks = {site.name: RANK for site in SHAPE.sites}
    return JobOutline(
        JobShape(f"task{number}", 0, number, trainable, longest), ranks, tuple(tuple(one) for one in batches)
    )


def padded_job(number: int, samples: int, length: int) -> JobOutline:
    return job(number, [[length] * samples] * ROUNDS)


def drawn_job(number: int, kind: Kind, random: Random) -> JobOutline:
    return job(number, [random.choices(CUT[kind.dataset], k=kind.batch) for _ in range(ROUNDS)])


def ground(width: int) -> ClusterCase:
    return cluster_case(SHAPE, make_cluster([A40] * width, None))


def step_alone(where: ClusterCase, kind: Kind) -> float:
    """A step of one task on an instance of its own, padded to its dataset's length."""
    return _alone(where, padded_job(0, kind.batch, PADDED[kind.dataset]))


def _alone(where: ClusterCase, one: JobOutline) -> float:
    return at_its_best(one_piped_after_another([one]), placements(where, [one]), [one]).step_seconds


def batching(where: ClusterCase, length: int) -> Curve:
    """By samples, all of them padded to `length`."""
    seconds = []
    for count in TASK_COUNTS:
        jobs = [padded_job(number, USUAL, length) for number in range(count)]
        seconds.append(at_its_best(greedily_packed(jobs), placements(where, jobs), jobs).step_seconds)
    return Curve(tuple(float(USUAL * count) for count in TASK_COUNTS), tuple(seconds))


def shared_base_curve(where: ClusterCase, some: Sequence[Kind]) -> Curve:
    """By tokens, in sets drawn from these kinds."""
    random = Random(0)
    rows, seconds = [], []
    for count in TASK_COUNTS:
        jobs = [drawn_job(number, random.choice(list(some)), random) for number in range(count)]
        found = outlook(where, jobs).forecast
        rows.append(found.tokens / found.steps)
        seconds.append(found.step_seconds)
    return Curve(tuple(rows), tuple(seconds))


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    most: int
    pace: Callable[[ClusterCase, Sequence[Kind]], Pace]


def separate_pace(where: ClusterCase, some: Sequence[Kind]) -> Pace:
    alone = {kind: step_alone(where, kind) for kind in some}
    return lambda aboard: alone[aboard[0]]


def unpadded_pace(where: ClusterCase, some: Sequence[Kind]) -> Pace:
    random = Random(0)
    alone = {kind: _alone(where, drawn_job(0, kind, random)) for kind in some}
    return lambda aboard: alone[aboard[0]]


def batching_pace(where: ClusterCase, some: Sequence[Kind]) -> Pace:
    curves = {PADDED[kind.dataset]: batching(where, PADDED[kind.dataset]) for kind in some}

    def pace(aboard: Sequence[Kind]) -> float:
        longest = max(PADDED[kind.dataset] for kind in aboard)
        return curves[longest](sum(kind.batch for kind in aboard))

    return pace


def weftune_pace(where: ClusterCase, some: Sequence[Kind]) -> Pace:
    curve = shared_base_curve(where, some)
    return lambda aboard: curve(sum(mean_tokens(kind) for kind in aboard))


WAYS = (
    Way("separate instances", 1, separate_pace),
    Way("separate, without padding", 1, unpadded_pace),
    Way("batching only", MOST, batching_pace),
    Way("Weftune", MOST, weftune_pace),
)


@dataclass(frozen=True, slots=True)
class Row:
    combination: str
    way: str
    width: int
    """GPUs of an instance."""
    served: Served
    throughput: float
    """Tokens per second over the week, without padding."""


def week(combination: str, seconds: float, widths: Sequence[int]) -> list[Row]:
    some = kinds(combination)
    tasks = trace(some, seconds)
    reference = {kind: step_alone(ground(REFERENCE), kind) for kind in some}
    steps = [task.duration / reference[task.kind] for task in tasks]
    rows = []
    for way in WAYS:
        for width in widths:
            pace = way.pace(ground(width), some)
            service = Service(tasks, steps, mean_tokens, GPUS // width, way.most, pace)
            served = service.run(seconds)
            rows.append(Row(combination, way.name, width, served, served.tokens / seconds))
    return rows


def show(rows: Sequence[Row]) -> str:
    """Each way at its best width, and what the other widths come to."""
    lines = []
    for combination in dict.fromkeys(row.combination for row in rows):
        mine = [row for row in rows if row.combination == combination]
        by_way = {way.name: [row for row in mine if row.way == way.name] for way in WAYS}
        best = {name: max(same, key=lambda row: row.throughput) for name, same in by_way.items()}
        base = best[WAYS[0].name].throughput
        for name, row in best.items():
            rest = [one for one in by_way[name] if one is not row]
            others = ", ".join(f"{one.width}: {one.throughput / base:.2f}" for one in rest)
            lines.append(
                [
                    combination,
                    name,
                    str(row.width),
                    f"{row.throughput:,.0f}",
                    f"{row.throughput / base:.2f} ×",
                    f"{row.served.finished:,} of {row.served.arrived:,}",
                    f"{row.served.waited / 3600:.1f} h",
                    f"{row.served.attached:.1f}",
                    others,
                ]
            )
    titles = ["", "way", "GPUs", "tokens/s", "", "finished", "waited", "aboard", "× with other GPUs"]
    return aligned(titles, lines)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--toy", action="store_true", help="six hours and one width, to see that it runs")
    options = parser.parse_args()
    began = time.perf_counter()
    seconds, widths = (WEEK / 28, WIDTHS[1:2]) if options.toy else (WEEK, WIDTHS)
    rows = [row for combination in COMBINATIONS for row in week(combination, seconds, widths)]
    print(f"{GPUS} simulated A40s, {seconds / 3600:.0f} hours; each way with the GPUs that suit it\n")
    print(show(rows))
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    numbers: dict[str, Any] = {"rows": [asdict(row) for row in rows]}
    finish(numbers, options.json)


if __name__ == "__main__":
    main()
