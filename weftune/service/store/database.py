"""Connections to the service's two sets of tables (clients' requests, and records of training), and the
migrations of the tables. Each set has one writing connection and several reading ones."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection, Engine, Row, Table, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import QueuePool

from weftune.core.files import json_text
from weftune.errors import MissingPackage, UserError, WeftuneError
from weftune.service.settings import ServiceSettings

MIGRATIONS = Path(__file__).parent / "migrations"
READERS = 16
"""Maximum number of simultaneous reading connections per process."""
BUSY_SECONDS = 5.0
"""Default number of seconds that a transaction waits for a locked database."""
UPGRADE_SECONDS = 600.0
"""Seconds that a process waits for another one that upgrades the same tables."""

TableSet = Literal["requests", "training"]


class StoreUnavailable(WeftuneError):
    """An error raised if the database is locked, unreachable, full, or not created yet.

    The transaction has been rolled back, and may be repeated after `retry_seconds`. HTTP answers 503 with
    Retry-After. If the connection to PostgreSQL was lost during a commit, the transaction may nevertheless
    have been stored.
    """

    def __init__(self, error_text: str, retry_seconds: float = 1.0) -> None:
        self.retry_seconds = retry_seconds
        super().__init__(f"The service's database cannot be used at the moment ({error_text}); try again.")


class Database:
    """Thread-safe connections of one process to one of the two sets of tables: either clients' requests or
    the records of training."""

    def __init__(self, readers: Engine, writer: Engine | None, busy_seconds: float) -> None:
        self._readers, self._writer = readers, writer
        self._busy_seconds = busy_seconds
        self._one_writer = threading.Lock()

    @property
    def is_sqlite(self) -> bool:
        return self._readers.dialect.name == "sqlite"

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a connection for statements that only read."""
        with _typed_errors(), self._readers.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Yield the writing connection inside a transaction, which is committed at the end of the block."""
        assert self._writer is not None, "this process only reads these tables"
        if not self._one_writer.acquire(timeout=self._busy_seconds):
            raise StoreUnavailable("other writes have been waiting for too long")
        try:
            with _typed_errors(), self._writer.begin() as connection:
                yield connection
        finally:
            self._one_writer.release()

    def close(self) -> None:
        # The last connection that closes a SQLite file writes its log back, which must be the writing one.
        self._readers.dispose()
        if self._writer is not None:
            self._writer.dispose()


def open_requests(settings: ServiceSettings, writable: bool, busy_seconds: float = BUSY_SECONDS) -> Database:
    """Open the tables that the HTTP process writes. Only that process may open them as writable."""
    return _open_database(settings, "requests", writable, busy_seconds)


def open_training(settings: ServiceSettings, writable: bool, busy_seconds: float = BUSY_SECONDS) -> Database:
    """Open the tables that the training process writes. Only that process may open them as writable."""
    return _open_database(settings, "training", writable, busy_seconds)


def upgrade_store(settings: ServiceSettings, folder: Path = MIGRATIONS) -> None:
    """Create both sets of tables, or bring them to the current version. The call can be repeated after a
    crash.

    The supervisor calls this before it starts processes, so that every process finds all tables.
    """
    for tables in ("requests", "training"):
        writer = _open_writer(settings, tables, UPGRADE_SECONDS)
        try:
            _upgrade_schema(writer, settings, tables, folder)
        finally:
            writer.dispose()


def _open_database(
    settings: ServiceSettings, tables: TableSet, writable: bool, busy_seconds: float
) -> Database:
    writer = None
    if writable:
        writer = _open_writer(settings, tables, busy_seconds)
        try:
            _upgrade_schema(writer, settings, tables, MIGRATIONS)
        except BaseException:
            writer.dispose()
            raise
    return Database(_open_readers(settings, tables, busy_seconds), writer, busy_seconds)


# -- engines ---------------------------------------------------------------------------------------------


def sqlite_path(settings: ServiceSettings, tables: TableSet) -> Path:
    return settings.store / f"{tables}.db"


def _open_readers(settings: ServiceSettings, tables: TableSet, busy_seconds: float) -> Engine:
    keys = {"pool_size": READERS, "max_overflow": 0, "pool_timeout": busy_seconds}
    if settings.database is not None:
        return _postgres_engine(settings.database, busy_seconds, isolation_level="AUTOCOMMIT", **keys)
    path = sqlite_path(settings, tables).absolute()

    def connect() -> sqlite3.Connection:
        # Read-only connections never write the log back: versions before 3.51.3 can corrupt a file of which
        # two connections do so.
        return sqlite3.connect(
            f"{path.as_uri()}?mode=ro",
            uri=True,
            timeout=busy_seconds,
            isolation_level=None,
            check_same_thread=False,
        )

    return create_engine("sqlite://", creator=connect, poolclass=QueuePool, json_serializer=json_text, **keys)


def _open_writer(settings: ServiceSettings, tables: TableSet, busy_seconds: float) -> Engine:
    keys = {"pool_size": 1, "max_overflow": 0, "pool_timeout": busy_seconds}
    if settings.database is not None:
        return _postgres_engine(settings.database, busy_seconds, **keys)
    path = sqlite_path(settings, tables)
    try:
        # The folder holds what tenants have uploaded: no other user of the machine may read it.
        settings.store.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(
            f"cannot create {settings.store}: {error.strerror}; choose another --store"
        ) from error

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    engine = create_engine(
        "sqlite://", creator=connect, poolclass=QueuePool, json_serializer=json_text, **keys
    )

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # The lock is taken at once, since a transaction that has read cannot wait for it any more.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _postgres_engine(url: str, busy_seconds: float, **keys: Any) -> Engine:
    parsed = make_url(url)
    if parsed.get_backend_name() != "postgresql":
        raise UserError(
            f"--database: {parsed.get_backend_name()} is not supported; write postgresql://USER@HOST/NAME"
        )
    try:
        return create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            pool_pre_ping=True,
            json_serializer=json_text,
            connect_args={
                "connect_timeout": max(2, round(busy_seconds)),
                "options": f"-c lock_timeout={round(busy_seconds * 1000)}",
            },
            **keys,
        )
    except ModuleNotFoundError as error:
        raise MissingPackage("PostgreSQL needs psycopg: pip install 'weftune[postgres]'") from error


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Convert database errors that are not bugs, such as a lock, a full disk, or missing tables, to
    StoreUnavailable."""
    try:
        yield
    except (OperationalError, PoolTimeoutError) as error:
        raise StoreUnavailable(_error_message(error)) from error
    except ProgrammingError as error:
        if type(error.orig).__name__ == "UndefinedTable":
            raise StoreUnavailable("its tables have not been created yet") from error
        raise


def _error_message(error: Exception) -> str:
    return str(error.orig if isinstance(error, DBAPIError) else error).strip().splitlines()[0]


# -- migrations ------------------------------------------------------------------------------------------


def _upgrade_schema(writer: Engine, settings: ServiceSettings, tables: TableSet, folder: Path) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", str(folder / tables).replace("%", "%%"))
    config.attributes["version_table"] = f"{tables}_version"
    head = ScriptDirectory.from_config(config).get_current_head()
    with _typed_errors(), writer.connect() as connection, _upgrade_exclusively(connection, settings):
        if _schema_revision(connection, tables) == head:
            return
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise UserError(
                f"The {tables} tables of {settings.store} were written by a later version of Weftune; use "
                "that version, or choose another --store."
            ) from error


def _schema_revision(connection: Connection, tables: TableSet) -> str | None:
    """Return the schema version of a set of tables. None if they do not exist."""
    table = f"{tables}_version"
    with connection.begin():
        exists = connection.dialect.has_table(connection, table)
        return connection.scalar(text(f"SELECT version_num FROM {table}")) if exists else None


@contextmanager
def _upgrade_exclusively(connection: Connection, settings: ServiceSettings) -> Iterator[None]:
    """Hold a database lock during the block so that only one process upgrades the tables. The lock is
    released even if the process dies."""
    if settings.database is not None:
        lock = "(hashtext('weftune upgrade'))"
        with connection.begin():
            connection.exec_driver_sql(f"SET lock_timeout = {round(UPGRADE_SECONDS * 1000)}")
            connection.exec_driver_sql(f"SELECT pg_advisory_lock{lock}")
        try:
            yield
        finally:
            connection.rollback()
            connection.exec_driver_sql(f"SELECT pg_advisory_unlock{lock}")
            connection.commit()
            # Its lock_timeout is the upgrade's.
            connection.invalidate()
        return
    import fcntl

    with (settings.store / ".upgrade.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- records ---------------------------------------------------------------------------------------------

Record = TypeVar("Record")


def to_values(record: Any) -> dict[str, Any]:
    """Return a dict of a record's columns for insertion into a table, without `number`, which the database
    assigns."""
    return {one.name: getattr(record, one.name) for one in fields(record) if one.name != "number"}


def to_record(kind: type[Record], row: Row[Any]) -> Record:
    """Create a record of class `kind` from a row. Columns that are not fields of the class are ignored."""
    found = row._mapping
    return kind(**{one.name: found[one.name] for one in fields(kind)})  # type: ignore[arg-type]


def insert_rows(
    connection: Connection,
    table: Table,
    rows: Iterable[Mapping[str, Any]],
    *,
    keys: Sequence[str] = (),
    changes: Mapping[str, Any] | Sequence[str] = (),
) -> None:
    """Insert rows with equal columns, or update existing rows with the same values in the columns `keys`.

    `changes` names the columns of an existing row that get the new row's values; as a mapping, it gives an
    expression for each column. If `changes` is empty, existing rows stay as they are.
    """
    if not (values := [dict(row) for row in rows]):
        return
    if connection.dialect.name == "sqlite":
        from sqlalchemy.dialects.sqlite import insert
    else:
        from sqlalchemy.dialects.postgresql import insert  # type: ignore[assignment]
    statement = insert(table)
    if not changes:
        statement = statement.on_conflict_do_nothing()
    else:
        if not isinstance(changes, Mapping):
            changes = {name: statement.excluded[name] for name in changes}
        statement = statement.on_conflict_do_update(index_elements=list(keys), set_=dict(changes))
    connection.execute(statement, values)
