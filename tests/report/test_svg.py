"""Charts as SVG: axes, gaps, dashed levels, smoothed and thinned curves, and names that stay text."""

from __future__ import annotations

import random
import re

import pytest

from weftune.report.svg import (
    Axis,
    Figure,
    LineStyle,
    Parallel,
    Point,
    ReferenceLine,
    Series,
    count_axis,
    figure_html,
    linear_axis,
    log_axis,
    smooth_points,
    thin_points,
    value_axis,
)

PEN = LineStyle("#123456", "dash")


def drawn(
    *points: tuple[float, float | None], levels: tuple[ReferenceLine, ...] = (), name: str = "a"
) -> str:
    series = Series(name=name, points=[Point(x, y) for x, y in points], line_style=PEN)
    figure = Figure(
        x=linear_axis("step", 0, 10), y=linear_axis("loss", 0, 1), series=[series], reference_lines=levels
    )
    return str(figure_html(figure))


def test_a_curve_lies_where_its_values_are_and_a_gap_begins_a_new_line() -> None:
    page = drawn((0, 0.0), (5, 0.5), (6, None), (8, 1.0), (10, 0.25))
    assert 'd="M0 1000L500 500M800 0L1000 750"' in page
    assert 'stroke-dasharray="6 4"' in page


def test_a_level_is_a_dashed_line_with_its_name() -> None:
    page = drawn((0, 0.5), (1, 0.5), levels=(ReferenceLine(0.25, "base 0.25"),))
    assert '<path class="level" d="M0 750H1000"/>' in page
    assert re.search(r'class="level-name" style="top: 75.00%">base 0.25<', page)


def test_one_point_is_a_dot() -> None:
    assert 'class="dots" d="M500 500h0"' in drawn((5, 0.5))


def test_a_value_outside_the_axis_is_drawn_at_its_edge() -> None:
    assert 'd="M0 0L1000 1000"' in drawn((0, 1e9), (10, -3.0))


def test_names_stay_text() -> None:
    page = drawn((0, 0.5), (1, 0.5), name='"><script>x</script>')
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([1.0, 1.2, 1.1, 0.9, 400.0], True), ([2.5, 1.5, 1.2, 1.1], False), ([0.0, 1.0, 1.0, 400.0], False)],
)
def test_an_axis_is_logarithmic_where_one_outlier_would_flatten_the_rest(
    values: list[float], is_log: bool
) -> None:
    axis = value_axis("loss", values)
    assert axis.is_log is is_log
    assert axis.min_value <= min(values) <= max(values) <= axis.max_value
    places = sorted(axis.position(value) for value in values)
    if is_log:
        assert places[-2] - places[0] > 0.03, "the others can be told apart"


@pytest.mark.parametrize(
    "axis", [linear_axis("", 0.31, 2.47), log_axis("", 0.02, 47.0), count_axis("", 0, 6)]
)
def test_an_axis_has_a_few_round_ticks_within_its_range(axis) -> None:
    assert 2 <= len(axis.ticks) <= 9
    assert all(axis.min_value <= value <= axis.max_value for value, _ in axis.ticks)


def test_steps_have_whole_ticks() -> None:
    assert [text for _, text in count_axis("step", 0, 2).ticks] == ["0", "1", "2"]


def test_an_axis_of_equal_values_has_room_around_them() -> None:
    axis = value_axis("loss", [2.0, 2.0])
    assert axis.min_value < 2.0 < axis.max_value


def test_parallel_coordinates_are_drawn_upright_for_wide_and_lying_for_narrow_screens() -> None:
    axes = [
        Axis(label="rank", min_value=0, max_value=1, ticks=((0.0, "8"), (1.0, "64"))),
        Axis(label="loss", min_value=0, max_value=1, ticks=((0.0, "1.2"),)),
    ]
    line = Series(
        name="a", points=[Point(0, 1.0), Point(1, 0.0)], line_style=PEN, tooltips=["rank 64", "loss 1.2"]
    )
    upright, lying = str(figure_html(Parallel(axes, [line]))).split('<div class="plot parallel lying"')
    assert 'd="M250 0L750 1000"' in upright
    assert 'd="M1000 250L0 750"' in lying
    assert upright.count("axis-name") == lying.count("axis-name") == 2


def test_smoothing_leaves_a_constant_and_its_gaps_alone() -> None:
    points = [Point(x, None if x == 5 else 2.0) for x in range(20)]
    smoothed = smooth_points(points)
    assert [point.y is None for point in smoothed] == [x == 5 for x in range(20)]
    assert all(point.y == pytest.approx(2.0) for point in smoothed if point.y is not None)


def test_smoothing_takes_away_noise_and_does_not_lag() -> None:
    noise = random.Random(1)
    points = [Point(x, 10 - x / 100 + noise.gauss(0, 1)) for x in range(1000)]
    errors = [
        point.y - (10 - point.x / 100) for point in smooth_points(points)[100:900] if point.y is not None
    ]
    assert max(abs(error) for error in errors) < 0.6
    assert abs(sum(errors) / len(errors)) < 0.05


def test_a_curve_of_nothing_but_gaps_stays_one() -> None:
    assert [point.y for point in smooth_points([Point(1, None), Point(2, None)])] == [None, None]


def test_thinning_keeps_the_ends_the_order_and_every_spike() -> None:
    points = [Point(x, 100.0 if x == 4321 else 1.0) for x in range(10_000)]
    thinned = thin_points(points, limit=200)
    assert len(thinned) <= 202
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert Point(4321, 100.0) in thinned
    assert [point.x for point in thinned] == sorted(point.x for point in thinned)


def test_a_short_curve_is_not_thinned() -> None:
    points = tuple(Point(x, 1.0) for x in range(100))
    assert thin_points(points) == points
