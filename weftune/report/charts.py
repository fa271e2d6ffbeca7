"""The curves of a run: losses and accuracy by step, throughput, time and memory by window."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

from weftune.report.compare import ENDED_BADLY, base_accuracy, base_validation, validation_rows
from weftune.report.curves import Point, smooth, thin
from weftune.report.promises import FEWEST, WORST
from weftune.report.read import JobRecord, WindowLine
from weftune.report.svg import Axis, Figure, Pen, ReferenceLine, Series, count_axis, value_axis
from weftune.report.words import loss_text

_COLOURS = (
    "#3b7ddd", "#e8710a", "#1e9e6a", "#9456d6", "#dc4646",
    "#0e9db5", "#d9528f", "#8a8f1a", "#a3673f", "#6b7a90",
)  # fmt: skip
_DASHES = ("solid", "dash", "dot", "dashdot")
MOST_CURVES = len(_COLOURS) * len(_DASHES)
"""Number of jobs that have curves, one per pen: more could not be told apart, and a page with thousands of
them does not open."""

_MOST_LEFT = 200
"""Number of trials dropped from a sweep that have a curve; all of them have the same pen."""
LEFT_PEN_COLOUR = "#9aa3b2"
LEFT = "left"
"""The group of these curves, which one button of the legend shows and hides."""
MOST_POINTS = 16_000
"""Number of points of all curves of one chart together, about 200 kB."""
_MOST_LEVELS = 3
"""Number of base losses that are drawn: jobs with other validation rows have another base loss."""

_FEWEST_WINDOWS = 3
_MEASURED, _PREDICTED = Pen("#3b7ddd"), Pen("#8a94a6", "dash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure with its title and the text below it."""

    name: str
    title: str
    words: str
    figure: Figure


def pen(index: int) -> Pen:
    return Pen(_COLOURS[index % len(_COLOURS)], _DASHES[index // len(_COLOURS) % len(_DASHES)])


def draw_charts(
    jobs: Sequence[JobRecord], windows: Sequence[WindowLine], left: Collection[str] = ()
) -> tuple[Chart, ...]:
    """Draw all charts of the page that have something to show. `jobs` come in the order of the table, which
    fixes their pens; `left` are the trials dropped from a sweep, which have no pens of their own."""
    drawn = [job for job in jobs if job.name not in left][:MOST_CURVES]
    others = [job for job in jobs if job.name in left][:_MOST_LEFT]
    charts = (
        _loss_chart(drawn, others),
        _validation_chart(drawn, others),
        _accuracy_chart(drawn, others),
        _throughput_chart(windows),
        _time_chart(windows),
        _memory_chart(windows),
    )
    return tuple(chart for chart in charts if chart is not None)


def _loss_chart(jobs: Sequence[JobRecord], left: Sequence[JobRecord]) -> Chart | None:
    curves = [[Point(line.step, line.loss) for line in job.losses] for job in jobs]
    if not _has_line(curves):
        return None
    grey = [_left_series(job, smooth([Point(line.step, line.loss) for line in job.losses])) for job in left]
    faint = [
        replace(_job_series(jobs, index, curve), opacity=0.25, silent=True, dots=False)
        for index, curve in enumerate(curves)
    ]
    bold = [_job_series(jobs, index, smooth(curve)) for index, curve in enumerate(curves)]
    words = f"Faint: the loss of each global batch. Bold: smoothed.{_left_words(left)}"
    series = _thinned([*grey, *faint, *bold])
    figure = Figure(x=_step_axis(curves), y=value_axis("loss", _shown_values(jobs, curves)), series=series)
    return Chart(name="loss", title="Training loss", words=words, figure=figure)


def _validation_chart(jobs: Sequence[JobRecord], left: Sequence[JobRecord]) -> Chart | None:
    """Draw the losses after training has begun, with the base as a dashed line."""
    curves = [[Point(line.step, line.loss) for line in job.evaluations] for job in jobs]
    bases = [(job, base) for job in jobs if (base := base_validation(job)) is not None]
    levels = _base_levels(bases)
    if not _has_line(curves):
        return None
    grey = [
        _left_series(job, [Point(line.step, line.loss) for line in job.evaluations])
        for job in left
        if job.evaluations
    ]
    own = [replace(_job_series(jobs, index, curve), dots=True) for index, curve in enumerate(curves) if curve]
    values = [*_shown_values(jobs, curves), *(level.value for level in levels)]
    words = (
        f"Dashed: the base without an adapter.{_left_words(left)}" if levels else _left_words(left).strip()
    )
    figure = Figure(
        x=_step_axis(curves), y=value_axis("loss", values), series=_thinned([*grey, *own]), levels=levels
    )
    return Chart(name="validation", title="Validation loss", words=words, figure=figure)


def _accuracy_chart(jobs: Sequence[JobRecord], left: Sequence[JobRecord]) -> Chart | None:
    def curve(job: JobRecord) -> list[Point]:
        return [
            Point(line.step, None if line.accuracy is None else 100 * line.accuracy)
            for line in job.evaluations
        ]

    curves = [curve(job) for job in jobs]
    if not _has_line(curves):
        return None
    bases = [(job, 100 * base) for job in jobs if (base := base_accuracy(job)) is not None]
    levels = _base_levels(bases, digits=1)
    grey = [_left_series(job, curve(job)) for job in left if job.evaluations]
    own = [replace(_job_series(jobs, index, one), dots=True) for index, one in enumerate(curves) if one]
    values = [*_known(curves), *(level.value for level in levels)]
    figure = Figure(
        x=_step_axis(curves),
        y=value_axis("% of tokens", values),
        series=_thinned([*grey, *own]),
        levels=levels,
        unit=" %",
    )
    words = "Validation tokens that the model itself would have chosen."
    return Chart(name="accuracy", title="Token accuracy", words=words, figure=figure)


def _base_levels(bases: Sequence[tuple[JobRecord, float]], digits: int = 3) -> list[ReferenceLine]:
    """Return one line for each distinct loss of a base, named by its rows if there are several."""
    found: dict[str, tuple[JobRecord, float]] = {}
    for job, value in bases:
        found.setdefault(loss_text(value, digits), (job, value))
    several = len(found) > 1
    return [
        ReferenceLine(value, f"base {text}" + (f" on {validation_rows(job)}" if several else ""))
        for text, (job, value) in list(found.items())[:_MOST_LEVELS]
    ]


def _throughput_chart(windows: Sequence[WindowLine]) -> Chart | None:
    # Minutes of work rather than of wall time: a run that was stopped for a night has no gap.
    ends = accumulate(window.seconds for window in windows)
    points = [
        Point(end / 60, window.tokens / window.seconds)
        for end, window in zip(ends, windows, strict=True)
        if window.seconds > 0
    ]
    if len(points) < _FEWEST_WINDOWS:
        return None
    series = [
        Series(name="each window", points=thin(points), pen=_MEASURED, opacity=0.25, silent=True),
        Series(name="tokens per second", points=thin(smooth(points)), pen=_MEASURED),
    ]
    figure = Figure(
        x=value_axis("minutes of work", [0.0, points[-1].x], margin=0.0),
        y=value_axis("tokens per second", _known([points]), from_zero=True),
        series=series,
    )
    words = "Tokens of all jobs together, window by window."
    return Chart(name="throughput", title="Throughput", words=words, figure=figure)


def _time_chart(windows: Sequence[WindowLine]) -> Chart | None:
    return _promise_chart(
        ("time", "Time of each window", "seconds"),
        windows,
        lambda window: window.seconds or None,
        lambda window: window.predicted_seconds,
    )


def _memory_chart(windows: Sequence[WindowLine]) -> Chart | None:
    return _promise_chart(
        ("memory", "Peak memory of each window", "GiB"),
        windows,
        lambda window: _gibibytes(window.peak_bytes),
        lambda window: _gibibytes(window.predicted_peak_bytes),
    )


def _promise_chart(
    names: tuple[str, str, str],
    windows: Sequence[WindowLine],
    measured: Callable[[WindowLine], float | None],
    predicted: Callable[[WindowLine], float | None],
) -> Chart | None:
    """Draw measured and predicted values, window by window. `names` are the chart's name, title and unit."""
    name, title, unit = names
    happened = [Point(number, measured(window)) for number, window in enumerate(windows, start=1)]
    promised = [Point(number, predicted(window)) for number, window in enumerate(windows, start=1)]
    if sum(point.y is not None for point in happened) < _FEWEST_WINDOWS:
        return None
    errors = [
        abs(promise.y - fact.y) / fact.y
        for promise, fact in zip(promised, happened, strict=True)
        if promise.y is not None and fact.y
    ]
    series = [Series(name="measured", points=thin(happened), pen=_MEASURED)]
    words = "Nothing was predicted for this run."
    if errors:
        series.append(Series(name="predicted", points=thin(promised), pen=_PREDICTED))
        words = "Dashed: as predicted just before the window ran."
        if len(errors) >= FEWEST and median(errors) <= WORST:
            words += f" Half of the windows were within {max(1.0, 100 * median(errors)):.0f} % of it."
    figure = Figure(
        x=count_axis("window", 1, len(windows)),
        y=value_axis(unit, _known([happened, promised]), from_zero=True),
        series=series,
        legend=True,
        unit=f" {unit}",
    )
    return Chart(name=name, title=title, words=words, figure=figure)


def _job_series(jobs: Sequence[JobRecord], index: int, points: Sequence[Point]) -> Series:
    return Series(name=jobs[index].name, points=points, pen=pen(index), group=str(index))


def _left_series(job: JobRecord, points: Sequence[Point]) -> Series:
    """Return the curve of a dropped trial: behind the others, and named by the pointer only."""
    return Series(name=job.name, points=points, pen=Pen(LEFT_PEN_COLOUR), width=1.2, opacity=0.6, group=LEFT)


def _left_words(left: Sequence[JobRecord]) -> str:
    return " Grey: trials that left their sweep early." if left else ""


def _thinned(series: Sequence[Series]) -> list[Series]:
    """Thin the curves so that the page opens at once; they share the limit on points."""
    limit = max(40, MOST_POINTS // max(1, len(series)))
    return [replace(one, points=thin(one.points, min(800, limit))) for one in series]


def _step_axis(curves: Sequence[Sequence[Point]]) -> Axis:
    return count_axis("step", 0, max((point.x for curve in curves for point in curve), default=1))


def _known(curves: Sequence[Sequence[Point]]) -> list[float]:
    return [point.y for curve in curves for point in curve if point.y is not None]


def _has_line(curves: Sequence[Sequence[Point]]) -> bool:
    """Return whether a curve has two points or more: one point adds nothing to the table."""
    return any(len(_known([curve])) > 1 for curve in curves)


def _shown_values(jobs: Sequence[JobRecord], curves: Sequence[Sequence[Point]]) -> list[float]:
    """Return the values that the axis has to show. A diverged loss of a failed job is drawn at the edge."""
    every = _known(curves)
    healthy = _known([curve for job, curve in zip(jobs, curves, strict=True) if job.state not in ENDED_BADLY])
    return healthy if healthy and max(every) > 2 * max(healthy) else every


def _gibibytes(count: float | None) -> float | None:
    return None if count is None else count / 2**30
