"""The order in which waiting jobs will be admitted, computed in the HTTP process.

The training process records the inputs of its admission policy after every few global batches. Here, the same
policy ranks the jobs, including jobs that have not been submitted yet."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from weftune.core.shapes import JobShape
from weftune.jobs.store.policy import FairShare, QueuedJob, Ranking, TenantUsage
from weftune.jobs.store.status import State
from weftune.service.settings import Quotas, ServiceSettings
from weftune.service.store.records import JobRow, TrainingStore, WindowRow
from weftune.service.store.requests import RequestStore, Submission

QUEUE = "queue"
"""Key, in the database record of a window (a few global batches of every job), under which the inputs of the
admission policy (`queue_values`) are stored."""
DAY_SECONDS = 86400
RECENT_SECONDS = 3600.0
"""Half-life, in seconds, with which trained tokens lose weight in a tenant's recent usage."""
BYTES_PER_TOKEN = 4
"""Assumed bytes of an uploaded file per token, for jobs whose rows have not been tokenised."""


def make_policy(quotas: Quotas) -> FairShare:
    return FairShare(running_jobs=quotas.running_jobs, tokens_per_day=quotas.tokens_per_day)


def decay_usage(tokens: float, seconds: float) -> float:
    """Return a tenant's recent usage in tokens after `seconds` of exponential decay."""
    return float(tokens * 0.5 ** (seconds / RECENT_SECONDS))


def queue_values(jobs: Sequence[QueuedJob], usage: Mapping[str, TenantUsage]) -> dict[str, Any]:
    """Return the inputs of the admission policy (each job's waiting time and size, and the tenants' recent
    usage) as JSON values for the database."""
    return {
        "recent_tokens": {tenant: one.recent_tokens for tenant, one in usage.items()},
        "jobs": {
            job.shape.name: {
                "submitted": job.submission_number,
                "batch_tokens": job.shape.batch_tokens,
                "queued_seconds": round(job.queued_seconds),
                "remaining_seconds": round(job.remaining_seconds),
                "deadline": job.deadline,
            }
            for job in jobs
        },
    }


def rank_queue(
    settings: ServiceSettings,
    training: TrainingStore,
    rows: Sequence[JobRow],
    new_jobs: Sequence[QueuedJob] = (),
) -> Ranking:
    """Rank the running and waiting jobs among `rows`, and `new_jobs`, as the training process would rank them
    now.

    Jobs whose sizes the training process has not recorded yet are assumed to be as large as the largest other
    job.
    """
    now, windows = time.time(), training.last_windows(1)
    last = windows[0] if windows else WindowRow(at=now, values={})
    recorded = last.values.get(QUEUE, {"recent_tokens": {}, "jobs": {}})
    largest_batch_tokens = max(
        (recorded_job["batch_tokens"] for recorded_job in recorded["jobs"].values()), default=1
    )
    jobs = [
        _queued_job(row, recorded["jobs"].get(row.id), largest_batch_tokens, now, last.at)
        for row in rows
        if row.state in (State.QUEUED, State.RUNNING)
    ]
    today = training.usage_by_tenant(int(now // DAY_SECONDS))
    usage = {
        tenant: TenantUsage(
            recent_tokens=decay_usage(recorded["recent_tokens"].get(tenant, 0.0), now - last.at),
            tokens_today=today.get(tenant, 0),
        )
        for tenant in {row.tenant for row in rows} | {job.tenant for job in new_jobs}
    }
    return make_policy(settings.quotas).rank([*jobs, *new_jobs], usage, now)


def _queued_job(
    row: JobRow,
    recorded_job: Mapping[str, Any] | None,
    largest_batch_tokens: int,
    current_time: float,
    recorded_at: float,
) -> QueuedJob:
    is_attached = row.state is State.RUNNING
    if recorded_job is None:
        recorded_job = {"submitted": row.number, "batch_tokens": largest_batch_tokens, "deadline": None}
        recorded_job |= {"queued_seconds": current_time - row.created_at, "remaining_seconds": 0.0}
        recorded_at = current_time
    waited = 0.0 if is_attached else current_time - recorded_at
    return QueuedJob(
        shape=_job_shape(row.id, row.priority, recorded_job["batch_tokens"]),
        is_attached=is_attached,
        tenant=row.tenant,
        submission_number=recorded_job["submitted"],
        queued_seconds=recorded_job["queued_seconds"] + waited,
        deadline=recorded_job["deadline"],
        remaining_seconds=recorded_job["remaining_seconds"],
    )


def new_job(requests: RequestStore, submission: Submission, position: int = 0) -> QueuedJob:
    """Return an entry of the queue for a job that has not been submitted yet. Among jobs of equal priority,
    the job comes after all other jobs of its tenant, and after new jobs with a lower `position`."""
    file = requests.file(submission.tenant, submission.training_file)
    row_bytes = 0.0 if file is None else file.bytes / max(1, file.rows)
    tokens = round(submission.job["batch_size"] * row_bytes / BYTES_PER_TOKEN)
    return QueuedJob(
        shape=_job_shape(submission.id, int(submission.job.get("priority", 0)), tokens),
        tenant=submission.tenant,
        submission_number=2**62 + position,
        deadline=submission.deadline,
    )


def _job_shape(name: str, priority: int, batch_tokens: int) -> JobShape:
    """Return a job's shape (its sizes) in which only the fields that scheduling policies read are set."""
    return JobShape(
        name=name,
        priority=priority,
        file_position=0,
        trainable_parameters=0,
        max_sample_tokens=0,
        batch_tokens=batch_tokens,
    )


def ordered_names(shapes: Sequence[JobShape]) -> list[str]:
    """Return the names of ranked jobs, in the order in which they will be admitted."""
    return [shape.name for shape in sorted(shapes, key=lambda one: (-one.priority, one.file_position))]
