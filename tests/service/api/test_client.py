"""`weftune jobs` against a service: the client needs no package besides Weftune's own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.service.api.running import rows
from weftune.cli import service_jobs
from weftune.errors import DataError, SpecError, UserError
from weftune.jobs.spec.read import read_run
from weftune.jobs.spec.spec import JobSpec, resolve_job
from weftune.jobs.store.status import State
from weftune.service.api.schemas import Extension
from weftune.service.client import EXTENSION_KEYS, ServiceClient

JOBS = """
base: demo
defaults: {epochs: 2, batch_size: 4, adapter: {rank: 4}}
jobs:
  - name: plain
    data: rows.jsonl
  - name: table
    data: {path: rows.csv, columns: {prompt: question, completion: answer}}
    eval: {path: rows.csv, every: 0.5}
    learning_rate: 1e-3
    clip: null
  - name: half
    data: {path: rows.jsonl, limit: 3}
    steps: 5
    adapter: {kind: dora, dropout: 0.1}
    schedule: cosine
"""


@pytest.fixture
def jobs(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(rows(8))
    (tmp_path / "rows.csv").write_text("question,answer\nHow?,So.\nWhy?,Thus.\n")
    (tmp_path / "jobs.yaml").write_text(JOBS)
    return tmp_path / "jobs.yaml"


@pytest.fixture
def own(service):
    return ServiceClient(service.url, service.keys["acme"])


def test_the_jobs_of_a_file_arrive_as_the_file_describes_them(own, jobs, training):
    run = read_run(jobs)
    made = list(own.submit(run))
    assert [job["weftune"]["suffix"] for job in made] == ["plain", "table", "half"]
    for spec, job in zip(run.jobs, made, strict=True):
        stored = resolve_job(JobSpec(**training.submission(job["id"]).job))
        wanted = resolve_job(spec)
        for values in (stored, wanted):
            for key in ("name", "data", "save_every"):
                values.pop(key)
            if values["eval"] is not None:
                values["eval"].pop("path")
        assert stored == wanted
    table = made[1]
    content = own._send_request("GET", f"/v1/files/{table['training_file']}/content", None, {})
    assert [json.loads(line) for line in content.splitlines()] == [
        {"prompt": "How?", "completion": "So."},
        {"prompt": "Why?", "completion": "Thus."},
    ]
    assert table["training_file"] == table["validation_file"]
    assert made[0]["training_file"] != made[2]["training_file"]


def test_every_key_that_the_client_sends_is_one_that_the_service_has():
    assert set(EXTENSION_KEYS) <= Extension.model_fields.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: owner/dataset", "a service takes one local file of rows"),
        ("data: {path: rows.jsonl, skip_bad_rows: true}", "is not taken by a service"),
        ("data: rows.jsonl\n    sweep: {over: {seed: [1, 2]}}", "seed"),
        (
            "data: rows.jsonl\n    eval: {fraction: 0.5}\n"
            "    sweep: {search: tpe, trials: 2, over: {learning_rate: [1e-4, 1e-3]}}",
            "search: random",
        ),
    ],
)
def test_what_a_service_does_not_take_is_refused_with_its_place(text, expected, own, jobs):
    jobs.write_text(f"base: demo\njobs:\n  - name: a\n    {text}\n")
    with pytest.raises(SpecError, match=expected):
        list(own.submit(read_run(jobs)))


def test_a_file_for_another_base_is_refused(own, jobs, tmp_path):
    jobs.write_text("base: owner/other\njobs:\n  - {name: a, data: rows.jsonl}\n")
    with pytest.raises(SpecError, match=r"base: is owner/other, and the service trains on HuggingFaceTB"):
        list(own.submit(read_run(jobs)))


SWEEPS = """
base: demo
jobs:
  - name: grid
    data: rows.jsonl
    eval: {fraction: 0.5}
    sweep: {over: {learning_rate: [1e-4, 1e-3], adapter: [{rank: 4}, {rank: 8, alpha: 8}]}}
  - {name: plain, data: rows.jsonl}
  - name: random
    data: rows.jsonl
    eval: {fraction: 0.5}
    steps: 40
    seed: 5
    sweep:
      search: random
      trials: 6
      over: {learning_rate: {min: 1e-5, max: 1e-3, log: true}, warmup: [0.0, 0.1]}
      halving: {at: [0.25], keep: 0.5}
      keep: 2
"""


def test_a_sweep_arrives_as_one_job_with_the_trials_that_the_file_describes(own, jobs, training):
    jobs.write_text(SWEEPS)
    run = read_run(jobs)
    made = list(own.submit(run))
    assert [job["weftune"]["suffix"] for job in made] == ["grid", "plain", "random"]
    specs = {job.name: job for job in run.jobs}
    for sweep, job in zip(run.sweeps, (made[0], made[2]), strict=True):
        assert job["weftune"]["sweep"] == job["id"]
        trials = training.requests.trials(job["id"])
        assert [(one.suffix, one.trial) for one in trials] == [(one.name, one.values) for one in sweep.trials]
        for one in trials:
            stored, wanted = resolve_job(JobSpec(**one.job)), resolve_job(specs[one.suffix])
            for values in (stored, wanted):
                for key in ("name", "data", "save_every"):
                    values.pop(key)
            assert stored == wanted
    # The rows, which all of them share, are uploaded once.
    assert len({job["training_file"] for job in made}) == 1


def test_a_bad_row_is_named_before_anything_is_submitted(own, jobs):
    (jobs.parent / "rows.jsonl").write_bytes(rows(2) + b'{"messages": []}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:3: `messages` is empty"):
        list(own.submit(read_run(jobs)))
    (jobs.parent / "rows.jsonl").write_bytes(rows(2) + b"{\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:3: not valid JSON"):
        list(own.submit(read_run(jobs)))


def test_verbs_find_a_job_by_its_id_and_by_its_suffix(own, jobs, training, capsys):
    job = next(iter(own.submit(read_run(jobs))))
    training.enter(job["id"], State.RUNNING, step=2, steps=4)
    training.add_metrics(job["id"], 2)
    for name in (job["id"], "plain"):
        assert own.job(name)["id"] == job["id"]
    service_jobs.list_jobs(own)
    line = next(line for line in capsys.readouterr().out.splitlines() if job["id"] in line)
    assert "running" in line
    assert "2/4" in line
    service_jobs.show_job(own, "plain")
    assert f"id: {job['id']}" in capsys.readouterr().out
    service_jobs.print_logs(own, "plain", keeps_following=False)
    assert [line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()] == [
        "Step 1: loss 1.000",
        "Step 2: loss 0.500",
    ]
    service_jobs.change_job(own, "plain", "pause")
    assert training.requests.commands_after(0)[-1].verb == "pause"


def test_mistakes_are_sentences(service, own, monkeypatch):
    with pytest.raises(UserError, match="there is no job nothing; see weftune jobs list"):
        own.job("nothing")
    with pytest.raises(UserError, match="No such fine_tuning_job"):
        own.job("ftjob-nothing")
    with pytest.raises(UserError, match="API key is missing or not valid"):
        list(ServiceClient(service.url, "wrong").list_items("/v1/models"))
    with pytest.raises(UserError, match="is no address of a service; write http://HOST:PORT"):
        ServiceClient("localhost:8000", "key")
    monkeypatch.delenv(service_jobs.URL, raising=False)
    monkeypatch.delenv(service_jobs.KEY, raising=False)
    with pytest.raises(UserError, match="name a service with --url"):
        service_jobs.open_client(None, None)
    with pytest.raises(UserError, match="needs an API key"):
        service_jobs.open_client(service.url, None)


def test_the_client_imports_neither_fastapi_nor_torch():
    program = (
        "import sys, weftune.service.client, weftune.cli.service_jobs; "
        "print([name for name in ('fastapi', 'sqlalchemy', 'torch', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
