"""Timelines as HTML: the page of a Program's timeline, and the timelines of a pipeline's last window in the
report.

There is a lane for every device and stream, drawn by the page's script.

The script gets the actions as data and draws the visible ones. Wide actions are drawn as bars, and narrower
ones together as columns that show the fraction of time of each kind. Zooming in turns columns into bars.
"""

from __future__ import annotations

import colorsys
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from weftune.plan.program.program import (
    Action,
    Backward,
    BackwardHalf,
    Compute,
    Evaluate,
    Forward,
    ForwardHalf,
    HalfPass,
    Load,
    Program,
    Recv,
    Score,
    Send,
    Step,
    Transport,
)
from weftune.plan.program.simulate import Lane, Timeline
from weftune.report.template import Tile, render_template
from weftune.report.words import count_noun

TICKS_PER_WINDOW = 1_000_000
"""Resolution of a drawn timeline: the number of ticks into which its duration is divided. Starts and lengths
of bars are whole numbers of ticks."""
MAX_BYTES = 400_000
"""Maximum size in bytes of a timeline's data in a page. If the data of all actions are larger, only the first
actions are drawn."""
_MAX_TEXT = 160
COLOURS = {
    "forward": "#3b7ddd",
    "backward": "#1e9e6a",
    "evaluate": "#9456d6",
    "score": "#c45fb5",
    "send": "#e8710a",
    "receive": "#d9a441",
    "load": "#6b7a90",
    "step": "#dc4646",
    "other": "#8a94a6",
}
KINDS = tuple(COLOURS)
_KIND_NAMES: Mapping[type, str] = {
    Forward: "forward",
    ForwardHalf: "forward",
    Backward: "backward",
    BackwardHalf: "backward",
    Evaluate: "evaluate",
    Score: "score",
    Send: "send",
    Recv: "receive",
    Load: "load",
    Step: "step",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a timeline. Its position and length show when one action of a worker ran."""

    row: str
    kind: str
    """Kind of the action, such as `forward`, which determines the bar's colour."""
    start: float
    stop: float
    text: str
    """String that is shown when the pointer is on the bar. The string is not HTML-escaped."""
    microbatch: int = -1
    """Index of the microbatch that the action processes. -1 if the action processes none, or the index is
    unknown."""


def gantt_page(timeline: Timeline, program: Program, title: str) -> str:
    """Return the timeline as one self-contained HTML page."""
    drawn = timeline_data(_timeline_bars(timeline, program), lane_names(timeline), timeline.makespan, program)
    passes = sum(isinstance(one.action, Compute) for one in timeline.events)
    microbatches = count_noun(len(program.microbatches), "microbatch").replace("batchs", "batches")
    tiles = [
        Tile("seconds", f"{timeline.makespan:.3g}", "predicted, from start to end"),
        Tile("passes", f"{passes:,}", microbatches),
    ]
    if timeline.devices > 1:
        bubbles = timeline.bubbles()
        detail = f"of the busiest device {min(bubbles):.1%}, of the idlest {max(bubbles):.1%}"
        tiles.insert(1, Tile("bubbles", f"{sum(bubbles) / len(bubbles):.1%}", detail))
    kept, every = drawn["drawn"], drawn["all"]
    cut = "" if kept == every else f" The first {kept:,} of {every:,} actions are drawn."
    kinds = [kind for kind in KINDS if any(kind == name for name, _ in drawn["kinds"])]
    values = {
        "title": title,
        "facts": (count_noun(timeline.devices, "device"), count_noun(len(job_colours(program)), "job")),
        "tiles": tiles,
        "words": f"Actions that are too narrow to be seen are drawn together, as shares of the time.{cut}",
        "columns": ("device", "computing", *kinds),
        "rows": _device_rows(timeline, kinds),
    }
    return render_template("gantt.html.jinja", {"gantt": drawn}, values)


def _device_rows(timeline: Timeline, kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a table row for each device, with the fraction of time in which the device computes and the
    fraction of time of each kind of action."""
    seconds: dict[tuple[int, str], float] = {}
    for one in timeline.events:
        key = one.device, action_kind(one.action)
        seconds[key] = seconds.get(key, 0.0) + one.stop - one.start
    whole = max(timeline.makespan, 1e-12)
    return [
        (
            f"device {device}",
            f"{1 - bubble:.1%}",
            *(
                f"{share:.1%}" if (share := seconds.get((device, kind), 0.0) / whole) else ""
                for kind in kinds
            ),
        )
        for device, bubble in enumerate(timeline.bubbles())
    ]


# -- data for the script --------------------------------------------------------------------------------


def timeline_data(
    bars: Sequence[Bar], lanes: Sequence[str], seconds: float, program: Program | None = None
) -> dict[str, Any]:
    """Return the data of a timeline for the page's script, limited in size. `seconds` is the duration that is
    drawn. With a `program`, bars also show the jobs whose tokens they process."""
    ordered = sorted((bar for bar in bars if bar.stop > bar.start), key=lambda bar: bar.start)
    count = len(ordered)
    while True:
        data = _chart_data(ordered[:count], lanes, seconds, program)
        size = len(json.dumps(data, separators=(",", ":")))
        if size <= MAX_BYTES or count <= 100:
            return data | {"drawn": count, "all": len(ordered)}
        count = min(count - 1, int(0.9 * count * MAX_BYTES / size))


def _chart_data(
    bars: Sequence[Bar], lanes: Sequence[str], seconds: float, program: Program | None
) -> dict[str, Any]:
    unit = max(seconds, 1e-12) / TICKS_PER_WINDOW
    texts: dict[str, int] = {}
    by_lane: dict[str, list[int]] = {lane: [] for lane in lanes}
    for bar in bars:
        start, length = round(bar.start / unit), max(1, round((bar.stop - bar.start) / unit))
        shown = bar.text if len(bar.text) <= _MAX_TEXT else f"{bar.text[: _MAX_TEXT - 1]}…"
        text = texts.setdefault(shown, len(texts))
        by_lane.setdefault(bar.row, []).extend((start, length, KINDS.index(bar.kind), text, bar.microbatch))
    side_lanes = tuple(f" {other}" for other in Lane if other is not Lane.compute)
    colours = job_colours(program) if program else {}
    shown_numbers = {bar.microbatch for bar in bars if bar.microbatch >= 0} if program else set()
    jobs = {name: at for at, name in enumerate(colours)}
    return {
        "seconds": seconds,
        "kinds": [
            [kind, colour] for kind, colour in COLOURS.items() if any(bar.kind == kind for bar in bars)
        ],
        "colours": list(COLOURS.values()),
        "names": list(KINDS),
        "jobs": [[name, colour] for name, colour in colours.items()],
        "lanes": [
            # A lane that does not compute is drawn narrower, below the main one.
            {"name": name, "main": not name.endswith(side_lanes), "bars": numbers}
            for name, numbers in by_lane.items()
        ],
        "texts": list(texts),
        "microbatches": {number: _segments(program, number, jobs) for number in sorted(shown_numbers)}
        if program
        else {},
    }


def _segments(program: Program, number: int, jobs: Mapping[str, int]) -> list[int]:
    """Return the jobs in microbatch `number` as a flat list `[job index, tokens, job index, tokens, ...]`.
    Adjacent segments of one job are merged."""
    found: list[int] = []
    for job, group in groupby(program.microbatches[number].segments, key=lambda one: one.job):
        found += (jobs[job], sum(one.tokens for one in group))
    return found


def _timeline_bars(timeline: Timeline, program: Program) -> list[Bar]:
    return [
        Bar(
            lane_name(one.device, one.lane),
            action_kind(one.action),
            one.start,
            one.stop,
            # Without the segments, which the script adds from the microbatch.
            f"microbatch {one.action.microbatch}, stage {one.action.stage}"
            if isinstance(one.action, Compute | HalfPass | Transport)
            else str(one.action),
            getattr(one.action, "microbatch", -1),
        )
        for one in timeline.events
    ]


# -- names and colours ----------------------------------------------------------------------------------


def timeline_title(timeline: Timeline, title: str) -> str:
    """Return the title of a timeline with its total seconds and, for several devices, the fraction of idle
    time."""
    text = f"{title}: {timeline.makespan:.3g} s"
    if timeline.devices == 1:
        return text
    return f"{text}, bubbles {', '.join(f'{share:.1%}' for share in timeline.bubbles())}"


def job_colours(program: Program) -> dict[str, str]:
    """Map every job of a Program to a colour. Jobs are in the order in which they first train, and
    consecutive hues are a golden angle apart."""
    names = dict.fromkeys(one.job for microbatch in program.microbatches for one in microbatch.segments)
    return {name: _hue(number) for number, name in enumerate(names)}


def _hue(number: int) -> str:
    lightness = (0.42, 0.62, 0.30)[number // 8 % 3]
    red, green, blue = colorsys.hls_to_rgb((0.08 + number * 0.618034) % 1.0, lightness, 0.7)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def lane_names(timeline: Timeline) -> list[str]:
    """Return the names of all lanes (one per device and stream) that have an event, sorted by device."""
    used = {(one.device, one.lane) for one in timeline.events}
    return [
        lane_name(device, lane)
        for device in range(timeline.devices)
        for lane in Lane
        if (device, lane) in used
    ]


def lane_name(device: int, lane: Lane) -> str:
    return f"device {device} {lane}"


def action_kind(action: Action) -> str:
    """Return the kind of an action, such as `forward`, which determines its colour in a timeline."""
    return _KIND_NAMES.get(type(action), "other")


def action_text(action: Action, program: Program) -> str:
    """Return the string that is shown when the pointer is on an action. The string may contain user input:
    the names of jobs."""
    if not isinstance(action, Compute | HalfPass | Transport):
        return str(action)
    microbatch = program.microbatches[action.microbatch]
    tokens = ", ".join(f"{one.job} step {one.step}: {one.tokens}" for one in microbatch.segments)
    return f"{action_kind(action)} of microbatch {action.microbatch}, stage {action.stage} (tokens: {tokens})"


TIMELINES = "timelines.json"
MAX_BARS = 2000
"""Maximum number of bars of a recorded timeline. If a window has more, only the first bars are kept."""
BUBBLE_COLUMNS = ("worker", "bubbles predicted", "measured", "in the steady part predicted", "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTimeline:
    """A timeline as the report shows it: the workers' bars and their fractions of idle time."""

    seconds: float
    bubbles: tuple[float, ...]
    """Fraction of the timeline's duration in which each worker is idle."""
    steady: tuple[float, ...]
    """Fraction of idle time of each worker while the pipeline is full: from the time when all workers have
    begun until any of them has run its last Forward."""
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timelines:
    foreseen: DrawnTimeline
    measured: DrawnTimeline


def prepare_timeline(timeline: Timeline, program: Program) -> DrawnTimeline:
    """Return a timeline with the computation of each worker as bars. Transfers run in parallel and are not
    drawn; only the trace file contains them."""
    computed = sorted(
        (one for one in timeline.events if one.lane is Lane.compute and one.stop > one.start),
        key=lambda one: one.start,
    )
    bars = [
        Bar(
            worker_row(one.device),
            action_kind(one.action),
            one.start,
            one.stop,
            action_text(one.action, program),
        )
        for one in computed[:MAX_BARS]
    ]
    return DrawnTimeline(
        seconds=timeline.makespan,
        bubbles=timeline.bubbles(),
        steady=timeline.bubbles(timeline.steady_span()),
        bars=tuple(bars),
    )


def worker_row(worker: int) -> str:
    return f"worker {worker}"


def write_timelines(output: Path, timelines: Timelines) -> None:
    (output / TIMELINES).write_text(json.dumps(asdict(timelines)))


# -- read -----------------------------------------------------------------------------------------------


def read_timelines(output: Path) -> Timelines | None:
    """Return the predicted and the measured timeline of a pipeline's last window from an output folder.
    Return None if the folder's file with these timelines is missing or cannot be read."""
    try:
        found = json.loads((output / TIMELINES).read_text(encoding="utf-8"))
        return Timelines(
            foreseen=_read_timeline(found["foreseen"]), measured=_read_timeline(found["measured"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_timeline(record: Mapping[str, Any]) -> DrawnTimeline:
    if unknown := {one["kind"] for one in record["bars"]} - COLOURS.keys():
        raise ValueError(f"no action is a {unknown.pop()}")
    return DrawnTimeline(
        seconds=_finite_number(record["seconds"]),
        bubbles=tuple(map(_finite_number, record["bubbles"])),
        steady=tuple(map(_finite_number, record["steady"])),
        bars=tuple(
            Bar(
                str(one["row"]),
                one["kind"],
                _finite_number(one["start"]),
                _finite_number(one["stop"]),
                str(one["text"]),
            )
            for one in record["bars"]
        ),
    )


def _finite_number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is no number of seconds")
    return number


# -- draw -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineChart:
    """A timeline in the report: its title, the sentences below it, and its data for the page's script."""

    name: str
    title: str
    caption: str
    data: Mapping[str, Any]


def timeline_charts(timelines: Timelines) -> tuple[TimelineChart, ...]:
    """Return two charts for the report, on the same time scale: the predicted and the measured timeline of a
    window (a few global batches of every job)."""
    both = (timelines.foreseen, timelines.measured)
    longest = max(one.seconds for one in both)
    workers = len(timelines.measured.bubbles)
    return (
        _timeline_chart("foreseen", "Predicted", timelines.foreseen, longest, workers),
        _timeline_chart("measured", "Measured", timelines.measured, longest, workers),
    )


def _timeline_chart(
    name: str, title: str, timeline: DrawnTimeline, max_seconds: float, workers: int
) -> TimelineChart:
    data = timeline_data(
        timeline.bars[:MAX_BARS], [worker_row(worker) for worker in range(workers)], max_seconds
    )
    is_cut = len(timeline.bars) >= MAX_BARS or data["drawn"] < data["all"]
    cut = f" Drawn are its first {data['drawn']:,} actions." if is_cut else ""
    caption = f"The last window in which jobs trained: {timeline.seconds:.3g} s.{cut}"
    return TimelineChart(name=name, title=title, caption=caption, data=data)


def bubble_rows(timelines: Timelines) -> list[tuple[str, ...]]:
    """Return one table row per worker of a pipeline about its idle time, with the columns
    `BUBBLE_COLUMNS`."""
    foreseen, measured = timelines.foreseen, timelines.measured
    columns: Sequence[Sequence[float]] = (
        foreseen.bubbles,
        measured.bubbles,
        foreseen.steady,
        measured.steady,
    )
    return [
        (str(worker), *(f"{share:.1%}" for share in shares))
        for worker, shares in enumerate(zip(*columns, strict=False))
    ]
