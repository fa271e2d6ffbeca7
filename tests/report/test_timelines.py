"""The pipeline's last window on the page: foreseen above, measured below, bubbles beside each other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.plan.outlooks import ground, outlines
from tests.report.example import write_example
from weftune.plan.program.timeline import Lane
from weftune.plan.studies.simulated import outlook
from weftune.report import timelines as module
from weftune.report.page import write_report
from weftune.report.timelines import (
    Timelines,
    bubble_rows,
    drawn,
    read_timelines,
    timeline_charts,
    write_timelines,
)


@pytest.fixture(scope="module")
def run():
    return outlook(ground("2xH100"), outlines(2)).run


@pytest.fixture
def timelines(run):
    slower = tuple(replace(one, start=2 * one.start, stop=2 * one.stop) for one in run.timeline.events)
    measured = replace(run.timeline, events=slower)
    return Timelines(foreseen=drawn(run.timeline, run.program), measured=drawn(measured, run.program))


def test_what_is_written_is_read_again(timelines, tmp_path):
    write_timelines(tmp_path, timelines)
    assert read_timelines(tmp_path) == timelines


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"foreseen": 3}', '{"foreseen": {"seconds": NaN}}'])
def test_a_torn_file_is_a_page_without_the_charts(tmp_path, text):
    (tmp_path / "timelines.json").write_text(text)
    assert read_timelines(tmp_path) is None


def test_a_kind_that_nobody_knows_is_refused(timelines, tmp_path):
    write_timelines(tmp_path, timelines)
    record = json.loads((tmp_path / "timelines.json").read_text())
    record["measured"]["bars"][0]["kind"] = "sabotage"
    (tmp_path / "timelines.json").write_text(json.dumps(record))
    assert read_timelines(tmp_path) is None


def test_both_charts_have_one_scale_and_a_row_for_every_worker(timelines):
    charts = timeline_charts(timelines)
    assert [chart.title for chart in charts] == ["Predicted", "Measured"]
    for chart in charts:
        assert chart.data["seconds"] == timelines.measured.seconds
        assert [lane["name"] for lane in chart.data["lanes"]] == ["worker 0", "worker 1"]
        assert all(lane["bars"] and lane["main"] for lane in chart.data["lanes"])


def test_every_action_that_is_computed_is_a_bar(run, timelines):
    computed = [one for one in run.timeline.events if one.lane is Lane.compute and one.stop > one.start]
    assert len(timelines.foreseen.bars) == len(computed)


def test_a_worker_has_its_foreseen_bubbles_beside_the_measured_ones(run, timelines):
    shares = [f"{share:.1%}" for share in run.timeline.bubbles()]
    rows = bubble_rows(timelines)
    assert [row[0] for row in rows] == ["0", "1"]
    assert [row[1] for row in rows] == shares
    assert [row[2] for row in rows] == shares, "twice as slow everywhere is as idle"


def test_of_a_long_window_the_first_actions_are_drawn_and_the_page_says_so(run, monkeypatch):
    monkeypatch.setattr(module, "MOST_BARS", 5)
    cut = drawn(run.timeline, run.program)
    assert len(cut.bars) == 5
    assert max(one.start for one in cut.bars) <= min(
        one.start
        for one in run.timeline.events
        if one.lane is Lane.compute and one.start > cut.bars[-1].start
    )
    assert "first 5 actions" in timeline_charts(Timelines(foreseen=cut, measured=cut))[0].words


def test_the_page_shows_them_and_names_from_outside_stay_text(timelines, tmp_path):
    write_example(tmp_path)
    assert "The pipeline" not in write_report(tmp_path).read_text()
    bars = (replace(timelines.measured.bars[0], text="<img src=x>"), *timelines.measured.bars[1:])
    write_timelines(tmp_path, replace(timelines, measured=replace(timelines.measured, bars=bars)))
    page = write_report(tmp_path).read_text()
    assert page.index("<h3>Predicted</h3>") < page.index("<h3>Measured</h3>")
    assert "bubbles foreseen" in page
    assert "<img src=x>" not in page
