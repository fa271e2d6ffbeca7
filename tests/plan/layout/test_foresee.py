"""What a window takes on a layout, by the terms of a profile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.plan.costs import SHAPE
from tests.plan.profiles import profile
from tests.plan.program.test_check import course
from weftune.core.shapes import JobShape, LayerRange
from weftune.plan.cost.profile_cost import pass_terms, profile_cost_model, step_rate
from weftune.plan.layout.choose import Machine, choose_layout
from weftune.plan.layout.foresee import StageTimes, shared_device_cost
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout, pipeline_layout
from weftune.plan.program.prices import Link
from weftune.plan.program.program import Forward, Recompute
from weftune.plan.window.pace import LoadPace, guess_pace
from weftune.plan.window.window import Pacing, plan_window

COURSES = [course("a", [[40, 60], [30]], evaluation=[20]), course("b", [[50]])]
SHAPES = {name: JobShape(name, 0, 0, size, 64) for name, size in (("a", 10**6), ("b", 10**5))}
KNOWN = pass_terms(profile(), SHAPE)
TIMES = StageTimes(SHAPE.layers, KNOWN, step_rate(profile()))
HALF = SHAPE.layers // 2
HALVES = [LayerRange(0, HALF, SHAPE.layers), LayerRange(HALF, SHAPE.layers, SHAPE.layers)]


def seconds(program, layout, loads=None):
    return TIMES.timeline(program, layout, SHAPES, loads).makespan


def test_on_one_device_the_simulation_is_the_sum_of_the_cost_model():
    layout = one_device_layout(SHAPE.layers)
    program = plan_window(COURSES, layout, 100)
    # A Step takes the mean over jobs there, and its own here.
    assert seconds(program, layout) == pytest.approx(
        profile_cost_model(profile(), SHAPE).program_seconds(program, SHAPES), rel=0.02
    )


def test_two_stages_take_less_than_one_device_and_more_than_half():
    layout = pipeline_layout(HALVES)
    pacing = Pacing(tuple(guess_pace(stage.layer_count) for stage in layout.stages), spare_microbatches=1)
    many = [course(name, [[40, 60]] * 8) for name in "ab"]
    together = seconds(plan_window(many, layout, 100, pacing=pacing), layout)
    alone = seconds(plan_window(many, one_device_layout(SHAPE.layers), 100), one_device_layout(SHAPE.layers))
    assert 0.5 < together / alone < 0.95


def test_stages_that_take_turns_recompute_all_but_the_last_and_wait_for_their_loads():
    stages = tuple(StageLayers(one.start, one.stop) for one in HALVES)
    turns = Layout(stages, (1,))
    program = plan_window([course("b", [[50]])], turns, 100)
    known = shared_device_cost(profile_cost_model(profile(), SHAPE), KNOWN, turns, SHAPE.layers)
    plain = seconds(program, turns)
    assert plain == pytest.approx(known.program_seconds(program, SHAPES), rel=0.02)
    slow = LoadPace((10**6, 10**6), bandwidth=10**7)
    assert seconds(program, turns, slow) > plain + 0.05


LINK = Link(bandwidth=1e9, latency=1e-5)
LINKED = replace(TIMES, link=LINK, output_bytes=1000)


def test_shards_divide_what_grows_with_rows_and_wait_for_sums_in_every_branch():
    whole = [LayerRange(0, SHAPE.layers, SHAPE.layers)]
    layout, one = pipeline_layout(whole, shards=2), pipeline_layout(whole)
    program = plan_window([course("b", [[50]])], one, 100, pacing=Pacing((guess_pace(SHAPE.layers),)))
    shared = LINKED.divide_among_shards(SHAPE, 2)
    assert LINKED.divide_among_shards(SHAPE, 1) == LINKED
    timeline = shared.timeline(program, layout, SHAPES)
    hidden = LINK.all_reduce_seconds(1000 * 50, 2)
    gradient = LINK.all_reduce_seconds(4 * 10**5, 2)
    ends = 2 * hidden if shared.divides_vocabulary else 0.0
    assert timeline.sum_seconds == pytest.approx(2 * 2 * SHAPE.layers * hidden + gradient + ends)
    busy = timeline.busy_fractions()[0] * timeline.makespan
    assert timeline.makespan == pytest.approx(busy + timeline.sum_seconds)
    alone = LINKED.timeline(program, one, SHAPES)
    assert alone.sum_seconds == 0.0
    assert busy < alone.makespan
    assert shared.terms.forward.layer.token == pytest.approx(KNOWN.forward.layer.token / 2)
    assert shared.terms.forward.layer.fixed == KNOWN.forward.layer.fixed


def test_a_sum_over_a_ring_sends_all_but_one_part_twice():
    assert LINK.all_reduce_seconds(4000, 4) == pytest.approx(6 * (1e-5 + 1000 / 1e9))
    assert LINK.all_reduce_seconds(4000, 1) == 0.0


def test_the_gradients_that_replicas_exchange_take_the_time_of_their_size():
    layout = pipeline_layout([LayerRange(0, SHAPE.layers, SHAPE.layers)], replicas=2)
    pacing = Pacing((guess_pace(SHAPE.layers),))
    program = plan_window([course("a", [[40, 60], [40, 60]])], layout, 100, pacing=pacing)
    fast, slow = (
        replace(LINKED, link=Link(bandwidth)).timeline(program, layout, SHAPES).makespan
        for bandwidth in (math.inf, 1e9)
    )
    # Two batches, each with a gradient of a million values.
    assert slow - fast == pytest.approx(2 * 4 * 10**6 / 1e9)


def test_recomputed_layers_take_their_forward_again():
    layout = pipeline_layout(HALVES)
    program = plan_window(
        [course("b", [[50]])], layout, 100, pacing=Pacing((guess_pace(HALF), guess_pace(HALF)))
    )
    again = replace(program, recompute=Recompute(recomputed_layers=HALF))
    forwards = [
        event.stop - event.start
        for event in TIMES.timeline(program, layout, SHAPES).events
        if isinstance(event.action, Forward)
    ]
    assert seconds(again, layout) - seconds(program, layout) == pytest.approx(sum(forwards))


def test_a_recomputed_layer_repeats_the_first_of_its_two_sums():
    whole = LayerRange(0, SHAPE.layers, SHAPE.layers)
    layout = pipeline_layout([whole], shards=2)
    program = plan_window([course("b", [[50]])], layout, 100, pacing=Pacing((guess_pace(SHAPE.layers),)))
    again = replace(program, recompute=Recompute(recomputed_layers=SHAPE.layers))
    shared = LINKED.divide_among_shards(SHAPE, 2)
    plain, repeated = (shared.timeline(one, layout, SHAPES).sum_seconds for one in (program, again))
    assert repeated - plain == pytest.approx(SHAPE.layers * LINK.all_reduce_seconds(1000 * 50, 2))


def test_the_times_of_a_profile_include_the_link_between_gpus():
    measured = profile()
    machine = Machine(
        on_gpu=True, budget_bytes=1 << 40, shards=2, profile=measured, worker_profile=measured, link=LINK
    )
    times = choose_layout(SHAPE, list(SHAPES.values()), machine).stage_times
    assert times.link == LINK
    assert times.output_bytes == SHAPE.hidden * SHAPE.bytes_per_value
