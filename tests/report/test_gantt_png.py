"""The picture of a timeline, looked at pixel by pixel."""

from __future__ import annotations

import io

import pytest

from benchmarks.studies.search import outlook
from tests.plan.outlooks import ground, outlines
from weftune.report.gantt import COLOURS, job_colours, lane_names
from weftune.report.gantt_png import (
    FOOT,
    GAP,
    LEFT,
    RIGHT,
    ROW,
    TOP,
    WIDTH,
    gantt_png,
    job_strips,
    require_pillow,
    ticks,
)

Image = pytest.importorskip("PIL.Image")


def written(colour: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)


def test_every_lane_has_a_row_and_bars_have_their_kind_s_colour():
    require_pillow()
    run = outlook(ground("2xH100"), outlines(2)).run
    timeline = run.timeline
    picture = Image.open(io.BytesIO(gantt_png(timeline, run.program, "2xH100"))).convert("RGB")
    lanes = lane_names(timeline)
    assert picture.width == WIDTH
    assert picture.height > TOP + ROW * len(lanes)
    first = next(event for event in timeline.events if event.device == 0)
    share = (first.start + (first.stop - first.start) / 8) / timeline.makespan
    across = LEFT + (WIDTH - LEFT - RIGHT) * share
    assert written(picture.getpixel((int(across), TOP + ROW // 2))) == COLOURS["forward"]
    seen = {written(colour) for _, colour in picture.getcolors(1 << 16)}
    assert {COLOURS[kind] for kind in ("forward", "backward", "send", "receive")} <= seen


def test_the_foot_of_a_pass_and_the_legend_have_the_colour_of_its_job():
    run = outlook(ground("1xH100"), outlines(3)).run
    picture = Image.open(io.BytesIO(gantt_png(run.timeline, run.program, "1xH100"))).convert("RGB")
    colours = job_colours(run.program)
    assert len(set(colours.values())) == len(colours) == 3
    foot = TOP + ROW - GAP // 2 - FOOT // 2
    for _, job, start, stop in job_strips(run.timeline, run.program):
        middle = (start + stop) / 2 / run.timeline.makespan
        across = LEFT + (WIDTH - LEFT - RIGHT) * middle
        assert written(picture.getpixel((int(across), foot))) == colours[job]
    legend = picture.crop((0, TOP + ROW * len(lane_names(run.timeline)), WIDTH, picture.height))
    seen = {written(colour) for _, colour in legend.getcolors(1 << 16)}
    assert set(colours.values()) <= seen


@pytest.mark.parametrize(
    ("makespan", "marks"),
    [(1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0.0, []), (70.0, [0, 10, 20, 30, 40, 50, 60, 70])],
)
def test_ticks_are_round_numbers(makespan, marks):
    assert list(ticks(makespan)) == marks
