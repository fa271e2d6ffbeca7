"""`report.html`: one self-contained page about an output folder, and the values that fill its template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any

from weftune.base.spec import DEMO
from weftune.core.evaluation import AnsweredRow
from weftune.errors import OutputError
from weftune.jobs.sweeps.record import rank_trials
from weftune.report.charts import DROPPED_COLOUR, MAX_CURVES, draw_charts, job_line_style
from weftune.report.compare import (
    base_accuracy,
    base_validation,
    best_jobs,
    differing_keys,
    flat_spec,
    kept_evaluation,
    kept_validation,
    sort_by_result,
    value_text,
    verdicts,
)
from weftune.report.effort import COLUMNS, error_sentences, headline, wall_time_bar, window_rows
from weftune.report.evaluation import BARE_BASE, MAX_ROWS, metric_title, score_text
from weftune.report.gantt import BUBBLE_COLUMNS, Timelines, bubble_rows, read_timelines, timeline_charts
from weftune.report.read import JobRecord, Run, read_run
from weftune.report.snippets import Remedy, base_spec, generate_command, load_snippet, remedies
from weftune.report.svg import LineStyle
from weftune.report.sweep_page import sweep_view
from weftune.report.template import Tile, render_template
from weftune.report.words import (
    NO_VALUE,
    accuracy_text,
    bytes_text,
    change_text,
    count_noun,
    duration_text,
    loss_text,
    minutes_text,
    points_text,
    rate_text,
    relative_link,
    short_paths,
)

_MAX_VALUE_LETTERS = 72
_MAX_WINDOWS = 200
_MAX_ROWS = 500
"""Maximum number of jobs in the table of the report. A page with more jobs would open slowly."""
_MAX_DETAILS = 200
"""Maximum number of jobs for which the report has commands to copy: the first jobs, and those that need the
user's action."""
_MAX_ANSWERS = 8
"""Maximum number of jobs whose answers to a prompt are shown side by side. The best jobs are chosen."""
_MAX_RUNS = 5
"""Maximum number of runs whose wall times are shown in the report of an output folder. If the folder was
resumed more often, only the last runs are shown."""
_CURVES = ("loss", "validation", "accuracy")
"""Names of the report's charts that show losses and accuracy. All other charts show time and memory."""
_NUMBERS = (
    ("validation", "validation loss"),
    ("change", "against the base"),
    ("accuracy", "token accuracy"),
    ("score", "metric of answers"),
    ("margin", "rewards/margins"),
    ("preference_accuracy", "rewards/accuracies"),
    ("loss", "training loss"),
)
"""Columns of numbers in the table of jobs, as pairs of an attribute of `JobView` and the heading."""
_STOPPED = ("failed", "cancelled", "paused", "interrupted")
_MIN_SAVED = 0.05
"""Minimum time saved by training jobs together that is reported, as a fraction of the run's time. Smaller
savings are within the error of the time model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A cell of the table of jobs that shows the value of a setting: a short string, and the complete string
    that is shown on hover."""

    key: str
    text: str
    full_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A measured number of a job in the report: the formatted number, its value for sorting, and the details
    below it."""

    text: str = ""
    value: float | None = None
    detail: str = ""
    colour_class: str = ""
    """CSS class that colours the formatted number: `good` or `worse`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job as the report shows it, with the formatted contents of its row."""

    job: JobRecord
    index: int
    badge: str
    values: tuple[Value, ...]
    loss: Number
    validation: Number
    change: Number
    accuracy: Number
    score: Number
    margin: Number
    preference_accuracy: Number
    snippet: str
    command: str
    remedies: tuple[Remedy, ...]
    is_trial: bool
    """Whether the job is a trial of a sweep, and therefore listed in the sweep's table."""
    is_dropped: bool
    """Whether the job was dropped from its sweep. Such a job has no adapter, and the user does not have to do
    anything."""

    @property
    def line_style(self) -> LineStyle:
        return job_line_style(self.index)

    @property
    def progress(self) -> str:
        steps = count_noun(self.job.steps, "step")
        return steps if self.job.step == self.job.steps else f"{self.job.step:,} of {steps}"

    @property
    def folder(self) -> str:
        """Link to the job's folder, relative to the page. Empty if the job has no folder."""
        return relative_link(self.job.name, "") if self.job.spec else ""

    @property
    def has_no_adapter(self) -> bool:
        """Whether the job ended or waits without an adapter. Such jobs are listed at the top of the page."""
        return self.job.state in _STOPPED and not self.is_dropped

    @property
    def has_curves(self) -> bool:
        """Whether the charts contain curves of the job, drawn in a colour and dashes that no other job
        has."""
        return self.index < MAX_CURVES and not self.is_dropped

    @property
    def has_instructions(self) -> bool:
        """Whether the report contains code that uses the job's adapter, or a command that resumes the job."""
        if self.is_dropped or (self.is_trial and self.job.state == "failed"):
            # The sweep has decided without it, and does not admit it again.
            return False
        return self.has_no_adapter or self.index < _MAX_DETAILS


def write_report(output: Path, run: Run | None = None) -> Path:
    """Write `report.html` of an output folder and return its path. `run` is the content of the folder, if it
    has been read already."""
    run = run or read_run(output)
    target = output / "report.html"
    draft = output / "report.html.tmp"
    page = render_page(run, read_timelines(output))
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise OutputError(f"{target} cannot be written: {error.strerror}") from error
    return target


def render_page(run: Run, timelines: Timelines | None = None) -> str:
    jobs = _sorted_jobs(run)
    views = _job_views(run, jobs)
    table = [view for view in views if not view.is_trial]
    charts = draw_charts(jobs, run.windows, run.dropped_trials)
    pipeline = timeline_charts(timelines) if timelines else ()
    values = {
        "title": run.output.resolve().name,
        "facts": _run_properties(run),
        "verdicts": verdicts(run),
        "tiles": _run_tiles(run),
        "keys": [value.key for value in table[0].values] if table else [],
        "numbers": [one for one in _NUMBERS if any(getattr(view, one[0]).text for view in table)],
        "jobs": views,
        "table": table[:_MAX_ROWS],
        "table_words": _table_note(table),
        "sweeps": [sweep_view(run, record, {view.job.name: view for view in views}) for record in run.sweeps],
        "dropped_colour": DROPPED_COLOUR,
        "notes": run.notes,
        "curves": [chart for chart in charts if chart.name in _CURVES],
        "pipeline": pipeline,
        "bubble_columns": BUBBLE_COLUMNS,
        "bubble_rows": bubble_rows(timelines) if timelines else [],
        "answers": answered_prompts(jobs),
        "effort_charts": [chart for chart in charts if chart.name not in _CURVES],
        "effort_words": _effort_sentences(run),
        "window_columns": COLUMNS,
        "window_rows": window_rows(run.windows[:_MAX_WINDOWS]),
        "walls": [wall_time_bar(one) for one in run.wall_times[-_MAX_RUNS:]],
        "unfinished": [view for view in views if view.has_instructions and not view.snippet],
        "usable": [view for view in views if view.has_instructions and view.snippet],
    }
    values["sections"] = _page_sections(values)
    return render_template("page.html.jinja", {chart.name: chart.data for chart in pipeline}, values)


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A held-out prompt, with the answers that the base model and the adapters of several jobs gave to it."""

    row: AnsweredRow
    titles: Mapping[str, str]
    """Maps the base and each job with an answer, the best first, to its title."""


def answered_prompts(jobs: Sequence[JobRecord]) -> list[AnsweredPrompt]:
    """Return the prompts with the answers of the base and of the first jobs side by side. `jobs` are in the
    order of the table."""
    asked: dict[tuple[str, str, str | None], list[tuple[JobRecord, AnsweredRow]]] = {}
    for job in jobs:
        for row in job.answers.rows if job.answers is not None else ():
            asked.setdefault((row.location, repr(row.prompt), row.expected), []).append((job, row))
    found = []
    for said in list(asked.values())[:MAX_ROWS]:
        shown, first = said[:_MAX_ANSWERS], said[0][1]
        answers = {BARE_BASE: first.answers[BARE_BASE]}
        answers |= {job.name: row.answers["job"] for job, row in shown}
        titles = {BARE_BASE: "base", **{job.name: _answer_title(job) for job, _ in shown}}
        found.append(AnsweredPrompt(replace(first, answers=answers), titles))
    return found


def _answer_title(job: JobRecord) -> str:
    assert job.answers is not None
    return f"{job.name}, step {job.answers.step:,}"


def _sorted_jobs(run: Run) -> tuple[JobRecord, ...]:
    """Return the jobs in the order of the table: jobs outside sweeps by result, then the trials of sweeps by
    result, then the dropped trials."""
    ranks = {
        trial.name: (1 + (trial.state == "left"), number)
        for number, trial in enumerate(trial for sweep in run.sweeps for trial in rank_trials(sweep))
    }
    return tuple(sorted(sort_by_result(run.jobs), key=lambda job: ranks.get(job.name, (0, 0))))


def _page_sections(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the anchor and title of each section of the report for which there is content."""
    others = (
        (values["table"], "jobs", "Jobs"),
        (values["curves"], "curves", "Curves"),
        (values["pipeline"], "pipeline", "The pipeline"),
        (values["answers"], "answers", "Answers"),
        (values["window_rows"] or values["walls"], "effort", "Time and memory"),
        (values["unfinished"], "unfinished", "How to resume"),
        (values["usable"], "use", "Use the adapters"),
    )
    return [
        *((f"sweep-{number}", f"Sweep {sweep.name}") for number, sweep in enumerate(values["sweeps"])),
        *((anchor, title) for shown, anchor, title in others if shown),
    ]


def _run_properties(run: Run) -> list[str]:
    """Return short strings about the run: model, quantisation, dtype, device and start time, as far as they
    are known."""
    bases = [base for job in run.jobs if job.base and (base := base_spec(job, run)) is not None]
    formats = sorted({base.quantize for base in bases if base.quantize})
    name = bases[0].published_name if bases else run.base
    started = datetime.fromtimestamp(run.started).astimezone() if run.started else None
    facts = (
        f"{name} (demo)" if bases and bases[0].model == DEMO else name,
        f"weights in {', '.join(formats)}" if formats else "",
        f"computed in {run.dtype}" if run.dtype and formats else run.dtype,
        run.device,
        started.strftime("%Y-%m-%d %H:%M %Z") if started else "",
    )
    return [fact for fact in facts if fact]


def _effort_sentences(run: Run) -> list[str]:
    words = error_sentences(run.windows)
    if run.seconds is not None and run.solo_seconds is not None:
        words.append(
            f"One after another the jobs would have taken {minutes_text(run.solo_seconds)} minutes, by the "
            f"time model that was fitted to this run; together they took {minutes_text(run.seconds)}."
        )
    microbatches = sum(window.microbatches for window in run.windows)
    shared = sum(window.shared for window in run.windows)
    if microbatches:
        words.append(
            f"{100 * shared / microbatches:.0f} % of the microbatches ({shared:,} of {microbatches:,}) hold "
            "samples of two jobs or more."
        )
    if len(run.windows) > _MAX_WINDOWS:
        words.append(f"The first {_MAX_WINDOWS} of {len(run.windows):,} windows are shown.")
    return words


def _run_tiles(run: Run) -> list[Tile]:
    dropped = run.dropped_trials
    states = Counter("dropped" if job.name in dropped else str(job.state) for job in run.jobs)
    succeeded = states.pop("succeeded", 0)
    detail = ", ".join(f"{count} {state}" for state, count in states.items())
    tokens = sum(job.trained_tokens for job in run.jobs)
    rate = tokens / run.seconds if run.seconds and tokens else None
    tiles = [
        Tile("jobs succeeded", f"{succeeded} of {len(run.jobs)}", detail or "none failed"),
        Tile("tokens per second", rate_text(rate), f"{tokens:,} tokens trained"),
    ]
    if run.seconds and run.seconds < 60:
        tiles.append(Tile("seconds", f"{run.seconds:.3g}", "from start to end"))
    elif run.seconds:
        detail = f"{duration_text(run.seconds)} from start to end"
        tiles.append(Tile("minutes", minutes_text(run.seconds), detail))
    if run.seconds is not None and run.solo_seconds is not None and headline(run.windows) is not None:
        # Only if the time model has proved accurate.
        saved = run.solo_seconds - run.seconds
        if saved >= _MIN_SAVED * run.seconds:
            detail = f"predicted, against {minutes_text(run.solo_seconds)} one after another"
            tiles.append(Tile("minutes saved", minutes_text(saved), detail))
    tiles.append(Tile("peak memory", bytes_text(run.peak_bytes), run.device))
    return [tile for tile in tiles if tile.value != NO_VALUE]


# -- jobs -----------------------------------------------------------------------------------------------


def _job_views(run: Run, jobs: Sequence[JobRecord]) -> list[JobView]:
    """Return the jobs as the report shows them. `jobs` are in the order of the table."""
    trials, dropped = run.trials, run.dropped_trials
    plain = [job for job in jobs if job.name not in trials]
    best = best_jobs(plain)
    columns = _setting_columns(plain)
    values = {job.name: tuple(column[at] for column in columns) for at, job in enumerate(plain)}
    views = []
    for index, job in enumerate(jobs):
        folder, base = run.output.resolve() / job.name, base_spec(job, run)
        usable, best_on = job.state == "succeeded" and base is not None, best.get(job.name)
        loss = job.loss
        view = JobView(
            job=job,
            index=index,
            badge="" if best_on is None else f"best on {best_on}" if best_on else "best",
            values=values.get(job.name, ()),
            loss=Number() if loss is None else Number(text=loss_text(loss), value=loss),
            validation=_validation_number(job),
            change=_loss_change_number(job),
            accuracy=_accuracy_number(job),
            score=_score_number(job),
            margin=_metric_number(job, ("rewards/margins", "margin"), loss_text),
            preference_accuracy=_metric_number(job, ("rewards/accuracies", "accuracy"), accuracy_text),
            snippet=load_snippet(base, folder) if usable and base is not None else "",
            command=generate_command(folder) if usable else "",
            remedies=remedies(job, run.command),
            is_trial=job.name in trials,
            is_dropped=job.name in dropped,
        )
        views.append(view)
    return views


def _validation_number(job: JobRecord) -> Number:
    """Return the validation loss of the adapter in the job's folder, with its step if that is not the last
    step. If the adapter was not evaluated, return the loss of the base without an adapter."""
    kept, base = kept_validation(job), base_validation(job)
    if kept is None:
        text = "" if base is None else f"base {loss_text(base)}"
        return Number(text=text, detail="not evaluated since" if text else "")
    known = [line for line in job.evaluations if line.loss is not None]
    best, detail = next((line for line in known if line.step == job.best_step), None), ""
    if best is not None and best is not known[-1]:
        detail = f"best {loss_text(best.loss)} at step {best.step:,}, last {loss_text(known[-1].loss)}"
    return Number(text=loss_text(kept), value=kept, detail=detail)


def _loss_change_number(job: JobRecord) -> Number:
    kept, base = kept_validation(job), base_validation(job)
    if kept is None or base is None or base == 0:
        return Number()
    tone = "" if kept == base else "good" if kept < base else "worse"
    text, share = change_text(base, kept), (kept - base) / abs(base)
    return Number(text=text, value=share, detail=f"base {loss_text(base)}", colour_class=tone)


def _metric_number(job: JobRecord, names: Sequence[str], text: Callable[[float], str]) -> Number:
    """Return a measured metric of the job for the report: the metric of its objective that has one of the
    given names, on the held-out pairs or, without held-out pairs, at the last step."""
    kept = kept_evaluation(job)
    line = kept if kept is not None else job.losses[-1] if job.losses else None
    metrics = {} if line is None else line.metrics
    value = next((metrics[name] for name in names if name in metrics), None)
    detail = "training" if kept is None else ""
    return Number() if value is None else Number(text=text(value), value=value, detail=detail)


def _score_number(job: JobRecord) -> Number:
    """Return the value of the job's `eval.metric` for the report: for the adapter in the job's folder, with
    the base's value as a detail."""
    name, base = job.metric_name, job.base_score
    if job.score is None or name is None:
        return Number()
    detail = metric_title(name) + (f", base {score_text(name, base)}" if base is not None else "")
    tone = "worse" if base is not None and job.score < base else ""
    return Number(text=score_text(name, job.score), value=job.score, detail=detail, colour_class=tone)


def _accuracy_number(job: JobRecord) -> Number:
    kept, base = kept_evaluation(job), base_accuracy(job)
    if kept is None or kept.accuracy is None:
        return Number()
    number = Number(text=accuracy_text(kept.accuracy), value=kept.accuracy)
    if base is None:
        return number
    detail = f"{points_text(base, kept.accuracy)}, base {accuracy_text(base)}"
    tone = "worse" if kept.accuracy < base else ""
    return Number(text=number.text, value=number.value, detail=detail, colour_class=tone)


def _setting_columns(jobs: Sequence[JobRecord]) -> list[list[Value]]:
    """Return a column of the table for each key in which jobs differ. Keys whose formatted values are all
    equal are left out."""
    specs = [flat_spec(job) for job in jobs]
    columns = [_setting_column(key, [spec.get(key) for spec in specs]) for key in differing_keys(jobs)]
    return [column for column in columns if len({one.full_text for one in column}) > 1]


def _setting_column(key: str, values: Sequence[Any]) -> list[Value]:
    wholes = ["" if value is None or value in ("", [], {}) else value_text(value) for value in values]
    names = short_paths(sorted({whole for whole in wholes if PurePath(whole).is_absolute()}))
    return [Value(key=key, text=_shorten(names.get(whole, whole)), full_text=whole) for whole in wholes]


def _shorten(text: str) -> str:
    half = _MAX_VALUE_LETTERS // 2
    return text if len(text) <= _MAX_VALUE_LETTERS else f"{text[: half - 1]}…{text[-half:]}"


def _table_note(table: Sequence[JobView]) -> str:
    words, count = [], len(table)
    if count > 1 and table[0].values:
        words.append("Only the settings in which the jobs differ are shown.")
    elif count > 1:
        words.append("The jobs do not differ in any setting.")
    if count > _MAX_ROWS:
        words.append(f"The first {_MAX_ROWS:,} of {count:,} jobs are in the table.")
    if count > MAX_CURVES:
        words.append(f"The first {MAX_CURVES} of {count:,} jobs have curves below.")
    if count > _MAX_DETAILS:
        words.append(f"Commands for the first {_MAX_DETAILS} stand at the end of the page.")
    if any(view.badge.startswith("best on") for view in table):
        words.append("Losses on different validation rows cannot be compared: each set has its own best.")
    return " ".join(words)
