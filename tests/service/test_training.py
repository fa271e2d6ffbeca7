"""The training process of a service, as a real process: jobs come and go, and each ends as it would alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sqlite3
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests import bench
from tests.base.folders import CHATML
from tests.service.serving import Serving
from tests.service.test_chat import GREEDY
from weftune.base.spec import BaseSpec
from weftune.jobs.store.status import State
from weftune.service.chat import ChatClient
from weftune.service.chat_requests import ChatRequest
from weftune.service.ids import new_id
from weftune.service.job_store import ServiceJobStore
from weftune.service.settings import Quotas, ServiceSettings
from weftune.service.store.database import open_training
from weftune.service.store.records import TrainingStore, process_name
from weftune.service.store.requests import Submission
from weftune.service.training import LEASE_LOST

DONE = (State.SUCCEEDED, State.FAILED, State.CANCELLED)


@pytest.fixture
def serving(tmp_path):
    found = Serving(tmp_path)
    yield found
    found.close()


def test_jobs_enter_an_idle_service_and_equal_their_solo_runs(serving):
    serving.start()
    first = serving.submit(epochs=2, eval={"fraction": 0.25})
    row = serving.until_state(first, *DONE)
    assert row.state is State.SUCCEEDED, row
    assert row.model == f"ft:model:acme:mine:{first}"
    assert row.finished_at >= row.started_at >= row.created_at
    # One adapter an epoch; that of the last one is the job's own.
    (epoch,) = serving.training.checkpoints(first)
    assert epoch.step == row.status.steps // 2
    assert epoch.model == f"{row.model}:ckpt-step-{epoch.step}"
    assert bench.adapter(serving.settings.jobs / first / epoch.folder)
    assert {"train_loss", "train_mean_token_accuracy", "valid_loss"} <= epoch.metrics.keys()
    receipt = serving.training.receipt(first)
    assert receipt.tokens == row.status.trained_tokens > 0
    assert receipt.passes >= row.status.steps
    assert receipt.device_seconds > 0
    (window,) = serving.training.last_windows(1)
    assert window.values["memory"]["jobs"].keys() == {first}
    memory = window.values["memory"]
    assert memory["answer_bytes"] == 512 << 20
    assert 0 < sum(memory["jobs"].values()) < memory["budget_bytes"] - memory["base_bytes"] - (512 << 20)
    passes = [one for row in serving.training.last_windows(200) for one in row.values["passes"]]
    assert len(passes) == receipt.passes
    trained = sum(one["jobs"][first] for one in passes if one["training"])
    assert trained == receipt.tokens
    assert sum(one["seconds"] for one in passes) == pytest.approx(receipt.device_seconds)
    assert passes[0]["predicted_seconds"] is not None, "the last window is predicted from those before"
    messages = serving.messages(first)
    assert messages[0] == f"Created fine-tuning job: {first}"
    assert "Fine-tuning job started" in messages
    assert messages[-2:] == [
        f"New fine-tuned model created: {row.model}",
        "The job has successfully completed",
    ]
    # The service is idle, becomes busy, and is idle again.
    second, third = serving.submit("umbrella", steps=9), serving.submit(steps=12, seed=3)
    for job in (second, third):
        assert serving.until_state(job, *DONE).state is State.SUCCEEDED
    tokens = sum(serving.training.receipt(job).tokens for job in (first, third))
    assert sum(serving.training.usage("acme").values()) == tokens
    assert serving.training.cursors()["prepared"] == 3
    serving.assert_as_alone(first, second, third)


def test_a_cancelled_job_ends_whatever_its_state(serving):
    """Row 17 of the faults."""
    unprepared, queued = serving.submit(steps=5, prepared=False), serving.submit(steps=5)
    serving.command(unprepared, "cancel")
    serving.command(queued, "pause")
    serving.command(queued, "cancel")
    serving.start()
    for job in (unprepared, queued):
        serving.until_state(job, State.CANCELLED)
    # Its rows are checked when it has been cancelled already.
    serving.requests.mark_prepared(unprepared)
    running, paused, other = (serving.submit(steps=steps, seed=steps) for steps in (900, 901, 40))
    serving.until(lambda: min(serving.step(job) for job in (running, paused)) > 1)
    serving.command(paused, "pause")
    serving.until_state(paused, State.PAUSED)
    for job in (running, paused):
        serving.command(job, "cancel")
        assert serving.until_state(job, State.CANCELLED).status.step < 900
        assert not (serving.settings.jobs / job / "adapter_model.safetensors").exists()
    ended = serving.until_state(other, *DONE)
    serving.command(other, "cancel")
    serving.until(lambda: serving.training.cursors()["commands"] == 7)
    assert serving.row(other) == ended
    assert serving.state(unprepared) is State.CANCELLED
    serving.assert_as_alone(other)


def test_a_job_is_paused_resumed_and_reprioritised_without_losing_a_bit(serving):
    serving.start()
    job, other = serving.submit(steps=60), serving.submit(steps=30, seed=1)
    serving.until(lambda: serving.step(job) > 2)
    serving.command(job, "pause")
    step = serving.until_state(job, State.PAUSED).status.step
    serving.command(job, "priority", 7)
    serving.until(lambda: serving.row(job).priority == 7)
    # A restart of the process resumes no job that a client has paused.
    serving.end(signal.SIGTERM)
    serving.start()
    serving.until_state(other, *DONE)
    assert (serving.state(job), serving.step(job)) == (State.PAUSED, step)
    serving.command(job, "resume")
    assert serving.until_state(job, *DONE).state is State.SUCCEEDED
    messages = serving.messages(job)
    assert "Fine-tuning job resumed; it is queued" in messages
    assert f"Fine-tuning job continues from step {step}" in messages
    serving.assert_as_alone(job, other)


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_killed_again_and_again_every_job_ends_as_alone_and_no_row_is_doubled(serving, kills):
    serving.start()
    dropout = {"adapter": {"rank": 3, "dropout": 0.1}}
    good = [serving.submit(steps=steps, seed=steps, **dropout) for steps in (30, 50)]
    bad = serving.submit(steps=30, learning_rate=1e200, clip=None)
    refused = serving.submit(steps=3, prepared=False)
    serving.requests.mark_prepared(refused, {"code": "bad", "message": "line 3 is empty", "param": None})
    for kill in range(1, kills + 1):
        reached = 40 * kill // kills
        serving.until(partial(lambda step: serving.step(good[1]) >= step, reached))
        serving.end()
        serving.start()
    for job in good:
        assert serving.until_state(job, *DONE).state is State.SUCCEEDED
    row = serving.until_state(bad, *DONE)
    assert (row.state, row.error["code"]) == (State.FAILED, "training_failed")
    assert serving.row(refused).error["message"] == "line 3 is empty"
    for job in (*good, bad, refused):
        moves = serving.training.transitions(job)
        assert all(before.new == after.old for before, after in itertools.pairwise(moves))
        steps = [step for step, _ in serving.losses(job)]
        assert len(steps) == len(set(steps))
    for job in good:
        assert serving.training.receipt(job).tokens == serving.row(job).status.trained_tokens
    serving.assert_as_alone(*good)


def test_sigterm_saves_every_job_and_loses_no_step(serving):
    """Row 22 of the faults."""
    serving.start()
    job, waiting = serving.submit(steps=60), serving.submit(steps=5, prepared=False)
    serving.until(lambda: serving.step(job) > 3)
    began = time.monotonic()
    assert serving.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < 30
    row = serving.row(job)
    assert row.state is State.QUEUED
    assert [step for step, _ in serving.losses(job)] == list(range(1, row.status.step + 1))
    assert not serving.training.lease().holder
    serving.requests.mark_prepared(waiting)
    serving.start()
    for one in (job, waiting):
        assert serving.until_state(one, *DONE).state is State.SUCCEEDED
    assert f"Fine-tuning job continues from step {row.status.step}" in serving.messages(job)
    serving.assert_as_alone(job, waiting)


def test_a_job_that_always_crashes_stops_and_blocks_no_other(tmp_path):
    """Row 23 of the faults."""
    serving = Serving(tmp_path, cursed_seed=666)
    try:
        serving.start()
        good = [serving.submit(steps=steps, seed=steps) for steps in (12, 20)]
        cursed = serving.submit(steps=5, seed=666)
        row = serving.until_state(cursed, *DONE, restart=True)
        assert (row.state, row.error["code"]) == (State.FAILED, "training_crashed")
        late = serving.submit(steps=6)
        for job in (*good, late):
            assert serving.until_state(job, *DONE, restart=True).state is State.SUCCEEDED
        serving.assert_as_alone(*good, late)
    finally:
        serving.close()


@pytest.mark.slow
def test_a_process_that_was_stopped_beyond_its_lease_writes_nothing_any_more(tmp_path):
    """Row 5 of the faults."""
    serving = Serving(tmp_path, lease_seconds=1.0)
    try:
        stopped = serving.start()
        job = serving.submit(steps=50)
        serving.until(lambda: serving.step(job) > 3)
        os.kill(stopped.pid, signal.SIGSTOP)
        serving.start()
        serving.until(lambda: serving.training.lease().token == 2)
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.join()
        assert stopped.exitcode == LEASE_LOST
        assert serving.until_state(job, *DONE).state is State.SUCCEEDED
        serving.assert_as_alone(job)
    finally:
        serving.close()


def resident_pages(serving):
    return int((Path("/proc") / str(serving.process.pid) / "statm").read_text().split()[1])


def open_files(serving):
    return len(list((Path("/proc") / str(serving.process.pid) / "fd").iterdir()))


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, 500])
def test_memory_and_open_files_stay_flat_over_many_jobs(serving, count):
    """Row 18 of the faults."""
    serving.start()
    serving.until_state(serving.submit(steps=1), State.SUCCEEDED)
    # A file for each of several jobs would be more than what a write under way has open.
    files = open_files(serving) + 8
    taken, jobs = [], []
    for number in range(count):
        jobs.append(serving.submit(steps=1, seed=number, batch_size=2))
        if len(jobs) == 10:
            for job in jobs:
                assert serving.until_state(job, *DONE).state is State.SUCCEEDED
            jobs.clear()
            taken.append(resident_pages(serving))
    assert taken[-1] <= taken[len(taken) // 3] * 1.02, taken
    # Files are open while a last one is written or deleted.
    serving.until(lambda: open_files(serving) <= files)


def test_a_job_that_cannot_be_trained_fails_and_a_budget_ends_a_job(serving):
    serving.start()
    spends = serving.submit(steps=200, token_budget=300)
    row = serving.until_state(spends, *DONE)
    assert row.state is State.FAILED
    assert "budget of 300 tokens" in row.error["message"]
    assert row.status.step < 40
    wrong = serving.submit(steps=3, adapter={"rank": 4, "targets": ["nothing"]})
    assert "nothing" in serving.until_state(wrong, State.FAILED).error["message"]
    metric = {"fraction": 0.25, "generate": {"prompts": 2}, "metric": "/gone/scores.py:length"}
    unknown = serving.until_state(serving.submit(steps=3, eval=metric), State.FAILED).error["message"]
    assert "length is no longer registered" in unknown
    assert "/gone" not in unknown


@pytest.mark.slow
def test_a_preference_job_equals_its_solo_run_through_kills(serving):
    """Its references are scored first, beside a job that trains."""
    rows = [
        {"prompt": f"w{n} w{n + 1}", "chosen": f"w{n + 2} w7", "rejected": f"w{n + 3} w8 w9"}
        for n in range(10, 34)
    ]
    pairs = serving.folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    serving.start()
    other = serving.submit(steps=30)
    dpo = serving.submit(steps=25, data={"path": str(pairs), "max_length": 64}, objective="dpo")
    serving.until(lambda: serving.step(dpo) > 3)
    serving.end()
    serving.start()
    for job in (dpo, other):
        assert serving.until_state(job, *DONE).state is State.SUCCEEDED, serving.row(job)
    metrics = [one.data for one in serving.training.metrics(dpo) if one.measured == "train"]
    assert "rewards/margins" in metrics[-1]
    serving.assert_as_alone(dpo, other)


def test_a_tenant_beyond_its_quota_waits_with_the_reason_and_others_do_not(tmp_path):
    serving = Serving(tmp_path, quotas=Quotas(running_jobs=1))
    try:
        serving.start()
        first, second = serving.submit(steps=80), serving.submit(steps=5, seed=1)
        serving.until(lambda: serving.step(first) > 1)
        other = serving.submit("umbrella", steps=5)
        assert serving.until_state(other, *DONE).state is State.SUCCEEDED
        waits = serving.row(second).status
        assert waits.state is State.QUEUED
        assert "at most 1 of this account's jobs may train at a time" in waits.reason
        # The urgent one takes the seat of the first, which goes on afterwards.
        serving.command(second, "priority", 9)
        assert serving.until_state(second, *DONE).state is State.SUCCEEDED
        assert serving.step(first) < 80
        assert serving.until_state(first, *DONE).state is State.SUCCEEDED
        assert any("is queued again at step" in message for message in serving.messages(first))
        serving.assert_as_alone(first, second, other)
    finally:
        serving.close()


def test_prompts_are_answered_while_jobs_train_in_smaller_microbatches_and_as_alone(tmp_path):
    # No pass is short enough, so that a microbatch has one sample, or several short ones.
    serving = Serving(tmp_path, turn_seconds=0.0)
    try:
        answer_and_train(serving)
    finally:
        serving.close()


def largest_pass(serving, job):
    """Return the tokens of the job's largest pass."""
    passes = [one for row in serving.training.last_windows(200) for one in row.values["passes"]]
    return max(one["tokens"] for one in passes if job in one["jobs"])


def answer_and_train(serving):
    (serving.folder / "model" / "chat_template.jinja").write_text(CHATML)
    serving.start()

    def answer(job=None):
        request = ChatRequest(
            id="1", job=job, step=None, messages=({"role": "user", "content": "w10 w20"},), sampling=GREEDY
        )

        async def ask():
            pieces = [one async for one in ChatClient(serving.settings.chat_socket).ask(request)]
            return "".join(pieces[:-1]), pieces[-1].completion_tokens

        return asyncio.run(ask())

    job = serving.submit(epochs=2, learning_rate=0.1)
    serving.until_state(job, State.SUCCEEDED)
    of_base, of_job = answer(), answer(job)
    assert of_base != of_job
    # From the first answer on, passes are short.
    running = serving.submit(steps=60, learning_rate=1e-4)
    serving.until(lambda: serving.step(running) > 1)
    assert (answer(), answer(job)) == (of_base, of_job)
    assert answer(running)[1] > 0
    assert serving.state(running) is State.RUNNING
    assert serving.until_state(running, *DONE).state is State.SUCCEEDED
    assert largest_pass(serving, running) < 0.7 * largest_pass(serving, job)
    serving.assert_as_alone(job, running)


def test_reasons_name_no_job_of_another_tenant(tmp_path):
    """Row 9 of the faults: an id is a name, too."""
    settings = ServiceSettings(base=BaseSpec(model="demo"), store=tmp_path)
    with closing(TrainingStore(open_training(settings, writable=True))) as training:
        training.acquire_lease(process_name(), 60)
        store = ServiceJobStore(settings, training, end_process=pytest.fail)
        ids = {tenant: new_id("ftjob") for tenant in ("acme", "other", "umbrella")}
        ids["own"] = new_id("ftjob")
        for tenant, id in ids.items():
            store.admit_submission(submission(id, "acme" if tenant == "own" else tenant))
        store.explain_job(ids["acme"], f"it waits behind {ids['other']}, which comes first")
        assert store.job(ids["acme"]).reason == "it waits behind another job, which comes first"
        store.move_job(ids["acme"], State.RUNNING)
        store.move_job(ids["acme"], State.QUEUED, f"preempted by {ids['own']}, priority 3")
        store.write_status()
        assert training.job(ids["acme"]).status.reason == f"preempted by {ids['own']}, priority 3"
        for event in training.events(ids["acme"], limit=None):
            assert ids["other"] not in event.message


def submission(id, tenant):
    return Submission(
        id=id, tenant=tenant, created_at=0.0, request={}, job={}, training_file="f", details={}, body_hash=id
    )


@pytest.mark.slow
def test_a_database_that_is_locked_for_long_loses_no_row(serving):
    """Row 24 of the faults."""
    serving.start()
    job = serving.submit(steps=60)
    serving.until(lambda: serving.step(job) > 2)
    with closing(sqlite3.connect(serving.settings.store / "training.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        time.sleep(30)
        other.execute("COMMIT")
    assert serving.until_state(job, *DONE).state is State.SUCCEEDED
    assert "database is locked" in (serving.folder / "log").read_text()
    serving.assert_as_alone(job)
