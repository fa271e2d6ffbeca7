"""The tables that are printed at the end of `weftune train` and of the quickstart: all jobs, and the best
trials of sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weftune.jobs.store.status import resume_line
from weftune.jobs.sweeps.record import (
    SweepRecord,
    TrialRecord,
    base_sentence,
    best_folder,
    flat_trial_values,
    leading_trials,
    metric_title,
    setting_text,
    shorten_keys,
    state_counts,
    swept_keys,
    trained_fraction,
    winners,
)
from weftune.report.compare import base_validation, best_jobs, first_loss, kept_validation, sort_by_result
from weftune.report.effort import headline
from weftune.report.read import JobRecord, Run
from weftune.report.snippets import remedies, serve_command
from weftune.report.terminal import STATE_STYLES
from weftune.report.words import (
    NO_VALUE,
    change_text,
    count_noun,
    loss_text,
    printable_line,
    trial_state_text,
)

Losses = tuple[float | None, float | None]
"""Pair of the first and the last value of a job's loss. A value is None if it is unknown."""


def final_table(run: Run, width: int = 80) -> Group:
    """Return a table of all jobs, the best result first, with the reasons of failures and how to resume. Of a
    sweep's trials, only the best are listed. Paths that do not fit into `width` columns are on separate
    lines."""
    trials = run.trials
    jobs = tuple(job for job in sort_by_result(run.jobs) if job.name not in trials)
    sweeps = [part for record in run.sweeps for part in sweep_ending(run, record, width)]
    parts = _jobs_in_table(run, jobs, width) if jobs or not sweeps else []
    sentence = headline(run.windows)
    predictions = [Text(printable_line(sentence), style="dim")] if sentence else []
    return Group(*parts, *sweeps, *predictions)


def print_ending(console: Console, run: Run) -> None:
    """Print the table of all jobs, the command that serves their adapters, and the path of the report."""
    console.print(final_table(run, console.width), crop=False)
    if (command := serve_command(run)) is not None:
        console.print(
            f"Serve: {printable_line(command)}", style="dim", highlight=False, markup=False, soft_wrap=True
        )
    if (run.output / "report.html").exists():
        console.print(f"Report: {run.output / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


def _jobs_in_table(run: Run, jobs: tuple[JobRecord, ...], width: int) -> list[RenderableType]:
    below = _job_reasons(run, jobs)
    whole = _job_table(run, jobs, shows_paths=True)
    if Console(width=10_000).measure(whole).maximum <= width:
        return [whole, *below]
    paths = [Text(_short_path(run.output / printable_line(job.name))) for job in jobs if job.spec]
    return [_job_table(run, jobs, shows_paths=False), *paths, *below]


def _job_reasons(run: Run, jobs: tuple[JobRecord, ...]) -> list[Text]:
    """Return lines for the end of a run: warnings about results, the reasons why jobs did not finish, and the
    command to retry failed jobs."""
    lines = [_no_wrap_text(f"{job.name}: {job.warning}", style="red") for job in jobs if job.warning]
    for job in jobs:
        if job.reason:
            lines.append(_no_wrap_text(f"{job.name}: {job.reason}"))
        if job.state == "failed":
            lines.append(_no_wrap_text(f"  {remedies(job, run.command)[0].command}", style="dim"))
    return lines


def _no_wrap_text(text: str, style: str = "") -> Text:
    """Return a line of text into which rich inserts no line breaks, since a command with line breaks could
    not be pasted."""
    return Text(printable_line(text), style=style, no_wrap=True, overflow="ignore")


def _job_table(run: Run, jobs: tuple[JobRecord, ...], shows_paths: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("job", overflow="ellipsis", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("steps", "loss", "validation", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    if shows_paths:
        table.add_column("path", no_wrap=True)
    best = best_jobs(jobs)
    for job in jobs:
        losses, validation = _first_and_last_loss(job), (base_validation(job), kept_validation(job))
        table.add_row(
            Text(printable_line(job.name), style="bold" if job.name in best else ""),
            Text(job.state, style=STATE_STYLES.get(job.state, "")),
            f"{job.step}/{job.steps}",
            _losses_text(*losses),
            _losses_text(*validation),
            _change_text(losses, validation),
            *(
                [Text(_short_path(run.output / printable_line(job.name)) if job.spec else NO_VALUE)]
                if shows_paths
                else []
            ),
        )
    return table


def job_state_table(jobs: Sequence[JobRecord]) -> Table:
    """Return a table of jobs during a run, with their states, steps and last losses, and the reasons why jobs
    do not train."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("job", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("steps", "loss", "validation"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for job in jobs:
        table.add_row(
            printable_line(job.name),
            Text(job.state, style=STATE_STYLES.get(job.state, "")),
            f"{job.step}/{job.steps}",
            loss_text(job.loss, 3),
            loss_text(job.eval_loss, 3),
            Text(printable_line(job.reason)),
        )
    return table


def _first_and_last_loss(job: JobRecord) -> Losses:
    """Return the first and the last training loss of a job. The last one is None if the job has made only one
    step."""
    many = sum(line.loss is not None for line in job.losses) > 1
    return first_loss(job), job.loss if many else None


def _losses_text(first_loss: float | None, last_loss: float | None) -> str:
    """Format the first and the last loss of a job, or only one of them if the other is not known."""
    if first_loss is None or last_loss is None:
        return loss_text(first_loss if last_loss is None else last_loss, 3)
    return f"{loss_text(first_loss, 3)} → {loss_text(last_loss, 3)}"


def _change_text(losses: Losses, validation: Losses) -> Text:
    """Format the change of the validation loss or, without a validation loss, of the training loss. The text
    is red if the loss increased."""
    first, last = losses if validation == (None, None) else validation
    is_worse = first is not None and last is not None and last > first
    return Text(change_text(first, last), style="red" if is_worse else "")


def _short_path(folder: Path) -> str:
    """Format the path of a folder, relative to the current directory if the folder is inside that
    directory."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


_LEADERS = 3
_FAILURES = 3


def sweep_ending(run: Run, record: SweepRecord, width: int) -> list[RenderableType]:
    """Return a table of a sweep's best trials, with the folders of the winners' adapters if these paths fit
    into `width` columns."""
    best = winners(record) or leading_trials(record, _LEADERS)
    doubt = base_sentence(record)
    below = [Text(printable_line(doubt), style="red")] if doubt else []
    below += [*_trial_failures(record), *_resume_lines(run, record)]
    heading = Text(printable_line(_sweep_heading(record)), style="bold")
    if not best:
        return [heading, *below]
    folders = [best_folder(run.output / record.name, trial.name) for trial in best if record.best]
    paths = [
        _short_path(run.output / printable_line(str(folder.relative_to(run.output)))) for folder in folders
    ]
    whole = _trial_table(record, best, paths)
    if Console(width=10_000).measure(whole).maximum <= width:
        return [heading, whole, *below]
    return [heading, _trial_table(record, best, ()), *map(Text, paths), *below]


def _sweep_heading(record: SweepRecord) -> str:
    states = ", ".join(f"{count} {trial_state_text(state)}" for state, count in state_counts(record).items())
    share = trained_fraction(record)
    saved = "" if share is None else f"; {100 * share:.0f} % of the samples that all to the end would take"
    return f"{record.name}: {count_noun(len(record.trials), 'trial')}, {states}{saved}"


def _trial_table(record: SweepRecord, trials: Sequence[TrialRecord], paths: Sequence[str]) -> Table:
    keys = swept_keys(record)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", justify="right")
    table.add_column("trial", overflow="ellipsis", no_wrap=True)
    for key in shorten_keys(keys).values():
        table.add_column(printable_line(key), justify="right", no_wrap=True)
    table.add_column(Text(metric_title(record.metric)), justify="right", no_wrap=True)
    if paths:
        table.add_column("path", no_wrap=True)
    for number, trial in enumerate(trials):
        values = flat_trial_values(trial)
        table.add_row(
            f"{number + 1}.",
            Text(printable_line(trial.name), style="" if number else "bold"),
            *(Text(printable_line(setting_text(values[key])) if key in values else NO_VALUE) for key in keys),
            loss_text(trial.score),
            *([Text(paths[number])] if paths else []),
        )
    return table


def _trial_failures(record: SweepRecord) -> list[Text]:
    failed = [trial for trial in record.trials if trial.state == "failed"]
    lines = [Text(printable_line(f"{trial.name} failed: {trial.reason}")) for trial in failed[:_FAILURES]]
    more = len(failed) - _FAILURES
    if more > 0:
        lines.append(Text(f"{count_noun(more, 'trial')} more failed; the report has the reasons"))
    return lines


def _resume_lines(run: Run, record: SweepRecord) -> list[Text]:
    if record.best or all(trial.state in ("finished", "left", "failed") for trial in record.trials):
        return []
    sentence = f"Resume the sweep with {resume_line(run.command)}"
    return [Text(printable_line(sentence), style="dim", no_wrap=True, overflow="ignore")]
