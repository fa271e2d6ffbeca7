"""What each mechanism of the planner is worth in `weftune plan`, over several clusters and sets of jobs.

A base of the shape of Llama-3.1-8B; lengths are lognormal around each job's own median. A row says what a
window takes longer (least / median / most over the cases) when one mechanism is switched off, or with one
that the default path leaves out; below 0 it would be shorter. Then, how often each grouping and each order
was chosen.

    python -m benchmarks.plan_mechanisms [--toy] [--json FILE]
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

from benchmarks.studies.ablate import ablate
from benchmarks.studies.bases import SHAPE_8B
from benchmarks.studies.placement import cluster_case
from benchmarks.studies.search import outlook
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.core.shapes import JobShape
from weftune.plan.cost.cluster import parse_cluster
from weftune.plan.cost.estimate import JobOutline

CLUSTERS = ("H100", "2xRTX4090", "4xA100-80G:pcie", "4xA100-80G", "8xH100", "8xA100-80G:pcie")
ROUNDS, LONGEST, SPREAD = 3, 2048, 0.6


@dataclass(frozen=True, slots=True)
class JobSet:
    """Jobs by their samples' median length; all have the same batch size."""

    name: str
    medians: tuple[int, ...]
    batch: int
    rank: int = 16

    def jobs(self) -> list[JobOutline]:
        random = Random(self.name)
        trainable = sum(self.rank * (site.in_features + site.out_features) for site in SHAPE_8B.sites)
        ranks = {site.name: self.rank for site in SHAPE_8B.sites}
        made = []
        for number, middle in enumerate(self.medians):
            batches = tuple(
                tuple(
                    max(16, min(LONGEST, int(middle * random.lognormvariate(0, SPREAD))))
                    for _ in range(self.batch)
                )
                for _ in range(ROUNDS)
            )
            longest = max(map(max, batches))
            made.append(JobOutline(JobShape(f"job{number}", 0, number, trainable, longest), ranks, batches))
        return made


JOB_SETS = (
    JobSet("one job", (600,), 16),
    JobSet("4 jobs of growing length", (200, 400, 600, 800), 8),
    JobSet("8 small jobs", (80,) * 8, 4),
    JobSet("8 jobs, short and long", (100, 120, 150, 200, 700, 900, 1000, 1200), 8),
    JobSet("16 jobs", tuple(100 + 40 * number for number in range(16)), 8),
)


@dataclass(frozen=True, slots=True)
class Case:
    cluster: str
    jobs: str
    order: str
    mechanism: str
    costs: dict[str, float]
    """What is instead → how much longer a window takes."""
    added: tuple[str, ...]


def case_of(cluster: str, job_set: JobSet) -> Case:
    found = outlook(cluster_case(SHAPE_8B, parse_cluster(cluster)), job_set.jobs())
    rows = ablate(found)
    return Case(
        cluster,
        job_set.name,
        str(found.scheme.order),
        found.mechanism,
        {_name(row.mechanism, row.alternative, row.is_added): row.relative_cost for row in rows},
        tuple(_name(row.mechanism, row.alternative, row.is_added) for row in rows if row.is_added),
    )


def _name(mechanism: str, instead: str, added: bool) -> str:
    if added and instead.startswith("groups"):
        return f"added: {instead}"
    if mechanism == "chunks":
        return "added: chunks of the size that suits best"
    if mechanism in ("tensor parallelism", "subgraph order"):
        return f"added: {mechanism}, {instead}"
    return f"{mechanism.partition(' by ')[0]}: {instead}"


def show(cases: Sequence[Case]) -> str:
    names = list(dict.fromkeys(name for case in cases for name in case.costs))
    lines = []
    for name in names:
        costs = [case.costs[name] for case in cases if name in case.costs]
        spread = f"{min(costs):+.1%} / {median(costs):+.1%} / {max(costs):+.1%}"
        better = sum(cost < -0.001 for cost in costs)
        lines.append([name, spread, f"{sum(cost > 0.001 for cost in costs)}", f"{better}", f"{len(costs)}"])
    titles = ["without, or with", "takes longer by", "slower in", "faster in", "cases"]
    return aligned(titles, lines)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--toy", action="store_true", help="two clusters and two sets of jobs")
    options = parser.parse_args()
    began = time.perf_counter()
    clusters, job_sets = (CLUSTERS[:2], JOB_SETS[:2]) if options.toy else (CLUSTERS, JOB_SETS)
    cases = [case_of(cluster, job_set) for cluster in clusters for job_set in job_sets]
    print(show(cases))
    piped = [case for case in cases if case.cluster != CLUSTERS[0]]
    for title, chosen in (
        ("Groups by", Counter(case.mechanism for case in cases)),
        ("Orders in pipelines", Counter(case.order for case in piped)),
    ):
        print(f"\n{title}: " + ", ".join(f"{name} {count}" for name, count in chosen.most_common()))
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    numbers: dict[str, Any] = {
        "cases": [
            {"cluster": case.cluster, "jobs": case.jobs, "order": case.order}
            | {"groups": case.mechanism, "costs": case.costs}
            for case in cases
        ]
    }
    finish(numbers, options.json)


if __name__ == "__main__":
    main()
