"""The section of the report about a sweep, as dataclasses with formatted strings that are not HTML-escaped
yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weftune.jobs.sweeps.record import (
    RungRow,
    SweepRecord,
    TrialRecord,
    best_folder,
    flat_trial_values,
    leading_trials,
    metric_title,
    rank_trials,
    rung_rows,
    setting_text,
    shorten_keys,
    state_counts,
    swept_keys,
    trained_fraction,
    winners,
)
from weftune.report.charts import Chart
from weftune.report.compare import base_validation, has_enough_rows
from weftune.report.read import Run
from weftune.report.snippets import base_spec, generate_command, load_snippet
from weftune.report.svg import LineStyle
from weftune.report.sweep_charts import sweep_charts
from weftune.report.template import Tile
from weftune.report.words import (
    NO_VALUE,
    count_noun,
    duration_text,
    loss_text,
    printable_line,
    relative_link,
    trial_state_text,
)

if TYPE_CHECKING:
    from weftune.report.page import JobView

_OPEN_TRIALS = 10
"""Number of trials of a sweep that stay visible if there are more than `_FEW_TRIALS` trials. The others are
collapsed."""
_FEW_TRIALS = 14
SEARCHES = {"grid": "grid", "random": "random search", "tpe": "TPE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """A row of the table of a sweep's trials."""

    rank: str
    name: str
    line_style: LineStyle | None
    index: int | None
    """Index of the trial among the jobs with commands at the end of the page. None if the trial has no
    commands there."""
    badge: str
    values: tuple[str, ...]
    score: str
    score_detail: str
    state: str
    reason: str
    steps: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepView:
    name: str
    properties: str
    tiles: list[Tile]
    metric: str
    keys: tuple[str, ...]
    trials: list[TrialView]
    """Rows of the best trials, which are visible when the page is opened."""
    other_trials: list[TrialView]
    rungs: list[tuple[str, ...]]
    """Rows of the table of rungs (steps at which trials are compared). The columns are the step, how many
    trials began, the percentage and number of trials that continue, the worst score that continues and the
    best one that does not."""
    charts: tuple[Chart, ...]
    """Charts of the sweep: all trials in parallel coordinates, and the metric for each swept key. Empty if
    nothing is measured."""
    winners: list[tuple[str, str, str]]
    """Link (relative to the page), folder and score of each winning trial."""
    snippet: str
    """Python code that loads the best adapter. Empty until the sweep has ended."""
    command: str


def sweep_view(run: Run, record: SweepRecord, views: Mapping[str, JobView]) -> SweepView:
    """Return the section of the report about a sweep. `views` maps the names of jobs to the jobs as the
    report shows them."""
    output, keys, best = run.output.resolve(), swept_keys(record), winners(record)
    trials = [
        _trial_view(record, trial, rank, views.get(trial.name), keys)
        for rank, trial in enumerate(rank_trials(record), start=1)
    ]
    shown = len(trials) if len(trials) <= _FEW_TRIALS else _OPEN_TRIALS
    line_styles = {name: view.line_style for name, view in views.items() if view.has_curves}
    jobs = [views[trial.name].job for trial in record.trials if trial.name in views]
    base_losses = [loss for job in jobs if (loss := base_validation(job))]
    folders = [best_folder(output / record.name, trial.name) for trial in best]
    first = views[best[0].name].job if best and best[0].name in views else None
    base = base_spec(first, run) if first is not None else None
    several = len({one.generation for one in record.trials}) > 1
    return SweepView(
        name=record.name,
        properties=_sweep_properties(record),
        tiles=_sweep_tiles(run, record),
        metric=metric_title(record.metric),
        keys=tuple(shorten_keys(keys).values()),
        trials=trials[:shown],
        other_trials=trials[shown:],
        rungs=[_rung_texts(row, show_generation=several) for row in rung_rows(record)],
        charts=sweep_charts(record, line_styles, base_losses[0] if base_losses else None),
        winners=[
            (*_folder_texts(output, folder), loss_text(trial.score))
            for folder, trial in zip(folders, best, strict=True)
        ],
        snippet=load_snippet(base, folders[0]) if base is not None else "",
        command=generate_command(folders[0]) if base is not None else "",
    )


def _sweep_properties(record: SweepRecord) -> str:
    better = "lower" if record.mode == "min" else "higher"
    parts = [
        SEARCHES.get(record.search, record.search),
        count_noun(record.count, "trial"),
        f"{metric_title(record.metric)} on the same held-out rows, {better} is better",
    ]
    if len(record.rungs) > 1:
        at = ", ".join(f"{step:,}" for step in record.rungs[:-1])
        share = f"the best {100 * record.share:.0f} % continue" if record.share else "the best continue"
        parts.append(f"{share} at step{'s' * (len(record.rungs) > 2)} {at} of {record.steps:,}")
        if record.judge == "mean":
            parts.append("losses there are those of the mean of a trial's last weights")
    return " · ".join(parts)


def _sweep_tiles(run: Run, record: SweepRecord) -> list[Tile]:
    best, ended = leading_trials(record, 1), state_counts(record)
    others = ", ".join(
        f"{count} {trial_state_text(state)}" for state, count in ended.items() if state != "finished"
    )
    tiles = [
        Tile(
            f"best {metric_title(record.metric)}{'' if record.best else ' so far'}",
            loss_text(best[0].score) if best else NO_VALUE,
            best[0].name if best else "nothing has been evaluated yet",
        ),
        Tile("trials to the end", f"{ended.get('finished', 0)} of {record.count}", others),
    ]
    share = trained_fraction(record)
    if share is not None:
        detail = f"{record.samples.trained:,} of the {record.samples.all:,} that all trials would take"
        tiles.append(Tile("samples trained", f"{100 * share:.0f} %", detail))
    # The trials' part of the run's seconds is estimated by their tokens.
    names = {trial.name for trial in record.trials}
    tokens = sum(job.trained_tokens for job in run.jobs)
    own_tokens = sum(job.trained_tokens for job in run.jobs if job.name in names)
    if record.best and share and share < 1 and own_tokens and run.seconds:
        seconds = run.seconds * own_tokens / tokens
        whole = duration_text(seconds / share)
        saved = f"about {duration_text(seconds / share - seconds)}"
        tiles.append(Tile("time saved", saved, f"all trials to their end: about {whole} of training"))
    return tiles


def _trial_view(
    record: SweepRecord, trial: TrialRecord, rank: int, view: JobView | None, keys: tuple[str, ...]
) -> TrialView:
    values = flat_trial_values(trial)
    steps = view.job.step if view is not None else trial.left_at or 0
    measured_at = trial.left_at if trial.score_step is None else trial.score_step
    badge = ""
    if trial.name in record.best:
        # The first is `best` only if there are enough held-out rows to say so.
        is_best = record.best[0] == trial.name and view is not None and has_enough_rows(view.job)
        badge = "best" if is_best else "kept"
    is_dropped = trial.state == "left" and measured_at is not None and trial.score is not None
    return TrialView(
        rank=f"{rank}" if trial.score is not None and trial.state != "failed" else NO_VALUE,
        name=trial.name,
        line_style=view.line_style if view is not None and view.has_curves else None,
        index=view.index if view is not None and view.has_instructions else None,
        badge=badge,
        values=tuple(setting_text(values[key]) if key in values else NO_VALUE for key in keys),
        score=loss_text(trial.score),
        score_detail=f"at step {measured_at:,}" if is_dropped else "",
        state=trial_state_text(trial.state),
        # Without what the state and the steps beside it already say.
        reason=trial.warning or trial.reason.removeprefix(f"left the sweep at step {trial.left_at}: "),
        steps=f"{steps:,} of {trial.steps or record.steps:,}",
    )


def _rung_texts(row: RungRow, *, show_generation: bool) -> tuple[str, ...]:
    step = f"{row.step:,}" + (f" (generation {row.generation + 1})" if show_generation else "")
    if row.kept_count is None:
        share = 100 * row.evaluated_count // max(1, row.started_count)
        what = "ended" if row.is_last else "evaluated so far"
        return step, f"{row.started_count}", f"{share}", f"{row.evaluated_count} {what}", ""
    parts = []
    if row.worst_kept_score is not None:
        parts.append(f"the last to continue had {loss_text(row.worst_kept_score)}")
    if row.best_dropped_score is not None:
        parts.append(f"the first dropped {loss_text(row.best_dropped_score)}")
    if row.lost_count:
        parts.append(f"{row.lost_count} failed or were dropped before")
    share = round(100 * row.kept_count / max(1, row.started_count))
    return step, f"{row.started_count}", f"{share}", f"{row.kept_count} went on", ", ".join(parts)


def _folder_texts(output: Path, folder: Path) -> tuple[str, str]:
    inside = folder.relative_to(output)
    return relative_link(*inside.parts, ""), printable_line(f"{output.name}/{inside}")
