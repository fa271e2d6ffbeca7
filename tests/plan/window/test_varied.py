"""Windows foreseen with passes that vary: with more bubbles than the even one, unless nothing varied."""

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.works import work
from weftune.plan.cost.time import Line
from weftune.plan.program.program import Backward, Forward
from weftune.plan.program.timeline import Lane
from weftune.plan.window.orders import multi_job, one_forward_one_backward
from weftune.plan.window.pipeline import StagePace, pace_prices, timeline_foreseen
from weftune.plan.window.varied import timelines_varied

FORWARD, BACKWARD = Line(1.0, 0.0), Line(2.0, 0.0)


def paces(*spreads):
    return tuple(StagePace(FORWARD, BACKWARD, 0.25, spread) for spread in spreads)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from([(), (1.0,), (1.0,) * 7]))
@settings(max_examples=25)
def test_where_no_pass_varied_every_draw_is_the_even_timeline(stages, jobs, microbatches, spread):
    program = one_forward_one_backward(work(jobs, microbatches, 2), stages)
    known = paces(*[spread] * stages)
    even = timeline_foreseen(program, known)
    assert all(one.events == even.events for one in timelines_varied(program, known))


def test_the_same_window_is_foreseen_alike_every_time():
    program = one_forward_one_backward(work(2, 4, 2), 2)
    known = paces((0.5, 1.5, 1.0), (0.8, 1.2))
    first, again = (timelines_varied(program, known) for _ in range(2))
    assert [one.events for one in first] == [one.events for one in again]
    assert len({one.makespan for one in first}) > 1


def test_a_stages_passes_take_its_own_multiples_in_their_order():
    program = one_forward_one_backward(work(1, 6, 1), 1)
    spread = (0.5, 1.0, 1.25, 1.5, 0.75)
    (timeline,) = timelines_varied(program, paces(spread), draws=1)
    passes = [one for one in timeline.of(0, Lane.compute) if isinstance(one.action, Forward | Backward)]
    factors = [(one.stop - one.start) / (1.0 if isinstance(one.action, Forward) else 2.0) for one in passes]
    begin = spread.index(factors[0])
    assert factors == pytest.approx([spread[(begin + place) % 5] for place in range(12)])


def test_passes_that_vary_leave_bubbles_where_even_ones_leave_none_and_more_in_flight_hide_them():
    stages, plan = 4, work(8, 4, 2)
    spreads = [
        tuple(1 + (0.4 if (7 * n + 3 * stage) % 5 < 2 else -0.3) for n in range(60)) for stage in range(4)
    ]
    known = paces(*spreads)

    def bubbles(spare):
        program = multi_job(plan, stages, pace_prices(plan.microbatches, known), spare)
        even = timeline_foreseen(program, known)
        varied = [mean(one.bubbles(one.steady())) for one in timelines_varied(program, known)]
        return mean(even.bubbles(even.steady())), mean(varied)

    (even, few), (_, many) = bubbles(1), bubbles(6)
    assert few > even + 0.02
    assert many < 0.7 * few
