"""Stages: the slowest is as fast as possible, and cuts follow measured or counted costs."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import is_within
from tests.plan.costs import SHAPE
from tests.plan.profiles import KINDS, profile
from tests.plan.streams import layer
from weftune.core.shapes import LayerRange
from weftune.errors import PlanError
from weftune.plan.cost.estimate import LayerCost, StageCost, stage_cost
from weftune.plan.cost.time import Terms
from weftune.plan.layout.stages import (
    PartCosts,
    StageLimit,
    balance_stages,
    cut_layers,
    measured_costs,
    multiplication_costs,
    typical_work,
)

LIMITS = st.lists(
    st.builds(
        StageLimit,
        st.integers(10, 80),
        microbatches_in_flight=st.integers(1, 3),
        relative_time=st.sampled_from([1.0, 1.5, 2.0]),
    ),
    min_size=1,
    max_size=4,
)


def slowest(stages: tuple[StageCost, ...], limits: list[StageLimit]) -> float:
    return max(limit.relative_time * stage.seconds for stage, limit in zip(stages, limits, strict=True))


def fullest(stages: tuple[StageCost, ...], limits: list[StageLimit]) -> int:
    return max(
        stage.resident_bytes(limit.microbatches_in_flight)
        for stage, limit in zip(stages, limits, strict=True)
    )


def every_cut(layers: list[LayerCost], limits: list[StageLimit]) -> list[tuple[StageCost, ...]]:
    """All cuts that fit."""
    found = []
    for inner in combinations(range(1, len(layers)), len(limits) - 1):
        cuts = pairwise((0, *inner, len(layers)))
        stages = tuple(stage_cost(layers, start, stop) for start, stop in cuts)
        bytes_of = zip(stages, limits, strict=True)
        if all(
            stage.resident_bytes(limit.microbatches_in_flight) <= limit.memory_bytes
            for stage, limit in bytes_of
        ):
            found.append(stages)
    return found


@given(st.lists(layer(), min_size=4, max_size=9), LIMITS)
def test_no_cut_that_fits_is_faster_and_none_as_fast_takes_less_memory(
    layers: list[LayerCost], limits: list[StageLimit]
) -> None:
    cuts = every_cut(layers, limits)
    if not cuts:
        with pytest.raises(PlanError):
            balance_stages(layers, limits)
        return
    found = balance_stages(layers, limits)
    least = min(slowest(stages, limits) for stages in cuts)
    assert slowest(found, limits) == pytest.approx(least)
    fast = [stages for stages in cuts if slowest(stages, limits) <= least + 1e-9]
    assert fullest(found, limits) == min(fullest(stages, limits) for stages in fast)
    assert [stage.start for stage in found[1:]] == [stage.stop for stage in found[:-1]]


def test_a_heavy_head_leaves_fewer_blocks_to_the_last_stage() -> None:
    block = LayerCost("block", 1.0, 2.0, 1)
    layers = [LayerCost("embedding", 0.0, 0.0, 1), *[block] * 16, LayerCost("head", 3.0, 3.0, 1)]
    stages = balance_stages(layers, [StageLimit(100)] * 4)
    assert stages[-1].stop - stages[-1].start < stages[1].stop - stages[1].start
    assert max(stage.seconds for stage in stages) == pytest.approx(15.0)


def test_a_device_with_less_memory_gets_fewer_layers() -> None:
    layers = [LayerCost("block", 1.0, 1.0, 10)] * 8
    stages = balance_stages(layers, [StageLimit(20), StageLimit(100)])
    assert [stage.stop - stage.start for stage in stages] == [2, 6]


def test_what_does_not_fit_is_named_with_its_number() -> None:
    layers = [LayerCost("block", 1.0, 1.0, 2**30, kept_bytes=2**29)] * 8
    with pytest.raises(PlanError, match=r"stage 1 needs 6\.00 GiB with 2 microbatches .* has 4\.00 GiB"):
        balance_stages(layers, [StageLimit(9 << 30, 2), StageLimit(4 << 30, 2)])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="3 stages need as many layers, but the base has 2"):
        balance_stages([LayerCost("block", 1.0, 1.0, 1)] * 2, [StageLimit(10)] * 3)


def test_128_layers_and_8_stages_take_well_under_a_second() -> None:
    block = LayerCost("block", 1.0, 2.0, 10, kept_bytes=1)
    layers = [LayerCost("embedding", 0.1, 0.0, 30), *[block] * 126, LayerCost("head", 2.0, 2.0, 30)]
    began = time.process_time()
    stages = balance_stages(layers, [StageLimit(1000, 8 - number) for number in range(8)])
    assert is_within(time.process_time() - began, 0.5)
    assert max(stage.seconds for stage in stages) == pytest.approx(48.1)


TOKENS = 1024


def sizes(found):
    return [one.stop - one.start for one in found]


@given(st.integers(2, 5), st.integers(5, 9), st.floats(0, 5), st.floats(0, 5))
def test_no_other_cut_has_a_faster_slowest_stage_or_others_more_alike(stages, layers, embedding, head):
    costs = PartCosts(embedding, 1.0, head)
    found = cut_layers(replace(SHAPE, layers=layers), stages, costs)
    assert [one.start for one in found] == [0, *(one.stop for one in found[:-1])]
    assert found[-1].is_last
    every = [
        [costs.stage_cost(LayerRange(start, stop, layers)) for start, stop in pairwise((0, *inner, layers))]
        for inner in combinations(range(1, layers), stages - 1)
    ]
    least = min(map(max, every))
    own = [costs.stage_cost(one) for one in found]
    assert max(own) == pytest.approx(least)
    squares = (sum(one**2 for one in taken) for taken in every if max(taken) <= least * (1 + 1e-9))
    assert sum(one**2 for one in own) == pytest.approx(min(squares))


@pytest.mark.parametrize(("head", "layers"), [(0.0, [3, 3, 3, 3]), (2.0, [3, 3, 4, 2]), (6.0, [3, 4, 4, 1])])
def test_stages_that_need_not_be_slow_share_the_layers(head, layers):
    """However dear the head is, no stage before it is left with one layer."""
    found = cut_layers(replace(SHAPE, layers=12), 4, PartCosts(0.0, 1.0, head))
    assert sizes(found) == layers


def test_without_costs_stages_are_alike_in_arithmetic():
    assert cut_layers(SHAPE, 4) == cut_layers(SHAPE, 4, multiplication_costs(SHAPE))
    per_layer = sum(site.in_features * site.out_features for site in SHAPE.sites) / SHAPE.layers
    costs = multiplication_costs(SHAPE)
    assert costs.head / costs.layer == pytest.approx(SHAPE.vocabulary * SHAPE.hidden / per_layer)


def test_a_profile_says_what_a_layer_and_the_ends_take_of_a_microbatch():
    work = typical_work(SHAPE, TOKENS)
    costs = measured_costs(profile(), SHAPE, work)
    adapters = KINDS.adapter(work) / SHAPE.layers
    assert costs.layer == pytest.approx(2 * (KINDS.layer(work) + adapters), rel=0.05)
    # The head is in the forward alone.
    assert costs.head == pytest.approx(KINDS.head(work), rel=0.05)
    assert costs.embedding + costs.head == pytest.approx(
        2 * KINDS.embedding(work) + KINDS.head(work), rel=0.05
    )


@pytest.mark.parametrize(("per_row", "last"), [(0.0, 7), (1e-3, 4), (1e-2, 1)])
def test_the_dearer_the_head_was_measured_the_fewer_layers_stand_beside_it(per_row, last):
    """Whatever the arithmetic of the head says: its matrix is the same in all three."""
    measured = profile(replace(KINDS, head=Terms(supervised=per_row)))
    costs = measured_costs(measured, SHAPE, typical_work(SHAPE, TOKENS))
    found = sizes(cut_layers(SHAPE, 4, costs))
    assert found[-1] == last
    assert sum(found) == SHAPE.layers


def test_the_typical_microbatch_is_one_that_the_base_can_take():
    work = typical_work(replace(SHAPE, context=100), TOKENS)
    assert (work.tokens, work.samples, work.squares) == (TOKENS, 10, TOKENS * 100)
    assert typical_work(SHAPE, 64).samples == 1


@pytest.mark.parametrize("stages", [1, SHAPE.layers + 1])
def test_a_number_of_stages_that_cannot_be_gets_a_sentence(stages):
    with pytest.raises(PlanError, match=f"--pipeline {stages}: "):
        cut_layers(SHAPE, stages, PartCosts(1.0, 1.0, 1.0))
