"""A base of 8 billion parameters and jobs on it, as the outlook takes them."""

from __future__ import annotations

import random

from benchmarks.studies.bases import CONFIG_8B, SHAPE_8B
from benchmarks.studies.placement import ClusterCase, cluster_case
from weftune.core.shapes import JobShape
from weftune.plan.cost.cluster import parse_cluster
from weftune.plan.cost.estimate import JobOutline

CONFIG, SHAPE = CONFIG_8B, SHAPE_8B
PARAMETERS = 8_030_261_248


def ground(cluster: str) -> ClusterCase:
    return cluster_case(SHAPE, parse_cluster(cluster))


def outline(name: str, mean: int, batch: int = 8, rank: int = 16, rounds: int = 2) -> JobOutline:
    """Lengths spread around `mean`, the same at every call."""
    dice = random.Random(name)
    batches = tuple(
        tuple(max(8, min(2048, int(dice.lognormvariate(0, 0.5) * mean))) for _ in range(batch))
        for _ in range(rounds)
    )
    trainable = sum(rank * (site.in_features + site.out_features) for site in SHAPE.sites)
    longest = max((max(lengths, default=0) for lengths in batches), default=0)
    ranks = {site.name: rank for site in SHAPE.sites}
    return JobOutline(JobShape(name, 0, 0, trainable, longest), ranks, batches)


def outlines(count: int) -> list[JobOutline]:
    return [outline(f"job{number}", 200 * (number + 1)) for number in range(count)]
