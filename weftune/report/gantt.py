"""A Program's timeline as a Gantt chart: a row for every device and lane, a bar for every action."""

from __future__ import annotations

import colorsys
import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weftune.plan.program.program import Action, Backward, Evaluate, Forward, Load, Program, Recv, Send, Step
from weftune.plan.program.timeline import Lane, Timeline

STRIP = 0.28
"""Of the distance between rows: how much of a bar shows whose it is."""
COLOURS = {
    "forward": "#3b7ddd",
    "backward": "#1e9e6a",
    "evaluate": "#9456d6",
    "send": "#e8710a",
    "receive": "#d9a441",
    "load": "#6b7a90",
    "step": "#dc4646",
    "other": "#8a94a6",
}


def gantt_page(timeline: Timeline, program: Program, title: str) -> str:
    """One self-contained HTML page."""
    from plotly.graph_objects import Figure

    figure = Figure(gantt(timeline, program, title))
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page


@dataclass(frozen=True, slots=True)
class Bar:
    """One action as it is drawn."""

    row: str
    kind: str
    """One of `COLOURS`."""
    start: float
    stop: float
    text: str
    """What the pointer shows; not escaped."""


def gantt(timeline: Timeline, program: Program, title: str) -> dict[str, Any]:
    """The figure as plain values: one trace for each kind of action, bars laid from start to stop."""
    bars = [
        Bar(row(one.device, one.lane), kind_of(one.action), one.start, one.stop, about(one.action, program))
        for one in timeline.events
    ]
    layout = {
        "title": {"text": html.escape(headline(timeline, title))},
        "barmode": "overlay",
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": rows(timeline)},
    }
    return {"data": [*bar_traces(bars), *job_traces(timeline, program)], "layout": layout}


def headline(timeline: Timeline, title: str) -> str:
    """One device has no bubbles to speak of."""
    text = f"{title}: {timeline.makespan:.3g} s"
    if timeline.devices == 1:
        return text
    return f"{text}, bubbles {', '.join(f'{share:.1%}' for share in timeline.bubbles())}"


@dataclass(frozen=True, slots=True)
class JobStrip:
    """The part of a pass that is one job's."""

    row: str
    job: str
    start: float
    stop: float


def job_strips(timeline: Timeline, program: Program) -> list[JobStrip]:
    """Every pass shared out among the jobs in it, by their tokens."""
    strips = []
    for event in timeline.events:
        if not isinstance(event.action, Forward | Backward | Evaluate) or event.stop <= event.start:
            continue
        segments = program.microbatches[event.action.microbatch].segments
        whole, start = sum(one.tokens for one in segments), event.start
        for one in segments:
            stop = start + (event.stop - event.start) * one.tokens / whole
            strips.append(JobStrip(row(event.device, event.lane), one.job, start, stop))
            start = stop
    return strips


def job_colours(program: Program) -> dict[str, str]:
    """A colour for every job, in the order in which they first train: hues a golden angle apart."""
    names = dict.fromkeys(one.job for microbatch in program.microbatches for one in microbatch.segments)
    return {name: _hue(number) for number, name in enumerate(names)}


def _hue(number: int) -> str:
    lightness = (0.42, 0.62, 0.30)[number // 8 % 3]
    red, green, blue = colorsys.hls_to_rgb((0.08 + number * 0.618034) % 1.0, lightness, 0.7)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def job_traces(timeline: Timeline, program: Program) -> list[dict[str, Any]]:
    """A strip along the lower edge of every pass, one trace for each job."""
    strips, traces = job_strips(timeline, program), []
    for job, colour in job_colours(program).items():
        own = [one for one in strips if one.job == job]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": html.escape(f"job {job}"),
                "marker": {"color": colour},
                "width": STRIP,
                "offset": 0.4 - STRIP,
                "base": [one.start for one in own],
                "x": [one.stop - one.start for one in own],
                "y": [one.row for one in own],
                "hovertext": [html.escape(job)] * len(own),
                "hoverinfo": "text",
            }
        )
    return traces


def bar_traces(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """One for each kind, in the order of `COLOURS`; what takes no time is left out."""
    traces = []
    for kind, colour in COLOURS.items():
        drawn = [one for one in bars if one.kind == kind and one.stop > one.start]
        if drawn:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": kind,
                    "marker": {"color": colour, "line": {"width": 0.5, "color": "white"}},
                    "base": [one.start for one in drawn],
                    "x": [one.stop - one.start for one in drawn],
                    "y": [one.row for one in drawn],
                    "hovertext": [html.escape(one.text) for one in drawn],
                    "hoverinfo": "text",
                }
            )
    return traces


def rows(timeline: Timeline) -> list[str]:
    """Every lane in which anything happens, device by device."""
    used = {(one.device, one.lane) for one in timeline.events}
    return [
        row(device, lane) for device in range(timeline.devices) for lane in Lane if (device, lane) in used
    ]


def row(device: int, lane: Lane) -> str:
    return f"device {device} {lane}"


def kind_of(action: Action) -> str:
    match action:
        case Forward():
            return "forward"
        case Backward():
            return "backward"
        case Evaluate():
            return "evaluate"
        case Send():
            return "send"
        case Recv():
            return "receive"
        case Load():
            return "load"
        case Step():
            return "step"
    return "other"


def about(action: Action, program: Program) -> str:
    """What the pointer shows; names of jobs come from outside."""
    if not isinstance(action, Forward | Backward | Evaluate | Send | Recv):
        return str(action)
    microbatch = program.microbatches[action.microbatch]
    held = ", ".join(f"{one.job} step {one.step}: {one.tokens}" for one in microbatch.segments)
    return f"{kind_of(action)} of microbatch {action.microbatch}, stage {action.stage} (tokens: {held})"
