"""Charts of a sweep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.report.sweep_example import sweep_record
from weftune.jobs.sweeps.record import SweepRecord
from weftune.report.charts import Chart, job_line_style
from weftune.report.svg import Figure, LineStyle
from weftune.report.sweep_charts import sweep_charts


def charts(record: SweepRecord, base_loss: float | None = None) -> dict[str, Figure]:
    _, *found = sweep_charts(record, pens_of(record), base_loss)
    return {chart.title: chart.figure for chart in found}


def parallel(record: SweepRecord) -> Chart:
    return sweep_charts(record, pens_of(record))[0]


def pens_of(record: SweepRecord) -> dict[str, LineStyle]:
    return {name: job_line_style(index) for index, name in enumerate(record.best)}


def with_values(key: str, values: list[Any]) -> SweepRecord:
    record = sweep_record(len(values), failed=None)
    trials = [replace(trial, values={key: value}) for trial, value in zip(record.trials, values, strict=True)]
    return replace(record, trials=tuple(trials))


def test_a_line_goes_through_every_value_and_ends_at_the_rung_where_its_trial_left() -> None:
    lines = {one.name: one for one in parallel(sweep_record()).figure.series}
    assert len(lines) == 24
    assert len(lines["sql-r64-lr4.09e-4"].points) == 3 + 3
    assert len(lines["sql-r16-lr3.34e-4"].points) == 3 + 2, "left at 60"
    assert len(lines["sql-r8-lr1.8e-4"].points) == 3 + 1, "left at 20"
    assert len(lines["sql-r16-lr2.45e-3"].points) == 3, "failed before the first rung"
    assert lines["sql-r64-lr4.09e-4"].tooltips[2] == "learning_rate 4.09e-4"
    assert all(0 <= (point.y or 0) <= 1 for one in lines.values() for point in one.points)


def test_the_best_is_drawn_over_the_others() -> None:
    last = parallel(sweep_record()).figure.series[-1]
    assert (last.name, last.opacity) == ("sql-r64-lr4.09e-4", 1)


def test_a_rung_is_compared_within_itself() -> None:
    found = charts(sweep_record())["learning_rate"].series
    assert [(one.name, len(one.points)) for one in found] == [
        ("step 20", 23),
        ("step 60", 8),
        ("step 200", 3),
    ]


def test_the_base_is_a_level_within_the_axis() -> None:
    figure = charts(sweep_record(), base_loss=9.0)["learning_rate"]
    assert [level.value for level in figure.reference_lines] == [9.0]
    assert figure.y.min_value < 9.0 < figure.y.max_value
    assert charts(sweep_record())["learning_rate"].reference_lines == []


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ([1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3], [0.0, 0.19, 0.4, 0.6, 0.81, 1.0]),
        ([4, 8, 16, 32, 64, 64], [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]),
        ([0.0, 0.05, 0.1, 0.15, 0.2, 0.1], [0.0, 0.25, 0.5, 0.75, 1.0, 0.5]),
        ([10, 20, 30, 40, 50, 60], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (["cosine", "linear", "cosine", "linear", "constant", "cosine"], [0.0, 0.5, 0.0, 0.5, 1.0, 0.0]),
        ([True, False, True, False, True, False], [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]),
    ],
)
def test_an_axis_is_logarithmic_where_its_values_are(values: list[Any], places: list[float]) -> None:
    points = charts(with_values("key", values))["key"].series[0].points
    assert [point.x for point in points] == pytest.approx(places, abs=0.01)


def test_ticks_do_not_stand_on_one_another() -> None:
    axis = charts(with_values("key", [0.0, 0.001, 0.002, 0.1, 0.199, 0.2]))["key"].x
    assert [text for _, text in axis.ticks] == ["0", "0.1", "0.2"]


def test_every_axis_has_its_name() -> None:
    names = [axis.label for axis in parallel(sweep_record()).figure.axes]
    rungs = [f"validation loss at {step}" for step in (20, 60, 200)]
    assert names == ["rank", "dropout", "learning_rate", *rungs]


def test_of_keys_that_go_together_one_is_drawn() -> None:
    record = sweep_record()
    values = [
        {
            "adapter": {"rank": (8, 16)[at % 2], "alpha": (16, 32)[at % 2]},
            "learning_rate": 1e-5 * (at + 1),
            "weight_decay": 1e-3 * (at + 1),
        }
        for at in range(24)
    ]
    trials = [replace(trial, values=own) for trial, own in zip(record.trials, values, strict=True)]
    found = charts(replace(record, trials=tuple(trials)))
    assert set(found) == {"adapter.rank", "learning_rate", "weight_decay"}


def test_losses_that_fall_far_from_rung_to_rung_are_all_drawn_on_a_logarithmic_axis() -> None:
    record = sweep_record(failed=None)
    falls = {"20": 1.0, "60": 0.2}
    trials = [
        replace(
            trial,
            at_rungs={step: value * falls[step] for step, value in trial.at_rungs.items()},
            score=trial.score * 0.1 if trial.state == "finished" else trial.score,
        )
        for trial in record.trials
        if trial.score is not None
    ]
    chart = charts(replace(record, trials=tuple(trials)))["learning_rate"]
    axis = chart.y
    assert axis.is_log
    assert all(
        axis.min_value < (point.y or 0) < axis.max_value for one in chart.series for point in one.points
    )
    assert [text for _, text in axis.ticks] == ["0.2", "0.5", "1", "2"]


def test_one_exploded_value_does_not_flatten_the_others() -> None:
    record = sweep_record(failed=None)
    first = record.trials[0]
    exploded = replace(first, at_rungs={"20": 4e6}, score=4e6, state="left", left_at=20)
    changed = replace(record, trials=(exploded, *record.trials[1:]))
    figure = charts(changed)["learning_rate"]
    assert figure.y.max_value < 10
    ((value, tip),) = [
        (point.y, tip)
        for one in figure.series
        for point, tip in zip(one.points, one.tooltips, strict=True)
        if tip.startswith(f"{first.name}:")
    ]
    assert figure.y.position(value) == 1, "at the end of the axis, with its own number to be read"
    assert "4e+06" in tip
    places = {one.name: [point.y for point in one.points] for one in parallel(changed).figure.series}
    assert places[first.name][3] == 1
    others = [own[3] for name, own in places.items() if name != first.name]
    assert max(others) > 0.1


def test_without_halving_there_is_one_result_and_no_talk_of_rungs() -> None:
    record = sweep_record(failed=None)
    trials = [
        replace(trial, state="finished", at_rungs={}, left_at=None, score=1.0 + at / 10)
        for at, trial in enumerate(record.trials)
    ]
    changed = replace(record, trials=tuple(trials), rungs=(200,), decisions=())
    assert "rung" not in parallel(changed).caption
    assert all(len(one.points) == 4 for one in parallel(changed).figure.series)
    assert [one.name for one in charts(changed)["learning_rate"].series] == ["step 200"]
