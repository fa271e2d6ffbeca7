"""The records that the training process keeps in the database: jobs, transitions between states, events,
checkpoints, receipts (used resources), and its lease (its exclusive right to write)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Row, delete, func, select, text, update

from weftune.errors import WeftuneError
from weftune.jobs.store.status import JobStatus, State, check_transition, job_from_json
from weftune.service.store.database import Database, insert_rows, to_record, to_values
from weftune.service.store.requests import Order, start_after_row
from weftune.service.store.tables import (
    checkpoints,
    cursors,
    events,
    jobs,
    leases,
    receipts,
    transitions,
    usage,
    windows,
)

KEPT_WINDOWS = 200
LEASE = "training"
PATIENCE = 1.25
"""Time without a renewal after which another process may take over a lease (the exclusive right to write), as
a multiple of the lease's duration."""
POLL_SECONDS = 0.1


Measured = Literal["train", "eval", "base", "rung"]


class LeaseHeld(WeftuneError):
    """An error raised if another process holds, or may still hold, the lease: the exclusive right to write
    the training tables."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(
            f"Another training process ({holder}) works on this store; stop it, or wait until it has ended."
        )


class LeaseLost(WeftuneError):
    """An error raised if another process has taken the lease, the exclusive right to write the training
    tables. The process that lost the lease must end without writing."""

    def __init__(self) -> None:
        super().__init__(
            "Another training process has taken over this store, since this one did not renew its lease; "
            "this process ends without writing."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job as the training process records it in the database."""

    id: str
    tenant: str
    priority: int = 0
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    estimated_finish: float | None = None
    model: str | None = None
    """Model name under which the finished adapter answers prompts. None if the adapter is not finished or has
    been deleted."""
    error: Mapping[str, Any] | None = None
    """Reason why the job failed: code, message, param."""
    status: JobStatus = field(default_factory=JobStatus)
    number: int = 0

    @property
    def state(self) -> State:
        return self.status.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    job: str
    at: float
    old: State | None
    """State of the job before the transition. None for the job's first state."""
    new: State
    reason: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    id: str
    job: str
    at: float
    level: Literal["info", "warn", "error"] = "info"
    type: Literal["message", "metrics"] = "message"
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
    measured: Measured | None = None
    """Kind of samples on which the metrics were measured, or `rung` for evaluations and decisions at a rung
    (a step at which a sweep compares its trials). None for all other events."""
    step: int | None = None
    """Step at which the metrics were measured or, for an event of a sweep, the number of the sweep's
    decision."""
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    id: str
    job: str
    at: float
    step: int
    model: str
    """Model name under which the checkpoint answers prompts."""
    folder: str
    """Folder of the checkpoint's adapter, relative to the job's folder."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Resources that a job has used so far."""

    job: str
    tenant: str
    tokens: int = 0
    padding_tokens: int = 0
    device_seconds: float = 0.0
    passes: int = 0
    shared_passes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRow:
    """An executed window (a few global batches of every job, planned together), with planned and measured
    values."""

    at: float
    values: Mapping[str, Any]
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRow:
    holder: str
    """Name of the process that holds the lease. Empty if the lease has been released."""
    token: int
    renewals: int
    seconds: float
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Everything that the training process writes to the database in one transaction."""

    jobs: Sequence[JobRow] = ()
    """Complete records of new and changed jobs. If a job has several records, the last one is stored."""
    transitions: Sequence[Transition] = ()
    """Every change of a job's state since the last flush, in order. The old state of a new job is None."""
    events: Sequence[EventRow] = ()
    """Events of jobs to append, such as metrics. Metrics of a step that is already stored are ignored."""
    checkpoints: Sequence[CheckpointRow] = ()
    """New checkpoints. A checkpoint of a step that is already stored is ignored."""
    receipts: Sequence[Receipt] = ()
    """Receipts, which replace earlier receipts of the same jobs."""
    usage: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Maps (tenant, day) to the number of tokens trained since the last flush, which is added to the stored
    number."""
    windows: Sequence[WindowRow] = ()
    cursors: Mapping[str, int] = field(default_factory=dict)
    """Maps `prepared` (prepared jobs) and `commands` (requests to change jobs) to the number of the last row
    that has been applied."""


class TrainingStore:
    """A thread-safe store of the training process's records. Every method raises StoreUnavailable if the
    database is locked for too long or unreachable; a cursor `after` of another job or tenant gives an empty
    page."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._token: int | None = None
        """Fencing token of the lease (the exclusive right to write) that this process holds. None if it holds
        no lease."""
        self._observed_lease: tuple[tuple[int, int], float] | None = None
        """Observation of another process's lease: a pair of its token and number of renewals, and the
        monotonic time, in seconds, at which these were first seen."""

    def close(self) -> None:
        self._database.close()

    # -- the lease ---------------------------------------------------------------------------------------

    def acquire_lease(self, holder: str, seconds: float, wait_seconds: float = 0.0) -> int:
        """Take the lease, by which this process is the only writer, and return its fencing token, which is
        greater than all earlier ones.

        `holder` is `process_name()`. Raise LeaseHeld if the lease is not available within `wait_seconds`. A
        lease is available if it was released, if its holder was a process of this machine that has ended, or
        if this object has seen no renewal for slightly longer than the lease lasts, by a monotonic clock.
        Observing that takes time, so repeat the call or pass `wait_seconds`.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            lease = self.lease()
            if self._is_available(lease) and (token := self._take_lease(lease, holder, seconds)) is not None:
                self._token = token
                return token
            if time.monotonic() >= deadline:
                raise LeaseHeld("" if lease is None else lease.holder)
            time.sleep(POLL_SECONDS)

    def _is_available(self, lease: LeaseRow | None) -> bool:
        if lease is None or not lease.holder or has_exited(lease.holder):
            return True
        now, version = time.monotonic(), (lease.token, lease.renewals)
        if self._observed_lease is None or self._observed_lease[0] != version:
            self._observed_lease = version, now
        return now - self._observed_lease[1] > lease.seconds * PATIENCE

    def _take_lease(self, lease: LeaseRow | None, holder: str, seconds: float) -> int | None:
        """Take the lease (the exclusive right to write) and return the fencing token. Return None if another
        process has changed the lease since `lease` was read."""
        values = {
            "holder": holder,
            "token": 1 if lease is None else lease.token + 1,
            "renewals": 0,
            "seconds": seconds,
            "expires_at": time.time() + seconds,
        }
        with self._database.write() as connection:
            if lease is None:
                insert_rows(connection, leases, [{"name": LEASE, **values}])
            else:
                connection.execute(
                    update(leases)
                    .where(leases.c.token == lease.token, leases.c.renewals == lease.renewals)
                    .values(values)
                )
            row = connection.execute(select(leases)).one()
        is_own = (row.holder, row.token, row.renewals) == (holder, values["token"], 0)
        return row.token if is_own else None

    def renew_lease(self, seconds: float) -> None:
        """Extend the lease (the exclusive right to write) to `seconds` from now. The next call must come well
        before they have passed. Raise LeaseLost if another process has taken the lease."""
        with self._database.write() as connection:
            self._check_lease(connection)
            connection.execute(
                update(leases).values(
                    renewals=leases.c.renewals + 1, seconds=seconds, expires_at=time.time() + seconds
                )
            )

    def release_lease(self) -> None:
        """Release the lease so that another process can take it immediately. Raise LeaseLost if another
        process has taken it already."""
        with self._database.write() as connection:
            self._check_lease(connection)
            connection.execute(update(leases).values(holder=""))
        self._token = None

    def lease(self) -> LeaseRow | None:
        """Return the lease. None if no process has ever held it."""
        with self._database.read() as connection:
            row = connection.execute(select(leases)).first()
        return None if row is None else to_record(LeaseRow, row)

    def _check_lease(self, connection: Connection) -> None:
        # The row stays locked until the transaction ends, so that the lease cannot be taken inside it.
        if self._token is None or connection.scalar(select(leases.c.token).with_for_update()) != self._token:
            raise LeaseLost

    # -- writing -----------------------------------------------------------------------------------------

    def write(self, changes: Changes) -> None:
        """Store all changes, or none of them if an error is raised.

        Raise LeaseLost if another process has taken the lease, and ValueError if a job's transitions do not
        lead from its stored state to its new state in allowed steps.
        """
        with self._database.write() as connection:
            self._check_lease(connection)
            self._check_transitions(connection, changes)
            insert_rows(
                connection,
                jobs,
                {job.id: _job_values(job) for job in changes.jobs}.values(),
                keys=["id"],
                changes=_JOB_COLUMNS,
            )
            insert_rows(connection, transitions, map(to_values, changes.transitions))
            insert_rows(connection, events, map(to_values, changes.events))
            insert_rows(connection, checkpoints, map(to_values, changes.checkpoints))
            insert_rows(
                connection,
                receipts,
                {one.job: to_values(one) for one in changes.receipts}.values(),
                keys=["job"],
                changes=[one.name for one in fields(Receipt) if one.name != "job"],
            )
            self._add_usage(connection, changes.usage)
            insert_rows(connection, windows, map(to_values, changes.windows))
            if changes.windows:
                newest = connection.scalar(select(func.max(windows.c.number))) or 0
                connection.execute(delete(windows).where(windows.c.number <= newest - KEPT_WINDOWS))
            insert_rows(
                connection,
                cursors,
                [{"name": name, "number": number} for name, number in changes.cursors.items()],
                keys=["name"],
                changes=["number"],
            )

    def _check_transitions(self, connection: Connection, changes: Changes) -> None:
        new_states = {job.id: job.state for job in changes.jobs}
        names = {*new_states, *(one.job for one in changes.transitions)}
        states: dict[str, State | None] = dict.fromkeys(names)
        for some in _id_batches(sorted(names)):
            query = select(jobs.c.id, jobs.c.state).where(jobs.c.id.in_(some))
            states |= {id: State(state) for id, state in connection.execute(query)}
        new_states = {**{name: state for name, state in states.items() if state is not None}, **new_states}
        for one in changes.transitions:
            before = states[one.job]
            if one.old != before:
                raise ValueError(f"{one.job} is {before}, so it cannot go from {one.old} to {one.new}")
            states[one.job] = one.new if before is None else check_transition(before, one.new)
        for name in names:
            if states[name] != new_states.get(name):
                raise ValueError(
                    f"the transitions of {name} lead to {states[name]}, and it is {new_states.get(name)}"
                )

    def _add_usage(self, connection: Connection, tokens: Mapping[tuple[str, int], int]) -> None:
        rows = [{"tenant": tenant, "day": day, "tokens": new} for (tenant, day), new in tokens.items()]
        added = {"tokens": text("usage.tokens + excluded.tokens")}
        insert_rows(connection, usage, rows, keys=["tenant", "day"], changes=added)

    # -- jobs --------------------------------------------------------------------------------------------

    def job(self, id: str, tenant: str | None = None) -> JobRow | None:
        """Return a job, or None if the job does not exist or belongs to another tenant than `tenant`."""
        query = select(jobs).where(jobs.c.id == id)
        if tenant is not None:
            query = query.where(jobs.c.tenant == tenant)
        with self._database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else _to_job_row(row)

    def jobs_by_id(self, ids: Iterable[str]) -> dict[str, JobRow]:
        """Return a mapping from id to job, for all given jobs that the training process has recorded."""
        found: dict[str, JobRow] = {}
        with self._database.read() as connection:
            for some in _id_batches(list(ids)):
                rows = connection.execute(select(jobs).where(jobs.c.id.in_(some)))
                found |= {row.id: _to_job_row(row) for row in rows}
        return found

    def jobs(
        self,
        tenant: str | None = None,
        *,
        states: Iterable[State] | None = None,
        after: str | None = None,
        limit: int | None = 100,
    ) -> list[JobRow]:
        """Return the tenant's jobs, the newest first, beginning after the job `after`. A tenant of None means
        all tenants."""
        query = select(jobs)
        if tenant is not None:
            query = query.where(jobs.c.tenant == tenant)
        if states is not None:
            query = query.where(jobs.c.state.in_([str(state) for state in states]))
        query = start_after_row(query, jobs, after, "desc", tenant).limit(limit)
        with self._database.read() as connection:
            return [_to_job_row(row) for row in connection.execute(query)]

    def unfinished_jobs(self) -> list[JobRow]:
        """Return every job that has not ended, the oldest first."""
        unfinished = [str(state) for state in State if not state.has_ended]
        query = select(jobs).where(jobs.c.state.in_(unfinished)).order_by(jobs.c.number)
        with self._database.read() as connection:
            return [_to_job_row(row) for row in connection.execute(query)]

    def transitions(self, job: str) -> list[Transition]:
        """Return every change of a job's state, the oldest first."""
        query = select(transitions).where(transitions.c.job == job).order_by(transitions.c.number)
        with self._database.read() as connection:
            return [
                Transition(
                    job=row.job,
                    at=row.at,
                    old=None if row.old is None else State(row.old),
                    new=State(row.new),
                    reason=row.reason,
                    number=row.number,
                )
                for row in connection.execute(query)
            ]

    # -- events, checkpoints and numbers -----------------------------------------------------------------

    def events(
        self,
        job: str,
        *,
        after: str | None = None,
        limit: int | None = 20,
        type: Literal["message", "metrics"] | None = None,
        order: Order = "desc",
    ) -> list[EventRow]:
        """Return a job's events, the newest first unless `order` is "asc", beginning after the event
        `after`."""
        query = select(events).where(events.c.job == job)
        if type is not None:
            query = query.where(events.c.type == type)
        if after is not None:
            query = query.where(select(events.c.id).where(events.c.id == after, events.c.job == job).exists())
        query = start_after_row(query, events, after, order).limit(limit)
        with self._database.read() as connection:
            return [to_record(EventRow, row) for row in connection.execute(query)]

    def metrics(self, job: str, after_number: int = 0) -> list[EventRow]:
        """Return a job's metrics, the oldest first, after the event with this number."""
        query = (
            select(events)
            .where(events.c.job == job, events.c.number > after_number, events.c.type == "metrics")
            .order_by(events.c.number)
        )
        with self._database.read() as connection:
            return [to_record(EventRow, row) for row in connection.execute(query)]

    def checkpoints(
        self, job: str, *, after: str | None = None, limit: int | None = None, order: Order = "desc"
    ) -> list[CheckpointRow]:
        """Return a job's checkpoints, the newest first unless `order` is "asc", beginning after the
        checkpoint `after`."""
        query = select(checkpoints).where(checkpoints.c.job == job)
        query = start_after_row(query, checkpoints, after, order).limit(limit)
        with self._database.read() as connection:
            return [to_record(CheckpointRow, row) for row in connection.execute(query)]

    def receipt(self, job: str) -> Receipt | None:
        """Return the receipt of a job. None if the job has not trained yet."""
        with self._database.read() as connection:
            row = connection.execute(select(receipts).where(receipts.c.job == job)).first()
        return None if row is None else to_record(Receipt, row)

    def usage(self, tenant: str, since_day: int = 0) -> dict[int, int]:
        """Return a mapping from days, from `since_day` on, to the number of tokens that the tenant's jobs
        trained on."""
        query = select(usage.c.day, usage.c.tokens).where(usage.c.tenant == tenant, usage.c.day >= since_day)
        with self._database.read() as connection:
            return {row.day: row.tokens for row in connection.execute(query.order_by(usage.c.day))}

    def usage_by_tenant(self, since_day: int = 0) -> dict[str, int]:
        """Return a mapping from tenants to the number of tokens that their jobs trained on from `since_day`
        on."""
        query = select(usage.c.tenant, func.sum(usage.c.tokens)).where(usage.c.day >= since_day)
        with self._database.read() as connection:
            rows = connection.execute(query.group_by(usage.c.tenant))
            return {tenant: int(tokens) for tenant, tokens in rows}

    def last_windows(self, limit: int = 1) -> list[WindowRow]:
        """Return the records of the latest windows (a few global batches of every job each), the newest
        first."""
        query = select(windows).order_by(windows.c.number.desc()).limit(limit)
        with self._database.read() as connection:
            return [to_record(WindowRow, row) for row in connection.execute(query)]

    def cursors(self) -> dict[str, int]:
        """Return a mapping from `prepared` (prepared jobs) and `commands` (requests to change jobs) to the
        number of the last row that has been applied. Empty if none has been applied."""
        with self._database.read() as connection:
            return {row.name: row.number for row in connection.execute(select(cursors))}


# -- rows of jobs ----------------------------------------------------------------------------------------

_STATUS_FIELDS = tuple(one.name for one in fields(JobStatus) if one.name != "state")
_JOB_COLUMNS = ("state", *(one.name for one in fields(JobRow) if one.name not in ("id", "number")))
_PORTION = 500
"""Maximum number of ids in one database query. SQLite allows 32,766 parameters."""


def _job_values(job: JobRow) -> dict[str, Any]:
    status = {name: getattr(job.status, name) for name in _STATUS_FIELDS}
    return {**to_values(job), "state": str(job.state), "status": status}


def _to_job_row(row: Row[Any]) -> JobRow:
    found = dict(row._mapping)
    status = job_from_json({**found["status"], "state": found.pop("state")})
    return JobRow(**{**found, "status": status})


def _id_batches(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[start : start + _PORTION] for start in range(0, len(ids), _PORTION)]


# -- names of processes ----------------------------------------------------------------------------------


def process_name() -> str:
    """Return a globally unique name of this process."""
    return f"{_machine_name()}/{os.getpid()}/{_start_time(os.getpid())}"


def has_exited(holder: str) -> bool:
    """Return whether the process that `process_name` named `holder` has ended. False if that cannot be known,
    such as for a process of another machine."""
    machine, _, rest = holder.partition("/")
    number, _, start = rest.partition("/")
    if machine != _machine_name() or not number.isdecimal() or not start:
        return False
    return _start_time(int(number)) != start


def _machine_name() -> str:
    """Return a name of this machine that changes at every boot, so that a process id is unique together with
    it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}.{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{socket.gethostname()}.unknown.{os.getpid()}"


def _start_time(process: int) -> str:
    """Return the start time of a process in clock ticks since the boot, as a string. Empty if the process has
    ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    state, *values = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else values[18]
