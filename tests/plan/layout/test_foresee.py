"""What a window takes on a layout, by the terms of a profile."""

from __future__ import annotations

import pytest

from tests.plan.costs import SHAPE
from tests.plan.profiles import profile
from tests.plan.program.test_check import course
from weftune.core.shapes import JobShape, LayerRange
from weftune.plan.cost.profile_cost import cost_of, directions, step_rate
from weftune.plan.layout.foresee import StageTimes, taking_turns
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout, pipeline_layout
from weftune.plan.window.pace import LoadPace, guess_pace
from weftune.plan.window.window import Pacing, plan_window

COURSES = [course("a", [[40, 60], [30]], evaluation=[20]), course("b", [[50]])]
SHAPES = {name: JobShape(name, 0, 0, size, 64) for name, size in (("a", 10**6), ("b", 10**5))}
KNOWN = directions(profile(), SHAPE)
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
        cost_of(profile(), SHAPE).program_seconds(program, SHAPES), rel=0.02
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
    known = taking_turns(cost_of(profile(), SHAPE), KNOWN, turns, SHAPE.layers)
    plain = seconds(program, turns)
    assert plain == pytest.approx(known.program_seconds(program, SHAPES), rel=0.02)
    slow = LoadPace((10**6, 10**6), bandwidth=10**7)
    assert seconds(program, turns, slow) > plain + 0.05
