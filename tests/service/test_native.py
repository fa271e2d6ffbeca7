"""Our own API beside OpenAI's, in front of a real store."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.data import families
from tests.forks import Forks
from tests.plan.costs import CONFIG
from tests.service.api.running import start_service
from tests.service.site import Site, different_rows, rows, serving
from weftune.jobs.store.status import State
from weftune.service import plan_preview
from weftune.service.api.native import _stream_events
from weftune.service.server import GRACE_SECONDS
from weftune.service.settings import Quotas
from weftune.service.store.records import Changes


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    found.close()


@pytest.fixture
def client(site: Site) -> Iterator[TestClient]:
    with TestClient(site.app, headers=site.headers()) as found:
        yield found


def job_of(client: TestClient, id: str) -> dict:
    return client.get(f"/api/jobs/{id}").json()["job"]


def test_the_overview_shows_each_job_of_the_tenant_with_state_progress_and_end(site, client):
    running, queued = site.add("support"), site.add("sql")
    site.add("theirs", "globex")
    new = site.submit(None)
    site.move(running, State.RUNNING)
    site.train(running, 20)
    found = client.get("/api/overview").json()
    assert (found["tenant"], found["training"], found["running"], found["waiting"]) == ("acme", True, 1, 2)
    by_id = {job["id"]: job for job in found["jobs"]}
    assert list(by_id) == [new, queued, running], "the newest first, and none of another tenant"
    job = by_id[running]
    assert (job["name"], job["state"], job["step"], job["steps"]) == ("support", "running", 20, 40)
    assert job["estimated_finish"] > time.time()
    assert (job["model"], job["answers_as"]) == (None, site.model(running)), "its current weights answer"
    assert by_id[new]["state"] == "validating"
    assert by_id[new]["answers_as"] is None
    assert by_id[new]["name"] == new


def test_a_waiting_job_says_how_many_are_ahead_and_names_only_the_tenants_own(site, client):
    site.add("theirs", "globex", priority=3)
    first = site.add("first")
    last = site.add("last", reason=f"it waits behind {first}, which comes first")
    found = job_of(client, last)
    assert (found["ahead"], found["ahead_names"]) == (2, ["another tenant's job", "first"])
    assert found["reason"] == "it waits behind first, which comes first"
    assert job_of(client, first)["ahead"] == 1


def test_the_queue_follows_the_fair_share_of_the_tenants(site, client):
    theirs = [site.add(f"theirs-{n}", "globex") for n in range(4)]
    first, last = site.add("first"), site.add("last")
    by_id = {job["id"]: job["ahead"] for job in client.get("/api/overview").json()["jobs"]}
    assert by_id == {first: 1, last: 3}, "the tenants take turns, though the other was first"
    facts = {"submitted": 1, "queued_seconds": 0, "remaining_seconds": 0, "deadline": None}
    jobs = {id: {**facts, "submitted": n, "batch_tokens": 100} for n, id in enumerate([*theirs, first, last])}
    site.window({theirs[0]: 10}, queue={"recent_tokens": {"acme": 1e6, "globex": 0.0}, "jobs": jobs})
    by_id = {job["id"]: job["ahead"] for job in client.get("/api/overview").json()["jobs"]}
    assert by_id == {first: 4, last: 5}, "the tenant has had more than its share lately"


def test_a_reason_never_names_a_job_of_another_tenant(site, client):
    theirs = site.add("secret-project", "globex")
    job = site.add("mine", reason=f"preempted by {theirs}, priority 4")
    site.log(job, f"It waits for {theirs}.")
    text = client.get(f"/api/jobs/{job}").text
    assert theirs not in text
    assert "secret-project" not in text
    assert "preempted by another tenant's job, priority 4" in text


def test_the_actions_of_a_job_are_the_legal_transitions_of_its_state(site, client):
    job = site.submit("x")
    seen = [job_of(client, job)["actions"]]
    site.enter(job)
    seen.append(job_of(client, job)["actions"])
    site.move(job, State.PAUSED)
    seen.append(job_of(client, job)["actions"])
    site.move(job, State.QUEUED)
    site.move(job, State.RUNNING)
    site.succeed(job)
    seen.append(job_of(client, job)["actions"])
    assert seen == [
        ["cancel", "priority"],
        ["pause", "cancel", "priority"],
        ["resume", "cancel", "priority"],
        ["download"],
    ]


def test_a_curve_has_the_loss_of_each_step_and_grows(site, client):
    job = site.add("x")
    site.move(job, State.RUNNING)
    site.train(job, 12)
    before = client.get(f"/api/jobs/{job}/curve").json()
    assert [step for step, _ in before["train"]] == list(range(1, 13))
    assert [step for step, _ in before["eval"]] == [10]
    site.train(job, 13)
    after = client.get(f"/api/jobs/{job}/curve").json()
    assert after["train"][:12] == before["train"]
    assert after["train"][12][0] == 13
    assert after["number"] > before["number"]


def test_a_long_curve_keeps_its_spikes(site, client):
    job = site.add("x", steps=5000)
    site.move(job, State.RUNNING)
    site.train(job, 5000, held_out=False)
    everything = [row.data["train_loss"] for row in site.training.metrics(job)]
    found = client.get(f"/api/jobs/{job}/curve").json()["train"]
    assert 500 < len(found) <= 1100
    assert max(loss for _, loss in found) == max(everything)
    assert found[-1][0] == 5000


def test_losses_that_are_not_finite_are_left_out(site, client):
    job = site.add("x")
    site.move(job, State.RUNNING)
    site.training.write(
        Changes(
            events=[
                site.metric(job, "train", step, {"train_loss": loss}) for step, loss in ((1, None), (2, 1.5))
            ]
        )
    )
    assert client.get(f"/api/jobs/{job}/curve").json()["train"] == [[2, 1.5]]


def test_a_window_shows_own_jobs_by_id_and_all_others_as_a_sum(site, client):
    mine, theirs = site.add("mine"), site.add("theirs", "globex")
    site.window({mine: 300, theirs: 200}, passes=3)
    answer = client.get("/api/windows?limit=1")
    assert theirs not in answer.text
    (window,) = answer.json()["data"]
    first = window["passes"][0]
    assert (first["jobs"], first["other_jobs"], first["other_tokens"]) == ({mine: 300}, 1, 200)
    assert window["memory"]["jobs"].keys() == {mine}
    assert window["memory"]["other_bytes"] == 220 << 20
    assert window["memory"]["answer_bytes"] == 384 << 20
    lines = client.get("/metrics").text.splitlines()
    sizes = {"budget": 12 << 30, "base": 4 << 30, "answers": 384 << 20, "jobs": (180 + 220) << 20}
    found = dict(line.split() for line in lines if line.startswith("weftune_memory_bytes{"))
    assert {part: float(found[f'weftune_memory_bytes{{part="{part}"}}']) for part in sizes} == sizes


def test_a_receipt_says_what_a_job_has_used(site, client):
    job, new = site.add("x"), site.submit("y")
    site.move(job, State.RUNNING)
    site.train(job, 10)
    found = client.get("/api/receipts").json()
    assert [one["job"] for one in found["data"]] == [new, job]
    assert found["data"][1]["tokens"] == 5120
    assert found["data"][1] == client.get(f"/api/jobs/{job}/receipt").json()
    assert client.get(f"/api/jobs/{new}/receipt").json()["tokens"] == 0


def test_a_priority_becomes_a_command_for_training(site, client):
    job = site.add("x")
    assert client.post(f"/api/jobs/{job}/priority", json={"priority": 5}).status_code == 200
    (command,) = site.requests.commands_after(0)
    assert (command.job, command.verb, command.value) == (job, "priority", 5)
    site.move(job, State.CANCELLED)
    refused = client.post(f"/api/jobs/{job}/priority", json={"priority": 5})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_state")


@pytest.mark.parametrize("format", ["tar", "zip"])
def test_a_finished_adapter_is_downloaded_as_an_archive_of_its_folder(site, client, format):
    job = site.add("x")
    early = client.get(f"/api/jobs/{job}/adapter")
    assert (early.status_code, early.json()["error"]["code"]) == (400, "adapter_not_finished")
    site.move(job, State.RUNNING)
    site.checkpoint(job, 10)
    site.succeed(job)
    (site.settings.jobs / job / "job.yaml").write_text("job: {data: {path: /home/service/rows.jsonl}}")
    answer = client.get(f"/api/jobs/{job}/adapter?format={format}")
    folder = site.settings.jobs / job
    assert _files(answer.content) == {
        f"{job}/{name}": (folder / name).read_bytes()
        for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    kept = client.get(f"/api/jobs/{job}/adapter?format={format}&step=10")
    assert set(_files(kept.content)) == {
        f"{job}-step-10/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    assert client.get(f"/api/jobs/{job}/adapter?step=11").status_code == 404


def _files(content: bytes) -> dict[str, bytes]:
    if content.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None
            return {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive.getmembers()}


PATHS = ("", "/curve", "/receipt", "/adapter", "/adapter?step=1&format=zip", "/priority")


@pytest.mark.parametrize("path", PATHS)
def test_a_foreign_id_and_an_unknown_one_have_the_same_answer(site, client, path):
    """Row 9 of the faults."""
    theirs = site.add("secret-project", "globex")
    site.move(theirs, State.RUNNING)
    site.succeed(theirs)
    site.checkpoint(theirs, 1)
    unknown = "ftjob-" + "0" * 24
    answers = [
        client.post(f"/api/jobs/{id}{path}", json={"priority": 1})
        if path == "/priority"
        else client.get(f"/api/jobs/{id}{path}")
        for id in (theirs, unknown)
    ]
    assert [one.status_code for one in answers] == [404, 404]
    assert answers[0].text.replace(theirs, unknown) == answers[1].text
    assert not site.requests.commands_after(0)


def test_every_path_of_the_api_needs_a_key(site):
    with TestClient(site.app) as client:
        document = client.get("/openapi.json").json()
        paths = [path for path in document["paths"] if path.startswith("/api/")]
        assert len(paths) >= 10
        for path in paths:
            for method in document["paths"][path]:
                assert client.request(method, path.replace("{job_id}", "x")).status_code == 401


def test_the_openapi_document_has_the_answers_as_models(client):
    document = client.get("/openapi.json").json()
    answer = document["paths"]["/api/overview"]["get"]["responses"]["200"]
    assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/Overview")
    assert "JobSummary" in document["components"]["schemas"]


# -- streams --------------------------------------------------------------------------------------------


def events_of(site: Site, seconds: float, act=lambda: None, tenant: str = "acme") -> list[tuple[str, dict]]:
    """Return the events of a stream during these seconds, with something that happens after the first."""
    service, streams = site.app.state.service, site.app.state.streams
    found: list[tuple[str, dict]] = []

    async def read() -> None:
        stream = _stream_events(service, tenant, site.keys[tenant], streams)
        deadline, acted = time.monotonic() + seconds, False
        async for text in stream:
            if text.startswith("event:"):
                name, data = text.strip().split("\n")
                found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
            if not acted:
                acted = True
                threading.Timer(0.2, act).start()
            if time.monotonic() > deadline or len(found) >= 4:
                break
        await stream.aclose()

    async def limited() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(read(), seconds + 2)

    asyncio.run(limited())
    return found


def test_a_stream_begins_with_all_jobs_and_then_has_what_changes(site, client):
    job, other = site.add("x"), site.add("y")
    theirs = site.add("theirs", "globex")
    for one in (job, theirs):
        site.move(one, State.RUNNING)
    site.train(job, 5)

    def act() -> None:
        site.train(job, 7)
        site.train(theirs, 30)
        site.window({job: 100, theirs: 100})

    found = events_of(site, 4, act)
    assert [name for name, _ in found] == ["changes", "changes", "metrics", "window"]
    assert {one["id"] for one in found[0][1]["jobs"]} == {job, other}
    assert [(one["id"], one["step"]) for one in found[1][1]["jobs"]] == [(job, 7)]
    assert [step for step, _ in found[2][1]["train"]] == [6, 7], "steps from before are in the curve"
    assert theirs not in json.dumps(found)


def test_a_stream_is_sent_over_http_as_it_happens(site):
    job = site.add("x")
    with serving(site.app) as url:
        request = urllib.request.Request(f"{url}/api/stream", headers=site.headers())
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = iter(answer.readline, b"")
            assert next(line for line in lines if line.startswith(b"event:")) == b"event: changes\n"
            site.move(job, State.RUNNING)
            data = [next(line for line in lines if line.startswith(b"data:")) for _ in range(2)]
        assert b'"running"' in data[1]
        deadline = time.monotonic() + 60
        while site.app.state.streams.open_counts["acme"] and time.monotonic() < deadline:
            time.sleep(0.05)
    assert site.app.state.streams.open_counts["acme"] == 0, "a closed connection ends its stream"


def test_a_revoked_key_ends_its_stream(site, client):
    site.add("x")
    began = time.monotonic()
    assert [name for name, _ in events_of(site, 20, site.settings.keys.unlink)] == ["changes"]
    assert time.monotonic() - began < 10


def test_a_stop_of_the_service_ends_open_streams(tmp_path):
    running = start_service(tmp_path)
    headers = {"Authorization": f"Bearer {running.keys['acme']}"}
    request = urllib.request.Request(f"{running.url}/api/stream", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        answer.readline()
        running.process.terminate()
        answer.read()
        running.process.join(GRACE_SECONDS / 2)
        assert running.process.exitcode is not None, "it need not wait for the end of its grace"
    assert "Traceback" not in running.log.read_text()


def test_a_tenant_has_a_limited_number_of_streams(site, client):
    site.app.state.streams.open_counts["acme"] = 20
    refused = client.get("/api/stream")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    site.app.state.streams.open_counts["acme"] = 0


# -- plans ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base of config.json and tokenizer only."""
    folder = tmp_path_factory.mktemp("plan") / "small-base"
    families.smollm2().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture
def planned(tmp_path, base, monkeypatch):
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    # Tests beside this one would keep a process of low priority waiting for longer than its time limit.
    monkeypatch.setattr(plan_preview, "NICENESS", 0)
    found = Site(tmp_path, base)
    with TestClient(found.app, headers=found.headers()) as client:
        yield found, client
    found.close()


@pytest.fixture
def planned_by_forks(planned, monkeypatch):
    """The same, but the command that plans is a fork, in the place of a new interpreter."""
    monkeypatch.setattr(plan_preview, "_run", run_as_fork)
    return planned


async def run_as_fork(command: Sequence[str]) -> tuple[int, str]:
    words = command[3:]  # behind `python -m weftune`
    folder = Path(words[1]).parent
    environment = {"WEFTUNE_CACHE": os.environ["WEFTUNE_CACHE"], "COLUMNS": "10000", "NO_COLOR": "1"}
    status = await asyncio.to_thread(
        Forks().weftune, *words, cwd=folder, away=os.devnull, environment=environment
    )
    return status, (folder / "log").read_text()


BASE = "small-base"


def upload(client: TestClient, text: str) -> str:
    answer = client.post(
        "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("mine.jsonl", text.encode())}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def test_a_plan_says_when_a_job_would_end_and_what_it_needs(planned):
    site, client = planned
    running = site.add("beside")
    site.move(running, State.RUNNING)
    body = {"model": BASE, "training_file": upload(client, rows(40)), "seed": 1}
    alone = client.post("/api/plan", json=body | {"weftune": {"steps": 5, "adapter": {"rank": 8}}})
    assert alone.status_code == 200, alone.text
    found = alone.json()
    assert found["fits"]
    assert found["waits_for"] == ""
    assert (found["steps"], found["running_jobs"]) == (5, 1)
    assert found["seconds"] > 0
    assert 0 < found["state_bytes"] < found["needs_bytes"] < found["budget_bytes"]
    assert not site.requests.submissions("acme")[0].request.get("seed"), "nothing was submitted"


@pytest.mark.slow
def test_a_plan_counts_the_jobs_that_the_fair_share_puts_before_the_new_one(planned_by_forks):
    site, client = planned_by_forks
    theirs = [site.add(f"theirs-{n}", "globex") for n in range(3)]
    facts = {"queued_seconds": 0, "remaining_seconds": 0, "deadline": None, "batch_tokens": 10_000}
    jobs = {id: {**facts, "submitted": n} for n, id in enumerate(theirs)}
    body = {"model": BASE, "training_file": upload(client, rows(40)), "weftune": {"steps": 5}}
    # Three jobs wait; the new one is smaller, and its tenant has none. Later its tenant has had its share.
    for recent, ahead in ((0.0, 0), (1e6, 3)):
        site.window({theirs[0]: 10}, queue={"recent_tokens": {"acme": recent}, "jobs": jobs}, device="cuda")
        answer = client.post("/api/plan", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["ahead"] == ahead


@pytest.mark.slow
def test_a_plan_of_a_job_that_cannot_fit_says_why(planned_by_forks):
    site, client = planned_by_forks
    mine, theirs = site.add("mine"), site.add("theirs", "globex")
    for one in (mine, theirs):
        site.move(one, State.RUNNING)
    # So little memory that only one job fits beside the base.
    site.window({mine: 10}, memory={"budget_bytes": 700 << 20, "base_bytes": 1, "jobs": {}})
    body = {"model": BASE, "training_file": upload(client, rows(40))}
    answer = client.post("/api/plan", json=body | {"weftune": {"steps": 5, "adapter": {"rank": 512}}})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert not found["fits"]
    assert "GiB" in found["why_not"]
    assert "other-" not in answer.text


def test_a_plan_that_would_wait_says_for_what_without_names_of_others(planned_by_forks):
    site, client = planned_by_forks
    large = {"rank": 64}
    others = [site.submit("theirs", "globex", adapter=large) for _ in range(3)]
    for one in others:
        site.enter(one, priority=1)
        site.move(one, State.RUNNING)
    # Two jobs fit beside the base, and a third does not.
    site.window({others[0]: 10}, memory={"budget_bytes": 2200 << 20, "base_bytes": 1, "jobs": {}})
    body = {"model": BASE, "training_file": upload(client, rows(40))}
    answer = client.post("/api/plan", json=body | {"weftune": {"steps": 5, "adapter": large}})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["fits"]
    assert found["waits_for"] == "it waits behind another tenant's job, which comes first"
    assert not any(one in answer.text for one in others)


def test_a_plan_of_a_wrong_request_is_refused_like_the_job(planned):
    site, client = planned
    body = {"model": BASE, "training_file": upload(client, rows(4))}
    answers = [
        client.post(path, json=body | {"weftune": {"adapter": {"rnk": 8}}})
        for path in ("/api/plan", "/v1/fine_tuning/jobs")
    ]
    assert [one.status_code for one in answers] == [400, 400]
    assert answers[0].json() == answers[1].json()
    theirs = site.add("theirs", "globex")
    file = site.requests.submission(None, theirs).training_file
    foreign = client.post("/api/plan", json={"model": BASE, "training_file": file})
    assert foreign.json()["error"]["code"] == "file_not_found"


SWEEP = {
    "over": {"learning_rate": [1e-4, 1e-3], "adapter.rank": [4, 64]},
    "halving": {"at": [0.5], "keep": 0.5},
}
TRIALS = ["sql-lr1e-4-r4", "sql-lr1e-4-r64", "sql-lr1e-3-r4", "sql-lr1e-3-r64"]


def sweep_request(client: TestClient, **extension) -> dict:
    own = {"steps": 8, "eval": {"fraction": 0.25}, "sweep": SWEEP, **extension}
    return {
        "model": BASE,
        "training_file": upload(client, different_rows(40)),
        "suffix": "sql",
        "weftune": own,
    }


def test_a_plan_of_a_sweep_has_its_trials_and_rungs_and_submits_nothing(planned_by_forks):
    site, client = planned_by_forks
    site.move(site.add("beside"), State.RUNNING)
    answer = client.post("/api/plan", json=sweep_request(client))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    trials = found["trials"]
    assert (found["fits"], found["running_jobs"]) == (True, 1)
    assert [one["name"] for one in trials] == TRIALS
    assert trials[1]["values"] == {"learning_rate": 1e-4, "adapter.rank": 64}
    assert [(one["fits"], one["waits_for"], one["steps"]) for one in trials] == [(True, "", 8)] * 4
    assert found["rungs"] == [{"step": 4, "trials": 4}, {"step": 8, "trials": 2}]
    assert found["expected_share"] == 0.75
    assert found["steps"] == 32
    assert found["seconds"] == max(one["seconds"] for one in trials) > 0
    assert found["state_bytes"] == sum(one["state_bytes"] for one in trials)
    assert len(site.requests.submissions("acme")) == 1, "nothing was submitted"
    made = client.post("/v1/fine_tuning/jobs", json=sweep_request(client)).json()
    assert [one.suffix for one in site.requests.trials(made["id"])] == TRIALS


def test_a_plan_of_a_sweep_says_which_trials_cannot_run_and_which_wait(planned_by_forks):
    site, client = planned_by_forks
    job = site.add("beside")
    site.move(job, State.RUNNING)
    answers = []
    for budget, ranks in ((2400, [16, 32, 64, 128, 512]), (700, [512, 640])):
        site.window({job: 10}, memory={"budget_bytes": budget << 20, "base_bytes": 1, "jobs": {}})
        body = sweep_request(client, sweep={"over": {"adapter.rank": ranks}})
        answers.append(client.post("/api/plan", json=body).json())
        assert "this-job" not in json.dumps(answers[-1])
    some, none = answers
    assert [one["fits"] for one in some["trials"]] == [True, True, True, True, False]
    assert [bool(one["waits_for"]) for one in some["trials"]] == [False, False, False, True, False]
    assert (some["fits"], some["waits_for"]) == (False, "")
    assert some["why_not"].startswith("1 of 5 trials cannot run; sql-r512: needs ")
    assert some["trials"][3]["seconds"] == some["seconds"] > some["trials"][0]["seconds"]
    assert [one["fits"] for one in none["trials"]] == [False, False]
    assert none["why_not"].startswith("2 of 2 trials cannot run; sql-r512: even alone it needs ")
    assert none["trials"][1]["why_not"].startswith("even alone it needs ")


def test_a_plan_of_a_sweep_counts_its_trials_for_the_quota(tmp_path, base, monkeypatch):
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_preview, "_run", run_as_fork)
    site = Site(tmp_path, base, quotas=Quotas(running_jobs=3, queued_jobs=5))
    with TestClient(site.app, headers=site.headers()) as client:
        site.move(site.add("beside"), State.RUNNING)
        found = client.post("/api/plan", json=sweep_request(client)).json()
        assert found["waits_for"] == ""
        waits = [one["waits_for"] for one in found["trials"]]
        assert waits[:2] == ["", ""]
        assert all(one.startswith("at most 3 of this account's jobs may train") for one in waits[2:])
        large = client.post("/api/plan", json=sweep_request(client, sweep={"over": {"warmup": [*range(6)]}}))
        assert large.json()["error"]["message"].startswith("weftune.sweep: has 6 trials, and you may have 5")
    site.close()


def test_a_mistake_of_the_rows_of_a_sweep_is_said_once_for_all_trials(planned_by_forks):
    _, client = planned_by_forks
    body = sweep_request(client) | {"training_file": upload(client, rows(4))}
    answer = client.post("/api/plan", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("eval.fraction: one row cannot be split")
    assert "\n" not in answer.json()["error"]["message"]


def test_a_plan_of_a_sweep_names_the_trial_whose_rung_is_within_its_warm_up(planned_by_forks):
    _, client = planned_by_forks
    found = client.post("/api/plan", json=sweep_request(client, warmup=6)).json()
    [warning] = found["warnings"]
    assert warning.startswith("sql: sweep.halving.at: the first rung is at step 4")


@pytest.mark.parametrize(
    "sweep", [{"over": {"adapter.rnk": [8]}}, {**SWEEP, "search": "tpe", "trials": 3}, {"over": {}}]
)
def test_a_plan_of_a_wrong_sweep_is_refused_like_the_sweep(planned, sweep):
    _, client = planned
    body = sweep_request(client, sweep=sweep)
    plan, job = (client.post(path, json=body) for path in ("/api/plan", "/v1/fine_tuning/jobs"))
    assert (plan.status_code, plan.json()) == (400, job.json())
