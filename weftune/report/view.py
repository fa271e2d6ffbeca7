"""Values for the page's template: records of finished text, still unescaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import PurePath
from typing import Any

from weftune.base.spec import DEMO
from weftune.report.charts import LEFT_PEN_COLOUR, MOST_CURVES, Chart, pen
from weftune.report.compare import (
    base_accuracy,
    base_validation,
    best_jobs,
    by_result,
    differing_keys,
    flat_spec,
    kept_evaluation,
    kept_validation,
    last_loss,
    value_text,
)
from weftune.report.promises import COLUMNS, headline, rows, sentences
from weftune.report.read import JobRecord, Run
from weftune.report.snippets import Remedy, base_spec, generate_command, load_snippet, remedies
from weftune.report.svg import Pen
from weftune.report.sweeps.ranking import ranked
from weftune.report.sweeps.view import DrawnSweep, SweepView, sweep_view
from weftune.report.timelines import COLUMNS as BUBBLE_COLUMNS
from weftune.report.timelines import TimelineChart, Timelines, bubble_rows, timeline_charts
from weftune.report.verdict import RunVerdict, verdicts
from weftune.report.wall import WallBar, wall_bar
from weftune.report.words import (
    NOTHING,
    accuracy_text,
    breakable,
    bytes_text,
    change_text,
    duration_text,
    link_to,
    loss_text,
    minutes_text,
    plural,
    points_text,
    rate_text,
    short_paths,
)

_LONGEST_VALUE = 72
_MOST_WINDOWS = 200
_MOST_ROWS = 500
"""Number of jobs in the table; a page with more of them would not open at once."""
_MOST_DETAILS = 200
"""Number of jobs whose commands are on the page: the first ones, and those that need action by the user."""
_MOST_RUNS = 5
"""Number of runs that are shown; of a folder that was resumed more often, the last ones."""
_CURVES = ("loss", "validation", "accuracy")
"""The charts about what was learned; the others are about time and memory."""
_STOPPED = ("failed", "cancelled", "paused", "interrupted")
_LEAST_SAVED = 0.05
"""Least share of the run that counts as saved: a smaller one is within the error of the time model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One headline number."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One cell of the table: shortened in the table, complete on hover."""

    key: str
    pieces: tuple[str, ...]
    """Parts of the text; lines may break between them."""
    whole: str

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One measured number of a job: its text, its value for sorting, and the detail below it."""

    text: str = ""
    value: float | None = None
    detail: str = ""
    tone: str = ""
    """`good` or `worse`, for the colour of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job on the page."""

    index: int
    name: str
    pieces: tuple[str, ...]
    """Parts of the name; lines may break between them."""
    pen: Pen
    badge: str
    state: str
    progress: str
    folder: str
    """A link to the job's folder, relative to the page; empty if there is none."""
    job_file: str
    """A link to its job.yaml."""
    values: tuple[Value, ...]
    loss: Number
    validation: Number
    change: Number
    accuracy: Number
    warning: str
    reason: str
    notes: tuple[str, ...]
    snippet: str
    command: str
    stopped: bool
    """Whether it ended or waits without an adapter; such jobs are listed at the top of the page."""
    remedies: tuple[Remedy, ...]
    trial: bool
    """Whether it belongs to a sweep; then it is in the sweep's table."""
    left: bool
    """Whether it was dropped from that sweep: there is no adapter to use, and nothing to do."""

    @property
    def drawn(self) -> bool:
        """Whether its curves are among the charts, with a pen of their own."""
        return self.index < MOST_CURVES and not self.left

    @property
    def detailed(self) -> bool:
        """Whether the page says how to use it, or how to resume it."""
        if self.left or (self.trial and self.state == "failed"):
            # The sweep has decided without it, and does not admit it again.
            return False
        return self.stopped or self.index < _MOST_DETAILS


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortView:
    """Predicted and measured time and memory, window by window."""

    charts: tuple[Chart, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]
    wall: tuple[WallBar, ...]
    """Wall time by phase of each run into the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineView:
    """The last window of a pipeline, predicted and measured."""

    charts: tuple[TimelineChart, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """The whole page."""

    title: str
    facts: tuple[str, ...]
    sections: tuple[tuple[str, str], ...]
    """Anchor and title of every section, for links."""
    verdicts: tuple[RunVerdict, ...]
    tiles: tuple[Tile, ...]
    keys: tuple[str, ...]
    """Keys in which the jobs differ; each has a column."""
    numbers: tuple[tuple[str, str], ...]
    """The attribute of `JobView` and the heading of each column of numbers that at least one job has."""
    jobs: tuple[JobView, ...]
    """All jobs, in the order of their pens."""
    table: tuple[JobView, ...]
    """The jobs of the table: all that are not trials of a sweep."""
    sweeps: tuple[SweepView, ...]
    left_colour: str
    """Colour of the curves of trials dropped from a sweep."""
    table_words: str
    notes: tuple[str, ...]
    charts: tuple[Chart, ...]
    effort: EffortView
    pipeline: PipelineView | None
    """Timelines of the pipeline. None if there are none, as on one device."""

    @property
    def usable(self) -> tuple[JobView, ...]:
        return tuple(job for job in self.jobs if job.detailed and job.snippet)

    @property
    def unfinished(self) -> tuple[JobView, ...]:
        """Jobs without a finished adapter for which the page says how to resume."""
        return tuple(job for job in self.jobs if job.detailed and not job.snippet)


def in_order(run: Run) -> tuple[JobRecord, ...]:
    """Return the jobs by result, then the trials of sweeps by result, then the dropped trials."""
    places = {
        trial.name: (1 + (trial.state == "left"), number)
        for number, trial in enumerate(trial for sweep in run.sweeps for trial in ranked(sweep))
    }
    return tuple(sorted(by_result(run.jobs), key=lambda job: places.get(job.name, (0, 0))))


def page_view(
    run: Run, jobs: Sequence[JobRecord], charts: tuple[Chart, ...], timelines: Timelines | None = None
) -> PageView:
    """Return the values of the whole page. `jobs` come in the order of the table, as from `in_order`."""
    trials, left = run.trials, run.left
    plain = [job for job in jobs if job.name not in trials]
    best = best_jobs(plain)
    columns = _setting_columns(plain, differing_keys(plain))
    values = {job.name: tuple(column[at] for column in columns.values()) for at, job in enumerate(plain)}
    none: tuple[Value, ...] = ()
    views = tuple(
        _job_view(run, job, index, values.get(job.name, none), best, job.name in trials, job.name in left)
        for index, job in enumerate(jobs)
    )
    table = tuple(view for view in views if not view.trial)
    view = PageView(
        title=run.output.resolve().name,
        facts=_facts(run),
        sections=(),
        verdicts=verdicts(run),
        tiles=_tiles(run),
        keys=tuple(columns),
        numbers=tuple(
            (name, heading) for name, heading in _NUMBERS if any(getattr(one, name).text for one in table)
        ),
        jobs=views,
        table=table[:_MOST_ROWS],
        sweeps=tuple(sweep_view(run, record, _drawn(views)) for record in run.sweeps),
        left_colour=LEFT_PEN_COLOUR,
        table_words=_table_words(plain, tuple(columns), best),
        notes=run.notes,
        charts=tuple(chart for chart in charts if chart.name in _CURVES),
        effort=_effort(run, tuple(chart for chart in charts if chart.name not in _CURVES)),
        pipeline=_pipeline(timelines) if timelines else None,
    )
    return replace(view, sections=_sections(view))


_NUMBERS = (
    ("validation", "validation loss"),
    ("change", "against the base"),
    ("accuracy", "token accuracy"),
    ("loss", "training loss"),
)


def _sections(view: PageView) -> tuple[tuple[str, str], ...]:
    """Return anchor and title of the sections that the page has."""
    found = [(f"sweep-{at}", f"Sweep {sweep.name}") for at, sweep in enumerate(view.sweeps)]
    others = (
        (bool(view.table), "jobs", "Jobs"),
        (bool(view.charts), "curves", "Curves"),
        (view.pipeline is not None, "pipeline", "The pipeline"),
        (bool(view.effort.rows or view.effort.wall), "effort", "Time and memory"),
        (bool(view.unfinished), "unfinished", "How to go on"),
        (bool(view.usable), "use", "Use the adapters"),
    )
    return (*found, *((anchor, title) for shown, anchor, title in others if shown))


def _facts(run: Run) -> tuple[str, ...]:
    """Return model, quantisation, dtype, device and start, as far as they are known."""
    bases = [base for job in run.jobs if job.base and (base := base_spec(job, run)) is not None]
    formats = sorted({base.quantize for base in bases if base.quantize})
    name = bases[0].published_name if bases else run.base
    started = datetime.fromtimestamp(run.started).astimezone() if run.started else None
    computed = f"computed in {run.dtype}" if run.dtype and formats else run.dtype
    facts = (
        f"{name} (demo)" if bases and bases[0].model == DEMO else name,
        f"weights in {', '.join(formats)}" if formats else "",
        computed,
        run.device,
        started.strftime("%Y-%m-%d %H:%M %Z") if started else "",
    )
    return tuple(fact for fact in facts if fact)


def _drawn(views: Sequence[JobView]) -> Mapping[str, DrawnSweep]:
    return {
        view.name: DrawnSweep(view.pen if view.drawn else None, view.index if view.detailed else None)
        for view in views
    }


def _pipeline(timelines: Timelines) -> PipelineView:
    return PipelineView(
        charts=timeline_charts(timelines), columns=BUBBLE_COLUMNS, rows=tuple(bubble_rows(timelines))
    )


def _effort(run: Run, charts: tuple[Chart, ...]) -> EffortView:
    windows = run.windows
    left_out = len(windows) - _MOST_WINDOWS
    cut = [f"The first {_MOST_WINDOWS} of {len(windows):,} windows are shown."] if left_out > 0 else []
    return EffortView(
        charts=charts,
        columns=COLUMNS,
        rows=tuple(rows(windows[:_MOST_WINDOWS])),
        words=(*sentences(windows), *_alone_words(run), *_shared_words(run), *cut),
        wall=tuple(wall_bar(one) for one in run.wall_times[-_MOST_RUNS:]),
    )


def _shared_words(run: Run) -> list[str]:
    microbatches = sum(window.microbatches for window in run.windows)
    shared = sum(window.shared for window in run.windows)
    if not microbatches:
        return []
    return [
        f"{100 * shared / microbatches:.0f} % of the microbatches ({shared:,} of {microbatches:,}) hold "
        "samples of two jobs or more."
    ]


def _alone_words(run: Run) -> list[str]:
    if run.seconds is None or run.solo_seconds is None:
        return []
    return [
        f"One after another the jobs would have taken {minutes_text(run.solo_seconds)} minutes, by the time "
        f"model that was fitted to this run; together they took {minutes_text(run.seconds)}."
    ]


def _tiles(run: Run) -> tuple[Tile, ...]:
    tokens = sum(job.trained_tokens for job in run.jobs)
    rate = tokens / run.seconds if run.seconds and tokens else None
    tiles = (
        _jobs_tile(run),
        Tile(label="tokens per second", value=rate_text(rate), detail=f"{tokens:,} tokens trained"),
        *_time_tile(run),
        *_saved_tile(run),
        Tile(label="peak memory", value=bytes_text(run.peak_bytes), detail=run.device),
    )
    return tuple(tile for tile in tiles if tile.value != NOTHING)


def _time_tile(run: Run) -> tuple[Tile, ...]:
    if not run.seconds:
        return ()
    if run.seconds < 60:
        return (Tile(label="seconds", value=f"{run.seconds:.3g}", detail="from start to end"),)
    detail = f"{duration_text(run.seconds)} from start to end"
    return (Tile(label="minutes", value=minutes_text(run.seconds), detail=detail),)


def _jobs_tile(run: Run) -> Tile:
    left = run.left
    others = Counter("dropped" if job.name in left else job.state for job in run.jobs)
    succeeded = others.pop("succeeded", 0)
    detail = ", ".join(f"{count} {state}" for state, count in others.items())
    value = f"{succeeded} of {len(run.jobs)}"
    return Tile(label="jobs succeeded", value=value, detail=detail or "none failed")


def _saved_tile(run: Run) -> tuple[Tile, ...]:
    """Return the minutes saved against one job after another, if the time model has proved accurate."""
    if run.seconds is None or run.solo_seconds is None or headline(run.windows) is None:
        return ()
    saved = run.solo_seconds - run.seconds
    if saved < _LEAST_SAVED * run.seconds:
        return ()
    detail = f"predicted, against {minutes_text(run.solo_seconds)} one after another"
    return (Tile(label="minutes saved", value=minutes_text(saved), detail=detail),)


def _job_view(
    run: Run,
    job: JobRecord,
    index: int,
    values: tuple[Value, ...],
    best: Mapping[str, str],
    trial: bool,
    left: bool,
) -> JobView:
    folder = run.output.resolve() / job.name
    base = base_spec(job, run)
    usable = job.state == "succeeded" and base is not None
    rows = best.get(job.name)
    return JobView(
        index=index,
        name=job.name,
        pieces=breakable(job.name),
        pen=pen(index),
        badge="" if rows is None else f"best on {rows}" if rows else "best",
        state=job.state,
        progress=_progress(job),
        folder=link_to(job.name, "") if job.spec else "",
        job_file=link_to(job.name, "job.yaml") if job.spec else "",
        values=values,
        loss=_loss_number(job),
        validation=_validation_number(job),
        change=_change_number(job),
        accuracy=_accuracy_number(job),
        warning=job.warning,
        reason=job.reason,
        notes=job.notes,
        snippet=load_snippet(base, folder) if usable and base is not None else "",
        command=generate_command(folder) if usable else "",
        stopped=job.state in _STOPPED and not left,
        remedies=remedies(job, run.command),
        trial=trial,
        left=left,
    )


def _progress(job: JobRecord) -> str:
    steps = plural(job.steps, "step")
    return steps if job.step == job.steps else f"{job.step:,} of {steps}"


def _loss_number(job: JobRecord) -> Number:
    loss = last_loss(job)
    return Number() if loss is None else Number(text=loss_text(loss), value=loss)


def _validation_number(job: JobRecord) -> Number:
    """Return the loss of the kept adapter, or of the base if only that was evaluated."""
    kept, base = kept_validation(job), base_validation(job)
    if kept is not None:
        return Number(text=loss_text(kept), value=kept, detail=_validation_detail(job))
    return Number() if base is None else Number(text=f"base {loss_text(base)}", detail="not evaluated since")


def _change_number(job: JobRecord) -> Number:
    kept, base = kept_validation(job), base_validation(job)
    if kept is None or base is None or base == 0:
        return Number()
    tone = "" if kept == base else "good" if kept < base else "worse"
    text, share = change_text(base, kept), (kept - base) / abs(base)
    return Number(text=text, value=share, detail=f"base {loss_text(base)}", tone=tone)


def _accuracy_number(job: JobRecord) -> Number:
    kept, base = kept_evaluation(job), base_accuracy(job)
    if kept is None or kept.accuracy is None:
        return Number()
    if base is None:
        return Number(text=accuracy_text(kept.accuracy), value=kept.accuracy)
    return Number(
        text=accuracy_text(kept.accuracy),
        value=kept.accuracy,
        detail=f"{points_text(base, kept.accuracy)}, base {accuracy_text(base)}",
        tone="worse" if kept.accuracy < base else "",
    )


def _validation_detail(job: JobRecord) -> str:
    """Return the step of the best validation loss, if it is not the last one."""
    known = [line for line in job.evaluations if line.loss is not None]
    best = next((line for line in known if line.step == job.best_step), None)
    if best is None or best is known[-1]:
        return ""
    return f"best {loss_text(best.loss)} at step {best.step:,}, last {loss_text(known[-1].loss)}"


def _setting_columns(jobs: Sequence[JobRecord], keys: Sequence[str]) -> dict[str, list[Value]]:
    """Return key → the values of all jobs, without keys whose values all look the same."""
    specs = [flat_spec(job) for job in jobs]
    columns = {key: _column(key, [spec.get(key) for spec in specs]) for key in keys}
    return {key: column for key, column in columns.items() if len({one.whole for one in column}) > 1}


def _column(key: str, values: Sequence[Any]) -> list[Value]:
    wholes = ["" if value is None or value in ("", [], {}) else value_text(value) for value in values]
    names = short_paths(sorted({whole for whole in wholes if PurePath(whole).is_absolute()}))
    return [
        Value(key=key, pieces=breakable(_shortened(names.get(whole, whole))), whole=whole) for whole in wholes
    ]


def _shortened(text: str) -> str:
    half = _LONGEST_VALUE // 2
    return text if len(text) <= _LONGEST_VALUE else f"{text[: half - 1]}…{text[-half:]}"


def _table_words(jobs: Sequence[JobRecord], keys: Sequence[str], best: Mapping[str, str]) -> str:
    sentences = []
    if len(jobs) > 1:
        sentences.append(
            "Only the settings in which the jobs differ are shown."
            if keys
            else "The jobs do not differ in any setting."
        )
    if len(jobs) > _MOST_ROWS:
        sentences.append(f"The first {_MOST_ROWS:,} of {len(jobs):,} jobs are in the table.")
    if len(jobs) > MOST_CURVES:
        sentences.append(f"The first {MOST_CURVES} of {len(jobs):,} jobs have curves below.")
    if len(jobs) > _MOST_DETAILS:
        sentences.append(f"Commands for the first {_MOST_DETAILS} stand at the end of the page.")
    if any(best.values()):
        sentences.append("Losses on different validation rows cannot be compared: each set has its own best.")
    return " ".join(sentences)
