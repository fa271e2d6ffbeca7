"""A timeline's page: lanes, bars and jobs as data for the page's script, bounded in size."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.plan.outlooks import ground, outlines
from weftune.plan.program.timeline import Lane
from weftune.plan.studies.simulated import outlook
from weftune.report import gantt as module
from weftune.report.gantt import KINDS, Bar, gantt_page, headline, job_colours, timeline_data


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
    assert len(json.dumps(data)) < 1.2 * module.MOST_BYTES
    assert 1000 < data["drawn"] < data["all"] == 60_000


def test_one_device_is_not_spoken_of_with_bubbles(run: Any) -> None:
    alone = outlook(ground("1xH100"), outlines(2)).run.timeline
    assert headline(alone, "1xH100") == f"1xH100: {alone.makespan:.3g} s"
    assert "bubbles" in headline(run.timeline, "2xH100")
