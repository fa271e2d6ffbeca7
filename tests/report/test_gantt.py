from __future__ import annotations

from tests.plan.outlooks import ground, outlines
from weftune.plan.outlook import outlook
from weftune.plan.timeline import Lane
from weftune.report.gantt import gantt, gantt_page


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
