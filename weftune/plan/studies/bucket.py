"""Assignment of fusion groups to buckets (MuxTune's equation 7).

Groups of one bucket interleave within a stage, where one computes while another communicates; buckets follow
one another through the pipeline. For each number of buckets the groups are spread as evenly as possible, and
the number with the least modelled end-to-end time wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from weftune.plan.layout.balanced import Buckets, balance, variance
from weftune.plan.studies.fuse import Fusion
from weftune.plan.studies.stage import GroupLoad, PassSeconds, PipelineCost


@dataclass(frozen=True, slots=True)
class Bucket:
    groups: tuple[GroupLoad, ...]
    forward: tuple[float, ...]
    """Seconds on each stage, with its groups interleaved."""
    backward: tuple[float, ...]

    @property
    def paces(self) -> list[float]:
        return [forward + backward for forward, backward in zip(self.forward, self.backward, strict=True)]


@dataclass(frozen=True, slots=True)
class BucketTrial:
    """Result for one number of buckets."""

    buckets: int
    variance: float
    """Variance of the buckets' summed first-stage latency."""
    seconds: float | None
    """Seconds of one round. None if a bucket does not fit in memory with all its groups in flight."""


@dataclass(frozen=True, slots=True)
class Bucketing:
    buckets: tuple[Bucket, ...]
    """Buckets from the longest to the shortest, as the pipeline template takes them."""
    seconds: float
    """Seconds of one round end to end."""
    trials: tuple[BucketTrial, ...]


@dataclass(frozen=True, slots=True)
class Arrangement:
    bucketing: Bucketing
    reason: str
    """Reason for the number of fusion groups."""


EVERY = 16
"""Number of groups or buckets up to which each is tried; above it, only its multiples and the largest."""


def bucket(groups: Sequence[GroupLoad], pipeline: PipelineCost) -> Bucketing:
    """Return the best buckets for `groups`, each of which fits in memory alone."""
    assert groups, "no fusion group to put into a bucket"
    latencies = [pipeline.paces(load)[0] for load in groups]
    trials: list[BucketTrial] = []
    best: Bucketing | None = None
    for count in _tried(len(groups)):
        spread = balance(latencies, count)
        found = _bucketing(spread, groups, pipeline)
        trials.append(BucketTrial(count, variance(spread, latencies), found.seconds if found else None))
        if found and (best is None or found.seconds < best.seconds):
            best = found
    assert best is not None, "a fusion group does not fit even in a bucket of its own"
    return Bucketing(best.buckets, best.seconds, tuple(trials))


def arrange(fusion: Fusion, pipeline: PipelineCost) -> Arrangement:
    """Return buckets for the number of fusion groups that suits them best.

    Fusion assumes that communication is hidden, but a few large groups leave little to hide it behind. If
    there is any communication, the best groupings for other numbers of groups are tried as well.
    """
    own = len(fusion.groups)
    tried = {own: bucket([group.load for group in fusion.groups], pipeline)}
    if not pipeline.communicates:
        return Arrangement(tried[own], f"as many groups as fused, {own}: there is no communication to hide")
    for count in {*_tried(max(fusion.by_count))} & fusion.by_count.keys() - {own}:
        tried[count] = bucket(fusion.by_count[count].groups, pipeline)
    chosen = min(tried, key=lambda count: (tried[count].seconds, count))
    if chosen == own:
        return Arrangement(
            tried[own], f"as many groups as fused, {own}: no other number of them takes less time"
        )
    return Arrangement(
        tried[chosen],
        f"{chosen} groups, not {own} as fused: communication hides behind other groups' compute, and a round "
        f"takes {tried[chosen].seconds:.3g} s end to end, not {tried[own].seconds:.3g} s",
    )


def make_bucket(groups: Sequence[GroupLoad], pipeline: PipelineCost) -> Bucket:
    stages = list(zip(*(pipeline.times(load) for load in groups), strict=True))
    # Adapters of different groups may run fused only if no group holds several jobs.
    fused = all(len(load.jobs) == 1 for load in groups)
    return Bucket(
        tuple(groups),
        tuple(interleaved([time.forward for time in times], fused) for times in stages),
        tuple(interleaved([time.backward for time in times], fused) for times in stages),
    )


def interleaved(passes: Sequence[PassSeconds], fused: bool) -> float:
    """Return a stage's seconds for passes of several groups: those of its busier lane, at least those of any
    group alone.

    This is a lower bound: the two-lane timeline of `overlap` comes close to it if operators are many and
    small.
    """
    adapters = [one.adapters for one in passes]
    together = reduce(add, adapters).seconds if fused else sum(each.seconds for each in adapters)
    compute = sum(one.base for one in passes) + together
    return max(compute, sum(one.communication for one in passes), *(one.alone for one in passes))


def end_to_end(buckets: Sequence[Bucket], microbatches: int) -> float:
    """Return the seconds of one round: the first bucket fills the pipeline, all pass its slowest stage, the
    last one drains it."""
    busy = [sum(paces) for paces in zip(*(one.paces for one in buckets), strict=True)]
    slowest = busy.index(max(busy))
    others = [stage for stage in range(len(busy)) if stage != slowest]
    filling = sum(buckets[0].forward[stage] for stage in others)
    draining = sum(buckets[-1].backward[stage] for stage in others)
    return filling + microbatches * busy[slowest] + draining


def _tried(most: int) -> list[int]:
    return [count for count in range(1, most + 1) if count <= EVERY or count % EVERY == 0 or count == most]


def _bucketing(spread: Buckets, groups: Sequence[GroupLoad], pipeline: PipelineCost) -> Bucketing | None:
    chosen = [[groups[index] for index in sorted(indices)] for indices in spread]
    if any(pipeline.shortage(reduce(add, together)) for together in chosen):
        return None
    made = [make_bucket(together, pipeline) for together in chosen]
    made.sort(key=lambda one: (-one.paces[0], one.groups[0].jobs))
    return Bucketing(tuple(made), end_to_end(made, pipeline.microbatches), ())
