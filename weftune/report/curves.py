"""Smoothing of curves, and thinning so that the page of a long run still opens at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

POINTS = 800
"""Maximum number of points of one curve on the page: about the pixels of a chart."""


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float | None
    """None is a gap."""


def smooth(points: Sequence[Point]) -> tuple[Point, ...]:
    """Smooth by exponential means over about a twentieth of the curve, from both sides to avoid a lag.

    A gap stays a gap.
    """
    keep = 1 - 1 / max(3.0, len(points) / 20)
    forward = _running_mean([point.y for point in points], keep)
    backward = _running_mean([point.y for point in reversed(points)], keep)
    return tuple(
        Point(point.x, None if point.y is None else (before + after) / 2)
        for point, before, after in zip(points, forward, reversed(backward), strict=True)
    )


def _running_mean(values: Sequence[float | None], keep: float) -> list[float]:
    """Return means with weights that fall by `keep` per step into the past, normalised to avoid bias."""
    mean = weight = 0.0
    means = []
    for value in values:
        if value is not None:
            mean = keep * mean + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        means.append(mean / weight if weight else 0.0)
    return means


def thin(points: Sequence[Point], limit: int = POINTS) -> tuple[Point, ...]:
    """Return about `limit` points at most: the lowest and highest of each stretch, so no spike is lost."""
    if len(points) <= limit:
        return tuple(points)
    stretch = -(-2 * len(points) // limit)
    kept: list[Point] = [points[0]]
    for start in range(1, len(points) - 1, stretch):
        part = points[start : min(start + stretch, len(points) - 1)]
        kept.extend(_extremes(part))
    return (*kept, points[-1])


def _extremes(part: Sequence[Point]) -> list[Point]:
    known = [point for point in part if point.y is not None]
    if not known:
        return [part[0]]
    lowest = min(known, key=_height)
    highest = max(known, key=_height)
    return sorted({lowest, highest}, key=lambda point: point.x)


def _height(point: Point) -> float:
    assert point.y is not None
    return point.y
