"""The unmodified `openai` client drives the service; rows of training are written by the test itself."""

from __future__ import annotations

import csv
import io

import openai
import pytest

from tests.service.api.running import PAIR, rows
from weftune.jobs.store.status import State


def test_a_file_is_uploaded_listed_downloaded_and_deleted(client):
    content = rows(3)
    file = client.files.create(file=("train.jsonl", content), purpose="fine-tune")
    assert (file.bytes, file.filename, file.purpose, file.status) == (
        len(content),
        "train.jsonl",
        "fine-tune",
        "processed",
    )
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert file.id in [one.id for one in client.files.list(purpose="fine-tune")]
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert file.id not in [one.id for one in client.files.list()]


def test_files_are_paged_by_the_last_id_in_both_orders(client):
    made = [client.files.create(file=("a.jsonl", rows(1)), purpose="fine-tune").id for _ in range(5)]
    first = client.files.list(limit=2)
    assert [one.id for one in first.data] == made[:-3:-1]
    assert first.has_more
    walked = [one.id for one in client.files.list(limit=2)]
    assert walked[:5] == made[::-1]
    assert len(walked) == len(set(walked))
    after = client.files.list(limit=2, order="asc", after=made[0])
    assert [one.id for one in after.data] == made[1:3]


def test_a_new_job_has_the_numbers_that_auto_stands_for(client, file):
    job = client.fine_tuning.jobs.create(
        model="demo",
        training_file=file.id,
        validation_file=file.id,
        suffix="support",
        metadata={"team": "a"},
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": "auto"}}},
    )
    assert job.status == "validating_files"
    assert job.organization_id == "acme"
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (3, 2)
    assert job.method.supervised.hyperparameters.learning_rate_multiplier == 1.0
    assert (job.training_file, job.validation_file) == (file.id, file.id)
    assert job.metadata == {"team": "a"}
    assert job.seed >= 0
    assert client.fine_tuning.jobs.retrieve(job.id) == job


def test_the_multiplier_multiplies_the_default_learning_rate_of_the_objective(client, file, service):
    jobs = client.fine_tuning.jobs
    sft = jobs.create(model="demo", training_file=file.id, hyperparameters={"learning_rate_multiplier": 0.5})
    assert sft.weftune["job"]["learning_rate"] == pytest.approx(1e-4)
    pairs = client.files.create(file=("p.jsonl", rows(8, PAIR)), purpose="fine-tune")
    hyperparameters = {"beta": 0.3, "learning_rate_multiplier": 2.0, "n_epochs": 1}
    method = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
    dpo = jobs.create(model="demo", training_file=pairs.id, method=method)
    assert dpo.method.type == "dpo"
    assert dpo.method.dpo.hyperparameters.beta == 0.3
    assert dpo.weftune["job"]["objective"] == {"kind": "dpo", "beta": 0.3}
    assert dpo.weftune["job"]["learning_rate"] == pytest.approx(2e-6)


def test_keys_under_weftune_are_those_of_jobs_yaml(client, file):
    extension = {"adapter": {"kind": "dora", "rank": 4}, "priority": 3, "learning_rate": 1e-3, "steps": 7}
    job = client.fine_tuning.jobs.create(
        model="demo", training_file=file.id, extra_body={"weftune": extension}
    )
    found = job.weftune["job"]
    assert found["adapter"] == {"kind": "dora", "rank": 4}
    assert (found["learning_rate"], found["steps"], job.weftune["priority"]) == (1e-3, 7, 3)
    assert "epochs" not in found
    assert job.hyperparameters.n_epochs is None


def test_jobs_are_listed_newest_first_with_a_cursor_and_by_metadata(client, file):
    jobs = client.fine_tuning.jobs
    made = [
        jobs.create(model="demo", training_file=file.id, metadata={"walk": str(n % 2)}).id for n in range(4)
    ]
    page = jobs.list(limit=3)
    assert [one.id for one in page.data] == made[:0:-1]
    assert page.has_more
    assert [one.id for one in jobs.list(limit=3)][:4] == made[::-1]
    assert [one.id for one in jobs.list(metadata={"walk": "1"})] == [made[3], made[1]]


STATES = {
    "queued": ([], "queued"),
    "running": ([State.RUNNING], "running"),
    "paused": ([State.RUNNING, State.PAUSED], "queued"),
    "succeeded": ([State.RUNNING, State.SUCCEEDED], "succeeded"),
    "failed": ([State.RUNNING, State.FAILED], "failed"),
    "cancelled": ([State.CANCELLED], "cancelled"),
}


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_one_that_the_client_knows(name, client, job, training):
    states, expected = STATES[name]
    training.enter(job.id, *states, step=4, steps=8, trained_tokens=99)
    found = client.fine_tuning.jobs.retrieve(job.id)
    assert found.status == expected
    assert found.weftune["state"] == name
    has_ended = name in ("succeeded", "failed", "cancelled")
    assert (found.trained_tokens == 99) == has_ended
    assert (found.finished_at is not None) == has_ended
    assert (found.fine_tuned_model is not None) == (name == "succeeded")
    assert (found.error is not None) == (name == "failed")


def test_events_are_paged_newest_first_and_their_metrics_are_a_csv_file(client, job, training):
    training.enter(job.id, State.RUNNING)
    training.add_metrics(job.id, 25)
    jobs = client.fine_tuning.jobs
    page = jobs.list_events(job.id, limit=10)
    assert (len(page.data), page.has_more) == (10, True)
    events = list(jobs.list_events(job.id, limit=10))
    assert [event.data["train_loss"] for event in events] == [1 / step for step in range(25, 0, -1)]
    assert {event.type for event in events} == {"metrics"}
    assert jobs.retrieve(job.id).result_files == []


def test_the_result_file_of_a_finished_job_has_the_metrics_of_every_step(client, job, training):
    training.enter(job.id, State.RUNNING, State.SUCCEEDED, step=5)
    training.add_metrics(job.id, 5)
    (result,) = client.fine_tuning.jobs.retrieve(job.id).result_files
    content = client.files.content(result).read()
    table = list(csv.DictReader(io.StringIO(content.decode())))
    assert [row["step"] for row in table] == ["1", "2", "3", "4", "5"]
    assert [float(row["train_loss"]) for row in table] == [1 / step for step in range(1, 6)]
    described = client.files.retrieve(result)
    assert (described.purpose, described.bytes) == ("fine-tune-results", len(content))


def test_checkpoints_are_listed_and_are_models(client, job, training):
    training.enter(job.id, State.RUNNING)
    rows = [training.add_checkpoint(job.id, step) for step in (4, 8, 12)]
    found = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=2))
    assert [one.step_number for one in found] == [12, 8, 4]
    assert found[0].id == rows[-1].id
    assert (found[0].metrics.train_loss, found[0].metrics.full_valid_loss) == (0.5, 0.75)
    name = found[0].fine_tuned_model_checkpoint
    assert name.endswith(f"{job.id}:ckpt-step-12")
    assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(name.replace("step-12", "step-13"))


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume"])
def test_a_request_to_change_a_job_is_stored_for_training(verb, client, job, training):
    training.enter(job.id, State.RUNNING)
    before = len(training.requests.commands_after(0))
    answer = getattr(client.fine_tuning.jobs, verb)(job.id)
    assert answer.id == job.id
    stored = training.requests.commands_after(0)[before:]
    assert [(one.job, one.tenant, one.verb) for one in stored] == [(job.id, "acme", verb)]


def test_a_finished_model_is_listed_and_deleted_at_once(client, job, training):
    training.enter(job.id, State.RUNNING, State.SUCCEEDED)
    name = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert name == f"ft:HuggingFaceTB/SmolLM2-135M-Instruct:acme:support:{job.id}"
    assert name in [model.id for model in client.models.list()]
    assert client.models.retrieve(name).owned_by == "acme"
    assert client.models.delete(name).deleted
    assert name not in [model.id for model in client.models.list()]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(name)


def test_a_job_may_start_from_a_finished_model(client, service, file, training, tmp_path):
    extension = {"weftune": {"adapter": {"rank": 4}}}
    first = client.fine_tuning.jobs.create(model="demo", training_file=file.id, extra_body=extension)
    training.enter(first.id, State.RUNNING, State.SUCCEEDED)
    folder = service.settings.jobs / first.id
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"{}")
    name = client.fine_tuning.jobs.retrieve(first.id).fine_tuned_model
    second = client.fine_tuning.jobs.create(model=name, training_file=file.id)
    assert second.model == name
    assert second.weftune["job"]["adapter"] == {"rank": 4}
    stored = training.submission(second.id).job["adapter"]
    assert stored == {"rank": 4, "init_from": str(folder)}


def test_a_job_is_prepared_and_its_tokens_are_cached(client, job, training):
    found = training.wait_until_prepared(job.id)
    assert found.refusal is None


def test_a_job_whose_rows_do_not_fit_its_method_is_refused_with_the_reason(client, file, training):
    job = client.fine_tuning.jobs.create(model="demo", training_file=file.id, method={"type": "dpo"})
    found = training.wait_until_prepared(job.id)
    assert found.refusal["code"] == "invalid_training_file"
    assert "needs preference pairs" in found.refusal["message"]
