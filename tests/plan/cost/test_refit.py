"""The time model follows what is measured, few passes do not swing it, and odd ones do not mislead it."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.costs import SHAPE, TRUTH, draw, measured, step, work
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.cost.refit import MAX_MEASUREMENTS, Times, refit_cost_model
from weftune.plan.cost.time import PassTime, Terms


def error(model, one) -> float:
    return abs(model.pass_seconds(one) / TRUTH.pass_seconds(one) - 1)


def test_without_measurements_nothing_changes() -> None:
    assert refit_cost_model(TRUTH, Times()) is TRUTH


def test_a_model_that_is_right_stays_right() -> None:
    dice = random.Random(0)
    fitted = refit_cost_model(TRUTH, Times(passes=[measured(draw(dice)) for _ in range(50)]))
    assert max(error(fitted, draw(dice)) for _ in range(50)) < 1e-6


def test_a_machine_that_is_slower_throughout_is_followed() -> None:
    dice = random.Random(1)
    fitted = refit_cost_model(TRUTH, Times(passes=[measured(draw(dice), slower=1.5) for _ in range(30)]))
    other = draw(dice)
    assert fitted.pass_seconds(other) == pytest.approx(1.5 * TRUTH.pass_seconds(other), rel=0.03)
    look = work([40, 80])
    assert fitted.evaluation(look) == pytest.approx(1.5 * TRUTH.evaluation(look), rel=0.1)


def test_counted_proportions_and_some_passes_predict_passes_of_other_sizes() -> None:
    dice = random.Random(2)
    fitted = refit_cost_model(
        uncalibrated_cost_model(SHAPE), Times(passes=[measured(draw(dice)) for _ in range(40)])
    )
    assert fitted.is_measured
    errors = [error(fitted, draw(dice)) for _ in range(200)]
    assert sum(errors) / len(errors) < 0.05


def test_a_few_noisy_passes_do_not_swing_a_profile() -> None:
    dice = random.Random(3)
    noisy = [measured(work([64, 64]), slower=dice.choice([0.8, 1.25])) for _ in range(3)]
    fitted = refit_cost_model(TRUTH, Times(passes=noisy))
    assert error(fitted, work([300] * 8, size=4 * 10**6)) < 0.25


def test_passes_that_compiled_or_captured_are_not_fitted_to() -> None:
    slow = [replace(measured(work([64]), slower=50.0), settled=False) for _ in range(20)]
    assert refit_cost_model(TRUTH, Times(passes=slow)) is TRUTH


def test_one_pass_that_was_held_up_does_not_mislead() -> None:
    dice = random.Random(4)
    passes = [measured(draw(dice)) for _ in range(30)]
    passes[20] = replace(passes[20], forward=10 * passes[20].forward)
    fitted = refit_cost_model(TRUTH, Times(passes=passes))
    assert max(error(fitted, draw(dice)) for _ in range(50)) < 0.05


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.floats(1e-4, 10), st.floats(1e-4, 10), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_no_term_is_ever_negative(passes: list[tuple[int, float, float, bool]]) -> None:
    times = Times(
        passes=[
            PassTime(work=work([tokens]), forward=f, backward=b if training else 0.0, training=training)
            for tokens, f, b, training in passes
        ]
    )
    fitted = refit_cost_model(uncalibrated_cost_model(SHAPE), times)
    for terms in (fitted.forward, fitted.backward, fitted.evaluation):
        assert isinstance(terms, Terms)
        assert min(terms.values()) >= 0


def test_steps_are_told_apart_by_jobs_and_parameters() -> None:
    steps = [step(parameters, jobs) for parameters in (10**5, 10**6, 8 * 10**6) for jobs in (1, 4)]
    fitted = refit_cost_model(
        replace(TRUTH, step=TRUTH.step), Times(passes=[measured(work([64]))], steps=steps)
    )
    assert fitted.step(2, 3 * 10**6) == pytest.approx(TRUTH.step(2, 3 * 10**6), rel=0.02)


def test_what_no_action_took_is_shared_out_over_the_actions() -> None:
    times = Times(passes=[measured(work([64]))], overheads=[0.2 / 10, 0.4 / 20])
    assert refit_cost_model(TRUTH, times).overhead_per_action == pytest.approx(0.02)


def test_old_measurements_are_forgotten() -> None:
    times = Times(passes=[measured(work([64]))] * (MAX_MEASUREMENTS + 5))
    times.drop_old_measurements()
    assert len(times.passes) == MAX_MEASUREMENTS
