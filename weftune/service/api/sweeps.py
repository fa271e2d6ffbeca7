"""Sweeps in the HTTP API. A sweep is shown as one job, whose state follows from its trials (the sweep's
jobs), together with the ranking of the trials, which the training process writes to sweep.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from weftune.errors import OutputError
from weftune.jobs.store.status import JobStatus, State
from weftune.jobs.sweeps.halving import LEFT
from weftune.jobs.sweeps.record import (
    SWEEP_FILE,
    RungRow,
    SweepRecord,
    TrialRecord,
    TrialState,
    rank_trials,
    read_record,
    rung_rows,
)
from weftune.jobs.sweeps.spec import Mode
from weftune.service.api.context import BEARER, ERRORS, Service, ServiceHere, StrictRoute, Tenant
from weftune.service.api.errors import not_found
from weftune.service.api.files import page_fields
from weftune.service.api.schemas import Count, JobState, Page
from weftune.service.settings import ServiceSettings
from weftune.service.store.records import JobRow
from weftune.service.store.requests import Submission

MAX_SWEEPS = 50
"""Maximum number of sweeps on one page."""
STANDINGS: Mapping[State, TrialState] = {
    State.RUNNING: "running",
    State.SUCCEEDED: "finished",
    State.FAILED: "failed",
    State.CANCELLED: "left",
}
"""Maps the state of a job to the state of a trial, for a sweep whose file sweep.json does not exist yet.
Trials whose job is in a state that is missing here are shown as waiting."""

router = APIRouter(
    prefix="/api/sweeps", tags=["Weftune"], route_class=StrictRoute, dependencies=[BEARER], responses=ERRORS
)


class TrialSummary(BaseModel):
    id: str = Field(description="The trial's job.")
    name: str
    values: dict[str, Any] = Field(description="The values in which it differs, by dotted key.")
    state: TrialState = Field(description="`resting`: it waits at a rung; `left`: it was dropped.")
    reason: str
    step: Count
    steps: Count
    score: float | None = Field(description="The sweep's metric at `score_step`.")
    score_step: int | None
    best: bool = Field(description="Whether the sweep has ended and keeps this adapter as one of the best.")
    model: str | None = Field(description="Name under which the finished adapter answers.")


class RungSummary(BaseModel):
    """A step at which the trials are compared. The last rung is the last step of training."""

    step: Count
    started: Count = Field(description="Number of trials that begin the rung.")
    evaluated: Count
    kept: Count | None = Field(description="Number of trials that continue; null until it is decided.")


class SweepSummary(BaseModel):
    id: str = Field(description="The sweep's job, by which it is cancelled, paused and resumed.")
    name: str
    state: JobState
    search: str
    metric: str
    mode: Mode
    keep: Count
    rungs: list[RungSummary]
    trials: list[TrialSummary] = Field(
        description="Finished trials by score, then unfinished, dropped and failed ones."
    )


class SweepPage(Page):
    data: list[SweepSummary]


@router.get("", response_model=SweepPage, summary="List the tenant's sweeps")
def list_sweeps(
    tenant: Tenant,
    service: ServiceHere,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_SWEEPS)] = 10,
) -> SweepPage:
    """List sweeps with the ranking of their trials, the newest first."""
    found = service.requests.submissions(tenant, after=after, limit=limit + 1, only_sweeps=True)
    return SweepPage(data=[_sweep_view(service, one) for one in found[:limit]], **page_fields(found, limit))


@router.get("/{sweep_id}", response_model=SweepSummary, summary="Show a sweep and the ranking of its trials")
def show_sweep(sweep_id: str, tenant: Tenant, service: ServiceHere) -> SweepSummary:
    found = service.requests.submission(tenant, sweep_id)
    if found is None or not found.is_sweep:
        raise not_found("sweep", sweep_id)
    return _sweep_view(service, found)


# -- the job of a sweep ---------------------------------------------------------------------------------


def job_rows(service: Service, submissions: Sequence[Submission]) -> dict[str, JobRow]:
    """Return a mapping from job ids to records, for all jobs that the training process has recorded. The
    record of a sweep's job is derived from its trials."""
    rows = service.training.jobs_by_id(one.id for one in submissions)
    ids = service.requests.trial_ids(one.id for one in submissions if one.is_sweep)
    trials = service.training.jobs_by_id(id for some in ids.values() for id in some)
    for one in submissions:
        if one.is_sweep and (row := _sweep_row(service.settings, one, ids[one.id], trials)) is not None:
            rows[one.id] = row
    return rows


def job_row(service: Service, submission: Submission) -> JobRow | None:
    """Return the record of a job; None if the training process has not recorded the job yet."""
    return job_rows(service, [submission]).get(submission.id)


def sweep_record(settings: ServiceSettings, sweep: str) -> SweepRecord | None:
    """Return the record of a sweep that the training process has written to sweep.json. None before the
    sweep's first trial is admitted, or if the file cannot be read."""
    folder = settings.jobs / sweep
    with suppress(OSError, OutputError):
        return _read_cached_record(folder, (folder / SWEEP_FILE).stat().st_mtime_ns)
    return None


@lru_cache(maxsize=512)
def _read_cached_record(folder: Path, changed_at: int) -> SweepRecord | None:
    """Read the record of a sweep from sweep.json in `folder`. Results are cached by `changed_at`, the time at
    which the file was last written."""
    return read_record(folder)


def _sweep_row(
    settings: ServiceSettings, sweep: Submission, ids: Sequence[str], rows: Mapping[str, JobRow]
) -> JobRow | None:
    known = [rows[id] for id in ids if id in rows]
    if not known:
        return None
    record = sweep_record(settings, sweep.id)
    state = _sweep_state([rows.get(id) for id in ids], record)
    best = None
    if state is State.SUCCEEDED and record is not None and record.best:
        best = rows.get(record.best[0])
    failed = next((row for row in known if row.state is State.FAILED), None)
    first = next((row for row in known if not row.state.has_ended), known[0])
    status = JobStatus(
        state=state,
        reason=_count_text(known, len(ids)),
        step=sum(row.status.step for row in known),
        steps=sum(row.status.step if row.state.has_ended else row.status.steps for row in known),
        trained_tokens=sum(row.status.trained_tokens for row in known),
        eval_loss=None if best is None else best.status.eval_loss,
        base_loss=next((row.status.base_loss for row in known if row.status.base_loss is not None), None),
        warning="" if best is None else best.status.warning,
    )
    return JobRow(
        id=sweep.id,
        tenant=sweep.tenant,
        priority=first.priority,
        created_at=sweep.created_at,
        started_at=min((row.started_at for row in known if row.started_at is not None), default=None),
        finished_at=max((row.finished_at or 0.0 for row in known), default=None) if state.has_ended else None,
        model=None if best is None else best.model,
        error=failed.error if failed is not None and state is State.FAILED else None,
        status=status,
    )


def _sweep_state(trials: Sequence[JobRow | None], record: SweepRecord | None) -> State:
    """Return the state of a sweep's job. `trials` has the records of the sweep's trials, and contains None
    for each trial that the training process has not recorded yet. A sweep has succeeded if a trial has
    succeeded and the best trials are known."""
    known = [row for row in trials if row is not None]
    states = {row.state for row in known}
    if len(known) == len(trials) and all(state.has_ended for state in states):
        if State.SUCCEEDED in states:
            return State.SUCCEEDED if record is None or record.best else State.RUNNING
        is_cancelled = any(
            row.state is State.CANCELLED and not row.status.reason.startswith(LEFT) for row in known
        )
        return State.FAILED if State.FAILED in states and not is_cancelled else State.CANCELLED
    if State.RUNNING in states:
        return State.RUNNING
    is_paused = len(known) == len(trials) and State.PAUSED in states and State.QUEUED not in states
    return State.PAUSED if is_paused else State.QUEUED


def _count_text(known_jobs: Sequence[JobRow], count: int) -> str:
    """Return a text that gives the number of a sweep's trials in each state. Trials without a record, out of
    `count`, are counted as well."""
    left = sum(row.status.reason.startswith(LEFT) for row in known_jobs)
    numbers = {
        "train": sum(row.state is State.RUNNING for row in known_jobs),
        "wait": count - len(known_jobs) + sum(row.state is State.QUEUED for row in known_jobs),
        "are paused": sum(row.state is State.PAUSED for row in known_jobs),
        "have finished": sum(row.state is State.SUCCEEDED for row in known_jobs),
        "were dropped": left,
        "were cancelled": sum(row.state is State.CANCELLED for row in known_jobs) - left,
        "have failed": sum(row.state is State.FAILED for row in known_jobs),
    }
    parts = [f"{number} {verb}" for verb, number in numbers.items() if number]
    return f"of {count} trials, {', '.join(parts)}"


# -- the ranking ----------------------------------------------------------------------------------------


def _sweep_view(service: Service, sweep: Submission) -> SweepSummary:
    trials = {one.id: one for one in service.requests.trials(sweep.id)}
    rows = service.training.jobs_by_id(trials)
    row = _sweep_row(service.settings, sweep, list(trials), rows)
    record, spec = sweep_record(service.settings, sweep.id), sweep.job["sweep"]
    if record is None:
        ranked = [TrialRecord(name=id, values=one.trial or {}) for id, one in trials.items()]
    else:
        ranked = rank_trials(record)
    best = () if record is None else record.best
    return SweepSummary(
        id=sweep.id,
        name=sweep.suffix or sweep.id,
        state="validating" if row is None else row.state.value,
        search=spec.get("search", "grid"),
        metric=spec.get("metric", "eval_loss") if record is None else record.metric,
        mode=spec.get("mode", "min") if record is None else record.mode,
        keep=spec.get("keep", 1),
        rungs=[] if record is None else [_rung_view(one) for one in rung_rows(record)],
        trials=[
            _trial_view(one, trials[one.name], rows.get(one.name), one.name in best, record is not None)
            for one in ranked
        ],
    )


def _rung_view(rung: RungRow) -> RungSummary:
    return RungSummary(
        step=rung.step, started=rung.started_count, evaluated=rung.evaluated_count, kept=rung.kept_count
    )


def _trial_view(
    trial: TrialRecord, submission: Submission, row: JobRow | None, is_best: bool, is_recorded: bool
) -> TrialSummary:
    status = JobStatus() if row is None else row.status
    score = trial.score
    return TrialSummary(
        id=trial.name,
        name=submission.suffix or trial.name,
        values=dict(trial.values),
        state=trial.state if is_recorded else STANDINGS.get(status.state, "waiting"),
        reason=trial.reason or status.reason,
        step=status.step,
        steps=status.steps,
        score=score if score is not None and math.isfinite(score) else None,
        score_step=trial.score_step,
        best=is_best,
        model=None if row is None else row.model,
    )
