"""What training records, and its lease, on SQLite and PostgreSQL."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from tests.cases import asks_for_every_case, slow_but
from tests.service.stores import job, moved, request_store, settings_in, start, training_store
from weftune.jobs.store.status import MOVES, JobStatus, State
from weftune.service.settings import ServiceSettings
from weftune.service.store import records
from weftune.service.store.database import open_requests, open_training
from weftune.service.store.records import (
    KEPT_WINDOWS,
    Changes,
    CheckpointRow,
    EventRow,
    LeaseHeld,
    LeaseLost,
    Receipt,
    TrainingStore,
    WindowRow,
    process_name,
)
from weftune.service.store.requests import RequestStore

LEASE_SECONDS = 0.4


@pytest.fixture
def store(settings: ServiceSettings) -> Iterator[TrainingStore]:
    with training_store(settings) as opened:
        opened.acquire_lease(process_name(), 60)
        yield opened


def enter(store: TrainingStore, *ids: str, **keys: object) -> None:
    store.write(
        Changes(
            jobs=[job(id, **keys) for id in ids], transitions=[moved(id, None, State.QUEUED) for id in ids]
        )
    )


# -- records ---------------------------------------------------------------------------------------------


def test_a_job_is_read_as_it_was_written(store):
    status = JobStatus(state=State.FAILED, reason="no", step=3, steps=9, eval_loss=1.5, notes=("a", "b"))
    written = job(
        "ftjob-1",
        status=status,
        priority=-2,
        started_at=2.0,
        finished_at=3.0,
        estimated_finish=4.0,
        model="ft:base:acme::ftjob-1",
        error={"code": "server_error", "message": "no", "param": None},
    )
    store.write(Changes(jobs=[written], transitions=[moved("ftjob-1", None, State.FAILED)]))
    found = store.job("ftjob-1")
    assert found is not None
    assert replace(found, number=0) == written
    assert store.job("ftjob-1", tenant="acme") == found
    assert store.job("ftjob-1", tenant="globex") is None
    assert store.jobs_by_id(["ftjob-1", "ftjob-2"]) == {"ftjob-1": found}


def test_jobs_are_listed_by_tenant_and_state(store):
    enter(store, "a", "b", "c")
    enter(store, "other", tenant="globex")
    store.write(
        Changes(jobs=[job("b", State.RUNNING)], transitions=[moved("b", State.QUEUED, State.RUNNING)])
    )
    assert [one.id for one in store.jobs("acme")] == ["c", "b", "a"]
    assert [one.id for one in store.jobs("acme", after="c", limit=1)] == ["b"]
    assert store.jobs("acme", after="other") == []
    assert [one.id for one in store.jobs(states=[State.QUEUED])] == ["other", "c", "a"]
    store.write(
        Changes(jobs=[job("b", State.SUCCEEDED)], transitions=[moved("b", State.RUNNING, State.SUCCEEDED)])
    )
    assert [one.id for one in store.unfinished_jobs()] == ["a", "c", "other"]


def test_a_resumed_jobs_repeated_metrics_and_checkpoints_are_ignored(store):
    def measured(step: int, loss: float, id: str) -> EventRow:
        data = {"step": step, "train_loss": loss}
        return EventRow(
            id=id, job="a", at=1.0, type="metrics", message="", data=data, measured="train", step=step
        )

    def said(id: str) -> EventRow:
        return EventRow(id=id, job="a", at=1.0, message="started")

    saved = CheckpointRow(id="c1", job="a", at=1.0, step=2, model="m", folder="f")
    enter(store, "a")
    store.write(
        Changes(events=[said("e1"), measured(1, 0.5, "e2"), measured(2, 0.4, "e3")], checkpoints=[saved])
    )
    store.write(
        Changes(events=[said("e4"), measured(2, 9.9, "e5"), measured(3, 0.3, "e6")], checkpoints=[saved])
    )
    store.write(Changes(checkpoints=[replace(saved, id="c2")]))
    assert [one.id for one in store.metrics("a")] == ["e2", "e3", "e6"]
    assert [one.id for one in store.metrics("a", store.metrics("a")[0].number)] == ["e3", "e6"]
    assert [one.id for one in store.events("a", order="asc")] == ["e1", "e2", "e3", "e4", "e6"]
    assert [one.id for one in store.events("a", limit=2)] == ["e6", "e4"]
    assert [one.id for one in store.events("a", after="e4", limit=2)] == ["e3", "e2"]
    assert [one.id for one in store.events("a", type="message")] == ["e4", "e1"]
    assert store.events("b", after="e4") == []
    assert [one.id for one in store.checkpoints("a")] == ["c1"]


def test_numbers_that_are_not_finite_are_stored_as_null(store):
    enter(store, "a")
    store.write(Changes(events=[EventRow(id="e", job="a", at=1.0, message="", data={"loss": float("nan")})]))
    assert store.events("a")[0].data == {"loss": None}


def test_receipts_are_replaced_usage_is_added_and_old_windows_are_dropped(store):
    for tokens in (10, 25):
        store.write(
            Changes(
                receipts=[Receipt(job="a", tenant="acme", tokens=tokens, device_seconds=0.5)],
                usage={("acme", 7): tokens, ("acme", 8): 1, ("globex", 7): 2},
                windows=[WindowRow(at=float(one), values={"number": one}) for one in range(KEPT_WINDOWS)],
                cursors={"prepared": tokens},
            )
        )
    assert store.receipt("a") == Receipt(job="a", tenant="acme", tokens=25, device_seconds=0.5)
    assert store.receipt("b") is None
    assert store.usage("acme", 7) == {7: 35, 8: 2}
    assert store.usage_by_tenant(since_day=7) == {"acme": 37, "globex": 4}
    assert store.usage_by_tenant(since_day=8) == {"acme": 2}
    assert len(store.last_windows(10 * KEPT_WINDOWS)) == KEPT_WINDOWS
    assert store.last_windows()[0].values == {"number": KEPT_WINDOWS - 1}
    assert store.cursors() == {"prepared": 25}


def test_a_flush_is_stored_whole_or_not_at_all(store):
    enter(store, "a", "b")
    before = store.jobs()
    with pytest.raises(ValueError, match="cannot go from queued to succeeded"):
        store.write(
            Changes(
                jobs=[job("a", State.RUNNING), job("b", State.SUCCEEDED)],
                transitions=[
                    moved("a", State.QUEUED, State.RUNNING),
                    moved("b", State.QUEUED, State.SUCCEEDED),
                ],
                cursors={"commands": 3},
            )
        )
    assert store.jobs() == before
    assert store.cursors() == {}
    assert len(store.transitions("a")) == 1


# -- row 16: random walks of the state machine -----------------------------------------------------------

Walk = list[tuple[str, list[State]]]
walks = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.lists(st.sampled_from(list(State)), min_size=1, max_size=3)),
    max_size=6,
)


@given_settings(max_examples=2000 if asks_for_every_case() else 150)
@given(walk=walks)
def test_fault_16_no_walk_through_the_store_makes_an_illegal_transition(walked_store, walk):
    walk_through(walked_store, walk)


@pytest.mark.slow
def test_fault_16_two_thousand_random_walks_on_postgres(tmp_path, postgres_server):
    settings, draw = settings_in(tmp_path, postgres_server.new_database()), random.Random(16)
    with training_store(settings) as store:
        store.acquire_lease(process_name(), 3600)
        for _ in range(2000):
            lengths = [draw.randint(1, 3) for _ in range(draw.randint(0, 6))]
            walk_through(store, [(draw.choice("ab"), draw.choices(list(State), k=size)) for size in lengths])


@pytest.fixture(scope="module")
def walked_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingStore]:
    with training_store(settings_in(tmp_path_factory.mktemp("walks"))) as store:
        store.acquire_lease(process_name(), 3600)
        yield store


walks_done = 0


def walk_through(store: TrainingStore, walk: Walk) -> None:
    """Take each job of the walk through the states of each flush, and compare with the table of moves."""
    global walks_done
    walks_done += 1
    model: dict[str, list[State]] = {}
    for name, states in walk:
        id = f"{name}{walks_done}"
        path = model.get(id, [])
        steps = [None, *states] if not path else [path[-1], *states]
        pairs = list(pairwise(steps))
        is_legal = all(old is None or new in MOVES[old] for old, new in pairs)
        changes = Changes(
            jobs=[job(id, states[-1])], transitions=[moved(id, old, new) for old, new in pairs if new]
        )
        if is_legal:
            store.write(changes)
            model[id] = [*path, *states]
        else:
            with pytest.raises(ValueError):
                store.write(changes)
    for id, path in model.items():
        found = store.transitions(id)
        assert [one.new for one in found] == path
        assert [one.old for one in found] == [None, *path[:-1]]
        assert store.jobs_by_id([id])[id].state is path[-1]
        assert not any(old.has_ended for old in path[:-1])


@pytest.mark.parametrize(
    "changes",
    [
        Changes(jobs=[job("a", State.RUNNING)]),
        Changes(transitions=[moved("a", State.QUEUED, State.RUNNING)]),
        Changes(jobs=[job("a", State.RUNNING)], transitions=[moved("a", State.PAUSED, State.RUNNING)]),
        Changes(jobs=[job("a", State.PAUSED)], transitions=[moved("a", State.QUEUED, State.RUNNING)]),
        Changes(jobs=[job("new")]),
        Changes(transitions=[moved("new", None, State.QUEUED)]),
    ],
    ids=["no transition", "no state", "wrong start", "wrong end", "no first", "no job"],
)
def test_a_state_and_its_transitions_never_disagree(store, changes):
    enter(store, "a")
    with pytest.raises(ValueError):
        store.write(changes)
    assert [one.new for one in store.transitions("a")] == [State.QUEUED]


# -- row 5: stopped past its lease -----------------------------------------------------------------------


def hold_and_finish(pipe: Connection, settings: ServiceSettings) -> None:
    """Start a job, and finish it as soon as the parent says so."""
    with training_store(settings) as store:
        token = store.acquire_lease(process_name(), LEASE_SECONDS)
        enter(store, "a")
        store.write(
            Changes(jobs=[job("a", State.RUNNING)], transitions=[moved("a", State.QUEUED, State.RUNNING)])
        )
        pipe.send(token)
        pipe.recv()
        answers = []
        for use in (
            lambda: store.write(finished("stale")),
            lambda: store.renew_lease(LEASE_SECONDS),
            store.release_lease,
        ):
            try:
                use()
                answers.append("accepted")
            except LeaseLost:
                answers.append("refused")
        pipe.send(answers)


def finished(by: str) -> Changes:
    return Changes(
        jobs=[job("a", State.SUCCEEDED, model=by)],
        transitions=[moved("a", State.RUNNING, State.SUCCEEDED)],
        events=[EventRow(id=f"end-{by}", job="a", at=1.0, message=by)],
    )


def test_fault_5_a_holder_stopped_past_its_lease_is_refused_and_there_is_one_result(settings):
    with training_store(settings) as store:
        process, pipe = start(hold_and_finish, settings)
        token = pipe.recv()
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(LeaseHeld):
            store.acquire_lease(process_name(), 60)
        began = time.monotonic()
        assert store.acquire_lease(process_name(), 60, wait_seconds=20) > token
        assert time.monotonic() - began >= LEASE_SECONDS
        store.write(finished("successor"))
        pipe.send("go on")
        os.kill(process.pid, signal.SIGCONT)
        assert pipe.recv() == ["refused", "refused", "refused"]
        process.join()
        found = store.job("a")
        assert found is not None
        assert found.model == "successor"
        assert [one.id for one in store.events("a")] == ["end-successor"]
        assert [one.new for one in store.transitions("a")].count(State.SUCCEEDED) == 1
        store.renew_lease(60)


def test_a_holder_that_is_not_replaced_keeps_writing(settings):
    with training_store(settings):
        process, pipe = start(hold_and_finish, settings)
        pipe.recv()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2 * LEASE_SECONDS)
        pipe.send("go on")
        os.kill(process.pid, signal.SIGCONT)
        assert pipe.recv() == ["accepted", "accepted", "accepted"]
        process.join()


def test_the_lease_of_a_killed_process_is_free_at_once(settings):
    with training_store(settings) as store:
        process, pipe = start(hold_and_finish, settings)
        token = pipe.recv()
        process.kill()
        process.join()
        assert store.acquire_lease(process_name(), 60) == token + 1


def test_the_name_of_a_process_is_its_own():
    process, pipe = start(lambda pipe: pipe.send(process_name()))
    other = pipe.recv()
    process.join()
    assert records.has_exited(other)
    assert not records.has_exited(process_name())
    machine, number, started = process_name().rsplit("/", 2)
    assert records.has_exited(f"{machine}/{number}/{int(started) + 1}"), "another process with that number"
    assert not records.has_exited(f"elsewhere.{machine}/{number}/1"), "nobody can know"


# -- row 24: a clock that is moved -----------------------------------------------------------------------


@pytest.mark.parametrize("hours", [1, -1])
def test_fault_24_a_clock_moved_by_an_hour_loses_no_lease_early(settings, monkeypatch, hours):
    real = time.time
    with training_store(settings) as holder, training_store(settings) as other:
        holder.acquire_lease("elsewhere/1/1", 0.5)
        for _ in range(10):
            with pytest.raises(LeaseHeld):
                other.acquire_lease(process_name(), 1.0)
            time.sleep(0.1)
            monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
            holder.renew_lease(0.5)
        holder.write(Changes(cursors={"commands": 1}))
        began = time.monotonic()
        other.acquire_lease(process_name(), 1.0, wait_seconds=20)
        assert 0.5 < time.monotonic() - began < 5, "without renewals it is lost, at whatever time of day"
        with pytest.raises(LeaseLost):
            holder.write(Changes())


# -- row 6: twenty claimers ------------------------------------------------------------------------------


def claim(pipe: Connection, settings: ServiceSettings, commands: int, crash: float) -> None:
    """Apply commands under the lease until none is left; sometimes die in the middle."""
    draw = random.Random(os.getpid())
    reader = RequestStore(open_requests(settings, writable=False))
    store = TrainingStore(open_training(settings, writable=True))
    while True:
        store.acquire_lease(process_name(), 60, wait_seconds=60)
        done = store.cursors().get("commands", 0)
        mine = reader.commands_after(done, limit=draw.randint(1, 20))
        if mine:
            events = [
                EventRow(id=f"{one.number}-{os.getpid()}", job=one.job, at=1.0, message="claimed")
                for one in mine
            ]
            store.write(Changes(events=events, cursors={"commands": mine[-1].number}))
        if draw.random() < crash:
            os.kill(os.getpid(), signal.SIGKILL)
        store.release_lease()
        if done == commands:
            return


@pytest.mark.parametrize(
    ("commands", "crash"), slow_but([(150, 0.1), (1000, 0.0), (1000, 0.08)], [(150, 0.1)])
)
def test_fault_6_twenty_claimers_claim_each_command_once(settings, commands, crash):
    with request_store(settings) as requests, training_store(settings):
        with requests._database.write() as connection:
            from weftune.service.store.tables import commands as table

            rows = [
                {"job": f"job{n}", "tenant": "acme", "at": 1.0, "verb": "cancel", "value": None}
                for n in range(commands)
            ]
            connection.execute(table.insert(), rows)
    processes = [start(claim, settings, commands, crash)[0] for _ in range(20)]
    for process in processes:
        process.join()
    dead = sum(process.exitcode == -signal.SIGKILL for process in processes)
    assert all(process.exitcode in (0, -signal.SIGKILL) for process in processes)
    assert bool(dead) == bool(crash)
    with closing(TrainingStore(open_training(settings, writable=False))) as store:
        with store._database.read() as connection:
            claimed = connection.exec_driver_sql("SELECT job FROM events").fetchall()
    assert sorted(one.job for one in claimed) == sorted(f"job{n}" for n in range(commands))


def test_fault_6_only_one_of_twenty_processes_holds_the_lease_at_a_time(settings, tmp_path):
    with training_store(settings):
        pass
    marks = tmp_path / "marks"
    marks.touch()
    processes = [start(hold_a_moment, settings, marks)[0] for _ in range(20)]
    for process in processes:
        process.join()
    lines = marks.read_text().split()
    assert len(lines) == 40
    assert lines[::2] == lines[1::2], "each leaves before the next comes"


def hold_a_moment(pipe: Connection, settings: ServiceSettings, marks: Path) -> None:
    store = TrainingStore(open_training(settings, writable=True))
    token = store.acquire_lease(process_name(), 60, wait_seconds=60)
    for _ in range(2):
        with marks.open("a") as file:
            file.write(f"{token}\n")
        time.sleep(0.005)
    store.release_lease()
