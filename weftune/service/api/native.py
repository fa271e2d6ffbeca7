"""Weftune's own API beside OpenAI's: an overview of jobs with live updates, loss curves, the device's last
windows (a few global batches of every job each), receipts (used resources), plans of jobs before they are
submitted, priorities, and downloads of adapters."""

from __future__ import annotations

import asyncio
import io
import logging
import math
import re
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from weftune.adapters.folder import CONFIG, JOB_FILE, WEIGHTS
from weftune.errors import UserError
from weftune.jobs.store.status import MOVES, JobStatus, State
from weftune.jobs.sweeps.spec import Trial
from weftune.report.svg import Point, thin_points
from weftune.service.api.context import BEARER, ERRORS, Service, ServiceHere, StrictRoute, Tenant
from weftune.service.api.errors import ApiError, invalid_request, not_found, quota_error
from weftune.service.api.files import page_fields
from weftune.service.api.guard import Keys
from weftune.service.api.job_request import trials_of
from weftune.service.api.jobs import (
    After,
    find_job,
    hide_paths,
    new_submission,
    refuse_large_sweep,
)
from weftune.service.api.schemas import Body, Count, JobError, JobRequest, JobState, Page
from weftune.service.api.sweeps import job_row, job_rows, sweep_record
from weftune.service.ids import AdapterName, parse_adapter_name
from weftune.service.plan_preview import NEW, OtherJob, PlanFailed, planned_trials, preview
from weftune.service.queue_order import new_job, ordered_names, rank_queue
from weftune.service.store.database import StoreUnavailable
from weftune.service.store.records import CheckpointRow, EventRow, JobRow, WindowRow
from weftune.service.store.requests import Submission

log = logging.getLogger(__name__)

SHOWN_JOBS = 200
"""Maximum number of jobs in an overview. Only the newest jobs are shown."""
SHOWN_EVENTS = 200
CURVE_POINTS = 1000
"""Maximum number of points of a curve, about the width of a chart in pixels."""
PLANNED_JOBS = 64
"""Maximum number of running and waiting jobs that the plan of a new job considers."""
MAX_PLANS = 4
"""Maximum number of plan requests that may wait or be computed at the same time. One plan is computed after
another."""
MAX_STREAMS = 20
"""Maximum number of simultaneous streams of server-sent events per tenant."""
STREAM_SECONDS = 1.0
"""Seconds between two reads of the database for a stream of server-sent events."""
SILENT_SECONDS = 15.0
"""Seconds without a change after which a stream of server-sent events sends a comment, so that proxies keep
it open."""
STREAM_MINUTES = 30.0
"""Minutes after which the server ends a stream of server-sent events. The client then opens a new stream."""
CHUNK = 1 << 20
ANOTHER = "another tenant's job"

router = APIRouter(
    prefix="/api", tags=["Weftune"], route_class=StrictRoute, dependencies=[BEARER], responses=ERRORS
)

Action = Literal["pause", "resume", "cancel", "priority", "download"]
Step = Annotated[int, Field(ge=0)]
Losses = list[tuple[Step, float]]


class SweepLink(BaseModel):
    id: str = Field(description="The sweep's job, which is the job itself if it is a sweep.")
    name: str
    best: bool = Field(description="Whether the sweep has ended and keeps this trial as one of the best.")
    values: dict[str, Any] = Field(description="The values in which a trial differs, by dotted key.")


class JobSummary(BaseModel):
    id: str
    name: str = Field(description="The suffix of the job, or its id.")
    state: JobState
    reason: str = Field(description="Why the job waits, is paused, failed or was cancelled.")
    ahead: int | None = Field(description="Number of waiting jobs before this one; null unless it waits.")
    ahead_names: list[str] = Field(description="The first of them; jobs of others have no name.")
    priority: int
    step: Count
    steps: Count = Field(description="Total number of steps; 0 until the rows are counted.")
    trained_tokens: Count
    eval_loss: float | None
    base_loss: float | None = Field(description="Validation loss of the base without an adapter.")
    warning: str
    notes: list[str]
    created_at: float
    started_at: float | None
    finished_at: float | None
    estimated_finish: float | None
    model: str | None = Field(description="Name under which the finished adapter answers.")
    answers_as: str | None = Field(
        description="Name under which the job can be asked now: while it trains, its current weights answer."
    )
    error: JobError | None
    actions: list[Action] = Field(description="What can be requested for the job in its state.")
    sweep: SweepLink | None = Field(description="The sweep that the job is, or whose trial it is.")


class JobChanges(BaseModel):
    """The part of an overview that changes over time. In a stream, `jobs` contains only jobs that have
    changed."""

    now: float
    training: bool = Field(description="Whether the training process runs.")
    running: Count = Field(description="Number of jobs of all tenants that train.")
    waiting: Count = Field(description="Number of jobs of all tenants that wait.")
    jobs: list[JobSummary]


class Overview(JobChanges):
    tenant: str
    base: str
    device: str | None
    has_more: bool = Field(description="Whether there are jobs older than those in `jobs`.")


class SummaryPage(Page):
    data: list[JobSummary]


class Curve(BaseModel):
    """Losses of a job by step."""

    job: str
    number: int = Field(description="Number of the last metric in the curve.")
    train: Losses
    eval: Losses


class LogLine(BaseModel):
    id: str
    at: float
    level: Literal["info", "warn", "error"]
    message: str


class CheckpointSummary(BaseModel):
    id: str
    at: float
    step: Step
    model: str
    eval_loss: float | None


class ReceiptView(BaseModel):
    """Tokens, passes and device time that a job has used."""

    job: str
    tokens: Count = Field(description="Tokens that the job has trained on.")
    padding_tokens: Count
    device_seconds: float = Field(description="Seconds of a pass are divided among its jobs by their tokens.")
    passes: Count
    shared_passes: Count = Field(description="Passes that at least one other job shared.")


class ReceiptPage(Page):
    data: list[ReceiptView]


class JobDetail(BaseModel):
    job: JobSummary
    training_file: str = Field(description="Name of the uploaded file.")
    settings: dict[str, Any] = Field(description="The job with the keys of jobs.yaml, without paths.")
    events: list[LogLine] = Field(description="The latest messages, the oldest first.")
    checkpoints: list[CheckpointSummary]
    receipt: ReceiptView | None


class PassView(BaseModel):
    """One pass of the base in a window. Jobs of other tenants are counted together."""

    jobs: dict[str, int] = Field(description="Maps the tenant's own jobs to their tokens.")
    other_jobs: Count
    other_tokens: Count
    tokens: Count
    training: bool = Field(description="False for evaluations.")
    seconds: float
    predicted_seconds: float | None


class MemoryView(BaseModel):
    budget_bytes: Count
    base_bytes: Count
    answer_bytes: Count = Field(
        description="Reserved for generated answers and for the adapters that give them."
    )
    jobs: dict[str, int] = Field(description="Maps the tenant's own jobs to the bytes of their adapters.")
    other_jobs: Count
    other_bytes: Count


class WindowView(BaseModel):
    """A window that the device has executed, with planned and measured values."""

    number: int
    at: float
    jobs: Count
    tokens: Count
    capacity: Count = Field(description="Maximum tokens of a pass.")
    microbatches: Count
    shared: Count = Field(description="Passes that several jobs shared.")
    seconds: float
    predicted_seconds: float | None
    peak_bytes: Count
    predicted_peak_bytes: Count | None
    passes: list[PassView]
    memory: MemoryView | None


class WindowList(BaseModel):
    data: list[WindowView]


class PriorityRequest(Body):
    priority: int = Field(ge=-(10**9), le=10**9, examples=[2])


class PlannedTrial(BaseModel):
    name: str
    values: dict[str, Any] = Field(description="The values in which it differs, by dotted key.")
    fits: bool
    why_not: str = Field(description="Why the trial cannot run even alone.")
    waits_for: str = Field(description="Why it would have to wait; empty if it starts at the next window.")
    steps: Count
    seconds: float = Field(description="Predicted seconds until the trial ends if no trial is dropped.")
    state_bytes: Count


class PlannedRung(BaseModel):
    step: Count
    trials: Count = Field(description="Number of trials that reach the step. The last rung is the end.")


class PlanPreview(BaseModel):
    """The prediction for a job or a sweep that has not been submitted, together with the jobs that train and
    wait now. Numbers of a sweep are those of all its trials together, if no trial is dropped."""

    fits: bool = Field(description="Whether the job, or every trial of the sweep, can run.")
    why_not: str = Field(description="Why the job, or some trial, cannot run even alone.")
    waits_for: str = Field(
        description="Why the job, or every trial, would have to wait; empty if one starts at the next window."
    )
    ahead: Count = Field(description="Number of waiting jobs that would be admitted before this one.")
    steps: Count
    seconds: float = Field(description="Predicted seconds until the job, or the last trial, ends.")
    state_bytes: Count = Field(description="Memory of the adapters with their gradients and optimizers.")
    needs_bytes: Count = Field(description="Predicted peak of all jobs together.")
    budget_bytes: Count
    running_jobs: Count
    source: str = Field(description="Source of the predicted times.")
    trials: list[PlannedTrial] = Field(description="The trials of a sweep; empty for a job that is none.")
    rungs: list[PlannedRung] = Field(description="Steps at which a sweep compares its trials, and its end.")
    expected_share: float = Field(
        description="Share of the samples of all trials that halving is expected to train; 1 without halving."
    )
    warnings: list[str]


# -- jobs -----------------------------------------------------------------------------------------------


@router.get("/overview", response_model=Overview, summary="Show the tenant's jobs and the device")
def overview(tenant: Tenant, service: ServiceHere) -> Overview:
    names = Names(service, tenant)
    submissions = service.requests.submissions(tenant, limit=SHOWN_JOBS + 1)
    changes = _job_changes(service, submissions[:SHOWN_JOBS], names)
    windows = service.training.last_windows(1)
    device = windows[0].values.get("device") if windows else service.settings.device
    return Overview(
        **dict(changes),
        tenant=tenant,
        base=service.settings.base_name,
        device=device,
        has_more=len(submissions) > SHOWN_JOBS,
    )


@router.get("/jobs", response_model=SummaryPage, summary="List the tenant's jobs")
def list_jobs(
    tenant: Tenant,
    service: ServiceHere,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=SHOWN_JOBS)] = 50,
) -> SummaryPage:
    """List jobs with their progress, the newest first."""
    found = service.requests.submissions(tenant, after=after, limit=limit + 1)
    jobs = _job_changes(service, found[:limit], Names(service, tenant)).jobs
    return SummaryPage(data=jobs, **page_fields(found, limit))


@router.get("/jobs/{job_id}", response_model=JobDetail, summary="Show a job")
def show_job(job_id: str, tenant: Tenant, service: ServiceHere) -> JobDetail:
    submission, names = find_job(service, tenant, job_id), Names(service, tenant)
    file = service.requests.file(tenant, submission.training_file)
    events = service.training.events(job_id, type="message", limit=SHOWN_EVENTS)
    return JobDetail(
        job=_job_changes(service, [submission], names).jobs[0],
        training_file=submission.training_file if file is None else file.filename,
        settings=hide_paths(submission.job),
        events=[
            LogLine(id=one.id, at=one.at, level=one.level, message=names.replace_ids(one.message))
            for one in reversed(events)
        ],
        checkpoints=[_checkpoint_summary(one) for one in service.training.checkpoints(job_id)],
        receipt=_read_receipt(service, submission),
    )


@router.get("/jobs/{job_id}/curve", response_model=Curve, summary="Get a job's losses")
def curve(job_id: str, tenant: Tenant, service: ServiceHere) -> Curve:
    """Get the loss of each step and each evaluation. Long curves are divided into parts, and only the minimum
    and the maximum of each part are returned."""
    find_job(service, tenant, job_id)
    found = _loss_curve(job_id, service.training.metrics(job_id))
    return found.model_copy(update={"train": _thin_curve(found.train), "eval": _thin_curve(found.eval)})


@router.post("/jobs/{job_id}/priority", response_model=JobSummary, summary="Change a job's priority")
def set_priority(job_id: str, body: PriorityRequest, tenant: Tenant, service: ServiceHere) -> JobSummary:
    """Change the priority with which a job, or every trial of a sweep, is admitted, from the next window on.
    The response shows the job before the change."""
    submission = find_job(service, tenant, job_id)
    row = job_row(service, submission)
    if row is not None and row.state.has_ended:
        raise invalid_request(
            f"{job_id} is {row.state}, so it cannot be changed any more.", code="invalid_state"
        )
    service.requests.add_command(tenant, job_id, "priority", body.priority)
    return _job_changes(service, [submission], Names(service, tenant)).jobs[0]


class Names:
    """The names of jobs that one tenant may see: the tenant's own jobs have names, and the jobs of other
    tenants have none."""

    def __init__(self, service: Service, tenant: str) -> None:
        self._requests, self._tenant = service.requests, tenant
        self._names: dict[str, str | None] = {}

    def visible_name(self, job: str) -> str | None:
        """Return the name of the tenant's own job. None for a job of another tenant."""
        if job not in self._names:
            found = self._requests.submission(self._tenant, job)
            self._names[job] = None if found is None else job_name(found)
        return self._names[job]

    def replace_ids(self, text: str) -> str:
        """Return a message of the scheduler in which ids of jobs are replaced by names."""
        return JOB_ID.sub(lambda found: self.visible_name(found[0]) or ANOTHER, text)


JOB_ID = re.compile(r"ftjob-[0-9a-f]+")


def job_name(submission: Submission) -> str:
    return submission.suffix or submission.id


def _job_changes(service: Service, submissions: Sequence[Submission], names: Names) -> JobChanges:
    """Return what an overview of jobs shows as changing over time: the current states of the given jobs, and
    the numbers of running and waiting jobs."""
    unfinished = service.training.unfinished_jobs()
    queue: list[str] = []
    if any(row.state is State.QUEUED for row in unfinished):
        ranking = rank_queue(service.settings, service.training, unfinished)
        held_ids = [
            row.id for row in unfinished if row.state is State.QUEUED and row.id in ranking.hold_reasons
        ]
        queue = [*ordered_names(ranking.waiting_jobs), *held_ids]
    places = {id: place for place, id in enumerate(queue)}
    rows = job_rows(service, submissions)
    jobs = []
    for one in submissions:
        place = places.get(one.id)
        before = [names.visible_name(id) or ANOTHER for id in queue[:3]] if place else []
        row, base = rows.get(one.id), service.settings.base_name
        link = _sweep_link(service, one, names)
        jobs.append(_job_summary(one, row, place, before[:place], names, base, link))
    lease = service.training.lease()
    now = time.time()
    return JobChanges(
        now=now,
        training=lease is not None and bool(lease.holder) and lease.expires_at > now,
        running=sum(row.state is State.RUNNING for row in unfinished),
        waiting=len(queue),
        jobs=jobs,
    )


def _job_summary(
    submission: Submission,
    row: JobRow | None,
    ahead: int | None,
    ahead_names: list[str],
    names: Names,
    base: str,
    sweep: SweepLink | None,
) -> JobSummary:
    status = JobStatus() if row is None else row.status
    return JobSummary(
        id=submission.id,
        name=job_name(submission),
        state="validating" if row is None else status.state.value,
        reason=names.replace_ids(status.reason),
        ahead=ahead,
        ahead_names=ahead_names,
        priority=submission.job.get("priority", 0) if row is None else row.priority,
        step=status.step,
        steps=status.steps,
        trained_tokens=status.trained_tokens,
        eval_loss=_finite_or_none(status.eval_loss),
        base_loss=_finite_or_none(status.base_loss),
        warning=status.warning,
        notes=list(status.notes),
        created_at=submission.created_at,
        started_at=None if row is None else row.started_at,
        finished_at=None if row is None else row.finished_at,
        estimated_finish=None if row is None else row.estimated_finish,
        model=None if row is None else row.model,
        answers_as=_chat_name(submission, row, base),
        error=None if row is None or row.error is None else JobError(**row.error),
        actions=_allowed_actions(submission, row),
        sweep=sweep,
    )


def _sweep_link(service: Service, submission: Submission, names: Names) -> SweepLink | None:
    if (sweep := submission.sweep) is None:
        return None
    record = None if submission.is_sweep else sweep_record(service.settings, sweep)
    is_best = record is not None and submission.id in record.best
    name, values = names.visible_name(sweep) or sweep, dict(submission.trial or {})
    return SweepLink(id=sweep, name=name, best=is_best, values=values)


def _chat_name(submission: Submission, row: JobRow | None, base: str) -> str | None:
    if row is None or row.state is not State.RUNNING or submission.is_sweep:
        return None if row is None else row.model
    return str(AdapterName(base, submission.tenant, submission.suffix or "", submission.id))


def _allowed_actions(submission: Submission, row: JobRow | None) -> list[Action]:
    """Return the actions that are allowed in a job's current state. Trials are paused and resumed only
    through their sweep."""
    if row is None:
        return ["cancel", "priority"]
    legal, is_trial = MOVES[row.state], submission.sweep is not None and not submission.is_sweep
    found: list[Action] = ["pause"] if State.PAUSED in legal and not is_trial else []
    found += ["resume"] if row.state is State.PAUSED and not is_trial else []
    found += ["cancel"] if State.CANCELLED in legal else []
    found += [] if row.state.has_ended else ["priority"]
    return [*found, "download"] if row.state is State.SUCCEEDED and row.model is not None else found


def _loss_curve(job: str, rows: Sequence[EventRow]) -> Curve:
    losses: dict[str, Losses] = {"train": [], "eval": []}
    keys = {"train": "train_loss", "eval": "valid_loss"}
    for row in rows:
        if row.measured in keys and row.step is not None:
            value = row.data.get(keys[row.measured])
            if isinstance(value, int | float) and math.isfinite(value):
                losses[row.measured].append((row.step, float(value)))
    return Curve(job=job, number=rows[-1].number if rows else 0, **losses)


def _thin_curve(losses: Losses) -> Losses:
    kept = thin_points([Point(step, loss) for step, loss in losses], CURVE_POINTS)
    return [(int(point.x), point.y) for point in kept if point.y is not None]


def _checkpoint_summary(row: CheckpointRow) -> CheckpointSummary:
    loss = _finite_or_none(row.metrics.get("valid_loss"))
    return CheckpointSummary(id=row.id, at=row.at, step=row.step, model=row.model, eval_loss=loss)


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# -- windows and receipts -------------------------------------------------------------------------------


@router.get("/windows", response_model=WindowList, summary="Get the device's last windows")
def windows(
    tenant: Tenant, service: ServiceHere, limit: Annotated[int, Query(ge=1, le=200)] = 20
) -> WindowList:
    """Get the latest windows, the newest first, with planned and measured values."""
    names = Names(service, tenant)
    return WindowList(data=[window_view(row, names) for row in service.training.last_windows(limit)])


def window_view(row: WindowRow, names: Names) -> WindowView:
    """Return a record of a window (a few global batches of every job, run together) as a tenant may see it,
    without the names of other tenants' jobs."""
    values = row.values
    keys = ("jobs", "tokens", "capacity", "microbatches", "shared", "seconds", "peak_bytes")
    return WindowView(
        number=row.number,
        at=row.at,
        **{key: values.get(key, 0) for key in keys},
        predicted_seconds=values.get("predicted_seconds"),
        predicted_peak_bytes=values.get("predicted_peak_bytes"),
        passes=[_pass_view(one, names) for one in values.get("passes", ())],
        memory=_memory_view(values["memory"], names) if values.get("memory") else None,
    )


def _pass_view(values: Mapping[str, Any], names: Names) -> PassView:
    own, count, tokens = _split_tenant_numbers(values["jobs"], names)
    return PassView(
        jobs=own,
        other_jobs=count,
        other_tokens=tokens,
        tokens=values["tokens"],
        training=values["training"],
        seconds=values["seconds"],
        predicted_seconds=values.get("predicted_seconds"),
    )


def _memory_view(values: Mapping[str, Any], names: Names) -> MemoryView:
    own, count, taken = _split_tenant_numbers(values["jobs"], names)
    return MemoryView(
        budget_bytes=values["budget_bytes"],
        base_bytes=values["base_bytes"],
        # Windows of earlier versions do not have it.
        answer_bytes=values.get("answer_bytes", 0),
        jobs=own,
        other_jobs=count,
        other_bytes=taken,
    )


def _training_bytes(memory: Mapping[str, int]) -> int:
    """Return the bytes that the base model and the training jobs may use, from the record of a window (a few
    global batches of every job), which has the device's memory by purpose."""
    return memory["budget_bytes"] - memory.get("answer_bytes", 0)


def _split_tenant_numbers(numbers: Mapping[str, int], names: Names) -> tuple[dict[str, int], int, int]:
    """Divide numbers by job into those of the tenant's own jobs, and the count and sum of the numbers of all
    other jobs."""
    own = {job: number for job, number in numbers.items() if names.visible_name(job) is not None}
    return own, len(numbers) - len(own), sum(numbers.values()) - sum(own.values())


@router.get("/receipts", response_model=ReceiptPage, summary="List what the tenant's jobs have used")
def receipts(
    tenant: Tenant,
    service: ServiceHere,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=SHOWN_JOBS)] = 50,
) -> ReceiptPage:
    """List receipts of jobs, the newest job first. A job that has not trained yet has a receipt of zeros, and
    so does a sweep, whose trials have their own receipts."""
    found = service.requests.submissions(tenant, after=after, limit=limit + 1)
    data = [
        _unused_receipt(one.id) if one.is_sweep else _read_receipt(service, one) or _unused_receipt(one.id)
        for one in found[:limit]
    ]
    return ReceiptPage(data=data, **page_fields(found, limit))


@router.get("/jobs/{job_id}/receipt", response_model=ReceiptView, summary="Get what a job has used")
def receipt(job_id: str, tenant: Tenant, service: ServiceHere) -> ReceiptView:
    """Get the receipt of a job, or the summed receipts of all trials of a sweep."""
    submission = find_job(service, tenant, job_id)
    return _read_receipt(service, submission) or _unused_receipt(job_id)


def _read_receipt(service: Service, submission: Submission) -> ReceiptView | None:
    """Return the receipt of a job (the resources that it has used), or the summed receipts of a sweep's
    trials. None if nothing was used."""
    ids = service.requests.trial_ids([submission.id])[submission.id] if submission.is_sweep else []
    found = [service.training.receipt(id) for id in ids or [submission.id]]
    values = [asdict(one) for one in found if one is not None]
    if not values:
        return None
    numbers = [key for key in values[0] if key not in ("job", "tenant")]
    return ReceiptView(job=submission.id, **{key: sum(one[key] for one in values) for key in numbers})


def _unused_receipt(job: str) -> ReceiptView:
    return ReceiptView(job=job, tokens=0, padding_tokens=0, device_seconds=0, passes=0, shared_passes=0)


# -- live changes ---------------------------------------------------------------------------------------


class Streams:
    """The open streams of server-sent events, counted by tenant, and the number of plan requests that wait or
    are being computed."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.open_counts: Counter[str] = Counter()
        self.is_closing = False
        """Whether the service is being stopped, which ends all streams."""
        self.planning = asyncio.Semaphore(1)
        self.plans = 0

    def allows_stream(self, tenant: str, key: str) -> bool:
        """Return whether a tenant may keep a stream open that was opened with this API key. The stream must
        be closed once the key has been revoked or the service is stopping."""
        return not self.is_closing and self._keys.find_tenant(key) == tenant


@router.get(
    "/stream",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    summary="Follow the tenant's jobs",
)
async def stream(request: Request, tenant: Tenant, service: ServiceHere) -> StreamingResponse:
    """Stream updates as server-sent events: `changes` (changed jobs, and numbers of jobs), `metrics` (new
    points of a curve), and `window` (the device's last window)."""
    streams: Streams = request.app.state.streams
    if streams.open_counts[tenant] >= MAX_STREAMS:
        raise quota_error(f"You have {MAX_STREAMS} open streams; close one.", "streams_quota_exceeded", 5)
    key = request.headers["authorization"].partition(" ")[2].strip()
    return StreamingResponse(
        _stream_events(service, tenant, key, streams),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _stream_events(service: Service, tenant: str, key: str, streams: Streams) -> AsyncIterator[str]:
    streams.open_counts[tenant] += 1
    try:
        seen = await asyncio.to_thread(Seen.from_store, service, tenant)
        yield ": connected\n\n"
        began = spoken = time.monotonic()
        while streams.allows_stream(tenant, key) and time.monotonic() - began < STREAM_MINUTES * 60:
            for name, value in await asyncio.to_thread(lambda: list(seen.changes())):
                spoken = time.monotonic()
                yield f"event: {name}\ndata: {value.model_dump_json()}\n\n"
            if time.monotonic() - spoken > SILENT_SECONDS:
                spoken = time.monotonic()
                yield ": alive\n\n"
            await asyncio.sleep(STREAM_SECONDS)
    except (StoreUnavailable, UserError) as error:
        # The client connects again, and is answered with an error until the store can be read.
        log.warning("%s", error)
    finally:
        streams.open_counts[tenant] -= 1


@dataclass(slots=True)
class Seen:
    """The values that a client has already received over its stream of changes."""

    service: Service
    tenant: str
    jobs: dict[str, JobSummary]
    counts: tuple[bool, int, int] | None
    metrics: dict[str, int]
    """Maps each job to the number of its last event with metrics that the client has received, or that
    existed when the stream began."""
    window: int

    @classmethod
    def from_store(cls, service: Service, tenant: str) -> Seen:
        unfinished = [row for row in service.training.unfinished_jobs() if row.tenant == tenant]
        latest = {row.id: service.training.events(row.id, type="metrics", limit=1) for row in unfinished}
        last = service.training.last_windows(1)
        return cls(
            service=service,
            tenant=tenant,
            jobs={},
            counts=None,
            metrics={job: events[0].number for job, events in latest.items() if events},
            window=last[0].number if last else 0,
        )

    def changes(self) -> Iterator[tuple[str, BaseModel]]:
        """Yield the changes since the last call as the names and bodies of server-sent events. The first call
        yields all jobs."""
        service, names = self.service, Names(self.service, self.tenant)
        submissions = service.requests.submissions(self.tenant, limit=SHOWN_JOBS)
        found = _job_changes(service, submissions, names)
        changed = [job for job in found.jobs if self.jobs.get(job.id) != job]
        counts = found.training, found.running, found.waiting
        first = self.counts is None
        if changed or counts != self.counts:
            yield "changes", found.model_copy(update={"jobs": changed})
        self.counts = counts
        for job in changed:
            self.jobs[job.id] = job
            if not first or job.id in self.metrics:
                yield from self._job_metrics(job.id)
        last = service.training.last_windows(1)
        if last and last[0].number > self.window:
            self.window = last[0].number
            yield "window", window_view(last[0], names)

    def _job_metrics(self, job: str) -> Iterator[tuple[str, BaseModel]]:
        rows = self.service.training.metrics(job, self.metrics.get(job, 0))
        if rows:
            self.metrics[job] = rows[-1].number
            yield "metrics", _loss_curve(job, rows)


# -- plans ----------------------------------------------------------------------------------------------


@router.post("/plan", response_model=PlanPreview, summary="Plan a job before submitting it")
async def plan(request: Request, body: JobRequest, tenant: Tenant, service: ServiceHere) -> PlanPreview:
    """Predict, as `weftune plan` does, when a job or the trials of a sweep would end beside the jobs that
    train and wait now, the memory that they take together, and whether they would have to wait. The body is
    that of a new job; nothing is submitted."""
    submission = await asyncio.to_thread(new_submission, service, tenant, body)
    new = await asyncio.to_thread(trials_of, submission, body) or [submission]
    refuse_large_sweep(service, len(new))
    trials = [Trial(one.suffix or one.id, one.trial or {}) for one in new if one.trial is not None]
    planned = planned_trials(submission.job, trials)
    streams: Streams = request.app.state.streams
    if streams.plans >= MAX_PLANS:
        raise quota_error("Other plans are being made; try again in a few seconds.", "busy", 3)
    streams.plans += 1
    try:
        async with streams.planning:
            queue = await asyncio.to_thread(_planned_queue, service, new)
            found = await preview(
                service.settings,
                submission.job,
                planned,
                queue.priority,
                queue.other_jobs,
                queue.budget_bytes,
                {
                    name: queue.hold_reasons[one.id]
                    for name, one in zip(planned or (NEW,), new, strict=True)
                    if one.id in queue.hold_reasons
                },
            )
    except UserError as error:
        raise invalid_request(_without_file_ids(service, tenant, str(error)), code="invalid_job") from None
    except PlanFailed as error:
        raise ApiError(503, str(error), code="plan_failed", headers={"Retry-After": "5"}) from None
    finally:
        streams.plans -= 1
    tenant_names = Names(service, tenant)
    names = {one.name: tenant_names.visible_name(str(one.job["name"])) or ANOTHER for one in queue.other_jobs}
    names |= {name: trial.name for name, trial in planned.items()}
    names[NEW] = (submission.suffix or "this sweep") if planned else "this job"

    def with_visible_names(values: Mapping[str, Any]) -> dict[str, Any]:
        why_not, waits_for = (_replace_names(values[key], names) for key in ("why_not", "waits_for"))
        return {**values, "fits": not why_not, "why_not": why_not, "waits_for": waits_for}

    values = with_visible_names(asdict(found))
    values["trials"] = [with_visible_names(one) for one in values["trials"]]
    values["warnings"] = [_replace_names(one, names) for one in values["warnings"]]
    return PlanPreview(running_jobs=queue.running_jobs, ahead=queue.jobs_ahead, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedQueue:
    """The queue when a new job or sweep is planned: the jobs that train or wait, and the priorities that the
    scheduling policy gives them."""

    other_jobs: list[OtherJob]
    """Running jobs, followed by waiting jobs. Waiting jobs that a tenant's quota holds back are left out."""
    priority: int
    """Effective priority of the new job, or of the trial that is admitted first."""
    hold_reasons: Mapping[str, str]
    """Maps each new job that the tenant's quota would keep waiting to the reason."""
    jobs_ahead: int
    running_jobs: int
    budget_bytes: int | None
    """Maximum bytes of memory for training on a CPU. None on a GPU, or if no job has trained yet."""


def _planned_queue(service: Service, submissions: Sequence[Submission]) -> _PlannedQueue:
    """Return the queue of running and waiting jobs, with a new job or the trials of a new sweep at their
    place in the order of admission."""
    rows = {row.id: row for row in service.training.unfinished_jobs()}
    new = [new_job(service.requests, one, position) for position, one in enumerate(submissions)]
    ids = {one.id for one in submissions}
    ranking = rank_queue(service.settings, service.training, list(rows.values()), new)
    waiting = ordered_names(ranking.waiting_jobs)
    levels = {shape.name: shape.priority for shape in (*ranking.waiting_jobs, *ranking.attached_jobs)}
    others: list[OtherJob] = []
    names = [name for name in (*ordered_names(ranking.attached_jobs), *waiting) if name not in ids]
    for name in names[:PLANNED_JOBS]:
        row, found = rows[name], service.requests.submission(None, name)
        if found is not None:
            rest = row.status.steps - row.status.step if row.status.steps else None
            others.append(OtherJob(f"other-{len(others)}", found.job, levels[name], rest))
    last = service.training.last_windows(1)
    values = last[0].values if last else {}
    last_priority = min(levels.values(), default=0) - 1
    return _PlannedQueue(
        other_jobs=others,
        priority=max((levels[id] for id in ids if id in levels), default=last_priority),
        hold_reasons={id: reason for id, reason in ranking.hold_reasons.items() if id in ids},
        jobs_ahead=next((place for place, name in enumerate(waiting) if name in ids), len(waiting)),
        running_jobs=sum(row.state is State.RUNNING for row in rows.values()),
        budget_bytes=_training_bytes(values["memory"]) if values.get("device") == "cpu" else None,
    )


def _replace_names(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"other-\d+|" + NEW, lambda found: names.get(found[0], found[0]), text)


def _without_file_ids(service: Service, tenant: str, text: str) -> str:
    """Return a message in which ids of the tenant's files are replaced by their names."""

    def name(match: re.Match[str]) -> str:
        file = service.requests.file(tenant, match[1])
        return match[0] if file is None else file.filename

    # Trials share the mistakes of their rows.
    lines = dict.fromkeys(re.sub(rf"^job {NEW}\S*: ", "", line) for line in text.splitlines())
    return re.sub(r"(file-[0-9a-f]+)\.jsonl", name, "\n".join(lines))


# -- adapters -------------------------------------------------------------------------------------------


@router.get(
    "/jobs/{job_id}/adapter",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-tar": {}, "application/zip": {}}}},
    summary="Download an adapter",
)
def download(
    job_id: str,
    tenant: Tenant,
    service: ServiceHere,
    step: Annotated[int | None, Query(ge=0, description="Step of a checkpoint.")] = None,
    format: Literal["tar", "zip"] = "tar",
) -> StreamingResponse:
    """Download the finished adapter, or a checkpoint, as an archive of its PEFT folder. Of a sweep, this is
    the adapter of its best trial."""
    submission = find_job(service, tenant, job_id)
    folder = _adapter_folder(service, submission, step)
    root = submission.id if step is None else f"{submission.id}-step-{step}"
    pieces = _tar_chunks(folder, root) if format == "tar" else _zip_chunks(folder, root)
    kind = "application/x-tar" if format == "tar" else "application/zip"
    headers = {"Content-Disposition": f'attachment; filename="{root}.{format}"'}
    return StreamingResponse(pieces, media_type=kind, headers=headers)


def _adapter_folder(service: Service, submission: Submission, step: int | None) -> Path:
    job, row = submission.id, job_row(service, submission)
    best = None
    if submission.is_sweep and row is not None and row.model is not None:
        best = parse_adapter_name(row.model)
    folder = service.settings.jobs / (job if best is None else best.job)
    if step is not None:
        found = [one for one in service.training.checkpoints(job) if one.step == step]
        if not found:
            raise not_found("checkpoint", f"{job} at step {step}")
        folder = folder / found[0].folder
    elif row is None or row.state is not State.SUCCEEDED:
        state = "being checked" if row is None else row.state
        raise invalid_request(f"{job} is {state}: it has no finished adapter.", code="adapter_not_finished")
    if not all((folder / name).is_file() for name in (CONFIG, WEIGHTS)):
        raise not_found("adapter", job)
    return folder


def _adapter_files(folder: Path) -> list[Path]:
    """Return the files of a PEFT folder except job.yaml, which contains paths of this machine."""
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != JOB_FILE]
    return [path for path in found if not path.name.startswith(".")]


def _tar_chunks(folder: Path, root: str) -> Iterator[bytes]:
    for path in _adapter_files(folder):
        entry, found = tarfile.TarInfo(f"{root}/{path.name}"), path.stat()
        entry.size, entry.mtime, entry.mode = found.st_size, int(found.st_mtime), 0o644
        yield entry.tobuf(tarfile.PAX_FORMAT)
        yield from _file_pieces(path)
        yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _zip_chunks(folder: Path, root: str) -> Iterator[bytes]:
    target = _Pieces()
    with zipfile.ZipFile(target, "w") as archive:
        for path in _adapter_files(folder):
            # Weights hardly become smaller.
            with archive.open(zipfile.ZipInfo.from_file(path, f"{root}/{path.name}"), "w") as entry:
                for piece in _file_pieces(path):
                    entry.write(piece)
                    yield target.take_chunks()
    yield target.take_chunks()


def _file_pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as content:
        yield from iter(lambda: content.read(CHUNK), b"")


class _Pieces(io.RawIOBase):
    """A write-only file object from which written content is taken out piece by piece, so that an archive can
    be sent while it is created."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._parts.append(bytes(content))
        return len(content)

    def take_chunks(self) -> bytes:
        content = b"".join(self._parts)
        self._parts.clear()
        return content
