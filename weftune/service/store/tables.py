"""The tables of a service.

There are two sets of tables, because each has one writer. The HTTP process writes `REQUESTS`: files,
submitted jobs, and commands. The training process writes `TRAINING`: states, transitions, events,
checkpoints, and its lease. Each process reads the other's tables. On SQLite, each set has its own file, so
that the processes never lock each other out; on PostgreSQL, both are in one database.

Times are seconds since 1970. Columns called `number` give the order of rows and are never reused.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

REQUESTS, TRAINING = MetaData(), MetaData()
Number = BigInteger().with_variant(Integer, "sqlite")
"""Type of a primary key that the database assigns; SQLite assigns keys of type INTEGER only."""

# -- written by the HTTP process ------------------------------------------------------------------------

files = Table(
    "files",
    REQUESTS,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("tenant", String(64), nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("deleted_at", Float),
    Index("files_of_tenant", "tenant", "number"),
)

submissions = Table(
    "submissions",
    REQUESTS,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("tenant", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    # The body of the client's request, from which responses about the job are made.
    Column("request", JSON, nullable=False),
    # The job with the keys of jobs.yaml, whose paths are those of uploaded files.
    Column("job", JSON, nullable=False),
    Column("training_file", String(64), nullable=False),
    Column("validation_file", String(64)),
    Column("suffix", String(64)),
    Column("details", JSON, nullable=False),
    # A repeated request with the key of an earlier one returns that job, if the body has the same hash.
    Column("idempotency_key", String(255)),
    Column("body_hash", String(64), nullable=False),
    # The service's own limits of a job: total tokens, and a time by which it should have ended.
    Column("token_budget", BigInteger),
    Column("deadline", Float),
    # For a trial: the id of its sweep's job. For the job of a sweep: its own id.
    Column("sweep", String(64)),
    # For a trial: the values in which it differs from the sweep's other trials, by dotted key.
    Column("trial", JSON(none_as_null=True)),
    UniqueConstraint("tenant", "idempotency_key", name="one_job_per_key"),
    Index("submissions_of_tenant", "tenant", "number"),
    Index("submissions_of_sweep", "sweep"),
)

# Submissions whose rows have been checked and tokenised, or refused. Training takes them by number.
prepared = Table(
    "prepared",
    REQUESTS,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("job", String(64), nullable=False, unique=True),
    Column("at", Float, nullable=False),
    # Why the job is refused: {"code", "message", "param"}. NULL if it can be trained.
    Column("refusal", JSON(none_as_null=True)),
)

commands = Table(
    "commands",
    REQUESTS,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("job", String(64), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("at", Float, nullable=False),
    # cancel, pause, resume, priority, delete (the finished adapter)
    Column("verb", String(16), nullable=False),
    Column("value", JSON(none_as_null=True)),
)

# -- written by the training process --------------------------------------------------------------------

jobs = Table(
    "jobs",
    TRAINING,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("tenant", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("priority", Integer, nullable=False, default=0),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    # Predicted time of its end while it runs.
    Column("estimated_finish", Float),
    # Name under which the finished adapter answers. NULL before, and after the adapter has been deleted.
    Column("model", Text),
    # Why the job failed: {"code", "message", "param"}.
    Column("error", JSON(none_as_null=True)),
    # All fields of weftune.jobs.store.status.JobStatus but the state.
    Column("status", JSON, nullable=False),
    Index("jobs_of_tenant", "tenant", "number"),
    Index("jobs_by_state", "state"),
)

transitions = Table(
    "transitions",
    TRAINING,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("job", String(64), nullable=False),
    Column("at", Float, nullable=False),
    Column("old", String(16)),
    Column("new", String(16), nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Index("transitions_of_job", "job", "number"),
)

events = Table(
    "events",
    TRAINING,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("job", String(64), nullable=False),
    Column("at", Float, nullable=False),
    Column("level", String(8), nullable=False),
    # `message` or `metrics`.
    Column("type", String(8), nullable=False),
    Column("message", Text, nullable=False),
    Column("data", JSON, nullable=False),
    # For metrics: train, eval, base or rung, and the step. A resumed job repeats steps that are stored.
    # For decisions of a sweep: rung, and the number of the decision.
    Column("measured", String(8)),
    Column("step", Integer),
    UniqueConstraint("job", "measured", "step", name="one_row_per_step"),
    Index("events_of_job", "job", "number"),
)

checkpoints = Table(
    "checkpoints",
    TRAINING,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("job", String(64), nullable=False),
    Column("at", Float, nullable=False),
    Column("step", Integer, nullable=False),
    # Name under which the checkpoint answers.
    Column("model", Text, nullable=False),
    # Folder of the adapter, relative to the job's folder.
    Column("folder", Text, nullable=False),
    Column("metrics", JSON, nullable=False),
    UniqueConstraint("job", "step", name="one_checkpoint_per_step"),
)

# What a job has used: one row per job, updated after every window.
receipts = Table(
    "receipts",
    TRAINING,
    Column("job", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("padding_tokens", BigInteger, nullable=False),
    # Seconds of the device, divided among the jobs of a pass by their tokens.
    Column("device_seconds", Float, nullable=False),
    Column("passes", BigInteger, nullable=False),
    Column("shared_passes", BigInteger, nullable=False),
)

# Tokens that a tenant's jobs have trained on, by day (days since 1970), for quotas and fair shares.
usage = Table(
    "usage",
    TRAINING,
    Column("tenant", String(64), primary_key=True),
    Column("day", Integer, primary_key=True),
    Column("tokens", BigInteger, nullable=False),
)

# The latest windows, planned and measured, for the dashboard.
windows = Table(
    "windows",
    TRAINING,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("values", JSON, nullable=False),
)

# How far the training process has read REQUESTS: one row for each table, `prepared` and `commands`.
cursors = Table(
    "cursors",
    TRAINING,
    Column("name", String(16), primary_key=True),
    Column("number", BigInteger, nullable=False),
)

# One row. Every transaction of the training process checks its token, which increases with every holder.
leases = Table(
    "leases",
    TRAINING,
    Column("name", String(16), primary_key=True),
    # The process that holds the lease. Empty if it has been released.
    Column("holder", String(255), nullable=False),
    Column("token", BigInteger, nullable=False),
    # The lease may be taken if it is not renewed for longer than `seconds`, by another process's clock.
    Column("renewals", BigInteger, nullable=False),
    Column("seconds", Float, nullable=False),
    # Only shown to operators: no decision depends on the time of day, which may be set wrongly.
    Column("expires_at", Float, nullable=False),
)
