"""A Program's timeline as a Gantt chart: a row for every device and lane, a bar for every action."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weftune.plan.program import Action, Backward, Evaluate, Forward, Load, Program, Recv, Send, Step
from weftune.plan.timeline import Lane, Timeline

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
    bubbles = ", ".join(f"{share:.1%}" for share in timeline.bubbles())
    layout = {
        "title": {"text": f"{html.escape(title)}: {timeline.makespan:.3g} s, bubbles {bubbles}"},
        "barmode": "overlay",
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": rows(timeline)},
    }
    return {"data": bar_traces(bars), "layout": layout}


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
