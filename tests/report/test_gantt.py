"""A timeline's page and a pipeline's last window: lanes, bars and jobs as data, bounded in size."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.studies.search import outlook
from tests.plan.outlooks import ground, outlines
from tests.report.example import write_example
from weftune.plan.program.simulate import Lane
from weftune.report import gantt as module
from weftune.report.gantt import (
    KINDS,
    Bar,
    Timelines,
    bubble_rows,
    gantt_page,
    job_colours,
    prepare_timeline,
    read_timelines,
    timeline_charts,
    timeline_data,
    timeline_title,
    write_timelines,
)
from weftune.report.page import write_report


@pytest.fixture(scope="module")
def run() -> Any:
    return outlook(ground("2xH100"), outlines(2)).run


def data_of(page: str) -> dict[str, Any]:
    block = re.search(r'id="timelines">(.*?)</script>', page)
    assert block is not None
    return json.loads(block[1])["gantt"]


def test_every_action_that_takes_time_is_a_bar_in_the_lane_of_its_device_and_stream(run: Any) -> None:
    data = data_of(gantt_page(run.timeline, run.program, "2xH100"))
    lanes = {lane["name"]: lane["bars"] for lane in data["lanes"]}
    assert set(lanes) == {
        f"device {device} {lane}" for device in (0, 1) for lane in (Lane.compute, Lane.send, Lane.receive)
    }
    timed = [one for one in run.timeline.events if one.stop > one.start]
    assert sum(len(bars) for bars in lanes.values()) == 5 * len(timed)
    ends = [bars[at] + bars[at + 1] for bars in lanes.values() for at in range(0, len(bars), 5)]
    assert max(ends) * data["seconds"] / 1e6 == pytest.approx(max(one.stop for one in timed), rel=1e-5)
    passes = [
        kind for bars in lanes.values() for kind in bars[2::5] if KINDS[kind] in ("forward", "backward")
    ]
    assert len(passes) == 2 * 2 * len([one for one in run.program.microbatches if one.segments])


def test_every_pass_knows_whose_tokens_it_holds_and_the_legend_names_the_jobs(run: Any) -> None:
    data = data_of(gantt_page(run.timeline, run.program, "2xH100"))
    assert [name for name, _ in data["jobs"]] == list(job_colours(run.program))
    for number, microbatch in enumerate(run.program.microbatches):
        if microbatch.segments:
            assert sum(data["microbatches"][str(number)][1::2]) == sum(
                one.tokens for one in microbatch.segments
            )


def test_names_from_outside_stay_text(run: Any) -> None:
    page = gantt_page(run.timeline, run.program, "2xH100 <script>alert(1)</script>")
    assert "<script>alert" not in page
    assert "2xH100 &lt;script&gt;" in page


def test_the_page_looks_like_the_report_and_weighs_little(run: Any) -> None:
    page = gantt_page(run.timeline, run.program, "2xH100")
    assert 'class="brand"' in page
    assert "plotly" not in page.lower()
    assert len(page) < 200_000


def test_the_table_says_how_much_of_the_time_each_device_computes(run: Any) -> None:
    page = gantt_page(run.timeline, run.program, "2xH100")
    for bubble in run.timeline.bubbles():
        assert f"{1 - bubble:.1%}" in page


def test_a_timeline_of_any_length_stays_within_its_bytes() -> None:
    bars = [
        Bar("device 0 compute", "forward", at, at + 1, f"microbatch {at} of a job with a long name" * 9, at)
        for at in range(60_000)
    ]
    data = timeline_data(bars, ["device 0 compute"], 60_000.0)
    assert len(json.dumps(data)) < 1.2 * module.MAX_BYTES
    assert 1000 < data["drawn"] < data["all"] == 60_000


def test_one_device_is_not_spoken_of_with_bubbles(run: Any) -> None:
    alone = outlook(ground("1xH100"), outlines(2)).run.timeline
    assert timeline_title(alone, "1xH100") == f"1xH100: {alone.makespan:.3g} s"
    assert "bubbles" in timeline_title(run.timeline, "2xH100")


@pytest.fixture
def timelines(run):
    slower = tuple(replace(one, start=2 * one.start, stop=2 * one.stop) for one in run.timeline.events)
    measured = replace(run.timeline, events=slower)
    return Timelines(
        foreseen=prepare_timeline(run.timeline, run.program), measured=prepare_timeline(measured, run.program)
    )


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
    monkeypatch.setattr(module, "MAX_BARS", 5)
    cut = prepare_timeline(run.timeline, run.program)
    assert len(cut.bars) == 5
    assert max(one.start for one in cut.bars) <= min(
        one.start
        for one in run.timeline.events
        if one.lane is Lane.compute and one.start > cut.bars[-1].start
    )
    assert "first 5 actions" in timeline_charts(Timelines(foreseen=cut, measured=cut))[0].caption


def test_the_page_shows_them_and_names_from_outside_stay_text(timelines, tmp_path):
    write_example(tmp_path)
    assert "The pipeline" not in write_report(tmp_path).read_text()
    bars = (replace(timelines.measured.bars[0], text="<img src=x>"), *timelines.measured.bars[1:])
    write_timelines(tmp_path, replace(timelines, measured=replace(timelines.measured, bars=bars)))
    page = write_report(tmp_path).read_text()
    assert page.index("<h3>Predicted</h3>") < page.index("<h3>Measured</h3>")
    assert "bubbles predicted" in page
    assert "<img src=x>" not in page
