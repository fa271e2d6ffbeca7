"""The table that `weftune train` and the quickstart end with."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weftune.report.compare import (
    base_validation,
    best_jobs,
    by_result,
    first_loss,
    kept_validation,
    last_loss,
)
from weftune.report.promises import headline
from weftune.report.read import JobRecord, Run
from weftune.report.snippets import remedies
from weftune.report.sweeps.ending import sweep_ending
from weftune.report.terminal import STATE_STYLES
from weftune.report.words import NOTHING, change_text, loss_text, printable

Way = tuple[float | None, float | None]
"""First and last value of a loss."""


def final_table(run: Run, width: int = 80) -> Group:
    """Return all jobs, best result first, with their folders; below, why some failed and how to resume.

    Paths that do not fit beside the numbers in `width` columns have lines of their own. Of a sweep's trials
    only the best are shown.
    """
    trials = run.trials
    jobs = tuple(job for job in by_result(run.jobs) if job.name not in trials)
    sweeps = [part for record in run.sweeps for part in sweep_ending(run, record, width)]
    parts = _jobs(run, jobs, width) if jobs or not sweeps else []
    return Group(*parts, *sweeps, *_promise(run))


def print_ending(console: Console, run: Run) -> None:
    """Print the table of all jobs and where the report is."""
    console.print(final_table(run, console.width), crop=False)
    if (run.output / "report.html").exists():
        console.print(f"Report: {run.output / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


def _jobs(run: Run, jobs: tuple[JobRecord, ...], width: int) -> list[RenderableType]:
    below = _reasons(run, jobs)
    whole = _table(run, jobs, with_paths=True)
    if Console(width=10_000).measure(whole).maximum <= width:
        return [whole, *below]
    paths = [Text(_place(run.output, job)) for job in jobs if job.spec]
    return [_table(run, jobs, with_paths=False), *paths, *below]


def _reasons(run: Run, jobs: tuple[JobRecord, ...]) -> list[Text]:
    """Return warnings about results, why jobs did not finish, and the command that helps with failed ones."""
    lines = [_long(f"{job.name}: {job.warning}", style="red") for job in jobs if job.warning]
    for job in jobs:
        if job.reason:
            lines.append(_long(f"{job.name}: {job.reason}"))
        if job.state == "failed":
            lines.append(_long(f"  {remedies(job, run.command)[0].command}", style="dim"))
    return lines


def _long(text: str, style: str = "") -> Text:
    """Return a line that only the terminal wraps: a command with line breaks cannot be pasted."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ignore")


def _promise(run: Run) -> list[Text]:
    told = headline(run.windows)
    return [] if told is None else [Text(printable(told), style="dim")]


def _table(run: Run, jobs: tuple[JobRecord, ...], with_paths: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("job", overflow="ellipsis", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("steps", "loss", "validation", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    if with_paths:
        table.add_column("path", no_wrap=True)
    best = best_jobs(jobs)
    for job in jobs:
        losses, validation = _losses(job), (base_validation(job), kept_validation(job))
        table.add_row(
            Text(printable(job.name), style="bold" if job.name in best else ""),
            Text(job.state, style=STATE_STYLES.get(job.state, "")),
            f"{job.step}/{job.steps}",
            _way(*losses),
            _way(*validation),
            _change(losses, validation),
            *([Text(_place(run.output, job) if job.spec else NOTHING)] if with_paths else []),
        )
    return table


def _losses(job: JobRecord) -> Way:
    """Return the first and the last training loss; the last is None for a job with one step."""
    many = sum(line.loss is not None for line in job.losses) > 1
    return first_loss(job), last_loss(job) if many else None


def _way(first: float | None, last: float | None) -> str:
    """Format the first and the last loss, or the one that is known."""
    if first is None or last is None:
        return loss_text(first if last is None else last, 3)
    return f"{loss_text(first, 3)} → {loss_text(last, 3)}"


def _change(losses: Way, validation: Way) -> Text:
    """Format the change of the validation loss if there is one, else of the training loss; red if worse."""
    first, last = losses if validation == (None, None) else validation
    is_worse = first is not None and last is not None and last > first
    return Text(change_text(first, last), style="red" if is_worse else "")


def _place(output: Path, job: JobRecord) -> str:
    """Return the job's folder, relative to the current directory if it is inside."""
    folder = output / printable(job.name)
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
