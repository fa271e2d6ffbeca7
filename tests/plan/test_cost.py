"""The time model recovers what made the measurements, and says nothing before it has any."""

import pytest

from weft.plan.cost import PassTime, fit
from weft.plan.planner import Course, plan_window
from weft.plan.program import GlobalBatch, Placed


def passes(fixed, per_token, tokens, training=True):
    return [PassTime(t, fixed + per_token * t, training) for t in tokens]


def program():
    batch = GlobalBatch("a", 1, (Placed(0, 30, 0), Placed(1, 50, 30)), supervised=80)
    return plan_window([Course("a", 0, (batch,), (), frozenset(), frozenset())], 64)


def test_the_fit_recovers_a_line_and_prices_a_program_with_it():
    model = fit(passes(0.5, 0.01, [10, 20, 64]))
    assert model.training is not None
    assert model.training.fixed == pytest.approx(0.5)
    assert model.program_seconds(program()) == pytest.approx(2 * 0.5 + 0.01 * 80)


def test_neither_part_goes_negative():
    falling = fit([PassTime(10, 3.0, True), PassTime(20, 1.0, True)]).training
    assert falling is not None
    assert falling.per_token == 0.0
    below_origin = fit([PassTime(10, 0.1, True), PassTime(20, 1.0, True)]).training
    assert below_origin is not None
    assert below_origin.fixed == 0.0


def test_an_unmeasured_pass_has_no_price():
    assert fit([]).program_seconds(program()) is None
    assert fit(passes(0, 1, [5], training=False)).program_seconds(program()) is None


def test_alone_costs_one_pass_for_each_microbatch_of_one_job():
    model = fit(passes(1.0, 0.0, [10, 20]))
    batch = GlobalBatch("a", 1, (Placed(0, 30, 0), Placed(1, 50, 30)), supervised=80)
    assert model.alone_seconds([batch, batch], 64) == pytest.approx(4.0)
