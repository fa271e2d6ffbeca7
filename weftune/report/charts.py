"""The curves of a run: losses and accuracy by step; throughput, time and memory by window (a few global
batches of every running job)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

from weftune.report.compare import ENDED_BADLY, base_accuracy, base_validation, validation_rows
from weftune.report.effort import MAX_ERROR, MIN_WINDOWS
from weftune.report.read import JobRecord, WindowLine
from weftune.report.svg import (
    Axis,
    Figure,
    LineStyle,
    Parallel,
    Point,
    ReferenceLine,
    Series,
    count_axis,
    smooth_points,
    thin_points,
    value_axis,
)
from weftune.report.words import loss_text

_COLOURS = (
    "#3b7ddd", "#e8710a", "#1e9e6a", "#9456d6", "#dc4646",
    "#0e9db5", "#d9528f", "#8a8f1a", "#a3673f", "#6b7a90",
)  # fmt: skip
_DASHES = ("solid", "dash", "dot", "dashdot")
MAX_CURVES = len(_COLOURS) * len(_DASHES)
"""Maximum number of jobs with curves: the number of combinations of colour and dashes. More curves could not
be distinguished and would make the page slow."""

_MAX_DROPPED = 200
"""Maximum number of drawn curves of trials that were dropped from a sweep. These curves all have the same
colour and dashes."""
DROPPED_COLOUR = "#9aa3b2"
GREY_NOTE = " Grey: trials that left their sweep early."
DROPPED = "left"
"""Name of the legend's group of all curves of trials that were dropped from a sweep. One button of the legend
shows and hides them."""
MAX_POINTS = 16_000
"""Maximum number of points of all curves of one chart together. So many points take about 200 kB in the
page."""
_MAX_LEVELS = 3
"""Maximum number of losses of the base model that are drawn as horizontal lines. The base has one loss for
every set of validation rows."""

_MIN_WINDOWS = 3
_MEASURED, _PREDICTED = LineStyle("#3b7ddd"), LineStyle("#8a94a6", "dash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of the report: a figure with its title and the sentences below it."""

    name: str
    title: str
    caption: str
    figure: Figure | Parallel


def job_line_style(index: int) -> LineStyle:
    return LineStyle(_COLOURS[index % len(_COLOURS)], _DASHES[index // len(_COLOURS) % len(_DASHES)])


def draw_charts(
    jobs: Sequence[JobRecord], windows: Sequence[WindowLine], dropped_trials: Collection[str] = ()
) -> tuple[Chart, ...]:
    """Return all charts of the report for which there is data. `jobs` are in the order of the table, which
    determines their colours and dashes. `dropped_trials` are the trials dropped from a sweep, which share one
    colour."""
    drawn = [job for job in jobs if job.name not in dropped_trials][:MAX_CURVES]
    others = [job for job in jobs if job.name in dropped_trials][:_MAX_DROPPED]
    charts = (
        _loss_chart(drawn, others),
        _evaluation_chart(drawn, others, accuracy=False),
        _evaluation_chart(drawn, others, accuracy=True),
        _throughput_chart(windows),
        _predicted_chart(
            ("time", "Time of each window", "seconds"),
            [window.seconds or None for window in windows],
            [window.predicted_seconds for window in windows],
        ),
        _predicted_chart(
            ("memory", "Peak memory of each window", "GiB"),
            [_gibibytes(window.peak_bytes) for window in windows],
            [_gibibytes(window.predicted_peak_bytes) for window in windows],
        ),
    )
    return tuple(chart for chart in charts if chart is not None)


def _loss_chart(jobs: Sequence[JobRecord], dropped_trials: Sequence[JobRecord]) -> Chart | None:
    def curve(job: JobRecord) -> list[Point]:
        return [Point(line.step, line.loss) for line in job.losses]

    curves = [curve(job) for job in jobs]
    if not _has_curve(curves):
        return None
    grey = [_dropped_series(job, smooth_points(curve(job))) for job in dropped_trials]
    faint = [
        replace(_job_series(jobs, index, points), opacity=0.25, ignores_pointer=True, has_dots=False)
        for index, points in enumerate(curves)
    ]
    bold = [_job_series(jobs, index, smooth_points(points)) for index, points in enumerate(curves)]
    caption = f"Faint: the loss of each global batch. Bold: smoothed.{GREY_NOTE if dropped_trials else ''}"
    figure = Figure(
        x=_step_axis(curves),
        y=value_axis("loss", _axis_values(jobs, curves)),
        series=_thin_series([*grey, *faint, *bold]),
    )
    return Chart(name="loss", title="Training loss", caption=caption, figure=figure)


def _evaluation_chart(
    jobs: Sequence[JobRecord], dropped_trials: Sequence[JobRecord], *, accuracy: bool
) -> Chart | None:
    """Return a chart of validation losses, or of token accuracies in percent, with the value of the base
    model without an adapter as a dashed line."""

    def curve(job: JobRecord) -> list[Point]:
        return [
            Point(line.step, _percent(line.accuracy) if accuracy else line.loss) for line in job.evaluations
        ]

    curves = [curve(job) for job in jobs]
    if not _has_curve(curves):
        return None
    bases = [(job, _percent(base_accuracy(job)) if accuracy else base_validation(job)) for job in jobs]
    levels = _base_levels(bases, digits=1 if accuracy else 3)
    grey = [_dropped_series(job, curve(job)) for job in dropped_trials if job.evaluations]
    own = [replace(_job_series(jobs, index, one), has_dots=True) for index, one in enumerate(curves) if one]
    values = _finite_values(curves) if accuracy else _axis_values(jobs, curves)
    figure = Figure(
        x=_step_axis(curves),
        y=value_axis("% of tokens" if accuracy else "loss", [*values, *(level.value for level in levels)]),
        series=_thin_series([*grey, *own]),
        reference_lines=levels,
        unit=" %" if accuracy else "",
    )
    if accuracy:
        caption = "Validation tokens that the model itself would have chosen."
        return Chart(name="accuracy", title="Token accuracy", caption=caption, figure=figure)
    caption = "Dashed: the base without an adapter." if levels else ""
    caption = f"{caption}{GREY_NOTE if dropped_trials else ''}".strip()
    return Chart(name="validation", title="Validation loss", caption=caption, figure=figure)


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def _base_levels(bases: Sequence[tuple[JobRecord, float | None]], digits: int) -> list[ReferenceLine]:
    """Return a horizontal line for each distinct loss of the base model without an adapter. If there are
    several, each line is labelled with the rows that the loss was measured on."""
    found: dict[str, tuple[JobRecord, float]] = {}
    for job, value in ((job, value) for job, value in bases if value is not None):
        found.setdefault(loss_text(value, digits), (job, value))
    several = len(found) > 1
    return [
        ReferenceLine(value, f"base {text}" + (f" on {validation_rows(job)}" if several else ""))
        for text, (job, value) in list(found.items())[:_MAX_LEVELS]
    ]


def _throughput_chart(windows: Sequence[WindowLine]) -> Chart | None:
    # Minutes of work rather than of wall time: a run that was stopped for a night has no gap.
    ends = accumulate(window.seconds for window in windows)
    points = [
        Point(end / 60, window.tokens / window.seconds)
        for end, window in zip(ends, windows, strict=True)
        if window.seconds > 0
    ]
    if len(points) < _MIN_WINDOWS:
        return None
    series = [
        Series(
            name="each window",
            points=thin_points(points),
            line_style=_MEASURED,
            opacity=0.25,
            ignores_pointer=True,
        ),
        Series(name="tokens per second", points=thin_points(smooth_points(points)), line_style=_MEASURED),
    ]
    figure = Figure(
        x=value_axis("minutes of work", [0.0, points[-1].x], margin=0.0),
        y=value_axis("tokens per second", _finite_values([points]), starts_at_zero=True),
        series=series,
    )
    caption = "Tokens of all jobs together, window by window."
    return Chart(name="throughput", title="Throughput", caption=caption, figure=figure)


def _predicted_chart(
    names: tuple[str, str, str],
    measured_values: Sequence[float | None],
    predicted_values: Sequence[float | None],
) -> Chart | None:
    """Return a chart of measured and predicted values of windows (a few global batches of every job each), in
    the order of the windows. `names` are the chart's name, title and unit."""
    name, title, unit = names
    happened = [Point(number, value) for number, value in enumerate(measured_values, start=1)]
    promised = [Point(number, value) for number, value in enumerate(predicted_values, start=1)]
    if sum(value is not None for value in measured_values) < _MIN_WINDOWS:
        return None
    errors = [
        abs(promise - fact) / fact
        for promise, fact in zip(predicted_values, measured_values, strict=True)
        if promise is not None and fact
    ]
    series = [Series(name="measured", points=thin_points(happened), line_style=_MEASURED)]
    caption = "Nothing was predicted for this run."
    if errors:
        series.append(Series(name="predicted", points=thin_points(promised), line_style=_PREDICTED))
        caption = "Dashed: as predicted just before the window ran."
        if len(errors) >= MIN_WINDOWS and median(errors) <= MAX_ERROR:
            caption += f" Half of the windows were within {max(1.0, 100 * median(errors)):.0f} % of it."
    figure = Figure(
        x=count_axis("window", 1, len(measured_values)),
        y=value_axis(unit, _finite_values([happened, promised]), starts_at_zero=True),
        series=series,
        has_legend=True,
        unit=f" {unit}",
    )
    return Chart(name=name, title=title, caption=caption, figure=figure)


def _job_series(jobs: Sequence[JobRecord], index: int, points: Sequence[Point]) -> Series:
    return Series(name=jobs[index].name, points=points, line_style=job_line_style(index), group=str(index))


def _dropped_series(job: JobRecord, points: Sequence[Point]) -> Series:
    """Return the curve of a trial that was dropped from its sweep. The curve is drawn behind all other
    curves, and its name is shown only on hover."""
    grey = LineStyle(DROPPED_COLOUR)
    return Series(name=job.name, points=points, line_style=grey, width=1.2, opacity=0.6, group=DROPPED)


def _thin_series(series: Sequence[Series]) -> list[Series]:
    """Reduce the number of points of the curves so that the page opens quickly. The limit applies to all
    curves together."""
    limit = max(40, MAX_POINTS // max(1, len(series)))
    return [replace(one, points=thin_points(one.points, min(800, limit))) for one in series]


def _step_axis(curves: Sequence[Sequence[Point]]) -> Axis:
    return count_axis("step", 0, max((point.x for curve in curves for point in curve), default=1))


def _finite_values(curves: Sequence[Sequence[Point]]) -> list[float]:
    return [point.y for curve in curves for point in curve if point.y is not None]


def _has_curve(curves: Sequence[Sequence[Point]]) -> bool:
    """Return whether any curve has two points or more. A curve of one point is not drawn, since the table
    contains its value."""
    return any(len(_finite_values([curve])) > 1 for curve in curves)


def _axis_values(jobs: Sequence[JobRecord], curves: Sequence[Sequence[Point]]) -> list[float]:
    """Return the values that an axis of losses must include. Diverged losses of failed jobs are left out;
    their points are drawn at the edge of the chart."""
    every = _finite_values(curves)
    healthy = _finite_values(
        [curve for job, curve in zip(jobs, curves, strict=True) if job.state not in ENDED_BADLY]
    )
    return healthy if healthy and max(every) > 2 * max(healthy) else every


def _gibibytes(count: float | None) -> float | None:
    return None if count is None else count / 2**30
