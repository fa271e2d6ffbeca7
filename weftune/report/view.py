"""What the page's template is filled with: records of finished text, still unescaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any

from weftune.report.charts import LEFT_PEN_COLOUR, MOST_CURVES, Chart, Pen, pen
from weftune.report.compare import (
    best_jobs,
    by_result,
    differing_keys,
    first_validation,
    flat_spec,
    kept_validation,
    last_loss,
    value_text,
)
from weftune.report.promises import COLUMNS, headline, rows, sentences
from weftune.report.read import JobRecord, Run
from weftune.report.snippets import Remedy, generate_command, load_snippet, remedies
from weftune.report.sweeps.standing import ranked
from weftune.report.sweeps.view import DrawnSweep, SweepView, sweep_view
from weftune.report.timelines import COLUMNS as BUBBLE_COLUMNS
from weftune.report.timelines import Timelines, bubble_rows, timeline_charts
from weftune.report.wall import page_sentence
from weftune.report.words import (
    NOTHING,
    breakable,
    bytes_text,
    change_text,
    duration_text,
    loss_text,
    minutes_text,
    plural,
    rate_text,
    short_paths,
)

_LONGEST_VALUE = 72
_MOST_WINDOWS = 200
_MOST_DETAILS = 200
"""Jobs whose commands are on the page; of more only the first, and those that want something of the user."""
_MOST_RUNS = 5
"""Of a folder that was resumed more often the last runs are told."""
_CURVES = ("loss", "validation")
"""The charts about what was learned; the others are about time and memory."""
_NARROW_LETTERS = 38
"""Settings of up to this width have columns of their own: they fit beside the losses on 1024 pixels."""
_STOPPED = ("failed", "cancelled", "paused", "interrupted")
_LEAST_SAVED = 0.05
"""Less than this share of the run is within what a time model can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One headline number."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One cell of the table: shortened for the eye, whole on hover."""

    key: str
    pieces: tuple[str, ...]
    """Lines may break between them."""
    whole: str

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job on the page."""

    index: int
    name: str
    pen: Pen
    badge: str
    state: str
    progress: str
    values: tuple[Value, ...]
    loss: str
    validation: str
    validation_detail: str
    change: str
    tone: str
    """good or worse, by the validation loss."""
    reason: str
    notes: tuple[str, ...]
    snippet: str
    command: str
    stopped: bool
    """Ended or waiting without an adapter: told at the top of the page."""
    remedies: tuple[Remedy, ...]
    trial: bool
    """Whether it belongs to a sweep, whose table it stands in."""
    left: bool
    """Whether it left that sweep early: there is nothing to use, and nothing to do."""

    @property
    def drawn(self) -> bool:
        """Whether its curves are among the charts, with a pen of their own."""
        return self.index < MOST_CURVES and not self.left

    @property
    def detailed(self) -> bool:
        """Whether the page says how to use it, or how it goes on."""
        if self.left or (self.trial and self.state == "failed"):
            # Its sweep has decided without it, and takes it in no more.
            return False
        return self.stopped or self.index < _MOST_DETAILS


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortView:
    """Time and memory, predicted beside measured, window by window."""

    charts: tuple[Chart, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]
    wall: tuple[str, ...]
    """A sentence for each run into the folder: how its wall time was spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineView:
    """The last window of a pipeline as foreseen and as measured."""

    charts: tuple[Chart, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """The whole page."""

    title: str
    facts: tuple[str, ...]
    tiles: tuple[Tile, ...]
    keys: tuple[str, ...]
    """In which the jobs differ."""
    in_columns: bool
    """Whether each key has a column; otherwise the values of a job stand together, with their names."""
    jobs: tuple[JobView, ...]
    """All of them, in the order of their pens."""
    table: tuple[JobView, ...]
    """The jobs of the table: those that are no trials of a sweep."""
    sweeps: tuple[SweepView, ...]
    left_colour: str
    """Of the curves of trials that left a sweep early."""
    table_words: str
    notes: tuple[str, ...]
    charts: tuple[Chart, ...]
    effort: EffortView
    pipeline: PipelineView | None
    """None where one device ran it all."""


def in_order(run: Run) -> tuple[JobRecord, ...]:
    """The jobs by result, then the trials of sweeps by theirs, last those that left early."""
    places = {
        trial.name: (1 + (trial.state == "left"), number)
        for number, trial in enumerate(trial for sweep in run.sweeps for trial in ranked(sweep))
    }
    return tuple(sorted(by_result(run.jobs), key=lambda job: places.get(job.name, (0, 0))))


def page_view(
    run: Run, jobs: Sequence[JobRecord], charts: tuple[Chart, ...], timelines: Timelines | None = None
) -> PageView:
    """`jobs` in the order of the table, as `in_order` has them."""
    trials, left = run.trials, run.left
    plain = [job for job in jobs if job.name not in trials]
    keys = differing_keys(plain)
    best = best_jobs(plain)
    settings = _settings(plain, keys)
    none: tuple[Value, ...] = ()
    values = dict(zip((job.name for job in plain), settings, strict=True))
    views = tuple(
        _job_view(run, job, index, values.get(job.name, none), best, job.name in trials, job.name in left)
        for index, job in enumerate(jobs)
    )
    started = datetime.fromtimestamp(run.started).astimezone() if run.started else None
    facts = (
        run.base,
        run.device,
        run.dtype,
        started.strftime("%Y-%m-%d %H:%M %Z") if started else "",
    )
    return PageView(
        title=run.output.resolve().name,
        facts=tuple(fact for fact in facts if fact),
        tiles=_tiles(run),
        keys=keys,
        in_columns=_letters(keys, settings) <= _NARROW_LETTERS,
        jobs=views,
        table=tuple(view for view in views if not view.trial),
        sweeps=tuple(sweep_view(run, record, _drawn(views)) for record in run.sweeps),
        left_colour=LEFT_PEN_COLOUR,
        table_words=_table_words(plain, keys, best),
        notes=run.notes,
        charts=tuple(chart for chart in charts if chart.name in _CURVES),
        effort=_effort(run, tuple(chart for chart in charts if chart.name not in _CURVES)),
        pipeline=_pipeline(timelines) if timelines else None,
    )


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
        charts=tuple(chart for chart in charts if chart.figure is not None),
        columns=COLUMNS,
        rows=tuple(rows(windows[:_MOST_WINDOWS])),
        words=(*sentences(windows), *_alone_words(run), *cut),
        wall=tuple(page_sentence(one) for one in run.wall_times[-_MOST_RUNS:]),
    )


def _alone_words(run: Run) -> list[str]:
    if run.seconds is None or run.solo_seconds is None:
        return []
    return [
        f"One after another the jobs would have taken {minutes_text(run.solo_seconds)} minutes, by the time "
        f"model that was fitted to this run; together they took {minutes_text(run.seconds)}."
    ]


def _tiles(run: Run) -> tuple[Tile, ...]:
    tokens = sum(job.trained_tokens for job in run.jobs)
    microbatches = sum(window.microbatches for window in run.windows)
    shared = sum(window.shared for window in run.windows)
    rate = tokens / run.seconds if run.seconds else None
    return (
        _jobs_tile(run),
        Tile(label="tokens per second", value=rate_text(rate), detail=f"{tokens:,} tokens trained"),
        Tile(
            label="minutes",
            value=minutes_text(run.seconds) if run.seconds else NOTHING,
            detail=f"{duration_text(run.seconds)} from start to end" if run.seconds else "",
        ),
        *_saved_tile(run),
        Tile(label="peak memory", value=bytes_text(run.peak_bytes), detail=run.device),
        Tile(
            label="shared microbatches",
            value=f"{100 * shared / microbatches:.0f} %" if microbatches else NOTHING,
            detail=f"{shared:,} of {microbatches:,} hold two jobs or more" if microbatches else "",
        ),
    )


def _jobs_tile(run: Run) -> Tile:
    left = run.left
    others = Counter("dropped" if job.name in left else job.state for job in run.jobs)
    succeeded = others.pop("succeeded", 0)
    detail = ", ".join(f"{count} {state}" for state, count in others.items())
    value = f"{succeeded} of {len(run.jobs)}"
    return Tile(label="jobs succeeded", value=value, detail=detail or "none failed")


def _saved_tile(run: Run) -> tuple[Tile, ...]:
    """Minutes saved against one after another, where the time model that says so has shown to be right."""
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
    first, kept = first_validation(job), kept_validation(job)
    folder = run.output.resolve() / job.name
    base, revision = job.base.get("model") or run.base, job.base.get("revision")
    usable = job.state == "succeeded" and bool(base)
    rows = best.get(job.name)
    return JobView(
        index=index,
        name=job.name,
        pen=pen(index),
        badge="" if rows is None else f"best on {rows}" if rows else "best",
        state=job.state,
        progress=_progress(job),
        values=values,
        loss=loss_text(last_loss(job)),
        validation=f"{loss_text(first)} → {loss_text(kept)}" if kept is not None else NOTHING,
        validation_detail=_validation_detail(job),
        change=change_text(first, kept) if kept is not None else "",
        tone=_tone(first, kept),
        reason=job.reason,
        notes=job.notes,
        snippet=load_snippet(str(base), str(revision) if revision else None, folder) if usable else "",
        command=generate_command(folder) if usable else "",
        stopped=job.state in _STOPPED and not left,
        remedies=remedies(job, run.command),
        trial=trial,
        left=left,
    )


def _progress(job: JobRecord) -> str:
    steps = plural(job.steps, "step")
    return steps if job.step == job.steps else f"{job.step:,} of {steps}"


def _tone(first: float | None, kept: float | None) -> str:
    if first is None or kept is None or first == kept:
        return ""
    return "good" if kept < first else "worse"


def _validation_detail(job: JobRecord) -> str:
    """Where the best validation loss lies, when it is not the last one."""
    known = [line for line in job.evaluations if line.loss is not None]
    best = next((line for line in known if line.step == job.best_step), None)
    if best is None or best is known[-1]:
        return ""
    return f"best {loss_text(best.loss)} at step {best.step:,}, last {loss_text(known[-1].loss)}"


def _settings(jobs: Sequence[JobRecord], keys: Sequence[str]) -> list[tuple[Value, ...]]:
    """For each job its values of `keys`."""
    specs = [flat_spec(job) for job in jobs]
    columns = [_column(key, [spec.get(key) if spec else NOTHING for spec in specs]) for key in keys]
    return [tuple(column[index] for column in columns) for index in range(len(jobs))]


def _column(key: str, values: Sequence[Any]) -> list[Value]:
    wholes = [value_text(value) for value in values]
    names = short_paths(sorted({whole for whole in wholes if PurePath(whole).is_absolute()}))
    return [
        Value(key=key, pieces=breakable(_shortened(names.get(whole, whole))), whole=whole) for whole in wholes
    ]


def _shortened(text: str) -> str:
    half = _LONGEST_VALUE // 2
    return text if len(text) <= _LONGEST_VALUE else f"{text[: half - 1]}…{text[-half:]}"


def _letters(keys: Sequence[str], settings: Sequence[tuple[Value, ...]]) -> int:
    """How wide the columns of all keys would be, with the room between them."""
    widest = [max(len(key), *(len(job[index].text) for job in settings)) for index, key in enumerate(keys)]
    return sum(width + 3 for width in widest)


def _table_words(jobs: Sequence[JobRecord], keys: Sequence[str], best: Mapping[str, str]) -> str:
    sentences = []
    if len(jobs) > 1:
        sentences.append(
            "Only the settings in which the jobs differ are shown."
            if keys
            else "The jobs do not differ in any setting."
        )
    if len(jobs) > MOST_CURVES:
        sentences.append(f"The first {MOST_CURVES} of {len(jobs):,} jobs have curves below.")
    if len(jobs) > _MOST_DETAILS:
        sentences.append(f"Commands for the first {_MOST_DETAILS} stand at the end of the page.")
    if any(best.values()):
        sentences.append("Losses on different validation rows cannot be compared: each set has its own best.")
    return " ".join(sentences)
