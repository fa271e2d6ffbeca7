"""A sweep's figures: the ways of its trials through the swept values and the rungs, and the metric against
each key.

Parallel coordinates are drawn as ordinary lines: plotly's own trace compiles shaders while it draws, which
the page's content security policy forbids.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from weftune.jobs.sweeps.record import SweepRecord, TrialRecord
from weftune.jobs.sweeps.rungs import worth
from weftune.report.charts import LEFT_PEN_COLOUR, Chart, Pen, Trace
from weftune.report.sweeps.standing import (
    METRIC_NAMES,
    flat_values,
    ranked,
    rung_value,
    setting_text,
    short_keys,
    swept_keys,
)
from weftune.report.words import loss_text

_MOST_KEYS = 6
"""Keys that are drawn; those with the most values."""
_MOST_TICKS = 6
_TICKS_APART = 0.15
"""The least share of an axis between two ticks."""
_LEAST_RATIO = 4
"""Values whose largest is fewer times the smallest are drawn on a linear axis."""
_RUNG_COLOURS = ("#b3bac6", "#7c98cf", "#3b7ddd")
"""From the first rung to the last step."""
_FURTHEST = 6
"""Values that are so many times further from the best than half of the trials are drawn at the axis' end."""
_FEWEST = 6
"""Of fewer values none is taken for an outlier."""

Pens = Mapping[str, Pen]


@dataclass(frozen=True, slots=True)
class Axis:
    """One quantity of the trials: where each trial lies, from 0 to 1, and what stands at the ticks."""

    name: str
    places: Mapping[str, float]
    texts: Mapping[str, str]
    ticks: tuple[tuple[float, str], ...]


def sweep_charts(record: SweepRecord, pens: Pens) -> tuple[Chart, ...]:
    """The ways of all trials, then a chart for each key. `pens`: how the trials are drawn in the curves;
    those without one are grey."""
    keys = _drawn_keys(record)
    measured = [trial for trial in record.trials if trial.score is not None]
    if not measured or not keys:
        return ()
    return (_ways(record, keys, pens), *(_against(record, key) for key in keys))


def _drawn_keys(record: SweepRecord) -> list[str]:
    """Those with the most values. Of keys that go together, as rank and alpha often do, the first."""
    values = {
        key: [repr(flat_values(trial).get(key)) for trial in record.trials] for key in swept_keys(record)
    }
    keys = [key for key in values if not any(_go_together(values, other, key) for other in values)]
    widest = sorted(keys, key=lambda key: -len(set(values[key])))[:_MOST_KEYS]
    return [key for key in keys if key in widest]


def _go_together(values: Mapping[str, Sequence[str]], earlier: str, later: str) -> bool:
    """Whether each says what the other is, by more than that all trials differ in both."""
    names = list(values)
    pairs = set(zip(values[earlier], values[later], strict=True))
    kinds = {len(pairs), len(set(values[earlier])), len(set(values[later]))}
    return names.index(earlier) < names.index(later) and len(kinds) == 1 and len(pairs) < len(values[later])


# -- parallel coordinates -------------------------------------------------------------------------------


def _ways(record: SweepRecord, keys: Sequence[str], pens: Pens) -> Chart:
    names = short_keys(keys)
    axes = [_key_axis(record, key, names[key]) for key in keys]
    axes += [_metric_axis(record, rung) for rung in range(_rung_count(record))]
    # The best last, so that it is drawn over the others.
    traces = [_way(trial, axes, pens) for trial in reversed(ranked(record))]
    ends = " It ends at the rung where the trial was dropped." if len(record.rungs) > 1 else ""
    failed = " Dotted: failed." if any(trial.state == "failed" for trial in record.trials) else ""
    words = f"A line is a trial.{ends}{failed} {_better(record)}"
    return Chart(
        name=f"sweep-{record.name}-ways",
        title="Values and results",
        words=words,
        figure={"data": traces, "layout": _ways_layout(axes)},
    )


def _way(trial: TrialRecord, axes: Sequence[Axis], pens: Pens) -> Trace:
    points = [(at, axis) for at, axis in enumerate(axes) if trial.name in axis.places]
    pen = pens.get(trial.name) if trial.state != "failed" else Pen("#dc4646", "dot")
    bold = pen is not None and trial.state != "failed"
    texts = [f"{axis.name} {axis.texts[trial.name]}" for _, axis in points]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html.escape(trial.name, quote=False),
        "x": [at for at, _ in points],
        "y": [round(axis.places[trial.name], 4) for _, axis in points],
        "text": [html.escape(text, quote=False) for text in texts],
        "line": {
            "color": pen.colour if pen else LEFT_PEN_COLOUR,
            "dash": pen.dash if pen else "solid",
            "width": 2.5 if bold else 1.2,
        },
        "marker": {"size": 5 if bold else 3},
        "opacity": 1 if bold else 0.45,
        "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
    }


def _ways_layout(axes: Sequence[Axis]) -> dict[str, Any]:
    ticks = [
        {
            "x": at,
            "y": place,
            "text": html.escape(text, quote=False),
            # To the left of each axis, but for the first: a tick there would be cut off by the page's edge.
            "xanchor": "right" if at else "left",
            "xshift": -6 if at else 6,
            "showarrow": False,
            "font": {"size": 11},
        }
        for at, axis in enumerate(axes)
        for place, text in axis.ticks
    ]
    return {
        "xaxis": {
            "tickvals": list(range(len(axes))),
            "showticklabels": False,
            "range": [-0.12, len(axes) - 0.9],
            "side": "top",
            "fixedrange": True,
            "zeroline": False,
        },
        "yaxis": {"visible": False, "range": [-0.08, 1.08], "fixedrange": True},
        "annotations": [*_axis_names(axes), *ticks],
        "showlegend": False,
        "margin": {"l": 12, "r": 28, "t": 48, "b": 8},
        "hovermode": "closest",
        "hoverlabel": {"namelength": 40},
    }


def _axis_names(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """Above the axes. Those at the edges are drawn inwards: plotly hides a tick's text that does not fit."""
    anchors = {0: ("left", -10), len(axes) - 1: ("right", 26)}
    return [
        {
            "x": at,
            "y": 1,
            "yref": "paper",
            "text": html.escape(axis.name, quote=False).replace(" at ", "<br>at "),
            "xanchor": anchors.get(at, ("center", 0))[0],
            "xshift": anchors.get(at, ("center", 0))[1],
            "yanchor": "bottom",
            "yshift": 4,
            "showarrow": False,
        }
        for at, axis in enumerate(axes)
    ]


def _key_axis(record: SweepRecord, key: str, name: str) -> Axis:
    values = {trial.name: flat_values(trial).get(key) for trial in record.trials}
    scale = _scale(list(values.values()))
    texts = {trial: setting_text(value) for trial, value in values.items()}
    places = {trial: scale.place(value) for trial, value in values.items()}
    ticks = tuple((scale.place(value), setting_text(value)) for value in scale.ticks)
    return Axis(name, places, texts, ticks)


def _metric_axis(record: SweepRecord, rung: int) -> Axis:
    last = rung == _rung_count(record) - 1
    measured = {
        trial.name: value
        for trial in record.trials
        if (value := _value_at(trial, rung, last=last)) is not None
    }
    name = METRIC_NAMES[record.metric]
    name = f"{name} at {record.rungs[rung]}" if len(record.rungs) > 1 else name
    if not measured:
        return Axis(name, {}, {}, ())
    low, high = _worthy_range(record, list(measured.values()))
    width = high - low or 1.0
    places = {trial: min(1.0, max(0.0, (value - low) / width)) for trial, value in measured.items()}
    texts = {trial: loss_text(value) for trial, value in measured.items()}
    ticks = (
        [(0.0, loss_text(low, 3)), (1.0, loss_text(high, 3))] if high > low else [(0.0, loss_text(low, 3))]
    )
    return Axis(name, places, texts, tuple(ticks))


def _worthy_range(record: SweepRecord, values: Sequence[float]) -> tuple[float, float]:
    """Best and worst, without what is so bad that the others could not be told apart."""
    ordered = sorted(values, key=lambda value: worth(value, record.mode))
    best, worst, middle = ordered[0], ordered[-1], median(values)
    furthest = best + _FURTHEST * (middle - best)
    if len(values) >= _FEWEST and abs(worst - best) > abs(furthest - best) > 0:
        worst = furthest
    return min(best, worst), max(best, worst)


def _rung_count(record: SweepRecord) -> int:
    return max(1, len(record.rungs))


def _value_at(trial: TrialRecord, rung: int, *, last: bool) -> float | None:
    """Of a trial that still runs the last score is no result yet."""
    if last:
        return trial.score if trial.state == "finished" else None
    return rung_value(trial, rung)


# -- the metric against a key ---------------------------------------------------------------------------


def _against(record: SweepRecord, key: str) -> Chart:
    count = _rung_count(record)
    span = _metric_span(record, count)
    drawn = (_rung_trace(record, key, rung, count, span) for rung in range(count))
    traces = [trace for trace in drawn if trace is not None]
    scale = _scale([flat_values(trial).get(key) for trial in record.trials])
    layout: dict[str, Any] = {
        "xaxis": _value_axis(scale),
        "yaxis": {
            "title": {"text": METRIC_NAMES[record.metric], "standoff": 6},
            "zeroline": False,
            "automargin": True,
            **_metric_axis_keys(span, record.mode == "min"),
        },
        "showlegend": len(traces) > 1,
        "legend": {
            "orientation": "h",
            "title": {"text": "step"},
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"size": 11},
        },
        "margin": {"l": 44, "r": 12, "t": 26 if len(traces) > 1 else 10, "b": 30},
        "hovermode": "closest",
        "hoverlabel": {"namelength": 40},
    }
    return Chart(
        name=f"sweep-{record.name}-{key}",
        title=key,
        words="",
        figure={"data": traces, "layout": layout},
    )


def _metric_span(record: SweepRecord, count: int) -> tuple[float, float]:
    """From best to worst over all rungs, without what is far off at its own."""
    spans = [
        _worthy_range(record, values)
        for rung in range(count)
        if (values := list(_measured(record, rung, count)))
    ]
    return min((low for low, _ in spans), default=0.0), max((high for _, high in spans), default=1.0)


def _metric_axis_keys(span: tuple[float, float], may_be_log: bool) -> dict[str, Any]:
    """Logarithmic where the best are a small part of the worst: they could not be told apart otherwise."""
    low, high = span
    if not may_be_log or low <= 0 or high <= _LEAST_RATIO * low:
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return {"range": [low - margin, high + margin]}
    margin = 0.05 * (math.log10(high) - math.log10(low))
    ticks = [tick for tick in _ones_twos_fives(low) if low / 1.1 <= tick <= high * 1.1]
    return {
        "type": "log",
        "range": [math.log10(low) - margin, math.log10(high) + margin],
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }


def _ones_twos_fives(low: float) -> Iterator[float]:
    power = math.floor(math.log10(low))
    for above in range(12):
        for digit in (1, 2, 5):
            yield float(f"{digit}e{power + above}")


def _measured(record: SweepRecord, rung: int, count: int) -> Iterator[float]:
    for trial in record.trials:
        value = _value_at(trial, rung, last=rung == count - 1)
        if value is not None:
            yield value


def _rung_trace(
    record: SweepRecord, key: str, rung: int, count: int, span: tuple[float, float]
) -> Trace | None:
    """The trials that were measured at a rung; what is beyond `span` is drawn at its end."""
    found = [
        (trial, flat_values(trial).get(key), value)
        for trial in record.trials
        if (value := _value_at(trial, rung, last=rung == count - 1)) is not None
    ]
    if not found:
        return None
    is_number = all(_is_number(flat_values(trial).get(key)) for trial in record.trials)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{record.rungs[rung]}" if record.rungs else "end",
        "x": [value if is_number else html.escape(setting_text(value), quote=False) for _, value, _ in found],
        "y": [float(f"{min(max(score, span[0]), span[1]):.6g}") for _, _, score in found],
        "text": [html.escape(trial.name, quote=False) for trial, _, _ in found],
        "customdata": [loss_text(score) for _, _, score in found],
        "marker": {"color": _rung_colour(rung, count), "size": 7 + 2 * (rung == count - 1)},
        "hovertemplate": "%{customdata}<extra>%{text}</extra>",
    }


def _rung_colour(rung: int, count: int) -> str:
    if rung == count - 1:
        return _RUNG_COLOURS[-1]
    return _RUNG_COLOURS[min(rung, len(_RUNG_COLOURS) - 2)]


def _value_axis(scale: Scale) -> dict[str, Any]:
    axis: dict[str, Any] = {"zeroline": False, "automargin": True, "tickangle": 0}
    if not scale.numbers:
        return axis | {"type": "category"}
    axis |= {"tickvals": list(scale.ticks), "ticktext": [setting_text(value) for value in scale.ticks]}
    if scale.log:
        axis["type"] = "log"
    return axis


# -- scales ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """Where the values of a key lie between its smallest and its largest."""

    values: tuple[Any, ...]
    """Distinct; numbers in their order, others as they come."""
    numbers: bool
    log: bool
    ticks: tuple[Any, ...]

    def place(self, value: Any) -> float:
        if not self.numbers:
            count = len(self.values) - 1
            return self.values.index(value) / count if count else 0.5
        low, high = self._along(self.values[0]), self._along(self.values[-1])
        return (self._along(value) - low) / (high - low) if high > low else 0.5

    def _along(self, value: float) -> float:
        return math.log(value) if self.log else float(value)


def _scale(values: Sequence[Any]) -> Scale:
    distinct = list({repr(value): value for value in values}.values())
    if not all(_is_number(value) for value in distinct):
        return Scale(tuple(distinct), numbers=False, log=False, ticks=tuple(distinct))
    ordered = tuple(sorted(distinct))
    log = _is_log(ordered)
    between = ordered if len(ordered) <= _MOST_TICKS else _round_numbers(ordered[0], ordered[-1], log)
    return Scale(ordered, numbers=True, log=log, ticks=_apart(ordered[0], ordered[-1], between, log))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_log(ordered: Sequence[float]) -> bool:
    """Whether the values lie evenly in their logarithms rather than in themselves."""
    low, high = ordered[0], ordered[-1]
    if low <= 0 or high < _LEAST_RATIO * low:
        return False
    middle = median(ordered)
    along = (math.log(middle) - math.log(low)) / (math.log(high) - math.log(low))
    return abs(along - 0.5) < abs((middle - low) / (high - low) - 0.5)


def _apart(low: float, high: float, between: Iterable[float], log: bool) -> tuple[float, ...]:
    """Both ends, and the numbers between them that are not too near to them or to one another."""
    along = math.log if log else float
    least = _TICKS_APART * (along(high) - along(low))
    found = [low]
    for tick in sorted(between):
        if along(tick) - along(found[-1]) > least and along(high) - along(tick) > least:
            found.append(tick)
    return (*found, high) if high > low else (low,)


def _round_numbers(low: float, high: float, log: bool) -> Iterator[float]:
    if log:
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
            if low < 10.0**power < high:
                yield 10.0**power
        return
    step = 10.0 ** math.floor(math.log10(high - low)) / 2
    first = math.ceil(low / step)
    yield from (step * number for number in range(first, math.floor(high / step) + 1))


def _better(record: SweepRecord) -> str:
    return "Lower is better." if record.mode == "min" else "Higher is better."
