"""Records -> plotly figures as plain values. Colours of the page (text, grid) are set in the browser."""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from weftune.report.compare import ENDED_BADLY
from weftune.report.curves import Point, smooth, thin
from weftune.report.promises import FEWEST, WORST
from weftune.report.read import JobRecord, WindowLine

_COLOURS = (
    "#3b7ddd", "#e8710a", "#1e9e6a", "#9456d6", "#dc4646",
    "#0e9db5", "#d9528f", "#8a8f1a", "#a3673f", "#6b7a90",
)  # fmt: skip
_DASHES = ("solid", "dash", "dot", "dashdot")
MOST_CURVES = len(_COLOURS) * len(_DASHES)
"""Of more jobs than there are pens only the first have curves: nobody could tell the others apart, and a page
with thousands of them does not open."""

_MOST_LEFT = 200
"""Of the trials that left a sweep early so many are drawn, all with one pen."""
LEFT_PEN_COLOUR = "#9aa3b2"
LEFT = "left"
"""What the traces of those trials are called together, for the legend."""

_FEWEST_WINDOWS = 3
_TOO_FEW = "Too few windows for a curve."

_MEASURED, _PREDICTED = "#3b7ddd", "#8a94a6"

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pen:
    """How one job is drawn in every chart."""

    colour: str
    dash: str

    @property
    def dashes(self) -> str:
        """The same dash for an SVG line."""
        return {"solid": "none", "dash": "6 3", "dot": "2 2", "dashdot": "6 2 2 2"}[self.dash]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure, or the words that stand in its place when there is nothing to draw."""

    name: str
    title: str
    words: str
    """Below the figure; with no figure, why there is none."""
    figure: dict[str, Any] | None = None


def pen(index: int) -> Pen:
    return Pen(_COLOURS[index % len(_COLOURS)], _DASHES[index // len(_COLOURS) % len(_DASHES)])


def draw_charts(
    jobs: Sequence[JobRecord], windows: Sequence[WindowLine], left: Collection[str] = ()
) -> tuple[Chart, ...]:
    """All charts of the page. `jobs` come in the order of the table, which fixes their pens; `left` are the
    trials that left a sweep early, behind the others and without pens of their own."""
    drawn = [job for job in jobs if job.name not in left][:MOST_CURVES]
    others = [job for job in jobs if job.name in left][:_MOST_LEFT]
    return (
        _loss_chart(drawn, others),
        _validation_chart(drawn, others),
        _throughput_chart(windows),
        _time_chart(windows),
        _memory_chart(windows),
    )


def _loss_chart(jobs: Sequence[JobRecord], left: Sequence[JobRecord]) -> Chart:
    title, curves = "Training loss", [[Point(line.step, line.loss) for line in job.losses] for job in jobs]
    grey = [_left_trace(job, smooth([Point(line.step, line.loss) for line in job.losses])) for job in left]
    if not any(point.y is not None for curve in curves for point in curve):
        return Chart(name="loss", title=title, words="No job has finished a step yet.")
    faint = [_job_trace(jobs, index, curve) | _FAINT for index, curve in enumerate(curves)]
    bold = [_job_trace(jobs, index, smooth(curve)) for index, curve in enumerate(curves)]
    layout = _layout("step", "loss") | _healthy_range(jobs, curves)
    words = f"Faint: the loss of each global batch. Bold: smoothed.{_left_words(left)}"
    data = [*grey, *faint, *bold]
    return Chart(name="loss", title=title, words=words, figure={"data": data, "layout": layout})


def _validation_chart(jobs: Sequence[JobRecord], left: Sequence[JobRecord]) -> Chart:
    title = "Validation loss"
    curves = [[Point(line.step, line.loss) for line in job.evaluations] for job in jobs]
    if not any(point.y is not None for curve in curves for point in curve):
        words = "No job has held-out rows: give it `eval: {fraction: 0.1}` to see how it does on them."
        return Chart(name="validation", title=title, words=words)
    marks = {"mode": "lines+markers", "marker": {"size": 6}}
    grey = [
        _left_trace(job, [Point(line.step, line.loss) for line in job.evaluations])
        for job in left
        if job.evaluations
    ]
    traces = [_job_trace(jobs, index, curve) | marks for index, curve in enumerate(curves) if curve]
    layout = _layout("step", "loss") | _healthy_range(jobs, curves)
    words = f"Step 0 is the base before any training.{_left_words(left)}"
    data = [*grey, *traces]
    return Chart(name="validation", title=title, words=words, figure={"data": data, "layout": layout})


def _throughput_chart(windows: Sequence[WindowLine]) -> Chart:
    title = "Throughput"
    # Minutes of work rather than of the clock: a run that was stopped for a night has no gap.
    ends = accumulate(window.seconds for window in windows)
    points = [
        Point(end / 60, window.tokens / window.seconds)
        for end, window in zip(ends, windows, strict=True)
        if window.seconds > 0
    ]
    if len(points) < _FEWEST_WINDOWS:
        return Chart(name="throughput", title=title, words=_TOO_FEW)
    hover = "%{y:,.0f} tokens/s after %{x:.1f} minutes<extra></extra>"
    faint = _trace("each window", points, _MEASURED, hover) | _FAINT
    bold = _trace("smoothed", smooth(points), _MEASURED, hover)
    layout = _layout("minutes of work", "tokens per second")
    layout["yaxis"]["rangemode"] = "tozero"
    words = "Tokens of all jobs together, window by window."
    return Chart(
        name="throughput", title=title, words=words, figure={"data": [faint, bold], "layout": layout}
    )


def _time_chart(windows: Sequence[WindowLine]) -> Chart:
    return _promise_chart(
        Chart(name="time", title="Time of each window", words=_TOO_FEW),
        "seconds",
        windows,
        lambda window: window.seconds or None,
        lambda window: window.predicted_seconds,
    )


def _memory_chart(windows: Sequence[WindowLine]) -> Chart:
    return _promise_chart(
        Chart(name="memory", title="Peak memory of each window", words=_TOO_FEW),
        "GiB",
        windows,
        lambda window: _gibibytes(window.peak_bytes),
        lambda window: _gibibytes(window.predicted_peak_bytes),
    )


def _promise_chart(
    empty: Chart,
    unit: str,
    windows: Sequence[WindowLine],
    measured: Callable[[WindowLine], float | None],
    predicted: Callable[[WindowLine], float | None],
) -> Chart:
    """What was measured over what was predicted, window by window."""
    happened = [Point(number, measured(window)) for number, window in enumerate(windows, start=1)]
    promised = [Point(number, predicted(window)) for number, window in enumerate(windows, start=1)]
    if sum(point.y is not None for point in happened) < _FEWEST_WINDOWS:
        return empty
    errors = [
        abs(promise.y - fact.y) / fact.y
        for promise, fact in zip(promised, happened, strict=True)
        if promise.y is not None and fact.y
    ]
    hover = f"window %{{x}}: %{{y:.3f}} {unit}"
    traces = [_trace("measured", happened, _MEASURED, hover)]
    words = "Nothing was predicted for this run."
    if errors:
        dashed = {"line": {"color": _PREDICTED, "width": 2, "dash": "dash"}}
        traces.append(_trace("predicted", promised, _PREDICTED, hover) | dashed)
        words = "Dashed: as predicted just before the window ran."
        if len(errors) >= FEWEST and median(errors) <= WORST:
            words += f" Half of the windows were within {100 * median(errors):.0f} % of it."
    layout = _layout("window", unit) | {"showlegend": True}
    layout["yaxis"]["rangemode"] = "tozero"
    return Chart(name=empty.name, title=empty.title, words=words, figure={"data": traces, "layout": layout})


_FAINT: Trace = {"opacity": 0.28, "hoverinfo": "skip", "hovertemplate": None, "showlegend": False}


def _job_trace(jobs: Sequence[JobRecord], index: int, points: Sequence[Point]) -> Trace:
    hover = "step %{x}: %{y:.4f}<extra>%{fullData.name}</extra>"
    drawn = pen(index)
    trace = _trace(jobs[index].name, points, drawn.colour, hover)
    trace["line"]["dash"] = drawn.dash
    return trace | {"meta": index}


def _left_trace(job: JobRecord, points: Sequence[Point]) -> Trace:
    """Of a trial that left its sweep: seen behind the others, and told by hovering only."""
    hover = "step %{x}: %{y:.4f}<extra>%{fullData.name}</extra>"
    trace = _trace(job.name, points, LEFT_PEN_COLOUR, hover)
    trace["line"]["width"] = 1.2
    return trace | {"meta": LEFT, "opacity": 0.6}


def _left_words(left: Sequence[JobRecord]) -> str:
    return " Grey: trials that left their sweep early." if left else ""


def _trace(name: str, points: Sequence[Point], colour: str, hover: str) -> Trace:
    thinned = thin(points)
    return {
        "type": "scatter",
        "mode": "lines" if len(points) > 1 else "markers",
        # plotly reads names as a small HTML of its own (links, line breaks) and turns entities back.
        "name": html.escape(name, quote=False),
        "x": [round(point.x, 4) for point in thinned],
        "y": [None if point.y is None else float(f"{point.y:.6g}") for point in thinned],
        "line": {"color": colour, "width": 2},
        "hovertemplate": hover,
    }


def _layout(x: str, y: str) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x, "standoff": 8}, "zeroline": False},
        "yaxis": {"title": {"text": y, "standoff": 8}, "zeroline": False, "automargin": True},
        "showlegend": False,
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"},
        "margin": {"l": 48, "r": 12, "t": 12, "b": 44},
        "hoverlabel": {"namelength": 40},
    }


def _healthy_range(jobs: Sequence[JobRecord], curves: Sequence[Sequence[Point]]) -> dict[str, Any]:
    """An axis that the jobs which did not fail fill: one exploded loss must not flatten all the others."""
    every = [point.y for curve in curves for point in curve if point.y is not None]
    healthy = [
        point.y
        for job, curve in zip(jobs, curves, strict=True)
        if job.state not in ENDED_BADLY
        for point in curve
        if point.y is not None
    ]
    if not healthy or max(every) <= 2 * max(healthy):
        return {}
    low, high = min(healthy), max(healthy)
    margin = 0.05 * (high - low) or 0.1
    axis = _layout("", "loss")["yaxis"] | {"range": [low - margin, high + margin]}
    return {"yaxis": axis}


def _gibibytes(count: float | None) -> float | None:
    return None if count is None else count / 2**30
