"""The final output of `weftune train` about a sweep: its best trials, and their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from weftune.jobs.store.resumption import resume_line
from weftune.jobs.sweeps.record import SweepRecord, TrialRecord, best_folder
from weftune.report.read import Run
from weftune.report.sweeps.ranking import (
    METRIC_NAMES,
    base_sentence,
    counts,
    flat_values,
    leaders,
    setting_text,
    short_keys,
    swept_keys,
    trained_share,
    winners,
)
from weftune.report.words import NOTHING, loss_text, plural, printable, trial_state_text

_LEADERS = 3
_REASONS = 3


def sweep_ending(run: Run, record: SweepRecord, width: int) -> list[RenderableType]:
    """Return a table of the best trials; the winners' folders are in it if `width` columns are enough."""
    best = winners(record) or leaders(record, _LEADERS)
    below = [*_doubts(record), *_failures(record), *_unfinished(run, record)]
    heading = Text(printable(_heading(record)), style="bold")
    if not best:
        return [heading, *below]
    places = [_place(run.output, record, trial) for trial in best if record.best]
    whole = _table(record, best, places)
    if Console(width=10_000).measure(whole).maximum <= width:
        return [heading, whole, *below]
    return [heading, _table(record, best, ()), *map(Text, places), *below]


def _heading(record: SweepRecord) -> str:
    states = ", ".join(f"{count} {trial_state_text(state)}" for state, count in counts(record).items())
    share = trained_share(record)
    saved = "" if share is None else f"; {100 * share:.0f} % of the samples that all to the end would take"
    return f"{record.name}: {plural(len(record.trials), 'trial')}, {states}{saved}"


def _table(record: SweepRecord, trials: Sequence[TrialRecord], places: Sequence[str]) -> Table:
    keys = swept_keys(record)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", justify="right")
    table.add_column("trial", overflow="ellipsis", no_wrap=True)
    for key in short_keys(keys).values():
        table.add_column(printable(key), justify="right", no_wrap=True)
    table.add_column(METRIC_NAMES[record.metric], justify="right", no_wrap=True)
    if places:
        table.add_column("path", no_wrap=True)
    for number, trial in enumerate(trials):
        values = flat_values(trial)
        table.add_row(
            f"{number + 1}.",
            Text(printable(trial.name), style="" if number else "bold"),
            *(Text(printable(setting_text(values[key])) if key in values else NOTHING) for key in keys),
            loss_text(trial.score),
            *([Text(places[number])] if places else []),
        )
    return table


def _place(output: Path, record: SweepRecord, trial: TrialRecord) -> str:
    """Return the winner's folder, relative to the current directory if it is inside."""
    inside = best_folder(output / record.name, trial.name).relative_to(output)
    folder, here = output / printable(str(inside)), Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _doubts(record: SweepRecord) -> list[Text]:
    sentence = base_sentence(record)
    return [Text(printable(sentence), style="red")] if sentence else []


def _failures(record: SweepRecord) -> list[Text]:
    failed = [trial for trial in record.trials if trial.state == "failed"]
    lines = [Text(printable(f"{trial.name} failed: {trial.reason}")) for trial in failed[:_REASONS]]
    more = len(failed) - _REASONS
    if more > 0:
        lines.append(Text(f"{plural(more, 'trial')} more failed; the report has the reasons"))
    return lines


def _unfinished(run: Run, record: SweepRecord) -> list[Text]:
    if record.best or all(trial.state in ("finished", "left", "failed") for trial in record.trials):
        return []
    sentence = f"The sweep goes on with {resume_line(run.command)}"
    return [Text(printable(sentence), style="dim", no_wrap=True, overflow="ignore")]
