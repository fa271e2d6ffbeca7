"""What the page's template is filled with: records of finished text, still unescaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath

from weftune.report.charts import Chart, Pen, pen
from weftune.report.compare import (
    best_jobs,
    differing_keys,
    first_validation,
    flat_spec,
    kept_validation,
    last_loss,
    value_text,
)
from weftune.report.promises import COLUMNS, rows, sentences
from weftune.report.read import JobRecord, Run, WindowLine
from weftune.report.snippets import generate_command, load_snippet
from weftune.report.timelines import COLUMNS as BUBBLE_COLUMNS
from weftune.report.timelines import Timelines, bubble_rows, timeline_charts
from weftune.report.words import (
    NOTHING,
    bytes_text,
    change_text,
    duration_text,
    loss_text,
    minutes_text,
    plural,
    rate_text,
)

_LONGEST_VALUE = 36
_MOST_WINDOWS = 200


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
    text: str
    whole: str


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseView:
    """Predicted beside measured, window by window."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]


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
    jobs: tuple[JobView, ...]
    table_words: str
    notes: tuple[str, ...]
    charts: tuple[Chart, ...]
    promises: PromiseView
    pipeline: PipelineView | None
    """None where one device ran it all."""


def page_view(
    run: Run, jobs: Sequence[JobRecord], charts: tuple[Chart, ...], timelines: Timelines | None = None
) -> PageView:
    """`jobs` in the order of the table."""
    keys = differing_keys(jobs)
    best = best_jobs(jobs)
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
        jobs=tuple(_job_view(run, job, index, keys, best) for index, job in enumerate(jobs)),
        table_words=_table_words(jobs, keys, best),
        notes=run.notes,
        charts=charts,
        promises=_promises(run.windows),
        pipeline=_pipeline(timelines) if timelines else None,
    )


def _pipeline(timelines: Timelines) -> PipelineView:
    return PipelineView(
        charts=timeline_charts(timelines), columns=BUBBLE_COLUMNS, rows=tuple(bubble_rows(timelines))
    )


def _promises(windows: Sequence[WindowLine]) -> PromiseView:
    left_out = len(windows) - _MOST_WINDOWS
    cut = [f"The first {_MOST_WINDOWS} of {len(windows):,} windows are shown."] if left_out > 0 else []
    return PromiseView(
        columns=COLUMNS,
        rows=tuple(rows(windows[:_MOST_WINDOWS])),
        words=(*sentences(windows), *cut),
    )


def _tiles(run: Run) -> tuple[Tile, ...]:
    tokens = sum(job.trained_tokens for job in run.jobs)
    microbatches = sum(window.microbatches for window in run.windows)
    shared = sum(window.shared for window in run.windows)
    rate = tokens / run.seconds if run.seconds else None
    return (
        _jobs_tile(run.jobs),
        Tile(label="tokens per second", value=rate_text(rate), detail=f"{tokens:,} tokens trained"),
        Tile(
            label="minutes",
            value=minutes_text(run.seconds) if run.seconds else NOTHING,
            detail=f"{duration_text(run.seconds)} from start to end" if run.seconds else "",
        ),
        _saved_tile(run),
        Tile(label="peak memory", value=bytes_text(run.peak_bytes), detail=run.device),
        Tile(
            label="shared microbatches",
            value=f"{100 * shared / microbatches:.0f} %" if microbatches else NOTHING,
            detail=f"{shared:,} of {microbatches:,} hold two jobs or more" if microbatches else "",
        ),
    )


def _jobs_tile(jobs: Sequence[JobRecord]) -> Tile:
    succeeded = sum(job.state == "succeeded" for job in jobs)
    others = {
        state: sum(job.state == state for job in jobs) for state in dict.fromkeys(job.state for job in jobs)
    }
    others.pop("succeeded", None)
    detail = ", ".join(f"{count} {state}" for state, count in others.items())
    return Tile(label="jobs succeeded", value=f"{succeeded} of {len(jobs)}", detail=detail or "none failed")


def _saved_tile(run: Run) -> Tile:
    """Minutes saved against one after another; the other side of the comparison is a prediction."""
    label = "minutes saved"
    if run.seconds is None or run.solo_seconds is None:
        return Tile(label=label, value=NOTHING, detail="no prediction of one after another")
    saved = run.solo_seconds - run.seconds
    detail = f"predicted, against {minutes_text(run.solo_seconds)} one after another"
    return Tile(label=label, value=minutes_text(saved).replace("-", "−"), detail=detail)


def _job_view(run: Run, job: JobRecord, index: int, keys: Sequence[str], best: Mapping[str, str]) -> JobView:
    spec = flat_spec(job)
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
        values=tuple(_value(key, value_text(spec.get(key)) if spec else NOTHING) for key in keys),
        loss=loss_text(last_loss(job)),
        validation=f"{loss_text(first)} → {loss_text(kept)}" if kept is not None else NOTHING,
        validation_detail=_validation_detail(job),
        change=change_text(first, kept) if kept is not None else "",
        tone=_tone(first, kept),
        reason=job.reason,
        notes=job.notes,
        snippet=load_snippet(str(base), str(revision) if revision else None, folder) if usable else "",
        command=generate_command(folder) if usable else "",
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


def _value(key: str, whole: str) -> Value:
    half = _LONGEST_VALUE // 2
    text = "/".join(PurePath(whole).parts[-2:]) if PurePath(whole).is_absolute() else whole
    text = text if len(text) <= _LONGEST_VALUE else f"{text[: half - 1]}…{text[-half:]}"
    return Value(key=key, text=text, whole=whole)


def _table_words(jobs: Sequence[JobRecord], keys: Sequence[str], best: Mapping[str, str]) -> str:
    sentences = []
    if len(jobs) > 1:
        sentences.append(
            "Only the keys in which the jobs differ are shown."
            if keys
            else "The jobs do not differ in any key."
        )
    if any(best.values()):
        sentences.append("Losses on different validation rows cannot be compared: each set has its own best.")
    return " ".join(sentences)
