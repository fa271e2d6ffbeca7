"""The wall time of a run by phase: as a sentence, as a bar, and stored in the output folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftune.core.clock import Phase, WallTime
from weftune.core.files import FORMAT, replace_json
from weftune.report.words import duration_text

WALL_TIME = "wall.json"
LABELS = {Phase.CHECKING: "checking the base", Phase.TRYING: "trying kernels"}
COLOURS = (
    "#8a94a6", "#0e9db5", "#9456d6", "#d9a441", "#e8710a", "#a3673f",
    "#d9528f", "#3b7ddd", "#1e9e6a", "#8a8f1a", "#5b6f9d", "#c3c9d3",
)  # fmt: skip
"""One colour per phase, in their order."""
LEAST = 0.05
"""Seconds below which a phase is not shown."""


def label(phase: Phase) -> str:
    return LABELS.get(phase, str(phase))


def wall_sentence(wall: WallTime) -> str:
    parts = [f"{label(phase)} {wall.phases[phase]:.1f}" for phase in Phase if wall.phases[phase] >= LEAST]
    return f"Wall time {wall.seconds:.1f} s" + (f": {', '.join(parts)}" if parts else "")


@dataclass(frozen=True, slots=True)
class WallPart:
    label: str
    seconds: str
    percent: float
    colour: str


@dataclass(frozen=True, slots=True)
class WallBar:
    """The wall time of one run as a stacked bar."""

    sentence: str
    parts: tuple[WallPart, ...]


def wall_bar(wall: WallTime) -> WallBar:
    """Return the phases in order. The run draws the page before it ends, so its last phase may be missing."""
    drawn_early = "" if wall.phases[Phase.REPORT] else ", until this page was drawn"
    told = [phase for phase in Phase if wall.phases[phase] >= LEAST]
    whole = max(wall.seconds, sum(wall.phases[phase] for phase in told), 1e-9)
    parts = tuple(
        WallPart(label(phase), f"{wall.phases[phase]:.1f} s", 100 * wall.phases[phase] / whole, COLOURS[at])
        for at, phase in enumerate(Phase)
        if phase in told
    )
    return WallBar(f"Wall time {duration_text(wall.seconds)} ({wall.seconds:.1f} s){drawn_early}", parts)


def keep_wall_time(output: Path, wall: WallTime) -> None:
    """Add a run to those that the output records; a run that is already recorded is replaced."""
    earlier = [one for one in read_wall_times(output) if one.started != wall.started]
    replace_json(output / WALL_TIME, {"format": FORMAT, "runs": [_plain(one) for one in (*earlier, wall)]})


def read_wall_times(output: Path) -> list[WallTime]:
    """Return the runs that wrote to the output, the earliest first; empty if the file cannot be read."""
    try:
        runs: Any = json.loads((output / WALL_TIME).read_bytes())["runs"]
        return [_wall_time(run) for run in runs]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _plain(wall: WallTime) -> dict[str, Any]:
    phases = {str(phase): round(seconds, 3) for phase, seconds in wall.phases.items()}
    return {"started": wall.started, "seconds": wall.seconds, "phases": phases}


def _wall_time(run: Any) -> WallTime:
    phases = {phase: _seconds(run["phases"].get(phase, 0.0)) for phase in Phase}
    return WallTime(_seconds(run["started"]), _seconds(run["seconds"]), phases)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no number of seconds")
    return float(value)
