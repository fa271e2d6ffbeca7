"""OpenAI's fine-tuning jobs, their events and checkpoints. The state of a job is read from the training
process's records. Requests to change it are stored as commands, which the training process reads between two
windows (runs of a few global batches of every job)."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request

from weftune.jobs.store.status import JobStatus, State
from weftune.service.api.context import BEARER, ERRORS, Service, ServiceHere, StrictRoute, Tenant
from weftune.service.api.errors import ApiError, invalid_request, not_found, quota_error
from weftune.service.api.files import RESULTS, open_jobs, page_fields
from weftune.service.api.job_request import body_hash, hyperparameters_of, job_keys, trials_of
from weftune.service.api.models import adapter_keys, find_adapter, is_base
from weftune.service.api.schemas import (
    MAX_METADATA_VALUE,
    Checkpoint,
    CheckpointMetrics,
    CheckpointPage,
    EventPage,
    Job,
    JobDetails,
    JobError,
    JobEvent,
    JobPage,
    JobRequest,
    UsedHyperparameters,
    UsedMethod,
)
from weftune.service.api.sweeps import job_row, job_rows
from weftune.service.ids import new_id, parse_adapter_name
from weftune.service.store.records import CheckpointRow, EventRow, JobRow
from weftune.service.store.requests import IdempotencyConflict, Submission, Verb

log = logging.getLogger(__name__)

MAX_PAGE = 100
REPEAT_SECONDS = 600.0
"""Seconds within which a request that the client marks as a repetition returns the job of the earlier, equal
request instead of a new job."""
QUEUE_SECONDS = 30
"""Seconds after which a client that has too many unfinished jobs may submit again, sent in the response's
header Retry-After."""
METADATA = re.compile(r"metadata\[.{1,64}\]")
VALIDATING = "validating_files"
UNSTARTED = JobStatus()

router = APIRouter(
    prefix="/v1/fine_tuning/jobs",
    tags=["Fine-tuning"],
    route_class=StrictRoute,
    dependencies=[BEARER],
    responses=ERRORS,
)
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
After = Annotated[str | None, Query(max_length=64)]


@router.post("", response_model=Job, summary="Create a job")
def create(
    body: JobRequest,
    tenant: Tenant,
    service: ServiceHere,
    idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
    x_stainless_retry_count: Annotated[str, Header(max_length=16)] = "0",
) -> Job:
    """Submit a job. The same request with the same Idempotency-Key, or repeated by OpenAI's client after a
    failure, returns the first job. With `weftune.sweep`, the job is a sweep: its trials are jobs, and its
    fine-tuned model is that of the best trial."""
    is_repeated = x_stainless_retry_count.isdecimal() and int(x_stainless_retry_count) > 0
    since = time.time() - REPEAT_SECONDS if is_repeated else None
    if since is not None:
        earlier = service.requests.recent_submission(tenant, body_hash(body), since)
        if earlier is not None:
            return read_job_view(service, earlier)
    submission = new_submission(service, tenant, body, idempotency_key)
    trials = trials_of(submission, body)
    _refuse_full_queue(service, tenant, idempotency_key, max(1, len(trials)))
    try:
        stored = service.requests.submit(submission, since, trials)
    except IdempotencyConflict as conflict:
        raise ApiError(
            409, str(conflict), code="idempotency_conflict", headers={"x-should-retry": "false"}
        ) from None
    if stored.id == submission.id:
        for one in trials or [stored]:
            service.preparer.prepare(one)
    return read_job_view(service, stored)


@router.get("", response_model=JobPage, summary="List jobs")
def list_jobs(
    request: Request, tenant: Tenant, service: ServiceHere, after: After = None, limit: Limit = 20
) -> JobPage:
    """List the tenant's jobs, the newest first. `metadata[KEY]=VALUE` keeps those with that metadata."""
    metadata = {
        key[len("metadata[") : -1]: value[:MAX_METADATA_VALUE]
        for key, value in request.query_params.items()
        if METADATA.fullmatch(key)
    }
    found = service.requests.submissions(tenant, after=after, limit=limit + 1, metadata=metadata)
    rows = job_rows(service, found[:limit])
    data = [job_view(service.settings.base_name, one, rows.get(one.id)) for one in found[:limit]]
    return JobPage(data=data, **page_fields(found, limit))


@router.get("/{job_id}", response_model=Job, summary="Get a job")
def get_job(job_id: str, tenant: Tenant, service: ServiceHere) -> Job:
    return read_job_view(service, find_job(service, tenant, job_id))


@router.post("/{job_id}/cancel", response_model=Job, summary="Cancel a job")
def cancel(job_id: str, tenant: Tenant, service: ServiceHere) -> Job:
    """Cancel a job, or all trials of a sweep. It ends at its next window; its checkpoints stay."""
    return _request_change(service, tenant, job_id, "cancel")


@router.post("/{job_id}/pause", response_model=Job, summary="Pause a job")
def pause(job_id: str, tenant: Tenant, service: ServiceHere) -> Job:
    """Pause a job, or all trials of a sweep, at the next window. A paused job keeps its progress; its status
    is shown as queued, and an event says that it is paused."""
    return _request_change(service, tenant, job_id, "pause")


@router.post("/{job_id}/resume", response_model=Job, summary="Resume a job")
def resume(job_id: str, tenant: Tenant, service: ServiceHere) -> Job:
    """Let a paused job train again."""
    return _request_change(service, tenant, job_id, "resume")


@router.get("/{job_id}/events", response_model=EventPage, summary="List a job's events")
def events(
    job_id: str, tenant: Tenant, service: ServiceHere, after: After = None, limit: Limit = 20
) -> EventPage:
    """List a job's events, the newest first: what has happened, and metrics of its steps."""
    find_job(service, tenant, job_id)
    found = service.training.events(job_id, after=after, limit=limit + 1)
    return EventPage(data=[event_view(one) for one in found[:limit]], **page_fields(found, limit))


@router.get("/{job_id}/checkpoints", response_model=CheckpointPage, summary="List a job's checkpoints")
def checkpoints(
    job_id: str, tenant: Tenant, service: ServiceHere, after: After = None, limit: Limit = 10
) -> CheckpointPage:
    """List a job's checkpoints, the newest first. Each has its own model name, under which it answers
    prompts."""
    find_job(service, tenant, job_id)
    found = service.training.checkpoints(job_id, after=after, limit=limit + 1)
    return CheckpointPage(data=[checkpoint_view(one) for one in found[:limit]], **page_fields(found, limit))


def find_job(service: Service, tenant: str, id: str) -> Submission:
    """Return the tenant's job. Raise an error with status 404 if the tenant has no such job."""
    submission = service.requests.submission(tenant, id)
    if submission is None:
        raise not_found("fine_tuning_job", id)
    return submission


# -- creating -------------------------------------------------------------------------------------------


def new_submission(
    service: Service, tenant: str, body: JobRequest, idempotency_key: str | None = None
) -> Submission:
    """Return the job that the body of a request describes, or raise an error for its first invalid value.
    Nothing is stored."""
    id, now, settings = new_id("ftjob"), time.time(), service.settings
    start = _starting_adapter(service, tenant, body.model)
    training = service.requests.file(tenant, body.training_file)
    if training is None:
        raise _file_not_found("training_file", body.training_file)
    validation = None
    if body.validation_file is not None:
        validation = service.requests.file(tenant, body.validation_file)
        if validation is None:
            raise _file_not_found("validation_file", body.validation_file)
    job = job_keys(
        body,
        id,
        training.rows,
        str(settings.file_path(training.id)),
        None if validation is None else str(settings.file_path(validation.id)),
        start,
        settings.metrics,
    )
    extension = body.weftune
    deadline = None if extension is None else extension.deadline
    if deadline is not None and deadline <= now:
        raise invalid_request(
            "weftune.deadline: is in the past", param="weftune.deadline", code="invalid_value"
        )
    return Submission(
        id=id,
        tenant=tenant,
        created_at=now,
        request=body.model_dump(exclude_unset=True),
        job=job,
        training_file=training.id,
        validation_file=None if validation is None else validation.id,
        suffix=body.suffix,
        details=body.metadata or {},
        idempotency_key=idempotency_key,
        body_hash=body_hash(body),
        token_budget=None if extension is None else extension.token_budget,
        deadline=deadline,
        sweep=id if extension is not None and extension.sweep is not None else None,
    )


def _starting_adapter(service: Service, tenant: str, model: str) -> dict[str, Any] | None:
    """Return the adapter keys, as in jobs.yaml, of the model from which a new job starts. None if it starts
    from the base model alone."""
    if is_base(service, model):
        return None
    found = find_adapter(service, tenant, model)
    if found is None:
        raise ApiError(
            404,
            f"The model {model[:200]} does not exist; write {service.settings.base_name}, or the name of "
            "one of your fine-tuned models.",
            code="model_not_found",
            param="model",
        )
    return adapter_keys(service, found)


def _file_not_found(param: str, id: str) -> ApiError:
    return invalid_request(f"{param}: there is no file {id[:64]}", param=param, code="file_not_found")


def _refuse_full_queue(service: Service, tenant: str, key: str | None, count: int) -> None:
    """Raise an error if the tenant would have too many jobs with `count` more, unless the request repeats an
    earlier one."""
    most = service.settings.quotas.queued_jobs
    if most is None:
        return
    waiting = open_jobs(service, tenant)
    if len(waiting) + count <= most:
        return
    if key is not None and any(
        one.idempotency_key == key for one in service.requests.submissions(tenant, limit=most)
    ):
        return
    refuse_large_sweep(service, count)
    more = "" if count == 1 else f", with {count} trials more"
    raise quota_error(
        f"{len(waiting)} of your jobs have not ended, and you may have {most}{more}; wait or cancel some.",
        "queued_jobs_quota_exceeded",
        QUEUE_SECONDS,
    )


def refuse_large_sweep(service: Service, count: int) -> None:
    """Raise an error if a sweep has more trials (jobs) than a tenant may have jobs."""
    most = service.settings.quotas.queued_jobs
    if most is not None and count > most:
        raise invalid_request(
            f"weftune.sweep: has {count:,} trials, and you may have {most:,} jobs; search fewer combinations",
            param="weftune.sweep",
            code="queued_jobs_quota_exceeded",
        )


def _request_change(service: Service, tenant: str, id: str, verb: Verb) -> Job:
    submission = find_job(service, tenant, id)
    if verb in ("pause", "resume") and submission.sweep is not None and not submission.is_sweep:
        raise invalid_request(
            f"{id} is a trial of the sweep {submission.sweep}, which decides when its trials train; "
            f"{verb} the sweep",
            code="invalid_state",
        )
    row = job_row(service, submission)
    if row is None or not row.state.has_ended:
        service.requests.add_command(tenant, id, verb)
        log.info("%s: %s is requested", id, verb)
    elif not (verb == "cancel" and row.state is State.CANCELLED):
        raise invalid_request(f"{id} is {row.state}, so it cannot be changed any more.", code="invalid_state")
    return read_job_view(service, submission)


# -- views ----------------------------------------------------------------------------------------------


def read_job_view(service: Service, submission: Submission) -> Job:
    return job_view(service.settings.base_name, submission, job_row(service, submission))


def job_view(base: str, submission: Submission, row: JobRow | None) -> Job:
    """Return a job in the format of OpenAI's API. `row` is the training process's record of the job."""
    status = UNSTARTED if row is None else row.status
    state = VALIDATING if row is None else str(status.state)
    body = JobRequest.model_validate(submission.request)
    used = used_hyperparameters(body, submission.job)
    has_ended = row is not None and row.state.has_ended
    measured = submission.id
    if submission.is_sweep:
        best = None if row is None or row.model is None else parse_adapter_name(row.model)
        measured = "" if best is None else best.job
    return Job(
        id=submission.id,
        created_at=int(submission.created_at),
        model=body.model if body.model.startswith("ft:") else base,
        organization_id=submission.tenant,
        status="queued" if state == State.PAUSED else state,  # type: ignore[arg-type]
        training_file=submission.training_file,
        validation_file=submission.validation_file,
        hyperparameters=used.model_copy(update={"beta": None}),
        method=used_method(submission.job, used),
        seed=submission.job["seed"],
        metadata=dict(submission.details) or None,
        fine_tuned_model=row.model if row is not None and row.state is State.SUCCEEDED else None,
        finished_at=_whole_seconds(row.finished_at) if row is not None and has_ended else None,
        estimated_finish=_whole_seconds(row.estimated_finish) if row is not None and not has_ended else None,
        trained_tokens=status.trained_tokens if has_ended else None,
        result_files=[RESULTS + measured] if has_ended and status.step and measured else [],
        error=None if row is None or row.error is None else JobError(**row.error),
        weftune=JobDetails(
            suffix=submission.suffix,
            state=state,  # type: ignore[arg-type]
            reason=status.reason,
            step=status.step,
            steps=status.steps,
            priority=submission.job.get("priority", 0) if row is None else row.priority,
            eval_loss=status.eval_loss,
            warning=status.warning,
            sweep=submission.sweep,
            trial=None if submission.trial is None else dict(submission.trial),
            job=hide_paths(submission.job),
        ),
    )


def used_hyperparameters(body: JobRequest, job: Mapping[str, Any]) -> UsedHyperparameters:
    given = hyperparameters_of(body)
    epochs = job.get("epochs")
    multiplier: Any = 1.0 if given.learning_rate_multiplier == "auto" else given.learning_rate_multiplier
    is_absolute = body.weftune is not None and body.weftune.learning_rate is not None
    return UsedHyperparameters(
        n_epochs=int(epochs) if epochs is not None and epochs == int(epochs) else None,
        batch_size=job["batch_size"],
        learning_rate_multiplier=None if is_absolute else multiplier,
        beta=job["objective"].get("beta"),
    )


def used_method(job: Mapping[str, Any], used_hyperparameters: UsedHyperparameters) -> UsedMethod:
    """Return a job's training method (objective and its settings) in the form of OpenAI's API. Every
    preference objective is shown as dpo."""
    if job["objective"].get("kind", "sft") == "sft":
        return UsedMethod(type="supervised", supervised=UsedMethod.Used(hyperparameters=used_hyperparameters))
    return UsedMethod(type="dpo", dpo=UsedMethod.Used(hyperparameters=used_hyperparameters))


def hide_paths(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of a job with all values left out that are paths on this machine."""
    shown = {key: value for key, value in job.items() if key not in ("name", "data", "eval", "adapter")}
    for section, hidden in (("data", "path"), ("eval", "path"), ("adapter", "init_from")):
        if section in job:
            shown[section] = {key: value for key, value in job[section].items() if key != hidden}
    if "metric" in shown.get("eval", ()):
        shown["eval"]["metric"] = shown["eval"]["metric"].rpartition(":")[2]
    return {key: value for key, value in shown.items() if value != {}}


def event_view(row: EventRow) -> JobEvent:
    return JobEvent(
        id=row.id,
        created_at=int(row.at),
        level=row.level,
        message=row.message,
        type=row.type,
        data=dict(row.data),
    )


def checkpoint_view(row: CheckpointRow) -> Checkpoint:
    # The whole validation set is measured each time.
    names = {name: name.removeprefix("full_") for name in CheckpointMetrics.model_fields}
    metrics = {name: row.metrics[ours] for name, ours in names.items() if ours in row.metrics}
    return Checkpoint(
        id=row.id,
        created_at=int(row.at),
        fine_tuned_model_checkpoint=row.model,
        fine_tuning_job_id=row.job,
        metrics=CheckpointMetrics(**{**metrics, "step": row.step}),
        step_number=row.step,
    )


def _whole_seconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
