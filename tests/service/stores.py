"""Small stores, rows for them, and processes that work on them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weftune.base.spec import BaseSpec
from weftune.jobs.store.status import JobStatus, State
from weftune.service.ids import new_id
from weftune.service.settings import ServiceSettings
from weftune.service.store.database import open_requests, open_training, upgrade_store
from weftune.service.store.records import JobRow, TrainingStore, Transition
from weftune.service.store.requests import FileRecord, RequestStore, Submission


def settings_in(folder: Path, database: str | None = None) -> ServiceSettings:
    return ServiceSettings(base=BaseSpec(model="none"), store=folder / "store", database=database)


def create_tables(settings: ServiceSettings) -> None:
    """Do what `upgrade_store` does for a new store in SQLite: write the files that it has made before."""
    settings.store.mkdir(parents=True, mode=0o700)
    for name, content in new_files().items():
        (settings.store / name).write_bytes(content)


@cache
def new_files() -> Mapping[str, bytes]:
    """Return the files of a new store."""
    with TemporaryDirectory() as folder:
        settings = settings_in(Path(folder))
        upgrade_store(settings)
        return {path.name: path.read_bytes() for path in settings.store.iterdir()}


@contextmanager
def request_store(settings: ServiceSettings, **keys: Any) -> Iterator[RequestStore]:
    with closing(RequestStore(open_requests(settings, writable=True, **keys))) as store:
        yield store


@contextmanager
def training_store(settings: ServiceSettings, **keys: Any) -> Iterator[TrainingStore]:
    with closing(TrainingStore(open_training(settings, writable=True, **keys))) as store:
        yield store


def file(tenant: str = "acme", **keys: Any) -> FileRecord:
    keys = {
        "filename": "rows.jsonl",
        "purpose": "fine-tune",
        "bytes": 100,
        "rows": 3,
        "sha256": "0" * 64,
    } | keys
    return FileRecord(**{"id": new_id("file"), "tenant": tenant, "created_at": time.time()} | keys)


def submission(tenant: str = "acme", **keys: Any) -> Submission:
    keys = {
        "request": {"model": "base"},
        "job": {"steps": 3},
        "training_file": "file-1",
        "details": {},
    } | keys
    keys = {"id": new_id("ftjob"), "created_at": time.time(), "body_hash": "1" * 64} | keys
    return Submission(tenant=tenant, **keys)


def job(id: str, state: State = State.QUEUED, **keys: Any) -> JobRow:
    return JobRow(**{"id": id, "tenant": "acme", "created_at": 1.0, "status": JobStatus(state=state)} | keys)


def moved(id: str, old: State | None, new: State) -> Transition:
    return Transition(job=id, at=time.time(), old=old, new=new)


Work = Callable[..., None]


def start(work: Work, *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Call `work(connection, *arguments)` in a new process; return it and the other end of the pipe."""
    fork = multiprocessing.get_context("fork")
    own, other = fork.Pipe()
    process = fork.Process(target=work, args=(other, *arguments), daemon=True)
    process.start()
    other.close()
    return process, own
