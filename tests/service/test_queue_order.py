"""The queue as the HTTP process ranks it, from what a real training process has recorded."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from tests.service.serving import Serving
from weftune.jobs.store.policy import QueuedJob
from weftune.jobs.store.status import State
from weftune.service.queue_order import QUEUE, decay_usage, new_job, ordered_names, rank_queue
from weftune.service.settings import Quotas


@pytest.fixture
def serving(tmp_path):
    found = Serving(tmp_path, quotas=Quotas(running_jobs=1))
    yield found
    found.close()


def recorded(serving):
    windows = serving.training.last_windows(1)
    return windows[0].values[QUEUE] if windows else {"recent_tokens": {}, "jobs": {}}


def test_the_http_process_ranks_jobs_by_the_facts_that_training_records(serving):
    serving.start()
    first, second = serving.submit(steps=2000), serving.submit(steps=20, seed=1)
    serving.until(lambda: {first, second} <= recorded(serving)["jobs"].keys() and serving.step(first) > 20)
    facts = recorded(serving)["jobs"][second]
    submission = serving.requests.submission(None, second)
    assert facts["submitted"] == submission.number
    assert facts["batch_tokens"] >= serving.row(first).status.trained_tokens / serving.step(first)
    rows = serving.training.unfinished_jobs()
    ranking = rank_queue(serving.settings, serving.training, rows)
    assert ordered_names(ranking.attached_jobs) == [first]
    assert ranking.hold_reasons.keys() == {second}, "it waits for its tenant's quota, as training says"
    assert ranking.hold_reasons[second] == serving.row(second).status.reason
    # A new job of another tenant waits for nobody; one of the same tenant is held back like the second.
    expected = {"umbrella": (["new"], {second}), "acme": ([], {second, "new"})}
    for tenant, (waiting, held) in expected.items():
        found = rank_queue(serving.settings, serving.training, rows, [new_of(serving, tenant)])
        assert (ordered_names(found.waiting_jobs), found.hold_reasons.keys()) == (waiting, held)


def new_of(serving, tenant) -> QueuedJob:
    (submission, *_) = serving.requests.submissions("acme")
    return new_job(serving.requests, replace(submission, id="new", tenant=tenant))


def test_recent_tokens_outlive_the_training_process(serving):
    serving.start()
    job = serving.submit(steps=3000)
    serving.until(lambda: recorded(serving)["recent_tokens"].get("acme", 0.0) > 1000)
    assert serving.end(signal.SIGTERM) == 0
    (window,) = serving.training.last_windows(1)
    before = window.values[QUEUE]["recent_tokens"]["acme"]
    serving.start()
    serving.until(lambda: serving.training.last_windows(1)[0].number > window.number)
    (later,) = serving.training.last_windows(1)
    assert later.values[QUEUE]["recent_tokens"]["acme"] >= decay_usage(before, later.at - window.at)
    assert serving.state(job) is State.RUNNING
