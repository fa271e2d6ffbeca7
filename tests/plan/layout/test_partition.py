from __future__ import annotations

import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.streams import layer
from weftune.errors import PlanError
from weftune.plan.cost.layers import LayerCost, StageCost, stage_cost
from weftune.plan.layout.partition import StageLimit, balance, stage_bytes

LIMITS = st.lists(
    st.builds(
        StageLimit, st.integers(10, 80), in_flight=st.integers(1, 3), pace=st.sampled_from([1.0, 1.5, 2.0])
    ),
    min_size=1,
    max_size=4,
)


def slowest(stages: tuple[StageCost, ...], limits: list[StageLimit]) -> float:
    return max(limit.pace * stage.seconds for stage, limit in zip(stages, limits, strict=True))


def fullest(stages: tuple[StageCost, ...], limits: list[StageLimit]) -> int:
    return max(stage_bytes(stage, limit.in_flight) for stage, limit in zip(stages, limits, strict=True))


def every_cut(layers: list[LayerCost], limits: list[StageLimit]) -> list[tuple[StageCost, ...]]:
    """All cuts that fit."""
    found = []
    for inner in combinations(range(1, len(layers)), len(limits) - 1):
        cuts = pairwise((0, *inner, len(layers)))
        stages = tuple(stage_cost(layers, start, stop) for start, stop in cuts)
        bytes_of = zip(stages, limits, strict=True)
        if all(stage_bytes(stage, limit.in_flight) <= limit.memory_bytes for stage, limit in bytes_of):
            found.append(stages)
    return found


@given(st.lists(layer(), min_size=4, max_size=9), LIMITS)
def test_no_cut_that_fits_is_faster_and_none_as_fast_takes_less_memory(
    layers: list[LayerCost], limits: list[StageLimit]
) -> None:
    cuts = every_cut(layers, limits)
    if not cuts:
        with pytest.raises(PlanError):
            balance(layers, limits)
        return
    found = balance(layers, limits)
    least = min(slowest(stages, limits) for stages in cuts)
    assert slowest(found, limits) == pytest.approx(least)
    fast = [stages for stages in cuts if slowest(stages, limits) <= least + 1e-9]
    assert fullest(found, limits) == min(fullest(stages, limits) for stages in fast)
    assert [stage.start for stage in found[1:]] == [stage.stop for stage in found[:-1]]


def test_a_heavy_head_leaves_fewer_blocks_to_the_last_stage() -> None:
    block = LayerCost("block", 1.0, 2.0, 1)
    layers = [LayerCost("embedding", 0.0, 0.0, 1), *[block] * 16, LayerCost("head", 3.0, 3.0, 1)]
    stages = balance(layers, [StageLimit(100)] * 4)
    assert stages[-1].stop - stages[-1].start < stages[1].stop - stages[1].start
    assert max(stage.seconds for stage in stages) == pytest.approx(15.0)


def test_a_device_with_less_memory_gets_fewer_layers() -> None:
    layers = [LayerCost("block", 1.0, 1.0, 10)] * 8
    stages = balance(layers, [StageLimit(20), StageLimit(100)])
    assert [stage.stop - stage.start for stage in stages] == [2, 6]


def test_what_does_not_fit_is_named_with_its_number() -> None:
    layers = [LayerCost("block", 1.0, 1.0, 2**30, kept_bytes=2**29)] * 8
    with pytest.raises(PlanError, match=r"stage 1 needs 6\.00 GiB with 2 microbatches .* has 4\.00 GiB"):
        balance(layers, [StageLimit(9 << 30, 2), StageLimit(4 << 30, 2)])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="3 stages need as many layers, but the base has 2"):
        balance([LayerCost("block", 1.0, 1.0, 1)] * 2, [StageLimit(10)] * 3)


def test_128_layers_and_8_stages_take_well_under_a_second() -> None:
    block = LayerCost("block", 1.0, 2.0, 10, kept_bytes=1)
    layers = [LayerCost("embedding", 0.1, 0.0, 30), *[block] * 126, LayerCost("head", 2.0, 2.0, 30)]
    began = time.process_time()
    stages = balance(layers, [StageLimit(1000, 8 - number) for number in range(8)])
    assert time.process_time() - began < 0.5
    assert max(stage.seconds for stage in stages) == pytest.approx(48.1)
