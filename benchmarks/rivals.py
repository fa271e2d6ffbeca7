"""Rivals: the schemes by which other systems would run the same jobs, at their best capacity."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.studies.placement import Placement, best_placement
from benchmarks.studies.scheme import Scheme, separate_groups
from benchmarks.studies.search import Proposal, Search
from weftune.plan.cost.estimate import JobOutline
from weftune.plan.outlook.forecast import Forecast, sum_forecasts
from weftune.plan.pack.best import BEST_FIT_ONLY


def one_piped_after_another(jobs: Sequence[JobOutline]) -> list[Scheme]:
    return [
        Scheme("1F1B per job", (names,), limits=BEST_FIT_ONLY, moves_samples=False)
        for names in separate_groups(jobs)
    ]


def greedily_packed(jobs: Sequence[JobOutline]) -> list[Scheme]:
    together = tuple(job.name for job in jobs)
    return [Scheme("greedy packing only", (together,), limits=BEST_FIT_ONLY, moves_samples=False)]


def at_its_best(
    schemes: Sequence[Scheme], tried: Sequence[Placement], jobs: Sequence[JobOutline]
) -> Forecast:
    """Return a simulation of schemes that run one after another, each with its own jobs, at the capacity at
    which they should be fastest, of those where they fit."""
    ordered: list[tuple[float, list[Proposal]]] = []

    def seconds(placement: Placement) -> float:
        parts = [
            Search(placement, [job for job in jobs if any(job.name in names for names in scheme.groups)])
            for scheme in schemes
        ]
        found = [part.propose("", scheme) for part, scheme in zip(parts, schemes, strict=True)]
        least = sum(one.least_seconds for one in found)
        ordered.append((least, found))
        return least

    best_placement(tried, seconds)
    runs: list[Forecast] = []
    for _, found in sorted(ordered, key=lambda one: one[0]):
        runs.append(sum_forecasts([one.simulate().forecast for one in found]))
        if runs[-1].fits:
            return runs[-1]
    return runs[0]
