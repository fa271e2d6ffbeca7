"""Charts as HTML and SVG that fit any width without a script.

The plot is an SVG that is stretched to its box; its lines keep their width, and dots are lines of zero length
with round ends. Ticks and labels are HTML beside the SVG, placed in percent, so that text is never stretched.
The page's script only adds the values that are shown at the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from markupsafe import Markup

POINTS = 800
"""Maximum number of points of one curve on the page, about the width of a chart in pixels."""


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float | None
    """Vertical value of the point. None is a gap in the curve."""


def smooth_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return a curve that is smoothed by exponential means over about a twentieth of its length, in both
    directions to avoid a lag. Gaps are kept."""
    keep = 1 - 1 / max(3.0, len(points) / 20)
    forward = _running_mean([point.y for point in points], keep)
    backward = _running_mean([point.y for point in reversed(points)], keep)
    return tuple(
        Point(point.x, None if point.y is None else (before + after) / 2)
        for point, before, after in zip(points, forward, reversed(backward), strict=True)
    )


def _running_mean(values: Sequence[float | None], decay: float) -> list[float]:
    """Return the exponential running means of the values. Weights fall by the factor `decay` per step into
    the past and are normalised to avoid bias."""
    mean = weight = 0.0
    means = []
    for value in values:
        if value is not None:
            mean = decay * mean + (1 - decay) * value
            weight = decay * weight + (1 - decay)
        means.append(mean / weight if weight else 0.0)
    return means


def thin_points(points: Sequence[Point], limit: int = POINTS) -> tuple[Point, ...]:
    """Return a curve reduced to about `limit` points: the lowest and the highest point of each part of the
    curve, so that spikes are kept."""
    if len(points) <= limit:
        return tuple(points)
    stretch = -(-2 * len(points) // limit)
    kept: list[Point] = [points[0]]
    for start in range(1, len(points) - 1, stretch):
        part = points[start : min(start + stretch, len(points) - 1)]
        known = [(point.y, at) for at, point in enumerate(part) if point.y is not None]
        # The first of equals, as in the order of the curve.
        ends = {min(known)[1], max(known, key=lambda one: one[0])[1]} if known else {0}
        kept.extend(part[at] for at in sorted(ends))
    return (*kept, points[-1])


UNITS = 1000
"""Width and height of every plot, in the units of its SVG's coordinates."""
LOG_RATIO = 10
"""Ratio of an axis's largest value to the median of its values above which the axis is logarithmic. On a
linear axis, half of the values would then be in the lowest tenth of the height."""
MAX_TICKS = 6
DASHES = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "7 3 2 3"}


@dataclass(frozen=True, slots=True)
class LineStyle:
    """Colour and dashes of a line."""

    colour: str
    dash_style: str = "solid"
    """Name of the style of the dashes, such as `dash` or `dot`."""

    @property
    def dashes(self) -> str:
        """Value of the SVG attribute `stroke-dasharray` for the style of the dashes."""
        return DASHES[self.dash_style] or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a chart: the range of the shown quantity, and the ticks along it."""

    label: str
    min_value: float
    max_value: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def position(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1. Values outside the range are at the nearer
        end."""
        if self.is_log:
            value, low, high = (math.log(max(one, 1e-300)) for one in (value, self.min_value, self.max_value))
        else:
            low, high = self.min_value, self.max_value
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A series of points in a chart, which is drawn as a line or as single dots."""

    name: str
    points: Sequence[Point]
    line_style: LineStyle
    width: float = 2.0
    opacity: float = 1.0
    has_line: bool = True
    has_dots: bool = False
    group: str = ""
    """Name of the group to which the series belongs. The series of a group are shown and hidden together by a
    button of the legend."""
    tooltips: Sequence[str] = ()
    """Strings that are shown on hover at each point, instead of its numbers."""
    ignores_pointer: bool = False
    """Whether the values of the series are not shown on hover."""


@dataclass(frozen=True, slots=True)
class ReferenceLine:
    """A dashed horizontal line, such as the loss of the base."""

    value: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    x: Axis
    y: Axis
    series: Sequence[Series]
    reference_lines: Sequence[ReferenceLine] = ()
    has_legend: bool = False
    """Whether the names of the series are shown above the plot."""
    height: int = 260
    unit: str = ""
    """Unit of the values in the chart, which is shown on hover."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """A chart with parallel coordinates. The coordinate x of a point is the index of an axis, and y is the
    position on that axis, from 0 to 1."""

    axes: Sequence[Axis]
    series: Sequence[Series]


# -- axes -----------------------------------------------------------------------------------------------


def value_axis(
    label: str, values: Iterable[float], *, starts_at_zero: bool = False, margin: float = 0.05
) -> Axis:
    """Return an axis for measured values. The axis is logarithmic if outliers would compress all other values
    on a linear axis."""
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if low > 0 and high > LOG_RATIO * median(known):
        stretch = (high / low) ** margin
        return log_axis(label, low / stretch, high * stretch)
    if starts_at_zero:
        low = min(0.0, low)
    room = margin * (high - low) or 0.05 * abs(high) or 1.0
    return linear_axis(label, low - (0.0 if starts_at_zero and low == 0 else room), high + room)


def linear_axis(label: str, min_value: float, max_value: float) -> Axis:
    ticks = tuple((tick, number_label(tick)) for tick in round_ticks(min_value, max_value))
    return Axis(label=label, min_value=min_value, max_value=max_value, ticks=ticks)


def log_axis(label: str, min_value: float, max_value: float) -> Axis:
    decades = math.log10(max_value / min_value)
    digits = (1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)
    every = max(1, round(decades / MAX_TICKS))
    powers = range(math.floor(math.log10(min_value)), math.ceil(math.log10(max_value)) + 1)
    ticks = [digit * 10.0**power for power in powers if power % every == 0 for digit in digits]
    shown = tuple((tick, number_label(tick)) for tick in ticks if min_value <= tick <= max_value)
    return Axis(label=label, min_value=min_value, max_value=max_value, ticks=shown, is_log=True)


def count_axis(label: str, min_value: float, max_value: float) -> Axis:
    """Return an axis of whole numbers, such as steps."""
    ticks = tuple((tick, f"{tick:,.0f}") for tick in round_ticks(min_value, max_value) if tick == int(tick))
    return Axis(
        label=label,
        min_value=min_value,
        max_value=max_value if max_value > min_value else min_value + 1,
        ticks=ticks,
    )


def round_ticks(min_value: float, max_value: float) -> list[float]:
    """Return the ticks of an axis: round numbers within its range, at distances of 1, 2 or 5 times a power of
    ten."""
    if not max_value > min_value:
        return [min_value]
    rough = (max_value - min_value) / (MAX_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(min_value / step - 1e-9), math.floor(max_value / step + 1e-9)
    return [float(f"{number * step:.9g}") for number in range(first, last + 1)]


def number_label(value: float) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.6g}"


# -- drawing --------------------------------------------------------------------------------------------


def figure_html(figure: Figure | Parallel) -> Markup:
    """Return a chart as HTML. Parallel coordinates are drawn twice, for wide and for narrow screens."""
    if isinstance(figure, Parallel):
        return _parallel_html(figure, vertical_axes=True) + _parallel_html(figure, vertical_axes=False)
    x, y = figure.x, figure.y
    # The widest label of the vertical axis determines the space left of the plot.
    room = max((len(text) for _, text in y.ticks), default=1)
    parts = [
        Markup('<div class="plot" style="--height: {}px; --room: {}ch" data-unit="{}" {}>').format(
            figure.height, max(2, room), figure.unit, _axis_ranges(figure)
        ),
        _legend_html(figure),
        Markup('<span class="y-label">{}</span>').format(f"{y.label}, log scale" if y.is_log else y.label),
        Markup('<div class="field">'),
        *(_tick_html("y", 100 - 100 * y.position(value), text) for value, text in y.ticks),
        Markup('<svg viewBox="0 0 {0} {0}" preserveAspectRatio="none" aria-hidden="true">').format(UNITS),
        Markup('<path class="grid" d="{}"/>').format(
            "".join(f"M0 {_y_coordinate(y.position(value))}H{UNITS}" for value, _ in y.ticks)
        ),
        *(
            Markup('<path class="level" d="M0 {0}H{1}"/>').format(
                _y_coordinate(y.position(level.value)), UNITS
            )
            for level in figure.reference_lines
        ),
        *(_series_html(figure, series) for series in figure.series),
        Markup("</svg>"),
        *(_reference_label(y.position(level.value), level.name) for level in figure.reference_lines),
        *(_tick_html("x", 100 * x.position(value), text) for value, text in x.ticks),
        Markup("</div>"),
        Markup('<span class="x-label">{}</span></div>').format(x.label),
    ]
    return Markup("").join(parts)


def _axis_ranges(figure: Figure) -> Markup:
    """Return the ranges of both axes as HTML attributes. The page's script uses them to convert positions in
    the plot to numbers."""
    pairs = (("x", figure.x), ("y", figure.y))
    return Markup(" ").join(
        Markup('data-{0}="{1:.9g} {2:.9g} {3}" data-{0}-label="{4}"').format(
            name, axis.min_value, axis.max_value, "log" if axis.is_log else "linear", axis.label
        )
        for name, axis in pairs
    )


def _legend_html(figure: Figure) -> Markup:
    if not figure.has_legend:
        return Markup("")
    entries = Markup("").join(
        Markup("<li>{}{}</li>").format(line_sample_html(one.line_style, has_dots=not one.has_line), one.name)
        for one in figure.series
        if not one.ignores_pointer
    )
    return Markup('<ul class="keys">{}</ul>').format(entries)


def line_sample_html(line_style: LineStyle, has_dots: bool = False) -> Markup:
    """Return a short line with the given colour and dashes as HTML, which identifies a curve in legends and
    tables."""
    if has_dots:
        return Markup(
            '<svg class="pen dot" viewBox="0 0 10 10" aria-hidden="true">'
            '<circle cx="5" cy="5" r="4" fill="{}"/></svg>'
        ).format(line_style.colour)
    return Markup(
        '<svg class="pen" viewBox="0 0 22 4" aria-hidden="true"><line x1="0" y1="2" x2="22" y2="2" '
        'stroke="{}" stroke-width="3.5" stroke-dasharray="{}"/></svg>'
    ).format(line_style.colour, line_style.dashes)


def _tick_html(axis: str, percent: float, text: str) -> Markup:
    side = "top" if axis == "y" else "left"
    return Markup('<span class="tick {}" style="{}: {:.2f}%">{}</span>').format(axis, side, percent, text)


def _reference_label(height: float, name: str) -> Markup:
    """Return the label of a horizontal reference line as HTML. `height` is the height of the line in the
    plot, from 0 to 1. Near the top of the plot, the label is below the line."""
    below = " below" if height > 0.9 else ""
    return Markup('<span class="level-name{}" style="top: {:.2f}%">{}</span>').format(
        below, 100 - 100 * height, name
    )


def _series_html(figure: Figure, series: Series) -> Markup:
    places = [
        None
        if point.y is None
        else (_x_coordinate(figure.x.position(point.x)), _y_coordinate(figure.y.position(point.y)))
        for point in series.points
    ]
    attributes = Markup('data-name="{}" stroke="{}"').format(series.name, series.line_style.colour)
    if series.group:
        attributes += Markup(' data-group="{}"').format(series.group)
    if series.opacity < 1:
        attributes += Markup(' opacity="{:g}"').format(series.opacity)
    if series.ignores_pointer:
        attributes += Markup(" data-silent")
    if series.tooltips:
        attributes += Markup(' data-tips="{}"').format(
            "\n".join(" ".join(tip.split()) for tip in series.tooltips)
        )
    known = [place for place in places if place is not None]
    drawn = Markup("")
    if series.has_line and len(known) > 1:
        dash = (
            f' stroke-dasharray="{DASHES[series.line_style.dash_style]}"'
            if DASHES[series.line_style.dash_style]
            else ""
        )
        drawn += Markup('<path class="curve" d="{}" {} stroke-width="{:g}"{}/>').format(
            _svg_path(places), attributes, series.width, Markup(dash)
        )
        # The pointer finds the line: its dots need no attributes of their own.
        attributes += Markup(" data-silent")
    if series.has_dots or len(known) == 1 or not series.has_line:
        dots = "".join(f"M{x} {y}h0" for x, y in known)
        drawn += Markup('<path class="dots" d="{}" {} stroke-width="{:g}"/>').format(
            dots, attributes, series.width + 4
        )
    return drawn


def _svg_path(points: Sequence[tuple[str, str] | None]) -> str:
    """Return the commands of an SVG path through the points. The path is interrupted at gaps."""
    text, pen_down = [], False
    for place in points:
        if place is not None:
            text.append(f"{'L' if pen_down else 'M'}{place[0]} {place[1]}")
        pen_down = place is not None
    return "".join(text)


def _x_coordinate(position: float) -> str:
    return f"{UNITS * position:.1f}".removesuffix(".0")


def _y_coordinate(position: float) -> str:
    """Format the vertical SVG coordinate of a position from 0 to 1. The coordinate is 0 at the top and has
    two decimals, so that values keep four digits."""
    return f"{UNITS * (1 - position):.2f}".rstrip("0").rstrip(".")


# -- parallel coordinates -------------------------------------------------------------------------------


def _parallel_html(chart: Parallel, vertical_axes: bool) -> Markup:
    count = len(chart.axes)
    places = [(number + 0.5) / count for number in range(count)]
    across = Axis(label="", min_value=-0.5, max_value=count - 0.5, ticks=())
    along = Axis(label="", min_value=0.0, max_value=1.0, ticks=())
    if vertical_axes:
        figure = Figure(x=across, y=along, series=chart.series)
        lines = "".join(f"M{_x_coordinate(place)} 0V{UNITS}" for place in places)
    else:
        turned = [
            replace(
                one,
                points=[Point(point.y, count - 1 - point.x) for point in one.points if point.y is not None],
            )
            for one in chart.series
        ]
        figure = Figure(x=along, y=across, series=turned)
        lines = "".join(f"M0 {_y_coordinate(1 - place)}H{UNITS}" for place in places)
    names = [
        Markup('<span class="axis-name" style="{}: {:.2f}%">{}</span>').format(
            "left" if vertical_axes else "top", 100 * place, axis.label
        )
        for place, axis in zip(places, chart.axes, strict=True)
    ]
    ticks = [
        Markup('<span class="axis-tick{}" style="left: {:.2f}%; top: {:.2f}%">{}</span>').format(
            "" if vertical_axes else " first" if tick < 0.1 else " last" if tick > 0.9 else "",
            100 * (place if vertical_axes else tick),
            100 * ((1 - tick) if vertical_axes else place),
            text,
        )
        for place, axis in zip(places, chart.axes, strict=True)
        for tick, text in axis.ticks
    ]
    return Markup(
        '<div class="plot parallel {}" style="--axes: {}"><div class="field">{}{}{}{}{}{}</div></div>'
    ).format(
        "upright" if vertical_axes else "lying",
        count,
        Markup('<svg viewBox="0 0 {0} {0}" preserveAspectRatio="none" aria-hidden="true">').format(UNITS),
        Markup('<path class="axis" d="{}"/>').format(lines),
        Markup("").join(_series_html(figure, one) for one in figure.series),
        Markup("</svg>"),
        Markup("").join(names),
        Markup("").join(ticks),
    )
