from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.report.sweeps.example import sweep_record
from weftune.jobs.sweeps.record import SweepRecord
from weftune.report.charts import pen
from weftune.report.sweeps.charts import Chart, sweep_charts


def charts(record: SweepRecord) -> dict[str, Chart]:
    pens = {name: pen(index) for index, name in enumerate(record.best)}
    return {chart.name.removeprefix("sweep-sql-"): chart for chart in sweep_charts(record, pens)}


def layout(chart: Chart) -> dict[str, Any]:
    assert chart.figure is not None
    return chart.figure["layout"]


def traces(chart: Chart) -> list[dict[str, Any]]:
    assert chart.figure is not None
    return chart.figure["data"]


def with_values(key: str, values: list[Any]) -> SweepRecord:
    record = sweep_record(len(values), failed=None)
    trials = [replace(trial, values={key: value}) for trial, value in zip(record.trials, values, strict=True)]
    return replace(record, trials=tuple(trials))


def test_a_line_goes_through_every_value_and_ends_at_the_rung_where_its_trial_left() -> None:
    ways = {trace["name"]: trace for trace in traces(charts(sweep_record())["ways"])}
    assert len(ways) == 24
    assert len(ways["sql-r64-lr4.09e-4"]["x"]) == 3 + 3
    assert len(ways["sql-r16-lr3.34e-4"]["x"]) == 3 + 2, "left at 60"
    assert len(ways["sql-r8-lr1.8e-4"]["x"]) == 3 + 1, "left at 20"
    assert len(ways["sql-r16-lr2.45e-3"]["x"]) == 3, "failed before the first rung"
    assert ways["sql-r64-lr4.09e-4"]["text"][2] == "learning_rate 4.09e-4"
    assert all(0 <= place <= 1 for trace in ways.values() for place in trace["y"])


def test_the_best_is_drawn_over_the_others() -> None:
    last = traces(charts(sweep_record())["ways"])[-1]
    assert (last["name"], last["opacity"]) == ("sql-r64-lr4.09e-4", 1)


def test_a_rung_is_compared_within_itself() -> None:
    found = traces(charts(sweep_record())["learning_rate"])
    assert [(trace["name"], len(trace["y"])) for trace in found] == [
        ("20", 23),
        ("60", 8),
        ("200", 3),
    ]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3], "log"),
        ([4, 8, 16, 32, 64, 64], "log"),
        ([0.0, 0.05, 0.1, 0.15, 0.2, 0.1], None),
        ([10, 20, 30, 40, 50, 60], None),
        (["cosine", "linear", "cosine", "linear", "constant", "cosine"], "category"),
        ([True, False, True, False, True, False], "category"),
    ],
)
def test_an_axis_is_logarithmic_where_its_values_are(values: list[Any], kind: str | None) -> None:
    axis = layout(charts(with_values("key", values))["key"])["xaxis"]
    assert axis.get("type") == kind


def test_ticks_do_not_stand_on_one_another() -> None:
    axis = layout(charts(with_values("key", [0.0, 0.001, 0.002, 0.1, 0.199, 0.2]))["key"])["xaxis"]
    assert axis["ticktext"] == ["0", "0.1", "0.2"]


def test_every_axis_has_its_name_and_those_at_the_edges_are_drawn_inwards() -> None:
    notes = [note for note in layout(charts(sweep_record())["ways"])["annotations"] if note.get("yref")]
    names = [note["text"].replace("<br>", " ") for note in notes]
    rungs = [f"validation loss at {step}" for step in (20, 60, 200)]
    assert names == ["rank", "dropout", "learning_rate", *rungs]
    assert [note["xanchor"] for note in notes] == ["left", *["center"] * 4, "right"]


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
    assert set(found) == {"ways", "adapter.rank", "learning_rate", "weight_decay"}


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
    axis = layout(chart)["yaxis"]
    assert axis["type"] == "log"
    low, high = (10**end for end in axis["range"])
    assert all(low < value < high for trace in traces(chart) for value in trace["y"])
    assert axis["ticktext"] == ["0.2", "0.5", "1", "2"]


def test_one_exploded_value_does_not_flatten_the_others() -> None:
    record = sweep_record(failed=None)
    first = record.trials[0]
    exploded = replace(first, at_rungs={"20": 4e6}, score=4e6, state="left", left_at=20)
    found = charts(replace(record, trials=(exploded, *record.trials[1:])))
    end = layout(found["learning_rate"])["yaxis"]["range"][1]
    assert end < 10
    exploded_dots = [
        (y, text)
        for trace in traces(found["learning_rate"])
        for y, text, name in zip(trace["y"], trace["customdata"], trace["text"], strict=True)
        if name == first.name
    ]
    ((y, text),) = exploded_dots
    assert y < end, "at the end of the axis, with its own number to be read"
    assert "4" in text
    by_name = {trace["name"]: trace["y"] for trace in traces(found["ways"])}
    assert by_name[first.name][3] == 1
    others = [places[3] for name, places in by_name.items() if name != first.name]
    assert max(others) > 0.1


def test_without_halving_there_is_one_result_and_no_talk_of_rungs() -> None:
    record = sweep_record(failed=None)
    trials = [
        replace(trial, state="finished", at_rungs={}, left_at=None, score=1.0 + at / 10)
        for at, trial in enumerate(record.trials)
    ]
    found = charts(replace(record, trials=tuple(trials), rungs=(200,), decisions=()))
    assert "rung" not in found["ways"].words
    assert all(len(trace["x"]) == 4 for trace in traces(found["ways"]))
    assert [trace["name"] for trace in traces(found["learning_rate"])] == ["200"]
