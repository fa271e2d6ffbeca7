"""Files, submissions and commands, on SQLite and PostgreSQL."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection

import psycopg
import pytest

from tests.cases import slow_but
from tests.service.stores import file, request_store, start, submission
from weftune.service.settings import ServiceSettings
from weftune.service.store.database import BUSY_SECONDS, StoreUnavailable, sqlite_path
from weftune.service.store.requests import IdempotencyConflict, RequestStore


@pytest.fixture
def store(settings: ServiceSettings) -> Iterator[RequestStore]:
    with request_store(settings) as opened:
        yield opened


def test_a_file_is_found_by_its_tenant_only_until_it_is_deleted(store):
    one, other = file("acme", bytes=7), file("globex", bytes=9)
    store.add_file(one)
    store.add_file(other)
    found = store.file("acme", one.id)
    assert found is not None
    assert (found.filename, found.bytes, found.created_at) == (one.filename, 7, one.created_at)
    assert store.file("globex", one.id) is None
    assert [each.id for each in store.files("globex")] == [other.id]
    assert store.stored_bytes("acme") == 7
    assert not store.delete_file("globex", one.id)
    assert store.delete_file("acme", one.id)
    assert not store.delete_file("acme", one.id)
    assert store.file("acme", one.id) is None
    assert store.files("acme") == []
    assert store.stored_bytes("acme") == 0


def test_pages_follow_one_another_in_both_orders(store):
    ids = []
    for index in range(7):
        ids.append(file(purpose="fine-tune" if index % 2 else "batch").id)
        store.add_file(file(id=ids[-1], purpose="fine-tune" if index % 2 else "batch"))
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        pages, after = [], None
        while page := store.files("acme", after=after, limit=3, order=order):
            pages.append([one.id for one in page])
            after = page[-1].id
        assert pages == [expected[:3], expected[3:6], expected[6:]]
    assert [one.id for one in store.files("acme", purpose="batch", order="asc")] == ids[::2]
    foreign = file("globex")
    store.add_file(foreign)
    assert store.files("acme", after=foreign.id) == []
    assert store.files("acme", after="file-unknown") == []


def test_a_submission_is_read_as_it_was_written(store):
    written = submission(
        request={"model": "base", "weftune": {"priority": 3}},
        job={"data": "a.jsonl"},
        details={"team": "ä"},
        suffix="my-model",
        validation_file="file-2",
        token_budget=1 << 40,
        deadline=1e9,
    )
    stored = store.submit(written)
    assert store.submission("acme", written.id) == stored
    assert stored.number > 0
    for name in ("request", "job", "details", "suffix", "validation_file", "token_budget", "deadline"):
        assert getattr(stored, name) == getattr(written, name)
    assert store.submission("globex", written.id) is None
    assert store.submission(None, written.id) == stored


def test_submissions_are_listed_by_metadata(store):
    blue = [store.submit(submission(details={"colour": "blue", 'a"b$.c': str(i)})) for i in range(5)]
    store.submit(submission(details={"colour": "red"}))
    store.submit(submission("globex", details={"colour": "blue"}))
    found = store.submissions("acme", metadata={"colour": "blue"}, limit=3)
    assert [one.id for one in found] == [one.id for one in blue[:1:-1]]
    assert store.submissions("acme", metadata={"colour": "blue"}, after=found[-1].id) == blue[1::-1]
    assert store.submissions("acme", metadata={'a"b$.c': "2"}) == [blue[2]]
    assert len(store.submissions(None)) == 7


def test_a_prepared_job_is_handed_over_once_and_in_order(store):
    jobs = [store.submit(submission()) for _ in range(3)]
    assert store.unprepared_submissions() == jobs
    refusal = {"code": "invalid_training_file", "message": "line 3: no messages", "param": "training_file"}
    store.mark_prepared(jobs[1].id, refusal)
    store.mark_prepared(jobs[0].id)
    store.mark_prepared(jobs[1].id)
    assert store.unprepared_submissions() == jobs[2:]
    found = store.prepared_after(0)
    assert [(one.submission, one.refusal) for one in found] == [(jobs[1], refusal), (jobs[0], None)]
    assert [one.submission for one in store.prepared_after(found[0].number)] == [jobs[0]]


def test_commands_are_read_in_the_order_in_which_they_were_added(store):
    first = store.add_command("acme", "ftjob-1", "priority", 5)
    second = store.add_command("acme", "ftjob-1", "cancel")
    found = store.commands_after(0)
    assert [(one.number, one.verb, one.value) for one in found] == [
        (first, "priority", 5),
        (second, "cancel", None),
    ]
    assert [one.number for one in store.commands_after(first)] == [second]
    assert store.commands_after(second) == []


# -- row 7: the same request fifty times at once ---------------------------------------------------------


def test_fault_7_fifty_requests_at_once_with_one_key_create_one_job(settings):
    with ExitStack() as opened:
        # On PostgreSQL several processes may write; a SQLite file has one writing connection.
        stores = [opened.enter_context(request_store(settings)) for _ in range(5 if settings.database else 1)]
        ready = threading.Barrier(50)

        def create(index: int) -> str:
            ready.wait()
            new = submission(idempotency_key="again")
            return stores[index % len(stores)].submit(new).id

        with ThreadPoolExecutor(50) as threads:
            returned = list(threads.map(create, range(50)))
        (only,) = stores[0].submissions("acme")
        assert set(returned) == {only.id}
        with pytest.raises(IdempotencyConflict, match=only.id):
            stores[0].submit(submission(idempotency_key="again", body_hash="2" * 64))
        assert stores[0].submit(submission("globex", idempotency_key="again")).id != only.id
        assert len(stores[0].submissions("acme")) == 1


def test_fault_7_a_repetition_without_a_key_returns_the_recent_job_with_that_body(store):
    first = store.submit(submission())
    assert store.submit(submission(), repeat_since=first.created_at - 60) == first
    assert store.recent_submission("acme", first.body_hash, first.created_at - 60) == first
    assert store.recent_submission("globex", first.body_hash, 0) is None
    assert store.submit(submission(body_hash="2" * 64), repeat_since=0) != first
    assert store.submit(submission(), repeat_since=first.created_at + 1) != first
    assert len(store.submissions("acme")) == 3


# -- row 4: killed while it writes -----------------------------------------------------------------------


def submit_all(pipe: Connection, settings: ServiceSettings, first: int, last: int) -> None:
    """Submit jobs with the keys `first` to `last`, and report each as soon as it is acknowledged."""
    with request_store(settings) as store:
        for number in range(first, last):
            pipe.send((number, store.submit(submission(idempotency_key=str(number))).id))
    pipe.send(None)


@pytest.mark.parametrize(("jobs", "kills"), slow_but([(150, 4), (1000, 20)], [(150, 4)]))
def test_fault_4_a_killed_writer_loses_no_acknowledged_job_and_doubles_none(settings, jobs, kills):
    draw = random.Random(4)
    moments = sorted(draw.sample(range(1, jobs), kills))
    acknowledged: dict[int, str] = {}
    while True:
        process, pipe = start(submit_all, settings, len(acknowledged), jobs)
        is_whole = False
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                break
            if message is None:
                is_whole = True
                break
            number, id = message
            # Submitted again after a kill, the job that may have been stored without an answer is returned.
            assert acknowledged.setdefault(number, id) == id
            if moments and len(acknowledged) >= moments[0]:
                moments.pop(0)
                time.sleep(draw.uniform(0, 0.01))
                process.kill()
        process.join()
        if is_whole:
            break
    assert not moments
    with request_store(settings) as store:
        stored = store.submissions("acme", limit=2 * jobs)
    assert {one.idempotency_key: one.id for one in stored} == {str(n): id for n, id in acknowledged.items()}
    assert len(stored) == jobs
    if settings.database is None:
        with closing(sqlite3.connect(sqlite_path(settings, "requests"))) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# -- row 24: a locked database ---------------------------------------------------------------------------


@contextmanager
def locked(settings: ServiceSettings) -> Iterator[None]:
    """While another program, such as a backup, lets nobody write."""
    if settings.database is None:
        with closing(sqlite3.connect(sqlite_path(settings, "requests"), isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield
    else:
        with psycopg.connect(settings.database) as connection:
            connection.execute("LOCK TABLE submissions IN SHARE MODE")
            yield


def test_fault_24_a_write_to_a_locked_database_fails_with_a_typed_error_and_can_be_repeated(settings):
    with request_store(settings, busy_seconds=0.1) as store:
        earlier, new = store.submit(submission()), submission()
        with locked(settings):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable) as raised:
                store.submit(new)
            assert time.monotonic() - began < 5
            assert raised.value.retry_seconds > 0
            assert store.submissions("acme") == [earlier], "reading goes on"
        stored = store.submit(new)
        assert store.submissions("acme") == [stored, earlier]


@pytest.mark.parametrize(("seconds", "patience"), slow_but([(0.6, 0.1), (30, BUSY_SECONDS)], [(0.6, 0.1)]))
def test_fault_24_no_write_is_lost_while_the_database_is_locked(settings, seconds, patience):
    with request_store(settings, busy_seconds=patience) as store:
        refused = 0

        def submit(number: int) -> None:
            nonlocal refused
            while True:
                try:
                    store.submit(submission(idempotency_key=str(number)))
                    return
                except StoreUnavailable:
                    refused += 1

        with ThreadPoolExecutor(8) as threads:
            with locked(settings):
                writes = [threads.submit(submit, number) for number in range(24)]
                time.sleep(seconds)
            for write in writes:
                write.result()
        assert refused
        stored = [one.idempotency_key for one in store.submissions("acme", limit=100)]
        assert sorted(map(int, stored)) == list(range(24))


def test_reading_before_the_tables_exist_fails_with_the_typed_error(settings):
    from weftune.service.store.database import open_requests

    with closing(RequestStore(open_requests(settings, writable=False))) as reader:
        with pytest.raises(StoreUnavailable):
            reader.unprepared_submissions()
        with request_store(settings) as store:
            new = store.submit(submission())
            assert reader.unprepared_submissions() == [new]
