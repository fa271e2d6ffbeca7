"""Candidate groupings: which jobs share microbatches according to each mechanism, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftune.plan.cost.estimate import (
    ADAPTER_BACKWARD,
    ATTENTION_BACKWARD,
    JobOutline,
    adapter_seconds,
    base_line,
    square_seconds,
)
from weftune.plan.cost.time import Line
from weftune.plan.pack.merge import JobLengths, group
from weftune.plan.studies.bucket import arrange
from weftune.plan.studies.fit import ClusterCase, Placement
from weftune.plan.studies.fuse import Fusion, fuse
from weftune.plan.studies.priced import made_again
from weftune.plan.studies.scheme import Groups
from weftune.plan.studies.stage import GroupLoad, PipelineCost, Stage, StagePass, one_adapter

ADAPTER_SHARE = 0.5
"""Share of the device that one adapter's products keep busy: fused adapters overlap to that extent."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate grouping and the mechanism that proposes it."""

    mechanism: str
    groups: Groups
    reason: str


def candidates(jobs: Sequence[JobOutline], layout: Placement) -> list[Candidate]:
    stages, names = len(layout.stages), [job.name for job in jobs]
    lengths = [JobLengths(job.name, _mean(job), round_tokens(job)) for job in jobs]
    head_tail = group(lengths, layout.capacity, stages)
    return [
        Candidate("head-tail grouping", head_tail.groups, head_tail.why(stages)),
        Candidate("one group", (tuple(names),), "groups that take turns would not wait less"),
        Candidate("single jobs", alone(jobs), "each job's rounds follow those of the others"),
    ]


def left_out(ground: ClusterCase, jobs: Sequence[JobOutline], layout: Placement) -> list[Candidate]:
    """Return the groupings that never won if there are no collectives to hide
    (`benchmarks/plan_mechanisms.py`)."""
    fusion, pipeline = _fused(ground, jobs, layout)
    arrangement = arrange(fusion, pipeline)
    buckets = tuple(load.jobs for bucket in arrangement.bucketing.buckets for load in bucket.groups)
    return [
        Candidate(
            "fusion", tuple(one.jobs for one in fusion.groups), "; ".join(one.reason for one in fusion.groups)
        ),
        Candidate("buckets", buckets, arrangement.reason),
    ]


def alone(jobs: Sequence[JobOutline]) -> Groups:
    return tuple((job.name,) for job in jobs)


def round_tokens(job: JobOutline) -> int:
    """Return the average number of tokens of a global batch."""
    return -(-sum(map(sum, job.batches)) // len(job.batches))


def _mean(job: JobOutline) -> float:
    count = sum(map(len, job.batches))
    return sum(map(sum, job.batches)) / max(1, count)


def _fused(ground: ClusterCase, jobs: Sequence[JobOutline], layout: Placement) -> tuple[Fusion, PipelineCost]:
    """Fuse over the minimum number of microbatches of a round, each with every job's share."""
    count = max(1, -(-sum(map(round_tokens, jobs)) // layout.capacity))
    pipeline = PipelineCost(
        tuple(_stage(ground, layout, number) for number in range(len(layout.stages))), count
    )
    loads = []
    for job in jobs:
        tokens = -(-round_tokens(job) // count)
        adapters = []
        for number, cut in enumerate(layout.stages):
            seconds = tokens * adapter_seconds(
                ground.layers[cut.start : cut.stop], job, ground.speeds[number]
            )
            adapters.append(one_adapter(seconds, ADAPTER_BACKWARD * seconds, ADAPTER_SHARE))
        loads.append(GroupLoad((job.name,), tokens, int(tokens * _mean(job)), tuple(adapters)))
    return fuse(loads, pipeline), pipeline


def _stage(ground: ClusterCase, layout: Placement, number: int) -> Stage:
    cut, speed = layout.stages[number], ground.speeds[number]
    layers = ground.layers[cut.start : cut.stop]
    line, square = base_line(layers, speed), square_seconds(layers, speed)
    again = made_again(layers, ground)
    twice = Line((1 + again) * line.fixed, (1 + again) * line.per_token)
    return Stage(
        forward=StagePass(line, square),
        backward=StagePass(twice, (ATTENTION_BACKWARD + again) * square),
        resident_bytes=cut.weight_bytes + cut.state_bytes + ground.slack,
        activation_bytes=cut.kept_bytes // layout.capacity,
        gradient_bytes=ground.held_bytes,
        budget=layout.budgets[number],
    )
