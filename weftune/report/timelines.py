"""Predicted and measured timelines of a pipeline's last window: stored in the output, drawn on the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weftune.plan.program.program import Program
from weftune.plan.program.timeline import Lane, Timeline
from weftune.report.gantt import COLOURS, Bar, about, kind_of, timeline_data

TIMELINES = "timelines.json"
MOST_BARS = 2000
"""Maximum number of bars; of a longer window the first ones are kept."""
COLUMNS = ("worker", "bubbles foreseen", "measured", "in the steady part foreseen", "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The part of a timeline that the page shows."""

    seconds: float
    bubbles: tuple[float, ...]
    """Share of the window in which each worker does not compute."""
    steady: tuple[float, ...]
    """Share of idle time of each worker, from when all workers have begun until one has no Forward left."""
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timelines:
    foreseen: Drawn
    measured: Drawn


def drawn(timeline: Timeline, program: Program) -> Drawn:
    """Return the bars of the workers' computation; transfers run beside it and are in the trace only."""
    computed = sorted(
        (one for one in timeline.events if one.lane is Lane.compute and one.stop > one.start),
        key=lambda one: one.start,
    )
    bars = [
        Bar(worker_row(one.device), kind_of(one.action), one.start, one.stop, about(one.action, program))
        for one in computed[:MOST_BARS]
    ]
    return Drawn(
        seconds=timeline.makespan,
        bubbles=timeline.bubbles(),
        steady=timeline.bubbles(timeline.steady()),
        bars=tuple(bars),
    )


def worker_row(worker: int) -> str:
    return f"worker {worker}"


def write_timelines(output: Path, timelines: Timelines) -> None:
    (output / TIMELINES).write_text(json.dumps(asdict(timelines)))


# -- read -----------------------------------------------------------------------------------------------


def read_timelines(output: Path) -> Timelines | None:
    """Read the timelines. Return None if there are none or they cannot be read: the page can do without."""
    try:
        found = json.loads((output / TIMELINES).read_text(encoding="utf-8"))
        return Timelines(foreseen=_read(found["foreseen"]), measured=_read(found["measured"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(record: Mapping[str, Any]) -> Drawn:
    return Drawn(
        seconds=_finite(record["seconds"]),
        bubbles=tuple(map(_finite, record["bubbles"])),
        steady=tuple(map(_finite, record["steady"])),
        bars=tuple(_bar(one) for one in record["bars"]),
    )


def _bar(record: Mapping[str, Any]) -> Bar:
    if record["kind"] not in COLOURS:
        raise ValueError(f"no action is a {record['kind']}")
    start, stop = _finite(record["start"]), _finite(record["stop"])
    return Bar(str(record["row"]), record["kind"], start, stop, str(record["text"]))


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is no number of seconds")
    return number


# -- draw -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineChart:
    """A timeline on the page, with its data for the script."""

    name: str
    title: str
    words: str
    data: Mapping[str, Any]


def timeline_charts(timelines: Timelines) -> tuple[TimelineChart, ...]:
    """Return the predicted and the measured timeline, on one scale."""
    both = (timelines.foreseen, timelines.measured)
    longest = max(one.seconds for one in both)
    workers = len(timelines.measured.bubbles)
    return (
        _chart("foreseen", "Predicted", timelines.foreseen, longest, workers),
        _chart("measured", "Measured", timelines.measured, longest, workers),
    )


def _chart(name: str, title: str, shown: Drawn, longest: float, workers: int) -> TimelineChart:
    data = timeline_data(shown.bars[:MOST_BARS], [worker_row(worker) for worker in range(workers)], longest)
    is_cut = len(shown.bars) >= MOST_BARS or data["drawn"] < data["all"]
    cut = f" Drawn are its first {data['drawn']:,} actions." if is_cut else ""
    words = f"The last window in which jobs trained: {shown.seconds:.3g} s.{cut}"
    return TimelineChart(name=name, title=title, words=words, data=data)


def bubble_rows(timelines: Timelines) -> list[tuple[str, ...]]:
    """Return one row per worker, with the columns `COLUMNS`."""
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
