"""Windows are as long as ten predicted seconds allow, by what a run has recorded and never by the clock."""

import json
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import bench
from tests.plan.costs import SHAPE, TRUTH
from tests.plan.works import work
from weftune import JobSpec
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.cost.time import Line
from weftune.plan.program.program import Backward, Forward, GlobalBatch, PlacedSample
from weftune.plan.program.simulate import Lane
from weftune.plan.window.orders import multi_job, one_forward_one_backward
from weftune.plan.window.pace import (
    WINDOW_SECONDS,
    MeasuredPass,
    StagePace,
    WindowPace,
    first_pace,
    fit_line,
    fit_with_attention,
    pace_prices,
    predict_timeline,
    shorten_windows,
    vary_timelines,
)
from weftune.plan.window.rounds import JobWindow


def course(job, *lengths, evaluated=0):
    """One sample a batch; with `evaluated`, so many held-out rows after its second step."""
    batches = tuple(
        GlobalBatch(job, step, (PlacedSample(step, length, 0, length),), length)
        for step, length in enumerate(lengths, start=1)
    )
    held_out = (PlacedSample(0, evaluated, 0, evaluated),) if evaluated else ()
    return JobWindow(job, 0, batches, held_out, frozenset({2}), frozenset())


def rounds(courses, **pace):
    return [len(one.batches) for one in shorten_windows(courses, WindowPace(**pace))]


def test_a_window_has_all_its_rounds_where_nothing_is_known_or_they_are_quick():
    courses = [course("a", 10, 10, 10, 10), course("b", 5, 5)]
    assert rounds(courses) == [4, 2]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 50) == [4, 2]
    assert shorten_windows(courses, WindowPace()) == courses, "where the bound does not bite nothing changes"


def test_a_window_ends_before_it_is_predicted_to_take_longer_but_has_one_round():
    courses = [course("a", 10, 10, 10, 10), course("b", 5, 5, 5)]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 30) == [2, 2]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 40) == [2, 2]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 45) == [3, 3]
    assert rounds(courses, row_seconds=1000.0) == [1, 1]
    assert rounds(courses, round_seconds=WINDOW_SECONDS / 3) == [3, 3], "stages that take turns all come"
    assert rounds([]) == []


def test_rows_that_are_evaluated_count_for_a_third():
    courses = [course("a", 10, 10, 10, evaluated=30)]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 30) == [2]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 29) == [1]


def test_before_anything_is_measured_a_profile_or_the_data_sheet_says_how_long_rows_take():
    by_sheet = first_pace(uncalibrated_cost_model(SHAPE), SHAPE, False, 1024)
    assert 0 < by_sheet.row_seconds < 1
    profiled = first_pace(TRUTH, SHAPE, False, 1024)
    assert profiled.row_seconds > 0
    assert profiled != by_sheet


@pytest.fixture
def jobs():
    rows = bench.rows(bench.samples(16))
    return [JobSpec(name="a", data=rows, steps=9, batch_size=4, adapter={"rank": 2}, save_every=1)]


def steps_of(programs):
    return [len(program.batches) for program in programs]


def test_a_slow_run_has_short_windows_and_a_resumed_one_the_same(jobs, tmp_path, monkeypatch):
    """The pace is pretended: no step takes so long."""
    model = bench.base()
    monkeypatch.setattr("weftune.plan.cost.fitted.Outcome.row_seconds", lambda self: 1000.0)
    undisturbed = bench.trainer(model, tmp_path / "undisturbed", jobs)
    undisturbed.run()
    assert steps_of(undisturbed.programs) == [4, 1, 1, 1, 1, 1], "the first window was planned by the sheet"
    assert json.loads((tmp_path / "undisturbed" / "learned.json").read_text())["row_seconds"] == 1000.0
    output, seen = tmp_path / "out", []

    def crash(event):
        seen.append(event)
        if len(seen) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.trainer(model, output, jobs).run(crash)
    monkeypatch.setattr("weftune.plan.cost.fitted.Outcome.row_seconds", lambda self: None)
    resumed = bench.trainer(model, output, jobs, options=bench.Options(resume=True))
    resumed.run()
    assert steps_of(resumed.programs) == [1] * len(resumed.programs)
    assert resumed.programs == undisturbed.programs[-len(resumed.programs) :]


FORWARD, BACKWARD = Line(1.0, 0.0), Line(2.0, 0.0)


def paces(*spreads):
    return tuple(StagePace(FORWARD, BACKWARD, 0.25, spread) for spread in spreads)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from([(), (1.0,), (1.0,) * 7]))
@settings(max_examples=25)
def test_where_no_pass_varied_every_draw_is_the_even_timeline(stages, jobs, microbatches, spread):
    program = one_forward_one_backward(work(jobs, microbatches, 2), stages)
    known = paces(*[spread] * stages)
    even = predict_timeline(program, known)
    assert all(one.events == even.events for one in vary_timelines(program, known))


def test_the_same_window_is_foreseen_alike_every_time():
    program = one_forward_one_backward(work(2, 4, 2), 2)
    known = paces((0.5, 1.5, 1.0), (0.8, 1.2))
    first, again = (vary_timelines(program, known) for _ in range(2))
    assert [one.events for one in first] == [one.events for one in again]
    assert len({one.makespan for one in first}) > 1


def test_a_stages_passes_take_its_own_multiples_in_their_order():
    program = one_forward_one_backward(work(1, 6, 1), 1)
    spread = (0.5, 1.0, 1.25, 1.5, 0.75)
    (timeline,) = vary_timelines(program, paces(spread), draws=1)
    passes = [
        one for one in timeline.events_of(0, Lane.compute) if isinstance(one.action, Forward | Backward)
    ]
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
        even = predict_timeline(program, known)
        varied = [mean(one.bubbles(one.steady_span())) for one in vary_timelines(program, known)]
        return mean(even.bubbles(even.steady_span())), mean(varied)

    (even, few), (_, many) = bubbles(1), bubbles(6)
    assert few > even + 0.02
    assert many < 0.7 * few


def test_the_time_of_attention_is_found_beside_that_of_rows():
    def passes(fixed, per_row, per_square, sizes):
        return [
            MeasuredPass(rows, fixed + per_row * rows + per_square * squares, squares=squares)
            for rows, squares in sizes
        ]

    # A whole sample of 400 rows, and its four chunks.
    sizes = [(400, 400**2), *((100, 100 * (2 * start + 100)) for start in (0, 100, 200, 300))]
    line, per_square = fit_with_attention(passes(0.5, 0.01, 2e-5, sizes))
    assert (line.fixed, line.per_token, per_square) == pytest.approx((0.5, 0.01, 2e-5))
    line, per_square = fit_with_attention(passes(0.0, 0.01, 0.0, sizes))
    assert (line.fixed, line.per_token, per_square) == pytest.approx((0.0, 0.01, 0.0))
    falling = passes(0.5, 0.01, -2e-6, sizes)
    line, per_square = fit_with_attention(falling)
    assert min(line.fixed, line.per_token, per_square) == per_square == 0.0
    assert fit_with_attention(passes(0.0, 0.25, 0.0, [(8, 64)])) == (Line(0.0, 0.25), 0.0)


def test_a_line_is_found_and_never_goes_below_zero():
    line = fit_line([MeasuredPass(rows, 0.5 + 0.01 * rows) for rows in (10, 20, 40)])
    assert (line.fixed, line.per_token) == pytest.approx((0.5, 0.01))
    assert fit_line([MeasuredPass(10, 1.0), MeasuredPass(20, 2.5)]).fixed == 0.0
    assert fit_line([MeasuredPass(10, 2.0), MeasuredPass(20, 1.0)]) == Line(1.5, 0.0)
    assert fit_line([MeasuredPass(8, 4.0), MeasuredPass(8, 4.0)]) == Line(0.0, 0.5)
