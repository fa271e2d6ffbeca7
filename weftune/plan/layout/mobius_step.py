"""Time of a training step whose stages are uploaded from host memory, since there are more stages than GPUs.

This is Mobius's recurrence (equations 4 to 11) for a frozen base. Stage j runs on GPU j mod N. Nothing is
copied back to the host. The first stage of a GPU is still there from the backward of the previous step, and
in the backward its last stage is still there from the forward. A step therefore uploads all other stages
twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from weftune.plan.cost.estimate import LayerCost, StageCost, stage_cost


@dataclass(frozen=True, slots=True)
class Host:
    """Identical GPUs, each with its own link to the host's memory."""

    gpus: int
    memory_bytes: int
    """Memory of one GPU, in bytes."""
    bandwidth: float
    """Bytes per second of one link."""
    stage_bytes: int = 0
    """Bytes that each stage holds on its GPU permanently, such as its inputs of all microbatches."""


@dataclass(frozen=True, slots=True)
class StreamPartition:
    """A partition of the layers into stages, each of which is resident or streamed."""

    cuts: tuple[int, ...]
    """Boundaries of the stages, from 0 to the number of layers."""
    resident_stages: tuple[bool, ...]
    """Whether each stage stays on its GPU instead of being streamed."""

    def costs(self, layers: Sequence[LayerCost]) -> tuple[StageCost, ...]:
        return tuple(stage_cost(layers, start, stop) for start, stop in pairwise(self.cuts))


@dataclass(frozen=True, slots=True)
class MobiusVisit:
    """A visit: the forward or the backward of one stage for all microbatches, with the transfers that must
    precede it."""

    seconds: float
    """Seconds of computation per microbatch."""
    received_bytes: int = 0
    """Bytes of the activation or gradient that is received from the preceding stage. 0 with a single GPU."""
    upload_bytes: int = 0
    delayed_bytes: int = 0
    """Bytes of a stage's upload that have no room on the GPU until the previous stage on this GPU has been
    computed."""


@dataclass(frozen=True, slots=True)
class MobiusVisits:
    """The visits (forwards or backwards of a stage for all microbatches) in the order in which they run. With
    N GPUs, visits j and j + N run on the same GPU."""

    forward: tuple[MobiusVisit, ...]
    backward: tuple[MobiusVisit, ...]


def step_seconds(
    partition: StreamPartition, layers: Sequence[LayerCost], host: Host, microbatches: int
) -> float:
    """Return the seconds of a training step, from the first forward to the end of the last backward, or
    infinity if the partition does not fit in memory."""
    return stages_seconds(partition.costs(layers), partition.resident_stages, host, microbatches)


def stages_seconds(
    stages: Sequence[StageCost], resident_stages: Sequence[bool], host: Host, microbatches: int
) -> float:
    rooms = free_bytes(stages, resident_stages, host)
    if min(rooms) < 0:
        return math.inf
    visits = _visits(stages, resident_stages, rooms, host)
    return pass_seconds(visits.forward, host, microbatches) + pass_seconds(
        visits.backward, host, microbatches
    )


def free_bytes(stages: Sequence[StageCost], resident_stages: Sequence[bool], host: Host) -> list[int]:
    """Return, for each stage, the free bytes of its GPU while the stage computes. A negative number means
    that the stage does not fit."""
    fixed = [0] * host.gpus
    for number, stage in enumerate(stages):
        own_bytes = host.stage_bytes + stage.state_bytes + resident_stages[number] * stage.weight_bytes
        fixed[number % host.gpus] += own_bytes
    return [
        host.memory_bytes - fixed[number % host.gpus] - temporary_bytes(stage, resident_stages[number])
        for number, stage in enumerate(stages)
    ]


def temporary_bytes(stage: StageCost, is_resident: bool) -> int:
    """Return the bytes that a stage needs only while it computes: activations and, if it is streamed,
    weights."""
    return stage.kept_bytes + (0 if is_resident else stage.weight_bytes)


def visits(partition: StreamPartition, layers: Sequence[LayerCost], host: Host) -> MobiusVisits:
    stages = partition.costs(layers)
    rooms = free_bytes(stages, partition.resident_stages, host)
    assert min(rooms) >= 0, "the partition does not fit"
    return _visits(stages, partition.resident_stages, rooms, host)


def pass_seconds(visits: Sequence[MobiusVisit], host: Host, microbatches: int) -> float:
    """Return the seconds of the forward or of the backward of all microbatches, by equations 8 to 10 of
    Mobius.

    Microbatches are alike, so it suffices to compute the start times of the first and of the last one. The
    upload of a stage begins when the previous stage on the same GPU begins to compute. The part that does not
    fit in memory by then is uploaded when that stage has ended.
    """
    first: list[float] = []
    last: list[float] = []
    for number, visit in enumerate(visits):
        start = final = 0.0
        if number:
            before = visits[number - 1].seconds + visit.received_bytes / host.bandwidth
            start, final = first[-1] + before, last[-1] + before
        if number >= host.gpus:
            above = number - host.gpus
            freed = last[above] + visits[above].seconds
            start = max(
                start,
                freed + visit.delayed_bytes / host.bandwidth,
                first[above] + visit.upload_bytes / host.bandwidth,
            )
        first.append(start)
        last.append(max(final, start + (microbatches - 1) * visit.seconds))
    return last[-1] + visits[-1].seconds


def _visits(
    stages: Sequence[StageCost], resident_stages: Sequence[bool], stage_free_bytes: Sequence[int], host: Host
) -> MobiusVisits:
    count, gpus = len(stages), host.gpus

    def visit(number: int, seconds: float, received_bytes: int, previous_gpu_stage: int) -> MobiusVisit:
        """Return the forward or backward of a stage with its transfers. `previous_gpu_stage` is the number of
        the stage that ran before on the same GPU; a number out of range means that there is none."""
        weights = (
            0
            if resident_stages[number] or not 0 <= previous_gpu_stage < count
            else stages[number].weight_bytes
        )
        late = max(0, weights - stage_free_bytes[previous_gpu_stage]) if weights else 0
        return MobiusVisit(seconds, received_bytes if gpus > 1 else 0, weights, late)

    forward = [
        visit(j, stages[j].forward, stages[j - 1].activation_bytes if j else 0, j - gpus)
        for j in range(count)
    ]
    backward = [
        visit(j, stages[j].backward, stages[j + 1].gradient_bytes if j + 1 < count else 0, j + gpus)
        for j in reversed(range(count))
    ]
    return MobiusVisits(tuple(forward), tuple(backward))
