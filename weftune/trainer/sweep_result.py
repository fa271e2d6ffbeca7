"""The result of a sweep in the Python API."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftune.jobs.sweeps.halving import worth
from weftune.jobs.sweeps.record import read_record
from weftune.trainer.trainer import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The result of a sweep."""

    name: str
    path: Path
    """The sweep's folder, which contains `best`."""
    rows: list[dict[str, Any]]
    """A row for each trial, the best first: its name, its values, its metric, and how it ended."""
    best: Result | None
    """Result of the winner; None if no trial has finished."""
    results: dict[str, Result]
    """Trial → its result."""

    @property
    def table(self) -> Any:
        """The rows as a pandas DataFrame; the rows themselves if pandas is not installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            return self.rows
        return pandas.DataFrame(self.rows)


def sweep_result(folder: Path, results: Mapping[str, Result]) -> SweepResult:
    """Return the result of the sweep in this folder; `results` are those of its run."""
    record = read_record(folder)
    assert record is not None, "a run with this sweep has written it"
    # Finished trials by their rank, followed by those that came farthest.
    places = {name: place for place, name in enumerate(record.best)}
    ordered = sorted(
        record.trials,
        key=lambda trial: (
            places.get(trial.name, len(places)),
            trial.state != "finished",
            bool(trial.warning),
            -len(trial.at_rungs),
            worth(trial.score, record.mode),
        ),
    )
    rows = [
        {
            "trial": trial.name,
            **trial.values,
            "state": trial.state,
            record.metric: trial.score,
            "step": int(results[trial.name].metrics["step"]) if trial.name in results else 0,
            "reason": trial.reason,
        }
        for trial in ordered
    ]
    best = results[record.best[0]] if record.best else None
    return SweepResult(name=record.name, path=folder, rows=rows, best=best, results=dict(results))
