"""Charts of a sweep: all trials in parallel coordinates, with the swept values and the metric at each rung (a
step at which trials are compared), and a chart of the metric for each swept key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from weftune.jobs.sweeps.halving import sort_value
from weftune.jobs.sweeps.record import (
    SweepRecord,
    TrialRecord,
    flat_trial_values,
    metric_title,
    rank_trials,
    rung_value,
    setting_text,
    shorten_keys,
    swept_keys,
)
from weftune.report.charts import DROPPED_COLOUR, Chart
from weftune.report.svg import (
    Axis,
    Figure,
    LineStyle,
    Parallel,
    Point,
    ReferenceLine,
    Series,
    linear_axis,
    log_axis,
)
from weftune.report.words import loss_text

_MAX_KEYS = 6
"""Maximum number of swept keys that are drawn as axes. If there are more, those with the most values are
chosen."""
_MAX_TICKS = 6
_TICKS_APART = 0.15
"""Minimum distance between two ticks, as a fraction of the axis."""
_LEAST_RATIO = 4
"""Ratio of the largest to the smallest value on an axis below which the axis is linear instead of
logarithmic."""
_RUNG_COLOURS = ("#b3bac6", "#7c98cf", "#3b7ddd")
"""Colours of the rungs (steps at which trials are compared), from the first rung to the last step."""
_FURTHEST = 6
"""Maximum distance of a metric's value from the best value, as a multiple of the distance between median and
best value. Values with a larger distance are outliers, which are drawn at the end of the axis."""
_FEWEST = 6
"""Minimum number of values of a metric that are needed to determine outliers. With fewer values, none is an
outlier."""

LineStyles = Mapping[str, LineStyle]


@dataclass(frozen=True, slots=True)
class TrialAxis:
    """An axis of a chart with parallel coordinates: the position of each trial on it, from 0 to 1, and the
    labels of the ticks."""

    name: str
    positions: Mapping[str, float]
    labels: Mapping[str, str]
    ticks: tuple[tuple[float, str], ...]


def sweep_charts(
    record: SweepRecord, line_styles: LineStyles, base_loss: float | None = None
) -> tuple[Chart, ...]:
    """Return a chart of all trials in parallel coordinates, and a chart for each swept key. Return an empty
    tuple if nothing is measured yet. `line_styles` maps trials to the colours and dashes of their curves; all
    other trials are grey. `base_loss` is drawn as a dashed line."""
    keys = _drawn_keys(record)
    measured = [trial for trial in record.trials if trial.score is not None]
    if not measured or not keys:
        return ()
    base = base_loss if record.metric == "eval_loss" else None
    return _parallel_chart(record, keys, line_styles), *(_key_chart(record, key, base) for key in keys)


def _drawn_keys(record: SweepRecord) -> list[str]:
    """Return the swept keys (settings that differ between trials) that are drawn: those with the most values.
    Of keys that vary together, such as rank and alpha, only the first is returned."""
    values = {
        key: [repr(flat_trial_values(trial).get(key)) for trial in record.trials]
        for key in swept_keys(record)
    }
    keys = [key for key in values if not any(_are_redundant_keys(values, other, key) for other in values)]
    widest = sorted(keys, key=lambda key: -len(set(values[key])))[:_MAX_KEYS]
    return [key for key in keys if key in widest]


def _are_redundant_keys(values: Mapping[str, Sequence[str]], first_key: str, second_key: str) -> bool:
    """Return whether one of two swept keys shows all that the other does: the value of each determines the
    value of the other, and at least two trials have the same value."""
    names = list(values)
    pairs = set(zip(values[first_key], values[second_key], strict=True))
    kinds = {len(pairs), len(set(values[first_key])), len(set(values[second_key]))}
    return (
        names.index(first_key) < names.index(second_key)
        and len(kinds) == 1
        and len(pairs) < len(values[second_key])
    )


# -- parallel coordinates -------------------------------------------------------------------------------


def _parallel_chart(record: SweepRecord, keys: Sequence[str], line_styles: LineStyles) -> Chart:
    names = shorten_keys(keys)
    axes = [_key_axis(record, key, names[key]) for key in keys]
    axes += [_metric_axis(record, rung) for rung in range(_rung_count(record))]
    # The best trial comes last, so that it is drawn over the others.
    series = [_trial_series(trial, axes, line_styles) for trial in reversed(rank_trials(record))]
    ends = " It ends at the rung where the trial was dropped." if len(record.rungs) > 1 else ""
    failed = " Dotted: failed." if any(trial.state == "failed" for trial in record.trials) else ""
    better = "Lower is better." if record.mode == "min" else "Higher is better."
    return Chart(
        name=f"sweep-{record.name}",
        title="Values and results",
        caption=f"A line is a trial.{ends}{failed} {better}",
        figure=Parallel(
            [Axis(label=axis.name, min_value=0, max_value=1, ticks=axis.ticks) for axis in axes], series
        ),
    )


def _trial_series(trial: TrialRecord, axes: Sequence[TrialAxis], line_styles: LineStyles) -> Series:
    points = [(at, axis) for at, axis in enumerate(axes) if trial.name in axis.positions]
    line_style = line_styles.get(trial.name) if trial.state != "failed" else LineStyle("#dc4646", "dot")
    bold = line_style is not None and trial.state != "failed"
    return Series(
        name=trial.name,
        points=[Point(at, axis.positions[trial.name]) for at, axis in points],
        line_style=line_style or LineStyle(DROPPED_COLOUR),
        width=2.5 if bold else 1.2,
        opacity=1.0 if bold else 0.5,
        has_dots=True,
        tooltips=[f"{axis.name} {axis.labels[trial.name]}" for _, axis in points],
    )


def _key_axis(record: SweepRecord, key: str, name: str) -> TrialAxis:
    values = {trial.name: flat_trial_values(trial).get(key) for trial in record.trials}
    scale = _key_scale(list(values.values()))
    texts = {trial: setting_text(value) for trial, value in values.items()}
    positions = {trial: scale.position(value) for trial, value in values.items()}
    ticks = tuple((scale.position(value), setting_text(value)) for value in scale.ticks)
    return TrialAxis(name, positions, texts, ticks)


def _metric_axis(record: SweepRecord, rung: int) -> TrialAxis:
    measured = _rung_values(record, rung)
    name = metric_title(record.metric)
    name = f"{name} at {record.rungs[rung]}" if len(record.rungs) > 1 else name
    if not measured:
        return TrialAxis(name, {}, {}, ())
    low, high = _inlier_range(record, list(measured.values()))
    width = high - low or 1.0
    positions = {trial: min(1.0, max(0.0, (value - low) / width)) for trial, value in measured.items()}
    texts = {trial: loss_text(value) for trial, value in measured.items()}
    ticks = (
        [(0.0, loss_text(low, 3)), (1.0, loss_text(high, 3))] if high > low else [(0.0, loss_text(low, 3))]
    )
    return TrialAxis(name, positions, texts, tuple(ticks))


def _inlier_range(record: SweepRecord, values: Sequence[float]) -> tuple[float, float]:
    """Return the range from the best to the worst value of a metric. Outliers, which would compress the other
    values on an axis, are left out."""
    ordered = sorted(values, key=lambda value: sort_value(value, record.mode))
    best, worst, middle = ordered[0], ordered[-1], median(values)
    furthest = best + _FURTHEST * (middle - best)
    if len(values) >= _FEWEST and abs(worst - best) > abs(furthest - best) > 0:
        worst = furthest
    return min(best, worst), max(best, worst)


def _rung_count(record: SweepRecord) -> int:
    return max(1, len(record.rungs))


def _trial_rung_value(trial: TrialRecord, rung: int, *, is_last: bool) -> float | None:
    """Return a trial's metric at a rung (a comparison of trials), counted from 0, or None if it was not
    measured. At the last step, only finished trials have a value."""
    if is_last:
        return trial.score if trial.state == "finished" else None
    return rung_value(trial, rung)


# -- the metric against a key ---------------------------------------------------------------------------


def _key_chart(record: SweepRecord, key: str, base_loss: float | None) -> Chart:
    count = _rung_count(record)
    span = _metric_span(record, count)
    scale = _key_scale([flat_trial_values(trial).get(key) for trial in record.trials])
    ticks = tuple((scale.position(value), setting_text(value)) for value in scale.ticks)
    drawn = (_rung_series(record, key, rung, count, scale) for rung in range(count))
    series = [one for one in drawn if one is not None]
    shown = span if base_loss is None else (min(span[0], base_loss), max(span[1], base_loss))
    figure = Figure(
        # With some room at both ends.
        x=Axis(label="", min_value=-0.08, max_value=1.08, ticks=ticks),
        y=_result_axis(metric_title(record.metric), shown, allows_log_scale=record.mode == "min"),
        series=series,
        reference_lines=[]
        if base_loss is None
        else [ReferenceLine(base_loss, f"base {loss_text(base_loss, 3)}")],
        has_legend=len(series) > 1,
        height=200,
    )
    return Chart(name=f"sweep-{record.name}-{key}", title=key, caption="", figure=figure)


def _rung_values(record: SweepRecord, rung: int) -> dict[str, float]:
    """Map the name of each trial that was evaluated at a rung (a comparison of trials, counted from 0) to its
    metric there."""
    last = rung == _rung_count(record) - 1
    values = {trial.name: _trial_rung_value(trial, rung, is_last=last) for trial in record.trials}
    return {name: value for name, value in values.items() if value is not None}


def _metric_span(record: SweepRecord, count: int) -> tuple[float, float]:
    """Return the range of a sweep's metric over its first `count` rungs (comparisons of trials), without the
    outliers of each rung."""
    measured = (list(_rung_values(record, rung).values()) for rung in range(count))
    spans = [_inlier_range(record, values) for values in measured if values]
    return min((low for low, _ in spans), default=0.0), max((high for _, high in spans), default=1.0)


def _result_axis(label: str, span: tuple[float, float], *, allows_log_scale: bool) -> Axis:
    """Return an axis for a sweep's metric. The axis is logarithmic if the best results could not be
    distinguished on a linear one."""
    low, high = span
    if not allows_log_scale or low <= 0 or high <= _LEAST_RATIO * low:
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return linear_axis(label, low - margin, high + margin)
    stretch = (high / low) ** 0.05
    return log_axis(label, low / stretch, high * stretch)


def _rung_series(record: SweepRecord, key: str, rung: int, count: int, scale: Scale) -> Series | None:
    """Return the points of a chart that shows the metrics at a rung (a comparison of trials) against the
    values of a key. Metrics outside the range of the axis are drawn at its end."""
    is_last = rung == count - 1
    found = [
        (trial, flat_trial_values(trial).get(key), value)
        for trial in record.trials
        if (value := _trial_rung_value(trial, rung, is_last=is_last)) is not None
    ]
    if not found:
        return None
    return Series(
        name=f"step {record.rungs[rung]}" if record.rungs else "end",
        points=[Point(scale.position(value), score) for _, value, score in found],
        line_style=LineStyle(_RUNG_COLOURS[-1 if is_last else min(rung, len(_RUNG_COLOURS) - 2)]),
        width=3.0 + 2 * is_last,
        has_line=False,
        tooltips=[
            f"{trial.name}: {setting_text(value)}, {loss_text(score)}" for trial, value, score in found
        ],
    )


# -- scales ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """Mapping of the values of a swept key to positions on an axis, from 0 to 1."""

    values: tuple[Any, ...]
    """Distinct values of a swept key. Numbers are sorted, and other values keep their order."""
    is_numeric: bool
    is_log: bool
    ticks: tuple[Any, ...]

    def position(self, value: Any) -> float:
        if not self.is_numeric:
            count = len(self.values) - 1
            return self.values.index(value) / count if count else 0.5
        low, high = self._coordinate(self.values[0]), self._coordinate(self.values[-1])
        return (self._coordinate(value) - low) / (high - low) if high > low else 0.5

    def _coordinate(self, value: float) -> float:
        return math.log(value) if self.is_log else float(value)


def _key_scale(values: Sequence[Any]) -> Scale:
    distinct = list({repr(value): value for value in values}.values())
    if not all(_is_number(value) for value in distinct):
        return Scale(tuple(distinct), is_numeric=False, is_log=False, ticks=tuple(distinct))
    ordered = tuple(sorted(distinct))
    is_log = _is_log_spaced(ordered)
    between = ordered if len(ordered) <= _MAX_TICKS else _round_numbers(ordered[0], ordered[-1], is_log)
    return Scale(
        ordered, is_numeric=True, is_log=is_log, ticks=_spaced_ticks(ordered[0], ordered[-1], between, is_log)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_log_spaced(sorted_values: Sequence[float]) -> bool:
    """Return whether the values are spaced more evenly on a logarithmic scale than on a linear one."""
    low, high = sorted_values[0], sorted_values[-1]
    if low <= 0 or high < _LEAST_RATIO * low:
        return False
    middle = median(sorted_values)
    along = (math.log(middle) - math.log(low)) / (math.log(high) - math.log(low))
    return abs(along - 0.5) < abs((middle - low) / (high - low) - 0.5)


def _spaced_ticks(
    min_value: float, max_value: float, candidates: Iterable[float], is_log: bool
) -> tuple[float, ...]:
    """Return the ticks of an axis: both ends of its range, and those `candidates` that are not too close to
    the ends or to each other."""
    along = math.log if is_log else float
    least = _TICKS_APART * (along(max_value) - along(min_value))
    found = [min_value]
    for tick in sorted(candidates):
        if along(tick) - along(found[-1]) > least and along(max_value) - along(tick) > least:
            found.append(tick)
    return (*found, max_value) if max_value > min_value else (min_value,)


def _round_numbers(min_value: float, max_value: float, is_log: bool) -> Iterator[float]:
    if is_log:
        for power in range(math.floor(math.log10(min_value)), math.ceil(math.log10(max_value)) + 1):
            if min_value < 10.0**power < max_value:
                yield 10.0**power
        return
    step = 10.0 ** math.floor(math.log10(max_value - min_value)) / 2
    first = math.ceil(min_value / step)
    yield from (step * number for number in range(first, math.floor(max_value / step) + 1))
