"""Sweeps over HTTP: one request becomes a sweep and a job for each trial; rows of training are written by the
test itself."""

from __future__ import annotations

import json
from types import SimpleNamespace

import openai
import pytest

from tests.service.api.running import rows, start_service
from weftune.jobs.store.status import State
from weftune.jobs.sweeps.halving import Decision
from weftune.jobs.sweeps.record import SweepRecord, TrialRecord, write_record

SWEEP = {
    "over": {"learning_rate": [1e-4, 1e-3], "adapter.rank": [4, 8]},
    "halving": {"at": [0.5], "keep": 0.5},
}
EXTENSION = {"sweep": SWEEP, "eval": {"fraction": 0.25}, "steps": 8}
LEFT = "left the sweep at step 4: 3rd of 4, the best 2 continue"


@pytest.fixture
def made(client, file, training):
    """A sweep and the ids of its trials."""
    sweep = client.fine_tuning.jobs.create(
        model="demo", training_file=file.id, suffix="sql", seed=7, extra_body={"weftune": EXTENSION}
    )
    return SimpleNamespace(sweep=sweep, trials=[one.id for one in training.requests.trials(sweep.id)])


def call(service, method, path, body=None, tenant="acme"):
    status, _, content = service.call(method, path, body, tenant)
    return status, json.loads(content)


def test_a_request_makes_a_sweep_and_a_job_for_each_trial(client, made, training):
    found = client.fine_tuning.jobs.retrieve(made.sweep.id)
    assert found.status == "validating_files"
    assert found.weftune["sweep"] == made.sweep.id
    assert found.weftune["trial"] is None
    assert found.weftune["job"]["sweep"] == SWEEP
    trials = [client.fine_tuning.jobs.retrieve(one) for one in made.trials]
    assert [one.weftune["trial"] for one in trials] == [
        {"learning_rate": rate, "adapter.rank": rank} for rate in (1e-4, 1e-3) for rank in (4, 8)
    ]
    assert trials[1].weftune["suffix"] == "sql-lr1e-4-r8"
    assert trials[1].weftune["job"]["adapter"] == {"rank": 8}
    assert trials[1].hyperparameters.learning_rate_multiplier is None
    assert {one.weftune["sweep"] for one in trials} == {made.sweep.id}
    assert {one.seed for one in trials} == {7}
    assert "sweep" not in trials[0].weftune["job"]
    listed = [one.id for one in client.fine_tuning.jobs.list(limit=5).data]
    assert listed == [*made.trials[::-1], made.sweep.id]
    # Its trials are prepared, and not the sweep itself.
    unprepared = {one.id for one in training.requests.unprepared_submissions()}
    assert made.sweep.id not in unprepared


def test_a_repeated_request_makes_no_second_sweep(client, file, training):
    body = {"model": "demo", "training_file": file.id, "extra_body": {"weftune": EXTENSION}}
    headers = {"Idempotency-Key": "one-sweep"}
    first, again = (client.fine_tuning.jobs.create(**body, extra_headers=headers) for _ in range(2))
    assert first.id == again.id
    assert len(training.requests.trials(first.id)) == 4
    repeated = {"X-Stainless-Retry-Count": "1"}
    assert client.fine_tuning.jobs.create(**body, extra_headers=repeated).id == first.id


def record_of(made, best, states, **keys):
    """What the training process has written when the first rung is decided."""
    trials = [
        TrialRecord(
            name=name,
            values={},
            state=state,
            reason=LEFT if state == "left" else "",
            steps=8,
            at_rungs={"4": 1.0 + number},
            score=0.5 + number,
            score_step=8 if state == "finished" else 4,
            left_at=4 if state == "left" else None,
        )
        for number, (name, state) in enumerate(zip(made.trials, states, strict=True))
    ]
    kept, left = tuple(made.trials[:2]), tuple(made.trials[2:])
    return SweepRecord(
        name=made.sweep.id,
        search="grid",
        metric="eval_loss",
        mode="min",
        keep=1,
        at=(0.5,),
        share=0.5,
        judge="mean",
        steps=8,
        rungs=(4, 8),
        trials=tuple(trials),
        decisions=(Decision(0, 0, 4, kept, left, 4),),
        best=best,
        **keys,
    )


def enter_trials(training, made, moves, steps):
    for name, states, step in zip(made.trials, moves, steps, strict=True):
        reason = LEFT if states[-1:] == [State.CANCELLED] else ""
        training.enter(name, *states, step=step, steps=8, trained_tokens=10, reason=reason)


def test_a_running_sweep_shows_its_trials_in_their_order(service, client, made, training):
    running, left = [State.RUNNING], [State.RUNNING, State.CANCELLED]
    enter_trials(training, made, [running, [], left, left], [6, 4, 4, 4])
    write_record(
        service.settings.jobs / made.sweep.id, record_of(made, (), ["running", "waiting", "left", "left"])
    )
    found = client.fine_tuning.jobs.retrieve(made.sweep.id)
    assert (found.status, found.fine_tuned_model, found.result_files) == ("running", None, [])
    assert found.weftune["reason"] == "of 4 trials, 1 train, 1 wait, 2 were dropped"
    assert (found.weftune["step"], found.weftune["steps"]) == (18, 24)
    status, sweep = call(service, "GET", f"/api/sweeps/{made.sweep.id}")
    assert status == 200
    assert [one["id"] for one in sweep["trials"]] == made.trials
    assert [one["state"] for one in sweep["trials"]] == ["running", "waiting", "left", "left"]
    assert sweep["trials"][2]["reason"] == LEFT
    assert sweep["rungs"] == [
        {"step": 4, "started": 4, "evaluated": 4, "kept": 2},
        {"step": 8, "started": 2, "evaluated": 0, "kept": None},
    ]
    _, overview = call(service, "GET", "/api/overview")
    jobs = {one["id"]: one for one in overview["jobs"]}
    assert jobs[made.trials[0]]["sweep"] == {
        "id": made.sweep.id,
        "name": "sql",
        "best": False,
        "values": {"learning_rate": 1e-4, "adapter.rank": 4},
    }
    assert "pause" not in jobs[made.trials[0]]["actions"]
    assert jobs[made.sweep.id]["actions"] == ["pause", "cancel", "priority"]


def test_an_ended_sweep_has_the_model_of_its_best_trial(service, client, made, training):
    ended = [State.RUNNING, State.SUCCEEDED]
    left = [State.RUNNING, State.CANCELLED]
    enter_trials(training, made, [ended, ended, left, left], [8, 8, 4, 4])
    training.add_metrics(made.trials[1], 8)
    folder, states = service.settings.jobs / made.sweep.id, ["finished", "finished", "left", "left"]
    write_record(folder, record_of(made, (), states))
    # Which one is best is not recorded yet.
    assert client.fine_tuning.jobs.retrieve(made.sweep.id).status == "running"
    write_record(folder, record_of(made, (made.trials[1],), states))
    found = client.fine_tuning.jobs.retrieve(made.sweep.id)
    best = client.fine_tuning.jobs.retrieve(made.trials[1])
    assert (found.status, found.fine_tuned_model) == ("succeeded", best.fine_tuned_model)
    assert found.trained_tokens == 40
    assert found.result_files == best.result_files
    _, sweep = call(service, "GET", f"/api/sweeps/{made.sweep.id}")
    assert [(one["id"], one["best"]) for one in sweep["trials"]][:2] == [
        (made.trials[1], True),
        (made.trials[0], False),
    ]
    adapter = service.settings.jobs / made.trials[1]
    adapter.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_bytes(b"{}")
    assert service.call("GET", f"/api/jobs/{made.sweep.id}/adapter")[0] == 200
    _, detail = call(service, "GET", f"/api/jobs/{made.trials[1]}")
    assert detail["job"]["sweep"]["best"]
    _, page = call(service, "GET", "/api/sweeps?limit=1")
    assert [one["id"] for one in page["data"]] == [made.sweep.id]


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([[State.FAILED], [State.FAILED], [State.FAILED], [State.FAILED]], "failed"),
        ([[State.PAUSED], [State.PAUSED], [State.FAILED], [State.PAUSED]], "paused"),
        ([[State.PAUSED], [], [State.FAILED], [State.PAUSED]], "queued"),
    ],
)
def test_the_state_of_a_sweep_follows_from_its_trials(moves, expected, client, made, training):
    for name, states in zip(made.trials, moves, strict=True):
        training.enter(name, *states)
    found = client.fine_tuning.jobs.retrieve(made.sweep.id)
    assert found.weftune["state"] == expected
    assert (found.error is not None) == (expected == "failed")


def test_a_sweep_is_cancelled_by_its_job_and_its_trials_are_not_paused_alone(service, client, made, training):
    for name in made.trials:
        training.enter(name, State.RUNNING)
    before = len(training.requests.commands_after(0))
    client.fine_tuning.jobs.cancel(made.sweep.id)
    client.fine_tuning.jobs.cancel(made.trials[0])
    stored = training.requests.commands_after(0)[before:]
    assert [(one.job, one.verb) for one in stored] == [(made.sweep.id, "cancel"), (made.trials[0], "cancel")]
    with pytest.raises(openai.BadRequestError, match=f"is a trial of the sweep {made.sweep.id}"):
        client.fine_tuning.jobs.pause(made.trials[0])


def test_a_sweep_is_not_seen_by_other_tenants(service, made):
    assert call(service, "GET", f"/api/sweeps/{made.sweep.id}", tenant="other")[0] == 404
    assert call(service, "GET", f"/api/sweeps/{made.trials[0]}")[0] == 404
    _, page = call(service, "GET", "/api/sweeps", tenant="other")
    assert made.sweep.id not in [one["id"] for one in page["data"]]


WRONG = {
    "no evaluation": ({"eval": None}, "weftune.sweep", "needs a validation_file, or weftune.eval"),
    "an unknown key": ({"sweep": {**SWEEP, "halvin": 1}}, "weftune.sweep.halvin", "did you mean halving"),
    "no over": ({"sweep": {}}, "weftune.sweep", "needs over"),
    "a path": (
        {"sweep": {"over": {"adapter.init_from": ["/etc/passwd"]}}},
        "weftune.sweep.over.adapter.init_from",
        "not taken over HTTP",
    ),
    "a path in a mapping": (
        {"sweep": {"over": {"adapter": [{"rank": 4, "init_from": "/etc/passwd"}, {"rank": 8}]}}},
        "weftune.sweep.over.adapter",
        "adapter.init_from is not taken over HTTP",
    ),
    "other rows": (
        {"sweep": {"over": {"data": ["/etc/passwd"]}}},
        "weftune.sweep.over.data",
        "cannot be swept",
    ),
    "a wrong value": (
        {"sweep": {"over": {"adapter.rank": [4, 0]}}},
        "weftune.sweep.over.adapter.rank[1]",
        "must be at least 1",
    ),
    "rungs that fall": (
        {"sweep": {**SWEEP, "halving": {"at": [0.5, 0.1], "keep": 0.5}}},
        "weftune.sweep.halving.at",
        "must rise",
    ),
    "tpe": (
        {"sweep": {**SWEEP, "search": "tpe", "trials": 3}},
        "weftune.sweep.search",
        'must be grid or random over HTTP, got "tpe"; a service makes all trials when a sweep is submitted',
    ),
    "an unknown search": (
        {"sweep": {**SWEEP, "search": "tep"}},
        "weftune.sweep.search",
        'must be grid or random over HTTP, got "tep"',
    ),
    "a long list": (
        {"sweep": {"over": {"learning_rate": [1e-3 + n * 1e-9 for n in range(1000)], "warmup": [0]}}},
        "weftune.sweep.over",
        "at most 1,000 values, got 1,001",
    ),
    "many trials": (
        {"sweep": {"over": {"learning_rate": [1e-3 + n * 1e-9 for n in range(600)], "warmup": [0, 1]}}},
        "weftune.sweep.over",
        "has at most 1,000",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sweep_is_refused_under_the_key_at_fault(name, service, file, training):
    changes, param, words = WRONG[name]
    extension = {key: value for key, value in {**EXTENSION, **changes}.items() if value is not None}
    before = len(training.requests.submissions("acme", limit=1000))
    body = {"model": "demo", "training_file": file.id, "weftune": extension}
    status, answer = call(service, "POST", "/v1/fine_tuning/jobs", body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert words in answer["error"]["message"]
    assert "passwd" not in answer["error"]["message"]
    assert len(training.requests.submissions("acme", limit=1000)) == before


def test_trials_count_for_the_quota_before_they_are_made(tmp_path):
    service = start_service(tmp_path, quotas={"queued_jobs": 5})
    try:
        client = service.client()
        file = client.files.create(file=("rows.jsonl", rows()), purpose="fine-tune")
        body = {"model": "demo", "training_file": file.id}
        client.fine_tuning.jobs.create(**body, extra_body={"weftune": EXTENSION})
        with pytest.raises(
            openai.RateLimitError, match=r"4 of your jobs have not ended, .* with 4 trials more"
        ):
            client.fine_tuning.jobs.create(**body, extra_body={"weftune": EXTENSION})
        client.fine_tuning.jobs.create(**body)
        large = {**EXTENSION, "sweep": {"over": {"warmup": [0, 1, 2, 3, 4, 5]}}}
        with pytest.raises(openai.BadRequestError, match="has 6 trials, and you may have 5 jobs"):
            client.fine_tuning.jobs.create(**body, extra_body={"weftune": large})
    finally:
        service.stop()
