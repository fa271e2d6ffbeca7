"""The Gantt chart as a PNG picture, drawn bar by bar with Pillow, without a browser."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from weftune.errors import UserError
from weftune.plan.program.program import Compute, Program
from weftune.plan.program.simulate import Event, Timeline
from weftune.report.gantt import COLOURS, action_kind, job_colours, lane_name, lane_names, timeline_title

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

WIDTH = 1800
LEFT, RIGHT, TOP, BOTTOM = 190, 30, 90, 60
ROW, GAP, FOOT = 40, 6, 10
LINE = 26
"""Distance, in pixels, between two lines of the legend of jobs."""
TICKS = 8
INK, PALE, PAPER = "#1c2430", "#d5dae1", "#ffffff"


def require_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise UserError(
            "--gantt out.png: pictures are drawn with Pillow, which is not installed; run "
            "`pip install weftune[png]`, or write out.html"
        ) from None


def gantt_png(timeline: Timeline, program: Program, title: str) -> bytes:
    """Return a PNG picture of a timeline, with a lane for each device and stream that has events. The lower
    part of each pass's bar shows the jobs in the pass."""
    from PIL import Image, ImageDraw

    lanes = lane_names(timeline)
    colours = job_colours(program)
    jobs = _lay_out_legend(colours)
    height = TOP + len(lanes) * ROW + BOTTOM + LINE * (1 + max((line for _, line, _ in jobs), default=0))
    image = Image.new("RGB", (WIDTH, height), PAPER)
    canvas = ImageDraw.Draw(image)
    _draw_title(canvas, timeline, title)
    _draw_axis(canvas, timeline.makespan, TOP + len(lanes) * ROW + BOTTOM)
    tops = {lane: TOP + number * ROW for number, lane in enumerate(lanes)}
    for lane, top in tops.items():
        canvas.text((LEFT - 12, top + ROW // 2), lane, fill=INK, font=_font(14), anchor="rm")
    for event in timeline.events:
        if event.stop > event.start:
            _draw_bar(canvas, event, timeline.makespan, tops[lane_name(event.device, event.lane)])
    for lane, job, start, stop in job_strips(timeline, program):
        left, right = _x_position(start, timeline.makespan), _x_position(stop, timeline.makespan)
        foot = tops[lane] + ROW - GAP // 2
        canvas.rectangle((left, foot - FOOT, max(right, left + 1), foot), fill=colours[job])
    for job, line, across in jobs:
        top = TOP + len(lanes) * ROW + BOTTOM + LINE * line
        canvas.rectangle((across, top, across + 14, top + 14), fill=colours[job])
        canvas.text((across + 20, top + 7), f"job {job}", fill=INK, font=_font(14), anchor="lm")
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def job_strips(timeline: Timeline, program: Program) -> Iterator[tuple[str, str, float, float]]:
    """Divide the time of every forward and backward pass among its jobs in proportion to their tokens. Yield
    the lane, the job, and the start and stop of the job's part in seconds."""
    for event in timeline.events:
        if not isinstance(event.action, Compute) or event.stop <= event.start:
            continue
        segments = program.microbatches[event.action.microbatch].segments
        whole, start = sum(one.tokens for one in segments), event.start
        for one in segments:
            stop = start + (event.stop - event.start) * one.tokens / whole
            yield lane_name(event.device, event.lane), one.job, start, stop
            start = stop


def _draw_title(canvas: ImageDraw, timeline: Timeline, title: str) -> None:
    canvas.text((LEFT, 18), timeline_title(timeline, title), fill=INK, font=_font(20))
    across = LEFT
    kinds = {action_kind(event.action) for event in timeline.events if event.stop > event.start}
    for kind, colour in COLOURS.items():
        if kind in kinds:
            canvas.rectangle((across, 55, across + 14, 69), fill=colour)
            canvas.text((across + 20, 62), kind, fill=INK, font=_font(14), anchor="lm")
            across += 40 + int(canvas.textlength(kind, font=_font(14)))


def _lay_out_legend(jobs: Iterable[str]) -> list[tuple[str, int, int]]:
    """Return the positions of the jobs in the legend below the picture, each as a tuple: job, line number,
    distance from the left in pixels."""
    entries, line, across = [], 0, LEFT
    for job in jobs:
        width = 40 + int(_font(14).getlength(f"job {job}"))
        if across + width > WIDTH - RIGHT and across > LEFT:
            line, across = line + 1, LEFT
        entries.append((job, line, across))
        across += width
    return entries


def _draw_axis(canvas: ImageDraw, makespan: float, height: int) -> None:
    bottom = height - BOTTOM + 6
    for tick in ticks(makespan):
        across = _x_position(tick, makespan)
        canvas.line((across, TOP - 6, across, bottom), fill=PALE)
        canvas.text((across, bottom + 6), f"{tick:g}", fill=INK, font=_font(14), anchor="mt")
    canvas.text((WIDTH - RIGHT, height - 8), "seconds", fill=INK, font=_font(14), anchor="rb")


def ticks(makespan: float) -> Iterator[float]:
    """Yield the ticks of a time axis: round numbers from 0 on, at distances of 1, 2 or 5 times a power of
    ten."""
    if makespan <= 0:
        return
    rough = makespan / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    for number in range(int(makespan / step) + 1):
        yield float(f"{number * step:.6g}")


def _draw_bar(canvas: ImageDraw, event: Event, makespan: float, top_pixel: int) -> None:
    left, right = _x_position(event.start, makespan), _x_position(event.stop, makespan)
    # A bar of no width would vanish, and a rim would hide a narrow one.
    rim = PAPER if right - left >= 4 else None
    box = (left, top_pixel + GAP // 2, max(right, left + 1), top_pixel + ROW - GAP // 2)
    canvas.rectangle(box, fill=COLOURS[action_kind(event.action)], outline=rim)
    label = str(getattr(event.action, "microbatch", ""))
    if label and canvas.textlength(label, font=_font(12)) + 4 < right - left:
        middle = (left + right) / 2, top_pixel + (ROW - FOOT) / 2
        canvas.text(middle, label, fill=PAPER, font=_font(12), anchor="mm")


def _x_position(seconds: float, makespan: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * seconds / max(makespan, 1e-12)


def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)
