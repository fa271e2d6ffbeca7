"""Stages of a pipeline are alike by what their layers and ends cost, measured where a profile is at hand."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.costs import SHAPE
from tests.plan.profiles import KINDS, profile
from weftune.core.shapes import LayerRange
from weftune.errors import PlanError
from weftune.plan.cost.time import Terms
from weftune.plan.layout.cut import PartCosts, counted_costs, cut_layers, measured_costs, typical_work

TOKENS = 1024


def sizes(found):
    return [one.stop - one.start for one in found]


@given(st.integers(2, 5), st.integers(5, 9), st.floats(0, 5), st.floats(0, 5))
def test_no_other_cut_has_a_faster_slowest_stage_or_others_more_alike(stages, layers, embedding, head):
    costs = PartCosts(embedding, 1.0, head)
    found = cut_layers(replace(SHAPE, layers=layers), stages, costs)
    assert [one.start for one in found] == [0, *(one.stop for one in found[:-1])]
    assert found[-1].last
    every = [
        [costs.of(LayerRange(start, stop, layers)) for start, stop in pairwise((0, *inner, layers))]
        for inner in combinations(range(1, layers), stages - 1)
    ]
    least = min(map(max, every))
    own = [costs.of(one) for one in found]
    assert max(own) == pytest.approx(least)
    squares = (sum(one**2 for one in taken) for taken in every if max(taken) <= least * (1 + 1e-9))
    assert sum(one**2 for one in own) == pytest.approx(min(squares))


@pytest.mark.parametrize(("head", "layers"), [(0.0, [3, 3, 3, 3]), (2.0, [3, 3, 4, 2]), (6.0, [3, 4, 4, 1])])
def test_stages_that_need_not_be_slow_share_the_layers(head, layers):
    """However dear the head is, no stage before it is left with one layer."""
    found = cut_layers(replace(SHAPE, layers=12), 4, PartCosts(0.0, 1.0, head))
    assert sizes(found) == layers


def test_without_costs_stages_are_alike_in_arithmetic():
    assert cut_layers(SHAPE, 4) == cut_layers(SHAPE, 4, counted_costs(SHAPE))
    per_layer = sum(site.in_features * site.out_features for site in SHAPE.sites) / SHAPE.layers
    costs = counted_costs(SHAPE)
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
