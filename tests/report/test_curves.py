from __future__ import annotations

import random

import pytest

from weftune.report.curves import Point, smooth, thin


def test_smoothing_leaves_a_constant_and_its_gaps_alone() -> None:
    points = [Point(x, None if x == 5 else 2.0) for x in range(20)]
    smoothed = smooth(points)
    assert [point.y is None for point in smoothed] == [x == 5 for x in range(20)]
    assert all(point.y == pytest.approx(2.0) for point in smoothed if point.y is not None)


def test_smoothing_takes_away_noise_and_does_not_lag() -> None:
    noise = random.Random(1)
    points = [Point(x, 10 - x / 100 + noise.gauss(0, 1)) for x in range(1000)]
    errors = [point.y - (10 - point.x / 100) for point in smooth(points)[100:900] if point.y is not None]
    assert max(abs(error) for error in errors) < 0.6
    assert abs(sum(errors) / len(errors)) < 0.05


def test_a_curve_of_nothing_but_gaps_stays_one() -> None:
    assert [point.y for point in smooth([Point(1, None), Point(2, None)])] == [None, None]


def test_thinning_keeps_the_ends_the_order_and_every_spike() -> None:
    points = [Point(x, 100.0 if x == 4321 else 1.0) for x in range(10_000)]
    thinned = thin(points, limit=200)
    assert len(thinned) <= 202
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert Point(4321, 100.0) in thinned
    assert [point.x for point in thinned] == sorted(point.x for point in thinned)


def test_a_short_curve_is_not_thinned() -> None:
    points = tuple(Point(x, 1.0) for x in range(100))
    assert thin(points) == points
