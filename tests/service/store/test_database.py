"""Migrations, and how SQLite is opened."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, event, inspect

from tests.cases import slow_but
from tests.service.stores import request_store, start, submission, training_store
from weftune.errors import UserError
from weftune.service.settings import ServiceSettings
from weftune.service.store import tables
from weftune.service.store.database import MIGRATIONS, open_requests, sqlite_path, upgrade_store
from weftune.service.store.requests import RequestStore

NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{before}"


def upgrade() -> None:
    op.add_column("{table}", sa.Column("colour{revision}", sa.Text(), server_default="blue"))
    op.create_table("notes_{table}{revision}", sa.Column("number", sa.Integer(), primary_key=True))
    op.execute("UPDATE {table} SET colour{revision} = tenant")
    op.create_index("colours_{table}{revision}", "{table}", ["colour{revision}"])
"""


def later_migrations(folder: Path) -> Path:
    """The migrations of a later version: two more revisions of each set of tables."""
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for tables_, table, head in (("requests", "submissions", "0002"), ("training", "jobs", "0001")):
        for before, revision in ((head, "1001"), ("1001", "1002")):
            text = NEXT.format(before=before, revision=revision, table=table)
            (folder / tables_ / f"later{revision}.py").write_text(text)
    return folder


def upgrade_until_killed(pipe: Connection, settings: ServiceSettings, folder: Path, statements: int) -> None:
    """Upgrade, but die by SIGKILL inside the statement with this number."""
    executed = 0

    @event.listens_for(Engine, "after_cursor_execute")
    def count(*_: object) -> None:
        nonlocal executed
        executed += 1
        if executed == statements:
            os.kill(os.getpid(), signal.SIGKILL)

    upgrade_store(settings, folder)
    pipe.send(executed)


def columns(settings: ServiceSettings, table: str) -> set[str]:
    set_ = "requests" if table in tables.REQUESTS.tables else "training"
    url = settings.database or f"sqlite:///{sqlite_path(settings, set_)}"
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with closing(engine.raw_connection()):
        found = {one["name"] for one in inspect(engine).get_columns(table)}
    engine.dispose()
    return found


@pytest.mark.parametrize("stride", slow_but([9, 1], [9]))
def test_fault_26_an_upgrade_killed_at_any_statement_loses_no_job_and_continues(settings, tmp_path, stride):
    folder = later_migrations(tmp_path / "later")
    with request_store(settings) as store, training_store(settings):
        jobs = [store.submit(submission()) for _ in range(20)]
    killed, moments = 0, iter(range(3 if stride > 1 else 1, 1000, stride))
    while True:
        process, _ = start(upgrade_until_killed, settings, folder, next(moments))
        process.join()
        with closing(RequestStore(open_requests(settings, writable=False))) as reader:
            assert reader.submissions("acme", limit=100) == jobs[::-1], "readable after every kill"
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        killed += 1
    assert killed >= 3
    upgrade_store(settings, folder)
    for revision in ("1001", "1002"):
        assert f"colour{revision}" in columns(settings, "submissions")
        assert f"colour{revision}" in columns(settings, "jobs")


@pytest.mark.parametrize("stride", slow_but([11, 1], [11]))
def test_fault_26_tables_whose_creation_was_killed_are_created_by_the_next_start(settings, stride):
    for statements in range(2, 60, stride):
        process, _ = start(upgrade_until_killed, settings, MIGRATIONS, statements)
        process.join()
    with request_store(settings) as store, training_store(settings) as training:
        new = store.submit(submission())
        assert store.unprepared_submissions() == [new]
        assert training.unfinished_jobs() == []


def test_tables_of_a_later_version_are_refused_in_one_sentence(settings, tmp_path):
    upgrade_store(settings, later_migrations(tmp_path / "later"))
    with pytest.raises(UserError, match="later version of Weftune") as raised:
        open_requests(settings, writable=True)
    assert "\n" not in str(raised.value)


def test_the_migrations_make_the_tables_that_the_code_expects(settings):
    upgrade_store(settings)
    for name, metadata in (("requests", tables.REQUESTS), ("training", tables.TRAINING)):
        url = settings.database or f"sqlite:///{sqlite_path(settings, name)}"
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        with engine.connect() as connection:
            known = set(metadata.tables)
            context = MigrationContext.configure(
                connection,
                opts={"include_name": lambda name, kind, _: kind != "table" or name in known},  # noqa: B023
            )
            assert compare_metadata(context, metadata) == []
        engine.dispose()


def test_several_processes_that_start_at_once_upgrade_one_after_the_other(settings):
    processes = [start(upgrade_until_killed, settings, MIGRATIONS, 0) for _ in range(5)]
    for process, _ in processes:
        process.join()
    assert [process.exitcode for process, _ in processes] == [0] * 5
    with request_store(settings) as store:
        store.submit(submission())


def test_sqlite_syncs_every_commit_and_readers_cannot_write(sqlite_settings):
    with request_store(sqlite_settings) as store:
        database = store._database
        with database.write() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        with database.read() as connection, pytest.raises(Exception, match="readonly"):
            connection.exec_driver_sql("DELETE FROM submissions")
    assert sqlite_settings.store.stat().st_mode & 0o777 == 0o700


def test_the_store_and_the_keys_import_no_torch():
    code = (
        "import sys, weftune.service.keys, weftune.service.store.records, weftune.service.store.requests\n"
        "sys.exit(bool({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
