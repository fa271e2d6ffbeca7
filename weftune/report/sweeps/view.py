"""A sweep on the page: records of finished text, still unescaped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weftune.jobs.sweeps.record import SweepRecord, TrialRecord, best_folder
from weftune.report.charts import Chart
from weftune.report.compare import base_validation, is_enough
from weftune.report.read import JobRecord, Run
from weftune.report.snippets import base_spec, generate_command, load_snippet
from weftune.report.svg import Pen
from weftune.report.sweeps.charts import WaysChart, sweep_charts
from weftune.report.sweeps.ranking import (
    METRIC_NAMES,
    RungRow,
    counts,
    flat_values,
    leaders,
    ranked,
    rung_rows,
    setting_text,
    short_keys,
    swept_keys,
    trained_share,
    winners,
)
from weftune.report.words import (
    NOTHING,
    duration_text,
    link_to,
    loss_text,
    plural,
    printable,
    trial_state_text,
)

_AT_ONCE = 10
"""Number of trials that are shown; the others are collapsed if there are more than `_FEW` trials."""
_FEW = 14
SEARCHES = {"grid": "grid", "random": "random search", "tpe": "TPE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTile:
    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """A row of the table."""

    place: str
    name: str
    pen: Pen | None
    index: int | None
    """Index of its commands at the end of the page. None if it has none."""
    badge: str
    values: tuple[str, ...]
    score: str
    score_detail: str
    state: str
    reason: str
    steps: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RungView:
    """A row of the table of rungs."""

    step: str
    came: str
    went_on: str
    share: int
    """Width of a bar: the kept trials, or those evaluated so far, in percent of those that came."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WinnerView:
    name: str
    score: str
    folder: str
    link: str
    """Link to that folder, relative to the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepView:
    name: str
    facts: str
    tiles: tuple[SweepTile, ...]
    metric: str
    keys: tuple[str, ...]
    trials: tuple[TrialView, ...]
    """The best trials, which are not collapsed."""
    others: tuple[TrialView, ...]
    rungs: tuple[RungView, ...]
    ways: WaysChart | None
    against: tuple[Chart, ...]
    winners: tuple[WinnerView, ...]
    snippet: str
    command: str


@dataclass(frozen=True, slots=True)
class DrawnSweep:
    """How the page shows a trial as a job: its pen in the curves, and the index of its commands."""

    pen: Pen | None
    index: int | None


def sweep_view(run: Run, record: SweepRecord, drawn: Mapping[str, DrawnSweep]) -> SweepView:
    keys = swept_keys(record)
    jobs = {job.name: job for job in run.jobs}
    rows = [
        _trial_view(record, trial, place, jobs.get(trial.name), drawn.get(trial.name), keys)
        for place, trial in enumerate(ranked(record), start=1)
    ]
    shown = len(rows) if len(rows) <= _FEW else _AT_ONCE
    pens = {name: one.pen for name, one in drawn.items() if one.pen is not None}
    bases = [
        base for trial in record.trials if (job := jobs.get(trial.name)) and (base := base_validation(job))
    ]
    ways, against = sweep_charts(record, pens, bases[0] if bases else None) or (None, ())
    best = winners(record)
    snippet, command = _use(run, record, jobs.get(best[0].name) if best else None)
    return SweepView(
        name=record.name,
        facts=_facts(record),
        tiles=_tiles(run, record),
        metric=METRIC_NAMES[record.metric],
        keys=tuple(short_keys(keys).values()),
        trials=tuple(rows[:shown]),
        others=tuple(rows[shown:]),
        rungs=tuple(_rung_view(row, several=len({one.generation for one in record.trials}) > 1)
                    for row in rung_rows(record)),
        ways=ways,
        against=against,
        winners=tuple(_winner(run, record, trial) for trial in best),
        snippet=snippet,
        command=command,
    )  # fmt: skip


def _facts(record: SweepRecord) -> str:
    better = "lower" if record.mode == "min" else "higher"
    parts = [
        SEARCHES.get(record.search, record.search),
        plural(record.count, "trial"),
        f"{METRIC_NAMES[record.metric]} on the same held-out rows, {better} is better",
    ]
    if len(record.rungs) > 1:
        at = ", ".join(f"{step:,}" for step in record.rungs[:-1])
        share = f"the best {100 * record.share:.0f} % go on" if record.share else "the best go on"
        parts.append(f"{share} at step{'s' * (len(record.rungs) > 2)} {at} of {record.steps:,}")
        if record.judge == "mean":
            parts.append("losses there are those of the mean of a trial's last weights")
    return " · ".join(parts)


def _tiles(run: Run, record: SweepRecord) -> tuple[SweepTile, ...]:
    best = leaders(record, 1)
    ended = counts(record)
    tiles = [
        SweepTile(
            label=f"best {METRIC_NAMES[record.metric]}{'' if record.best else ' so far'}",
            value=loss_text(best[0].score) if best else NOTHING,
            detail=best[0].name if best else "nothing has been evaluated yet",
        ),
        SweepTile(
            label="trials to the end",
            value=f"{ended.get('finished', 0)} of {record.count}",
            detail=", ".join(
                f"{count} {trial_state_text(state)}" for state, count in ended.items() if state != "finished"
            ),
        ),
    ]
    share = trained_share(record)
    if share is not None:
        tiles.append(
            SweepTile(
                label="samples trained",
                value=f"{100 * share:.0f} %",
                detail=f"{record.samples.trained:,} of the {record.samples.all:,} that all trials would take",
            )
        )
    seconds = trained_seconds(run, record)
    if record.best and share and share < 1 and seconds is not None:
        tiles.append(
            SweepTile(
                label="time saved",
                value=f"about {duration_text(seconds / share - seconds)}",
                detail=f"all trials to their end: about {duration_text(seconds / share)} of training",
            )
        )
    return tuple(tiles)


def trained_seconds(run: Run, record: SweepRecord) -> float | None:
    """Return the seconds that the trials have trained: their share of the run's seconds, by tokens."""
    names = {trial.name for trial in record.trials}
    every = sum(job.trained_tokens for job in run.jobs)
    own = sum(job.trained_tokens for job in run.jobs if job.name in names)
    return run.seconds * own / every if own and run.seconds else None


def _trial_view(
    record: SweepRecord,
    trial: TrialRecord,
    place: int,
    job: JobRecord | None,
    drawn: DrawnSweep | None,
    keys: tuple[str, ...],
) -> TrialView:
    values = flat_values(trial)
    steps = job.step if job is not None else trial.left_at or 0
    ranks = trial.score is not None and trial.state != "failed"
    measured_at = trial.left_at if trial.score_step is None else trial.score_step
    at = measured_at if trial.state == "left" else None
    return TrialView(
        place=f"{place}" if ranks else NOTHING,
        name=trial.name,
        pen=drawn.pen if drawn else None,
        index=drawn.index if drawn else None,
        badge=_badge(record, trial, job),
        values=tuple(setting_text(values[key]) if key in values else NOTHING for key in keys),
        score=loss_text(trial.score),
        score_detail=f"at step {at:,}" if at is not None and trial.score is not None else "",
        state=trial_state_text(trial.state),
        reason=_reason(trial),
        steps=f"{steps:,} of {trial.steps or record.steps:,}",
    )


def _badge(record: SweepRecord, trial: TrialRecord, job: JobRecord | None) -> str:
    """Return a winner's badge; the first is `best` only if the held-out rows are enough to tell."""
    if trial.name not in record.best:
        return ""
    is_first = record.best[:1] == (trial.name,)
    return "best" if is_first and job is not None and is_enough(job) else "kept"


def _reason(trial: TrialRecord) -> str:
    """Return a trial's warning or reason, without what the state and the steps beside it already say."""
    return trial.warning or trial.reason.removeprefix(f"left the sweep at step {trial.left_at}: ")


def _rung_view(row: RungRow, *, several: bool) -> RungView:
    step = f"{row.step:,}" + (f" (generation {row.generation + 1})" if several else "")
    if row.kept is None:
        what = "ended" if row.last else "evaluated so far"
        share = 100 * row.evaluated // max(1, row.began)
        return RungView(
            step=step, came=f"{row.began}", went_on=f"{row.evaluated} {what}", share=share, detail=""
        )
    parts = []
    if row.worst_kept is not None:
        parts.append(f"the last to go on had {loss_text(row.worst_kept)}")
    if row.best_left is not None:
        parts.append(f"the first dropped {loss_text(row.best_left)}")
    if row.lost:
        parts.append(f"{row.lost} failed or were dropped before")
    return RungView(
        step=step,
        came=f"{row.began}",
        went_on=f"{row.kept} went on",
        share=round(100 * row.kept / max(1, row.began)),
        detail=", ".join(parts),
    )


def _folder(run: Run, record: SweepRecord, trial: str) -> Path:
    return best_folder(run.output.resolve() / record.name, trial)


def _winner(run: Run, record: SweepRecord, trial: TrialRecord) -> WinnerView:
    output = run.output.resolve()
    inside = _folder(run, record, trial.name).relative_to(output)
    return WinnerView(
        name=trial.name,
        score=loss_text(trial.score),
        folder=printable(f"{output.name}/{inside}"),
        link=link_to(*inside.parts, ""),
    )


def _use(run: Run, record: SweepRecord, job: JobRecord | None) -> tuple[str, str]:
    """Return how to load the best adapter, and how to prompt it; empty before the sweep has ended."""
    base = base_spec(job, run) if job is not None else None
    if job is None or base is None:
        return "", ""
    folder = _folder(run, record, job.name)
    return load_snippet(base, folder), generate_command(folder)
