"""The whole service, driven by the `openai` client and by the command line."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress

import openai
import pytest

from tests.service.whole import Whole, rows
from weftune.cli import service_jobs
from weftune.service.client import ServiceClient
from weftune.service.processes import PIDS

ENDED = ("succeeded", "failed", "cancelled")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    found = Whole(tmp_path_factory.mktemp("whole"), forked=True)
    yield found
    if found.process.poll() is None:
        assert found.stop() == 0, found.log.read_text()[-5000:]


def follow_openais_guide(whole):
    client = whole.client()
    file = client.files.create(file=("rows.jsonl", rows()), purpose="fine-tune")
    base = client.models.list().data[0].id
    hyperparameters = {"n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 5}
    job = client.fine_tuning.jobs.create(
        model=base,
        training_file=file.id,
        validation_file=file.id,
        suffix="flow",
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        extra_body={"weftune": {"adapter": {"rank": 4}}},
    )
    whole.until(lambda: client.fine_tuning.jobs.retrieve(job.id).status in ENDED)
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded", job.error
    assert job.trained_tokens > 0
    assert job.fine_tuned_model == f"ft:{base}:acme:flow:{job.id}"
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=10))
    assert len([event for event in events if event.type == "metrics" and "train_loss" in event.data]) == 12
    assert [event.created_at for event in events] == sorted(
        (event.created_at for event in events), reverse=True
    )
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [one.step_number for one in checkpoints][-2:] == [8, 4]
    table = client.files.content(job.result_files[0]).read().decode().splitlines()
    assert table[0].startswith("step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy")
    assert {line.partition(",")[0] for line in table[1:]} >= {str(step) for step in range(1, 13)}
    question = [{"role": "user", "content": "w10 w50"}]
    answers = []
    for model in (job.fine_tuned_model, checkpoints[0].fine_tuned_model_checkpoint, base):
        keys = {"model": model, "messages": question, "max_tokens": 6, "temperature": 0}
        answer = client.chat.completions.create(**keys)
        stream = list(
            client.chat.completions.create(**keys, stream=True, stream_options={"include_usage": True})
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == answer.choices[0].message.content
        assert stream[-1].usage.total_tokens == answer.usage.total_tokens
        assert answer.usage.completion_tokens <= 6
        answers.append(text)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="ft:none:acme::ftjob-none", messages=question)
    assert client.models.delete(job.fine_tuned_model).deleted
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=job.fine_tuned_model, messages=question)


def test_the_flow_of_openais_guide_runs_with_only_the_address_and_the_key_changed(whole):
    follow_openais_guide(whole)


@pytest.mark.slow
def test_the_flow_of_openais_guide_runs_on_postgresql(tmp_path, postgres_server):
    whole = Whole(tmp_path, "--database", postgres_server.new_database())
    try:
        follow_openais_guide(whole)
        assert not list((tmp_path / "store").glob("*.db")), "all tables are in PostgreSQL"
        before = [job.id for job in whole.client().fine_tuning.jobs.list()]
        assert len(before) == 1
        assert whole.stop() == 0
        whole.start()
        assert [job.id for job in whole.client().fine_tuning.jobs.list()] == before
    finally:
        whole.kill()


def test_a_job_is_evaluated_by_a_metric_that_the_operator_has_registered(whole):
    client = whole.client()
    file = client.files.create(file=("rows.jsonl", rows()), purpose="fine-tune")
    base = client.models.list().data[0].id
    evaluation = {"fraction": 0.25, "generate": {"prompts": 2, "max_new_tokens": 4}}

    def submit(metric):
        extension = {"steps": 3, "eval": {**evaluation, "metric": metric}}
        return client.fine_tuning.jobs.create(
            model=base, training_file=file.id, extra_body={"weftune": extension}
        )

    job = submit("word_count")
    whole.until(lambda: client.fine_tuning.jobs.retrieve(job.id).status in ENDED)
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded", job.error
    assert job.weftune["job"]["eval"]["metric"] == "word_count"
    assert str(whole.folder) not in job.to_json()
    found = [event.data for event in client.fine_tuning.jobs.list_events(job.id) if event.type == "metrics"]
    scores = [data["eval_word_count"] for data in found if "eval_word_count" in data]
    assert len(scores) == 2, "before the first step, and at the end"
    assert all(0.0 <= score <= 1.0 for score in scores)
    for metric in (f"{whole.folder / 'scores.py'}:word_count", "os:system", ["word_count"]):
        with pytest.raises(openai.BadRequestError) as error:
            submit(metric)
        assert error.value.param == "weftune.eval.metric"
        assert "must be exact_match or word_count" in error.value.message


def test_a_long_job_is_paused_resumed_chatted_with_and_cancelled(whole):
    client = whole.client()
    file = client.files.create(file=("rows.jsonl", rows()), purpose="fine-tune")
    base = client.models.list().data[0].id
    jobs = client.fine_tuning.jobs
    job = jobs.create(
        model=base, training_file=file.id, suffix="long", extra_body={"weftune": {"steps": 100_000}}
    )
    whole.until(lambda: jobs.retrieve(job.id).weftune["step"] > 2)
    training = f"ft:{base}:acme:long:{job.id}"
    answer = client.chat.completions.create(
        model=training, messages=[{"role": "user", "content": "w10 w50"}], max_tokens=4
    )
    assert answer.model == training
    jobs.pause(job.id)
    whole.until(lambda: jobs.retrieve(job.id).weftune["state"] == "paused")
    assert jobs.retrieve(job.id).status == "queued"
    jobs.resume(job.id)
    whole.until(lambda: jobs.retrieve(job.id).status == "running")
    jobs.cancel(job.id)
    whole.until(lambda: jobs.retrieve(job.id).status == "cancelled")


def test_the_command_line_submits_follows_and_downloads(whole, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_bytes(rows())
    (tmp_path / "jobs.yaml").write_text(
        f"base: {whole.folder / 'model'}\ndefaults: {{steps: 3, adapter: {{rank: 2}}}}\n"
        "jobs: [{name: shell, data: rows.jsonl}]\n"
    )
    own = ServiceClient(whole.url, whole.key)
    service_jobs.submit_jobs(own, tmp_path / "jobs.yaml")
    service_jobs.print_logs(own, "shell", keeps_following=True)
    assert "The job has successfully completed" in capsys.readouterr().out
    service_jobs.download_adapter(own, "shell", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 2
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 1000


SWEEP = """
base: BASE
jobs:
  - name: tuned
    data: rows.jsonl
    eval: {fraction: 0.25}
    steps: 24
    batch_size: 2
    sweep:
      over: {learning_rate: [1e-4, 1e-3, 1e-2], adapter: [{rank: 2}, {rank: 4}]}
      halving: {at: [0.25, 0.5], keep: 0.5}
"""


@pytest.mark.slow
@pytest.mark.parametrize("victims", [("http",), ("training", "http")])
def test_a_sweep_of_a_jobs_file_ends_although_processes_are_killed_and_its_best_trial_answers(
    whole, tmp_path, capsys, victims
):
    (tmp_path / "rows.jsonl").write_bytes(rows())
    (tmp_path / "jobs.yaml").write_text(SWEEP.replace("BASE", str(whole.folder / "model")))
    own, client = ServiceClient(whole.url, whole.key), whole.client()
    service_jobs.submit_jobs(own, tmp_path / "jobs.yaml")
    sweep = capsys.readouterr().out.split()[0]
    if "training" in victims:
        whole.until(lambda: client.fine_tuning.jobs.retrieve(sweep).weftune["step"] > 12)
    # Else its trials are still being prepared.
    pids = json.loads((whole.folder / "store" / PIDS).read_text())
    for name in victims:
        os.kill(pids[name], signal.SIGKILL)

    def has_ended():
        with suppress(openai.APIConnectionError, openai.InternalServerError):
            return client.fine_tuning.jobs.retrieve(sweep).status in ENDED
        return False

    whole.until(has_ended)
    found = client.fine_tuning.jobs.retrieve(sweep)
    assert found.status == "succeeded", found.error
    ranking = own.request("GET", f"/api/sweeps/{sweep}")
    states = [one["state"] for one in ranking["trials"]]
    assert sorted(states) == ["finished"] * 2 + ["left"] * 4
    assert [one["kept"] for one in ranking["rungs"]] == [3, 2, None]
    best, *others = ranking["trials"]
    assert best["best"]
    assert not any(one["best"] for one in others)
    assert best["score"] == min(one["score"] for one in ranking["trials"] if one["state"] == "finished")
    assert best["name"].startswith("tuned-lr")
    assert found.fine_tuned_model == best["model"]
    answer = client.chat.completions.create(
        model=found.fine_tuned_model, messages=[{"role": "user", "content": "w10 w50"}], max_tokens=4
    )
    assert answer.model == best["model"]
    service_jobs.download_adapter(own, sweep, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == best["values"]["adapter"]["rank"]


@pytest.mark.slow
def test_a_service_that_is_stopped_and_started_finds_its_jobs_again(whole):
    client = whole.client()
    before = [job.id for job in client.fine_tuning.jobs.list()]
    assert whole.stop() == 0
    whole.start()
    assert [job.id for job in client.fine_tuning.jobs.list()] == before
