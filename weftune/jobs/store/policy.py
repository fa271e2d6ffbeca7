"""Scheduling policies: the order in which jobs are considered for admission, and jobs that must wait.

A policy is a pure function. It does not decide which jobs fit into memory: it sets the priority and the
position of every job, by which `weftune.jobs.store.scheduler.admit_jobs` admits and preempts jobs. A job is
preempted only by one of higher effective priority, so a policy gives jobs that must not preempt one another
the same effective priority.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from weftune.core.shapes import JobShape


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job that trains or waits, with the properties by which scheduling policies order jobs."""

    shape: JobShape
    """Sizes of the job, and the priority that the user requested."""
    is_attached: bool = False
    tenant: str = ""
    submission_number: int = 0
    """Serial number of the submission. Later submissions have larger numbers."""
    queued_seconds: float = 0.0
    """Total seconds for which the job has waited, including before its first admission."""
    deadline: float | None = None
    """Deadline of the job, in seconds since 1970."""
    remaining_seconds: float = 0.0
    """Predicted seconds until the job ends if it trains from now on without interruption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """The tokens that a tenant's jobs have trained on."""

    recent_tokens: float = 0.0
    """Number of trained tokens of the tenant's jobs, in which older tokens count less."""
    tokens_today: int = 0
    """Number of tokens that the tenant's jobs trained on today."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The jobs that may train and the jobs that are held back. A scheduling policy has set the priority and
    position of each job that may train."""

    waiting_jobs: tuple[JobShape, ...]
    attached_jobs: tuple[JobShape, ...]
    hold_reasons: Mapping[str, str] = field(default_factory=dict)
    """Maps each job that must not train now, whether it waits or is attached (trains already), to the
    reason."""


class Policy(Protocol):
    def rank(
        self, jobs: Sequence[QueuedJob], tenant_usage: Mapping[str, TenantUsage], current_time: float
    ) -> Ranking:
        """Rank the jobs: set the priorities and positions by which the scheduler admits and preempts them.
        `tenant_usage` maps tenants to the tokens that they trained on, and `current_time` is in seconds since
        1970."""
        ...


@dataclass(frozen=True, slots=True)
class ByPriority:
    """A policy that orders jobs by priority and, if priorities are equal, by time of submission."""

    def rank(
        self, jobs: Sequence[QueuedJob], tenant_usage: Mapping[str, TenantUsage], current_time: float
    ) -> Ranking:
        return ranking(jobs, lambda job: (-job.shape.priority,))


@dataclass(frozen=True, slots=True, kw_only=True)
class FairShare:
    """A policy that divides training among tenants, so that each trains on equally many tokens, or in
    proportion to `weights`.

    Jobs are ordered by priority first. A job that has waited `ageing_seconds` counts as one priority higher,
    so that no job waits forever. A job that would miss its deadline if it waited longer goes before others of
    its priority. Jobs of equal priority are ordered by the tokens that their tenant would have received after
    them: those of the tenant's earlier jobs in this ranking, plus recently trained tokens in multiples of
    `quantum_tokens`. A tenant with one job is therefore admitted within a few global batches, whatever number
    of jobs another tenant has, and tenants that do not fit together take turns that last about
    `quantum_tokens`.
    """

    quantum_tokens: int = 500_000
    ageing_seconds: float = 3600.0
    weights: Mapping[str, float] = field(default_factory=dict)
    """Maps tenants to their weights. Tenants that are missing here have weight 1."""
    running_jobs: int | None = None
    """Maximum number of jobs of a tenant that train at the same time. None means unlimited."""
    tokens_per_day: int | None = None
    """Maximum number of tokens that a tenant's jobs train on per day. None means unlimited."""

    def rank(
        self, jobs: Sequence[QueuedJob], tenant_usage: Mapping[str, TenantUsage], current_time: float
    ) -> Ranking:
        nothing = TenantUsage()
        by_tenant: dict[str, list[QueuedJob]] = defaultdict(list)
        for job in sorted(
            jobs,
            key=lambda job: (
                *self._aged_priority(job, current_time),
                not job.is_attached,
                job.submission_number,
            ),
        ):
            by_tenant[job.tenant].append(job)
        hold_reasons: dict[str, str] = {}
        positions: dict[str, tuple[float, float]] = {}
        for tenant, own in by_tenant.items():
            weight = self.weights.get(tenant, 1.0)
            turns = tenant_usage.get(tenant, nothing).recent_tokens / weight // self.quantum_tokens
            tokens, training = 0.0, 0
            for job in own:
                if reason := self._hold_reason(training, tenant_usage.get(tenant, nothing)):
                    hold_reasons[job.shape.name] = reason
                    continue
                training += 1
                tokens += max(1, job.shape.batch_tokens) / weight
                positions[job.shape.name] = turns, tokens
        allowed = [job for job in jobs if job.shape.name not in hold_reasons]
        found = ranking(
            allowed, lambda job: (*self._aged_priority(job, current_time), *positions[job.shape.name])
        )
        return replace(found, hold_reasons=hold_reasons)

    def _aged_priority(self, job: QueuedJob, current_time: float) -> tuple[int, bool]:
        """Return a sort key of a job: its negated priority, increased with waiting time, and whether the job
        can wait without missing its deadline."""
        aged = job.shape.priority + int(job.queued_seconds // self.ageing_seconds)
        can_wait = (
            job.deadline is None or current_time + DEADLINE_MARGIN * job.remaining_seconds < job.deadline
        )
        return -aged, can_wait

    def _hold_reason(self, training_jobs: int, tenant_usage: TenantUsage) -> str:
        if self.running_jobs is not None and training_jobs >= self.running_jobs:
            return f"at most {training_jobs} of this account's jobs may train at a time; one has to end first"
        if self.tokens_per_day is not None and tenant_usage.tokens_today >= self.tokens_per_day:
            return f"this account has used its {self.tokens_per_day:,} tokens of today; it continues tomorrow"
        return ""


DEADLINE_MARGIN = 1.5
"""Factor by which a job's predicted remaining time is multiplied. The job is urgent if less time than the
product is left until its deadline. The factor exceeds 1, since predictions assume that no further jobs are
admitted."""


def ranking(jobs: Sequence[QueuedJob], key: Callable[[QueuedJob], Any]) -> Ranking:
    """Return the jobs with effective priorities in the order of their sort keys, where a job with a lower key
    gets a higher priority. Jobs with equal keys get the same priority and are ordered by submission."""
    levels = {value: -level for level, value in enumerate(sorted({key(job) for job in jobs}))}
    ranked = {
        job.shape.name: replace(job.shape, priority=levels[key(job)], file_position=job.submission_number)
        for job in jobs
    }
    return Ranking(
        waiting_jobs=tuple(ranked[job.shape.name] for job in jobs if not job.is_attached),
        attached_jobs=tuple(ranked[job.shape.name] for job in jobs if job.is_attached),
    )
