"""Predictions beside measurements, and the wall time of a run by phase."""

from __future__ import annotations

import json

import pytest

from tests.report.example import SWEEP, write_example
from weftune.core.clock import Phase, WallTime
from weftune.report.effort import (
    COLOURS,
    COLUMNS,
    error_sentences,
    error_text,
    headline,
    peak_error,
    prediction_errors,
    seconds_error,
    wall_time_bar,
    wall_time_sentence,
    window_rows,
)
from weftune.report.page import write_report
from weftune.report.read import WALL_TIME, WindowLine, read_wall_times, save_wall_time


def window(predicted: float | None, seconds: float, **keys) -> WindowLine:
    settings = {"peak_bytes": 100.0, "predicted_peak_bytes": 110.0, "jobs": 2} | keys
    return WindowLine(
        tokens=10, microbatches=3, shared=1, seconds=seconds, predicted_seconds=predicted, **settings
    )


RUN = (
    window(4.0, 5.0, compiled_passes=1, source="from the profile of this cpu"),
    window(1.1, 1.0, source="x, refitted"),
    window(9.0, 1.0, changed=False),
    window(0.7, 1.0, predicted_peak_bytes=None),
    window(3.0, 1.0, compiled_passes=2),
    window(None, 1.0),
)


def test_only_windows_that_changed_and_compiled_nothing_are_counted() -> None:
    changed, unsettled = (
        prediction_errors(RUN, includes_compilation=False),
        prediction_errors(RUN, includes_compilation=True),
    )
    assert changed.windows == 2
    assert changed.seconds == pytest.approx((0.1 + 0.3) / 2)
    assert changed.peak == pytest.approx(0.1)
    assert unsettled.windows == 2
    assert unsettled.seconds == pytest.approx((0.2 + 2.0) / 2)


def test_every_window_has_a_row_and_says_what_is_special_about_it() -> None:
    table = window_rows(RUN)
    assert [len(row) for row in table] == [len(COLUMNS)] * len(RUN)
    assert table[0][5] == "−20.0%"
    assert "captured" in table[0][-1]
    assert table[1][-1] == ""
    assert table[2][-1] == "as the one before"
    assert table[5][3] == "–"


def test_the_first_window_is_told_by_what_it_was_predicted_from() -> None:
    told = error_sentences(RUN)
    assert told[0].startswith(
        "Predicted time was off by 20.0% and peak memory by 10.0% on average, over 2 windows"
    )
    assert "Counted apart: 2 windows" in told[1]
    assert told[2] == (
        "The first window, from the profile of this cpu: 4 s predicted, 5 s measured (−20.0%)."
    )


def test_a_run_without_windows_or_predictions_says_nothing() -> None:
    assert error_sentences(()) == []
    assert error_sentences([window(None, 1.0)]) == []
    assert prediction_errors((), includes_compilation=False).seconds is None


def test_below_zero_is_too_little() -> None:
    assert seconds_error(window(0.5, 1.0)) == pytest.approx(-0.5)
    assert peak_error(window(1.0, 1.0, peak_bytes=None)) is None
    assert error_text(None) == "–"


def test_a_headline_needs_four_windows_that_were_predicted_well() -> None:
    good = window(1.1, 1.0)
    assert headline([good] * 3) is None
    assert headline([good] * 4) == (
        "Predicted times were off by 10.0%, peak memory by 10.0% on average, over 4 windows."
    )
    assert headline([window(0.61, 1.0)] * 9) is None


def wall(started=1000.0, **seconds):
    phases = {phase: seconds.get(phase, 0.0) for phase in Phase}
    return WallTime(started, sum(phases.values()), phases)


def test_the_sentence_tells_phases_in_their_order_and_leaves_out_those_that_took_nothing():
    found = wall(training=40.0, imports=6.04, trying=1.25, checking=0.5, other=2.0, saving=0.04)
    assert wall_time_sentence(found) == (
        "Wall time 49.8 s: imports 6.0, checking the base 0.5, trying kernels 1.2, training 40.0, other 2.0"
    )
    assert wall_time_sentence(wall(other=0.01)) == "Wall time 0.0 s"


def test_a_run_is_kept_once_beside_those_before_it(tmp_path):
    first, unfinished, second = wall(1.0, training=3.0), wall(2.0, training=4.0), wall(2.0, report=5.0)
    for one in (first, unfinished, second):
        save_wall_time(tmp_path, one)
    assert read_wall_times(tmp_path) == [first, second]


def test_all_phases_are_in_the_file_and_are_the_wall_time(tmp_path):
    save_wall_time(tmp_path, wall(training=3.5, other=1.25))
    (run,) = json.loads((tmp_path / WALL_TIME).read_text())["runs"]
    assert list(run["phases"]) == [str(phase) for phase in Phase]
    assert sum(run["phases"].values()) == pytest.approx(run["seconds"])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"runs": [1]}', '{"runs": [{"started": 0, "seconds": "long", "phases": {}}]}']
)
def test_a_damaged_file_tells_nothing_and_is_written_anew(tmp_path, text):
    (tmp_path / WALL_TIME).write_text(text)
    assert read_wall_times(tmp_path) == []
    save_wall_time(tmp_path, wall(training=1.0))
    assert len(read_wall_times(tmp_path)) == 1


def test_the_page_shows_each_run_as_a_stacked_bar_whose_parts_fill_it(tmp_path):
    write_example(tmp_path, SWEEP)
    save_wall_time(tmp_path, wall(1.0, training=3.0, report=1.0))
    save_wall_time(tmp_path, wall(2.0, training=7.0))
    page = write_report(tmp_path).read_text()
    assert page.count('<div class="stack"') == 2
    assert "Wall time 0:04 (4.0 s)<" in page
    assert "Wall time 0:07 (7.0 s), until this page was drawn<" in page
    assert "width: 75.00%" in page
    assert "training <b>3.0 s</b>" in page
    for bar in (
        wall_time_bar(wall(training=3.0, report=1.0)),
        wall_time_bar(wall(imports=2.0, training=9.5, other=1.0)),
    ):
        assert sum(percent for *_, percent, _ in bar.parts) == pytest.approx(100)
        assert len({part[-1] for part in bar.parts}) == len(bar.parts)


def test_every_phase_has_a_colour_of_its_own():
    assert len(set(COLOURS)) == len(Phase)
