"""Requests that are repeated, and crashes between them: each acknowledged job is there once."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import openai
import psutil
import pytest

from tests.service.api.running import Training, rows, start_service

JOBS = "/v1/fine_tuning/jobs"


def test_fault_7_fifty_equal_requests_with_a_key_make_one_job_and_another_body_409(service, client, file):
    body = {"model": "demo", "training_file": file.id}
    headers = {"Idempotency-Key": "once"}
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda _: service.call("POST", JOBS, body, headers=headers), range(50), timeout=120)
        )
    assert {status for status, _, _ in answers} == {200}
    assert len({json.loads(content)["id"] for _, _, content in answers}) == 1
    status, found, content = service.call("POST", JOBS, {**body, "seed": 1}, headers=headers)
    assert (status, found["x-should-retry"]) == (409, "false")
    assert json.loads(content)["error"]["code"] == "idempotency_conflict"
    with pytest.raises(openai.ConflictError):
        client.with_options(max_retries=2).fine_tuning.jobs.create(
            model="demo", training_file=file.id, seed=2, extra_headers=headers
        )
    other = service.client("other")
    own = other.files.create(file=("a.jsonl", rows(2)), purpose="fine-tune")
    other.fine_tuning.jobs.create(model="demo", training_file=own.id, extra_headers=headers)


def test_a_request_that_the_client_repeats_returns_the_first_job(service, file):
    body = {"model": "demo", "training_file": file.id, "seed": 5}
    ids = []
    for count in ("0", "1", "2"):
        headers = {"x-stainless-retry-count": count}
        ids.append(json.loads(service.call("POST", JOBS, body, headers=headers)[2])["id"])
    assert len(set(ids)) == 1
    again = json.loads(service.call("POST", JOBS, body, headers={"x-stainless-retry-count": "0"})[2])["id"]
    assert again != ids[0]


def test_fault_4_every_acknowledged_job_is_there_once_after_kills(tmp_path):
    service = start_service(tmp_path)
    file = service.client().files.create(file=("a.jsonl", rows(2)), purpose="fine-tune")
    acknowledged = []
    for kills in range(3):
        with ThreadPoolExecutor(4) as pool:
            sent = [
                pool.submit(
                    service.call,
                    "POST",
                    JOBS,
                    {"model": "demo", "training_file": file.id},
                    headers={"Idempotency-Key": f"{kills}-{number}"},
                )
                for number in range(60)
            ]
            while sum(one.done() for one in sent) < 20:
                time.sleep(0.005)
            service.kill()
            for one in sent:
                error = one.exception()
                if error is None and one.result()[0] == 200:
                    acknowledged.append(json.loads(one.result()[2])["id"])
        service.restart()
    try:
        stored = [one.id for one in service.client().fine_tuning.jobs.list(limit=100)]
        assert len(acknowledged) >= 60
        assert set(acknowledged) <= set(stored)
        assert len(stored) == len(set(stored))
    finally:
        service.stop()


def preparing_processes(service) -> list[psutil.Process]:
    """Return the processes beside the HTTP process that tokenise."""
    return psutil.Process(service.process.pid).children()


def test_a_preparing_process_that_is_killed_three_times_refuses_the_job(tmp_path):
    service = start_service(tmp_path)
    training = Training.open(service.settings)
    try:
        while not (loading := preparing_processes(service)):
            time.sleep(0.02)
        client = service.client()
        file = client.files.create(file=("a.jsonl", rows(2)), purpose="fine-tune")
        checking = set(preparing_processes(service)) - set(loading)
        job = client.fine_tuning.jobs.create(model="demo", training_file=file.id)
        deadline = time.monotonic() + 120
        while job.id not in [one.submission.id for one in training.requests.prepared_after(0)]:
            assert time.monotonic() < deadline
            for process in set(preparing_processes(service)) - checking:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.02)
        refusal = training.wait_until_prepared(job.id).refusal
        assert refusal["code"] == "preparation_failed"
        assert "died 3 times" in refusal["message"]
    finally:
        training.close()
        service.stop()


def test_jobs_that_were_not_prepared_are_prepared_after_a_restart_though_a_process_is_killed(tmp_path):
    service = start_service(tmp_path)
    training = Training.open(service.settings)
    client = service.client()
    file = client.files.create(file=("a.jsonl", rows(2)), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(model="demo", training_file=file.id)
    service.kill()
    assert job.id in [one.id for one in training.requests.unprepared_submissions()]
    service.restart()
    try:
        while not preparing_processes(service):
            time.sleep(0.01)
        for process in preparing_processes(service):
            process.kill()
        assert training.wait_until_prepared(job.id).refusal is None
    finally:
        training.close()
        service.stop()


def test_a_locked_store_is_answered_with_503_and_loses_no_write(service, file):
    import sqlite3

    locked = sqlite3.connect(service.settings.store / "requests.db", isolation_level=None)
    body = {"model": "demo", "training_file": file.id}
    locked.execute("BEGIN IMMEDIATE")
    status, headers, content = service.call("POST", JOBS, body, headers={"Idempotency-Key": "locked"})
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    assert json.loads(content)["error"]["code"] == "store_unavailable"
    assert service.call("GET", JOBS)[0] == 200
    locked.execute("ROLLBACK")
    locked.close()
    assert service.call("POST", JOBS, body, headers={"Idempotency-Key": "locked"})[0] == 200
