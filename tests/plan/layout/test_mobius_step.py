from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.streams import HOSTS, bases, partition, partitions
from weftune.plan.cost.estimate import LayerCost, StageCost
from weftune.plan.layout.mobius_step import Host, StreamPartition, free_bytes, step_seconds, visits


def direction_seconds(
    stages: Sequence[StageCost],
    order: Sequence[int],
    seconds: Sequence[float],
    hops: Sequence[float],
    resident: Sequence[bool],
    host: Host,
    microbatches: int,
) -> float:
    """Eq 5-10 as printed and mended, microbatch by microbatch; `hops` are seconds before each stage."""
    free = free_bytes(stages, resident, host)
    start: dict[tuple[int, int], float] = {}
    for place, stage in enumerate(order):
        above = order[place - host.gpus] if place >= host.gpus else None
        for m in range(microbatches):
            times = [0.0]
            if place:
                times.append(start[order[place - 1], m] + seconds[order[place - 1]] + hops[stage])
            if m:
                times.append(start[stage, m - 1] + seconds[stage])
            if m == 0 and above is not None:
                ended = start[above, microbatches - 1] + seconds[above]
                weights = 0 if resident[stage] else stages[stage].weight_bytes
                prefetch = min(weights, free[above], host.bandwidth * (ended - start[above, 0]))
                times.append(ended + (weights - prefetch) / host.bandwidth)
            start[stage, m] = max(times)
    return start[order[-1], microbatches - 1] + seconds[order[-1]]


def literal_seconds(chosen: StreamPartition, layers: list[LayerCost], host: Host, microbatches: int) -> float:
    stages, count = chosen.costs(layers), len(chosen.resident_stages)
    if min(free_bytes(stages, chosen.resident_stages, host)) < 0:
        return math.inf
    link = host.bandwidth if host.gpus > 1 else math.inf
    return direction_seconds(
        stages,
        range(count),
        [stage.forward for stage in stages],
        [0.0, *(stage.activation_bytes / link for stage in stages[:-1])],
        chosen.resident_stages,
        host,
        microbatches,
    ) + direction_seconds(
        stages,
        range(count - 1, -1, -1),
        [stage.backward for stage in stages],
        [*(stage.gradient_bytes / link for stage in stages[1:]), 0.0],
        chosen.resident_stages,
        host,
        microbatches,
    )


@given(st.data(), bases(9), HOSTS, st.integers(1, 6))
def test_first_and_last_microbatch_say_what_the_whole_recurrence_says(
    data: st.DataObject, layers: list[LayerCost], host: Host, microbatches: int
) -> None:
    chosen = data.draw(partitions(len(layers)))
    expected = literal_seconds(chosen, layers, host, microbatches)
    assert step_seconds(chosen, layers, host, microbatches) == pytest.approx(expected)


def test_a_step_uploads_all_but_the_first_stages_forward_and_all_but_the_last_backward() -> None:
    layers = [LayerCost("block", 1.0, 1.0, 10)] * 6
    moved = visits(partition(range(7), [False] * 6), layers, Host(2, 100, 1.0))
    assert [visit.upload_bytes for visit in moved.forward] == [0, 0, 10, 10, 10, 10]
    assert [visit.upload_bytes for visit in moved.backward] == [0, 0, 10, 10, 10, 10]


def test_a_resident_stage_is_never_uploaded_and_takes_room_from_the_prefetch_of_the_others() -> None:
    layers = [LayerCost("block", 1.0, 1.0, 10)] * 3
    host = Host(1, 35, 1.0)
    streamed = visits(partition(range(4), [False] * 3), layers, host)
    stays = visits(partition(range(4), [True, False, False]), layers, host)
    assert [visit.delayed_bytes for visit in streamed.forward] == [0, 0, 0]
    assert [visit.delayed_bytes for visit in stays.forward] == [0, 0, 0]
    tight = visits(partition(range(4), [True, False, False]), layers, Host(1, 25, 1.0))
    assert [visit.delayed_bytes for visit in tight.forward] == [0, 0, 5]
    assert [visit.upload_bytes for visit in tight.backward] == [0, 10, 0]


def test_a_partition_that_does_not_fit_takes_for_ever() -> None:
    layers = [LayerCost("block", 1.0, 1.0, 10, state_bytes=3)] * 2
    assert step_seconds(partition([0, 1, 2], [False] * 2), layers, Host(1, 15, 1.0), 1) == math.inf
    assert step_seconds(partition([0, 1, 2], [False] * 2), layers, Host(1, 16, 1.0), 1) < math.inf
