"""The store of clients' requests: files, submitted jobs and commands. The HTTP process writes it, and both
processes read it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Select, Table, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from weftune.errors import WeftuneError
from weftune.service.store.database import Database, insert_rows, to_record, to_values
from weftune.service.store.tables import commands, files, prepared, submissions

Order = Literal["asc", "desc"]
Verb = Literal["cancel", "pause", "resume", "priority", "delete"]


class IdempotencyConflict(WeftuneError):
    """An error raised if an idempotency key is used again with another request body."""

    def __init__(self, key: str, job: str) -> None:
        self.job = job
        super().__init__(
            f"The idempotency key {key!r} was used for another request, which created {job}; use a new key."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """An uploaded file, whose content is at `settings.files / id`."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    rows: int
    sha256: str
    created_at: float
    deleted_at: float | None = None
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job as it was submitted. The training process records its state separately.

    A sweep is submitted as one job that is not trained itself, followed by one submission for each of its
    trials (the jobs that are trained).
    """

    id: str
    tenant: str
    created_at: float
    request: Mapping[str, Any]
    """Body of the client's request."""
    job: Mapping[str, Any]
    """Specification of the job, as keys and values of jobs.yaml."""
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    details: Mapping[str, str]
    """Metadata that the client has attached."""
    idempotency_key: str | None = None
    body_hash: str
    token_budget: int | None = None
    deadline: float | None = None
    sweep: str | None = None
    """Id of the sweep's job: for a trial, the sweep that it belongs to; for a sweep, its own id. None for all
    other jobs."""
    trial: Mapping[str, Any] | None = None
    """Values in which a trial differs from the sweep's other trials, by dotted key such as `adapter.rank`.
    None for a job that is no trial."""
    number: int = 0

    @property
    def is_sweep(self) -> bool:
        return self.sweep == self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSubmission:
    """A submission whose rows have been checked and tokenised, or that has been refused."""

    number: int
    at: float
    refusal: Mapping[str, Any] | None
    """Reason why the job cannot be trained: code, message, param. None if it can."""
    submission: Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A client's request to change a job, applied by the training process."""

    number: int
    job: str
    tenant: str
    at: float
    verb: Verb
    value: Any = None


class RequestStore:
    """A thread-safe store of requests. Methods that write return after the row is durable.

    Every method raises StoreUnavailable if the database is locked for too long or unreachable. Strings must
    be valid Unicode without NUL characters. Rows of other tenants are never returned, and a cursor `after`
    that is not the tenant's gives an empty page.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def close(self) -> None:
        self._database.close()

    # -- files -------------------------------------------------------------------------------------------

    def add_file(self, record: FileRecord) -> None:
        with self._database.write() as connection:
            connection.execute(insert(files).values(to_values(record)))

    def file(self, tenant: str, id: str) -> FileRecord | None:
        """Return the record of an uploaded file. None if the tenant has no such file, or has deleted it."""
        query = select(files).where(files.c.tenant == tenant, files.c.id == id, files.c.deleted_at.is_(None))
        with self._database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else to_record(FileRecord, row)

    def files(
        self,
        tenant: str,
        *,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> list[FileRecord]:
        """Return the tenant's files, the newest first unless `order` is "asc", beginning after the file
        `after`."""
        query = select(files).where(files.c.tenant == tenant, files.c.deleted_at.is_(None))
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        query = start_after_row(query, files, after, order, tenant).limit(limit)
        with self._database.read() as connection:
            return [to_record(FileRecord, row) for row in connection.execute(query)]

    def delete_file(self, tenant: str, id: str) -> bool:
        """Mark a file as deleted; the caller removes its content. Return False if the tenant has no such
        file."""
        deletion = (
            update(files)
            .where(files.c.tenant == tenant, files.c.id == id, files.c.deleted_at.is_(None))
            .values(deleted_at=time.time())
        )
        with self._database.write() as connection:
            return connection.execute(deletion).rowcount == 1

    def stored_bytes(self, tenant: str) -> int:
        """Return the total bytes of the files that the tenant has uploaded and not deleted."""
        query = select(func.coalesce(func.sum(files.c.bytes), 0)).where(
            files.c.tenant == tenant, files.c.deleted_at.is_(None)
        )
        with self._database.read() as connection:
            return int(connection.scalar(query) or 0)

    # -- jobs --------------------------------------------------------------------------------------------

    def submit(
        self,
        submission: Submission,
        repeat_since: float | None = None,
        trials: Sequence[Submission] = (),
    ) -> Submission:
        """Store a job and return it, or return the earlier job that the same request has created. The trials
        of a sweep are stored with it.

        Requests are the same if tenant, idempotency key and body hash are equal. Raise IdempotencyConflict if
        the key is equal but the body is not. If the client marks a request without a key as a repetition,
        `repeat_since` is given: the request is then also the same as a request of the tenant with an equal
        body that was stored at this time or later.
        """
        try:
            with self._database.write() as connection:
                earlier = self._earlier_submission(connection, submission, repeat_since)
                if earlier is None:
                    for one in (submission, *trials):
                        connection.execute(insert(submissions).values(to_values(one)))
                    query = select(submissions).where(submissions.c.id == submission.id)
                    return to_record(Submission, connection.execute(query).one())
                return earlier
        except IntegrityError:
            # On PostgreSQL, another process may have inserted the key meanwhile.
            with self._database.write() as connection:
                earlier = self._earlier_submission(connection, submission, repeat_since)
            if earlier is None:
                raise
            return earlier

    def _earlier_submission(
        self, connection: Connection, submission: Submission, repeat_since: float | None
    ) -> Submission | None:
        key = submission.idempotency_key
        if key is not None:
            query = select(submissions).where(
                submissions.c.tenant == submission.tenant, submissions.c.idempotency_key == key
            )
            if (row := connection.execute(query).first()) is not None:
                earlier = to_record(Submission, row)
                if earlier.body_hash != submission.body_hash:
                    raise IdempotencyConflict(key, earlier.id)
                return earlier
        if repeat_since is None:
            return None
        row = connection.execute(_recent_query(submission.tenant, submission.body_hash, repeat_since)).first()
        return None if row is None else to_record(Submission, row)

    def recent_submission(self, tenant: str, body_hash: str, earliest_time: float) -> Submission | None:
        """Return the tenant's newest job with this body that was submitted at `earliest_time` or later."""
        with self._database.read() as connection:
            row = connection.execute(_recent_query(tenant, body_hash, earliest_time)).first()
        return None if row is None else to_record(Submission, row)

    def submission(self, tenant: str | None, id: str) -> Submission | None:
        """Return a job. None if the tenant has no such job; a tenant of None means any."""
        query = select(submissions).where(submissions.c.id == id)
        if tenant is not None:
            query = query.where(submissions.c.tenant == tenant)
        with self._database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else to_record(Submission, row)

    def submissions(
        self,
        tenant: str | None,
        *,
        after: str | None = None,
        limit: int = 20,
        metadata: Mapping[str, str] | None = None,
        only_sweeps: bool = False,
    ) -> list[Submission]:
        """Return the tenant's jobs, the newest first, beginning after the job `after`. A tenant of None means
        all tenants.

        With `metadata`, only jobs that have all of its keys with these values are returned.
        """
        query = select(submissions)
        if only_sweeps:
            query = query.where(submissions.c.sweep == submissions.c.id)
        if tenant is not None:
            query = query.where(submissions.c.tenant == tenant)
        query = start_after_row(query, submissions, after, "desc", tenant)
        if not metadata:
            query = query.limit(limit)
        found: list[Submission] = []
        with self._database.read() as connection, connection.execute(query) as rows:
            # Compared here: a path to any key that a client may choose is written differently by each
            # database.
            for row in rows:
                if len(found) == limit:
                    break
                if not metadata or metadata.items() <= dict(row.details).items():
                    found.append(to_record(Submission, row))
        return found

    def trials(self, sweep: str) -> list[Submission]:
        """Return the trials (jobs) of a sweep, in the order of the sweep."""
        with self._database.read() as connection:
            rows = connection.execute(_trials_query(select(submissions), [sweep]))
            return [to_record(Submission, row) for row in rows]

    def trial_ids(self, sweeps: Iterable[str]) -> dict[str, list[str]]:
        """Return a mapping from each of these sweeps to the ids of the sweep's trials, in the order of the
        sweep."""
        found: dict[str, list[str]] = {sweep: [] for sweep in sweeps}
        query = _trials_query(select(submissions.c.id, submissions.c.sweep), found)
        with self._database.read() as connection:
            for row in connection.execute(query) if found else ():
                found[row.sweep].append(row.id)
        return found

    def unprepared_submissions(self) -> list[Submission]:
        """Return the jobs that have been neither prepared nor refused, the oldest first. Jobs of sweeps are
        left out, since only their trials are prepared."""
        known = select(prepared.c.job).where(prepared.c.job == submissions.c.id)
        is_sweep = submissions.c.sweep.is_not_distinct_from(submissions.c.id)
        query = select(submissions).where(~known.exists(), ~is_sweep).order_by(submissions.c.number)
        with self._database.read() as connection:
            return [to_record(Submission, row) for row in connection.execute(query)]

    def mark_prepared(self, job: str, refusal: Mapping[str, Any] | None = None) -> None:
        """Record that a job is prepared (checked and tokenised) or, with `refusal`, that it cannot be
        trained. Only the first call for a job has an effect."""
        row = {"job": job, "at": time.time(), "refusal": refusal}
        with self._database.write() as connection:
            insert_rows(connection, prepared, [row])

    def add_command(self, tenant: str, job: str, verb: Verb, value: Any = None) -> int:
        """Store a command for training, and return its number. The caller has checked that the tenant has
        the job."""
        row = {"job": job, "tenant": tenant, "at": time.time(), "verb": verb, "value": value}
        with self._database.write() as connection:
            result = connection.execute(insert(commands).values(row))
            assert result.inserted_primary_key is not None
            return int(result.inserted_primary_key[0])

    # -- read by training --------------------------------------------------------------------------------

    def prepared_after(self, number: int, limit: int = 1000) -> list[PreparedSubmission]:
        """Return jobs that were prepared or refused after the job with this number, the oldest first."""
        query = (
            select(
                submissions,
                prepared.c.number.label("prepared_number"),
                prepared.c.at,
                prepared.c.refusal,
            )
            .join(submissions, submissions.c.id == prepared.c.job)
            .where(prepared.c.number > number)
            .order_by(prepared.c.number)
            .limit(limit)
        )
        with self._database.read() as connection:
            return [
                PreparedSubmission(
                    number=row.prepared_number,
                    at=row.at,
                    refusal=row.refusal,
                    submission=to_record(Submission, row),
                )
                for row in connection.execute(query)
            ]

    def commands_after(self, number: int, limit: int = 1000) -> list[Command]:
        """Return clients' commands (requests to change jobs) that were stored after the command with this
        number, the oldest first."""
        query = select(commands).where(commands.c.number > number).order_by(commands.c.number).limit(limit)
        with self._database.read() as connection:
            return [to_record(Command, row) for row in connection.execute(query)]


def _recent_query(tenant: str, body_hash: str, earliest_time: float) -> Select[Any]:
    return (
        select(submissions)
        .where(
            submissions.c.tenant == tenant,
            submissions.c.body_hash == body_hash,
            submissions.c.created_at >= earliest_time,
        )
        .order_by(submissions.c.number.desc())
        .limit(1)
    )


def _trials_query(query: Select[Any], sweeps: Iterable[str]) -> Select[Any]:
    is_trial = submissions.c.sweep.in_(list(sweeps)) & (submissions.c.sweep != submissions.c.id)
    return query.where(is_trial).order_by(submissions.c.number)


def start_after_row(
    query: Select[Any], table: Table, after: str | None, order: Order, tenant: str | None = None
) -> Select[Any]:
    """Order a query by number, beginning after the row whose id is `after`. The row must belong to the
    tenant."""
    number = table.c.number
    query = query.order_by(number.asc() if order == "asc" else number.desc())
    if after is None:
        return query
    cursor = select(table.c.number).where(table.c.id == after)
    if tenant is not None:
        cursor = cursor.where(table.c.tenant == tenant)
    position = cursor.scalar_subquery()
    return query.where(number > position if order == "asc" else number < position)
