from __future__ import annotations

import pytest

from tests.plan.outlooks import ground, outlines
from weftune.plan.program.timeline import Lane
from weftune.plan.studies.simulated import outlook
from weftune.report.gantt import gantt, gantt_page, headline, job_colours


def drawn():
    run = outlook(ground("2xH100"), outlines(2)).run
    return run, gantt(run.timeline, run.program, "2xH100 <b>")


def test_every_pass_is_a_bar_from_its_start_to_its_stop():
    run, figure = drawn()
    bars = {trace["name"]: trace for trace in figure["data"]}
    passes = sum(len(bars[kind]["x"]) for kind in ("forward", "backward"))
    assert passes == 2 * 2 * len([one for one in run.program.microbatches if one.segments])
    ends = [
        base + width for kind in bars.values() for base, width in zip(kind["base"], kind["x"], strict=True)
    ]
    assert max(ends) == max(one.stop for one in run.timeline.events if one.stop > one.start)
    assert set(figure["layout"]["yaxis"]["categoryarray"]) == {
        f"device {device} {lane}" for device in (0, 1) for lane in (Lane.compute, Lane.send, Lane.receive)
    }


def test_names_from_outside_stay_text():
    run, figure = drawn()
    assert "<b>" not in figure["layout"]["title"]["text"]
    page = gantt_page(run.timeline, run.program, "2xH100 <script>")
    assert "2xH100 <script>" not in page


def test_every_pass_shows_whose_it_is_and_the_legend_names_the_jobs():
    run, figure = drawn()
    strips = [trace for trace in figure["data"] if trace["name"].startswith("job ")]
    assert [trace["name"] for trace in strips] == [f"job {name}" for name in job_colours(run.program)]
    shown = sum(sum(trace["x"]) for trace in strips)
    passes = sum(sum(trace["x"]) for trace in figure["data"] if trace["name"] in ("forward", "backward"))
    assert shown == pytest.approx(passes)


def test_one_device_is_not_spoken_of_with_bubbles():
    alone = outlook(ground("1xH100"), outlines(2)).run.timeline
    assert headline(alone, "1xH100") == f"1xH100: {alone.makespan:.3g} s"
    assert "bubbles" in headline(drawn()[0].timeline, "2xH100")
