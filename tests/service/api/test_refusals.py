"""Wrong requests are answered with OpenAI's typed errors, which name the value at fault."""

from __future__ import annotations

import json

import openai
import pytest

from tests.cases import takes_less
from tests.service.api.running import PAIR, ROW, openai_client, rows, start_service
from tests.traversal import PAYLOADS
from weftune.adapters.kinds import KINDS
from weftune.jobs.spec.build import LOCATED
from weftune.jobs.store.status import State
from weftune.service.api.guard import MAX_JSON_BYTES, SECURITY_HEADERS
from weftune.service.api.job_request import REFUSED_KEYS

JOBS = "/v1/fine_tuning/jobs"


def refused(service, body, **more):
    """Return the error of a job that is refused."""
    status, headers, content = service.call("POST", JOBS, body, **more)
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert headers["x-request-id"]
    return status, error


KINDS_OF_REQUESTS = {
    "no body": (b"", None, "required"),
    "no JSON": (b"{", "invalid_json", "not valid JSON"),
    "a list": (b"[]", None, "dictionary"),
    "a key twice": (b'{"model": "demo", "model": "demo"}', "invalid_json", "stands twice"),
    "no training file": ({"model": "demo"}, "training_file", "is required"),
    "an unknown file": ({"model": "demo", "training_file": "file-0"}, "training_file", "there is no file"),
    "a number for a name": ({"model": 3, "training_file": "FILE"}, "model", "string, got 3"),
    "an unknown key": ({"model": "demo", "training_file": "FILE", "sufix": "a"}, "sufix", "mean suffix?"),
    "a long suffix": ({"model": "demo", "training_file": "FILE", "suffix": "a" * 65}, "suffix", "at most 64"),
    "a suffix with a colon": ({"model": "demo", "training_file": "FILE", "suffix": "a:b"}, "suffix", "match"),
    "too much metadata": (
        {"model": "demo", "training_file": "FILE", "metadata": {str(n): "" for n in range(17)}},
        "metadata",
        "at most 16",
    ),
    "metadata that is no text": (
        {"model": "demo", "training_file": "FILE", "metadata": {"a": 1}},
        "metadata.a",
        "string, got 1",
    ),
    "an integration": (
        {"model": "demo", "training_file": "FILE", "integrations": [{"type": "wandb"}]},
        "integrations",
        "not supported",
    ),
    "reinforcement": (
        {"model": "demo", "training_file": "FILE", "method": {"type": "reinforcement"}},
        "method.type",
        "write supervised or dpo",
    ),
    "an unknown method": (
        {"model": "demo", "training_file": "FILE", "method": {"type": "sft"}},
        "method.type",
        "'supervised'",
    ),
    "both forms of hyperparameters": (
        {
            "model": "demo",
            "training_file": "FILE",
            "method": {"type": "supervised"},
            "hyperparameters": {"n_epochs": 1},
        },
        "hyperparameters",
        "leave it out beside method",
    ),
    "keys of another method": (
        {"model": "demo", "training_file": "FILE", "method": {"type": "supervised", "dpo": {}}},
        "method.dpo",
        "the method is supervised",
    ),
    "an unknown adapter key": (
        {"model": "demo", "training_file": "FILE", "weftune": {"adapter": {"rnk": 4}}},
        "weftune.adapter.rnk",
        "did you mean rank?",
    ),
    "an unknown objective": (
        {"model": "demo", "training_file": "FILE", "weftune": {"objective": "dop"}},
        "weftune.objective.kind",
        "did you mean dpo?",
    ),
    "contradicting objectives": (
        {
            "model": "demo",
            "training_file": "FILE",
            "method": {"type": "supervised"},
            "weftune": {"objective": "orpo"},
        },
        "weftune.objective",
        "contradicts method.type",
    ),
    "two learning rates": (
        {
            "model": "demo",
            "training_file": "FILE",
            "hyperparameters": {"learning_rate_multiplier": 2},
            "weftune": {"learning_rate": 1e-4},
        },
        "weftune.learning_rate",
        "not both",
    ),
    "a deadline in the past": (
        {"model": "demo", "training_file": "FILE", "weftune": {"deadline": 1.5e9}},
        "weftune.deadline",
        "is in the past",
    ),
    "half a surrogate pair": (
        b'{"model": "demo", "training_file": "FILE", "metadata": {"a": "\\ud800"}}',
        None,
        "surrogate",
    ),
}


@pytest.mark.parametrize("name", KINDS_OF_REQUESTS)
def test_a_wrong_request_is_answered_with_400_and_the_key_at_fault(name, service, file):
    body, param, expected = KINDS_OF_REQUESTS[name]
    body = json.loads(json.dumps(body).replace('"FILE"', f'"{file.id}"')) if isinstance(body, dict) else body
    status, error = refused(service, body)
    assert status == 400, error
    assert error["type"] == "invalid_request_error"
    assert expected in error["message"], error
    if isinstance(body, dict):
        assert error["param"] == param


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "0", "-1", "1e400", "1000000", '"x"'])
@pytest.mark.parametrize(
    "key", ["n_epochs", "learning_rate_multiplier", "batch_size", "rank", "learning_rate", "beta", "priority"]
)
def test_fault_14_hyperparameters_out_of_range_are_refused_under_their_name(key, value, service, file):
    fits = {
        ("1000000", "learning_rate_multiplier"),
        ("1000000", "batch_size"),
        ("1000000", "learning_rate"),
        ("1000000", "beta"),
        ("0", "priority"),
        ("-1", "priority"),
        ("1000000", "priority"),
    }
    if (value, key) in fits:
        pytest.skip("this is a value that the key may have")
    place = {
        "rank": f'"weftune": {{"adapter": {{"rank": {value}}}}}',
        "learning_rate": f'"weftune": {{"learning_rate": {value}}}',
        "priority": f'"weftune": {{"priority": {value}}}',
        "beta": f'"method": {{"type": "dpo", "dpo": {{"hyperparameters": {{"beta": {value}}}}}}}',
    }.get(key, f'"hyperparameters": {{"{key}": {value}}}')
    body = f'{{"model": "demo", "training_file": "{file.id}", {place}}}'
    status, error = refused(service, body.encode())
    assert status == 400
    is_number = value not in ("NaN", "Infinity", "-Infinity", "1e400")
    assert key in (error["param"] or "") if is_number else "not valid JSON" in error["message"]


def test_no_key_that_names_a_file_or_module_of_the_server_is_taken(service, file):
    refused_keys = {(section, key) for section, keys in REFUSED_KEYS.items() for key in keys}
    located = {(section, key) for section, key, _ in LOCATED if section != "data"}
    for section, key in located | refused_keys:
        if section in ("adapter", "objective", "eval"):
            body = {"model": "demo", "training_file": file.id, "weftune": {section: {key: "/etc/passwd"}}}
            status, error = refused(service, body)
            assert (status, error["param"]) == (400, f"weftune.{section}.{key}")
    for key in ("chat_template", "data", "path", "output", "base"):
        body = {"model": "demo", "training_file": file.id, "weftune": {key: "/etc/passwd"}}
        assert refused(service, body)[1]["param"] == f"weftune.{key}"


def test_errors_have_the_clients_own_types(service, client, file):
    jobs = client.fine_tuning.jobs
    with pytest.raises(openai.BadRequestError) as error:
        jobs.create(model="demo", training_file="file-none")
    assert (error.value.code, error.value.param) == ("file_not_found", "training_file")
    assert error.value.request_id
    with pytest.raises(openai.NotFoundError):
        jobs.retrieve("ftjob-none")
    with pytest.raises(openai.NotFoundError) as error:
        jobs.create(model="gpt-4o-mini", training_file=file.id)
    assert error.value.code == "model_not_found"
    wrong = openai_client(service.url, "tml-wft-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as error:
        wrong.models.list()
    assert error.value.code == "invalid_api_key"


def test_a_job_that_has_ended_cannot_be_changed_but_cancelled_twice(client, job, training):
    training.enter(job.id, State.CANCELLED)
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError) as error:
        client.fine_tuning.jobs.resume(job.id)
    assert error.value.code == "invalid_state"


def test_a_file_that_a_job_needs_is_not_deleted(client, file, job, training):
    def assert_in_use():
        with pytest.raises(openai.BadRequestError) as error:
            client.files.delete(file.id)
        assert error.value.code == "file_in_use"

    assert_in_use()
    training.wait_until_prepared(job.id)
    # Training has not read yet that it is prepared.
    assert_in_use()
    training.enter(job.id, State.CANCELLED)
    assert client.files.delete(file.id).deleted


UPLOADS = {
    "a purpose of another API": ({"purpose": "batch"}, rows(1), "purpose", "must be fine-tune"),
    "no rows": ({}, b"", "file", "is empty"),
    "blank lines": ({}, b"\n\n\n", "file", "is empty"),
    "bytes that are no text": ({}, b"\x1f\x8b\x08\x00" + bytes(100), "file", ":1: "),
    "a bad row": ({}, rows(2) + b'{"messages": []}\n', "file", "rows.jsonl:3: `messages` is empty"),
    "a bad pair": ({}, (PAIR % (1, 1)).encode() + b'{"input": 1}\n', "file", "rows.jsonl:2: "),
    "unknown columns": ({}, b'{"question": "a", "answer": "b"}\n', "file", "no row format has these columns"),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_an_upload_that_cannot_be_trained_on_is_refused(name, client, service):
    more, content, param, expected = UPLOADS[name]
    before = sorted(service.settings.files.iterdir())
    with pytest.raises(openai.BadRequestError) as error:
        client.files.create(file=("rows.jsonl", content), **{"purpose": "fine-tune", **more})
    assert error.value.param == param
    assert expected in error.value.body["message"]
    assert sorted(service.settings.files.iterdir()) == before


def test_a_compressed_body_is_refused_before_it_is_read(service):
    for path in ("/v1/files", JOBS):
        status, _, content = service.call("POST", path, b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
        assert status == 415
        assert json.loads(content)["error"]["code"] == "unsupported_media_type"


def test_a_body_that_is_too_large_is_refused(service):
    status, _, _ = service.call("POST", JOBS, b" " * (MAX_JSON_BYTES + 1))
    assert status == 413


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/nothing"), ("PUT", "/v1/files"), ("GET", "/healthz"), ("GET", "/v1/models")],
)
def test_fault_25_every_answer_has_headers_that_protect_browsers(method, path, service):
    _, headers, _ = service.call(method, path)
    for name, value in SECURITY_HEADERS.items():
        assert headers[name] == value
    assert headers["x-request-id"].startswith("req-")
    assert "server" not in {name.lower() for name in headers}


def test_fault_25_script_in_names_is_returned_as_json_only(service, client):
    name = "<script>alert(1)</script>.jsonl"
    file = client.files.create(file=(name, rows(1)), purpose="fine-tune")
    assert file.filename == "script>.jsonl"
    _, headers, _ = service.call("GET", f"/v1/files/{file.id}")
    assert headers["content-type"] == "application/json"
    _, headers, _ = service.call("GET", f"/v1/files/{file.id}/content")
    assert headers["content-disposition"] == "attachment"


def test_fault_9_a_foreign_tenant_sees_the_answer_of_an_unknown_id_everywhere(service, client, training):
    file = client.files.create(file=("a.jsonl", rows(2)), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(model="demo", training_file=file.id, suffix="secret")
    training.enter(job.id, State.RUNNING, State.SUCCEEDED, step=1)
    checkpoint = training.add_checkpoint(job.id, 1)
    extension = {"eval": {"fraction": 0.5}, "sweep": {"over": {"warmup": [0, 1]}}}
    sweep = client.fine_tuning.jobs.create(
        model="demo", training_file=file.id, extra_body={"weftune": extension}
    )
    result = f"file-results-{job.id}"
    model = str(training.model(training.submission(job.id)))
    document = json.loads(service.call("GET", "/openapi.json", tenant=None)[2])
    ids = {
        "{file_id}": (file.id, result),
        "{job_id}": (job.id, sweep.id),
        "{sweep_id}": (sweep.id,),
        "{model}": (model, checkpoint.model),
        "{checkpoint_id}": (checkpoint.id,),
        "{step}": ("1",),
    }
    checked = 0
    for path, operations in document["paths"].items():
        known = [name for name in ids if name in path]
        if not known or not path.startswith(("/v1", "/api")):
            assert "{" not in path, path
            continue
        for method in operations:
            for id in ids[known[0]]:
                unknown = id[:-3] + "zzz"
                body = {} if method in ("post", "put", "patch") else None
                answers = [
                    service.call(method.upper(), path.replace(known[0], one), body, tenant="other")
                    for one in (id, unknown)
                ]
                assert [status for status, _, _ in answers] in ([404, 404], [400, 400]), (method, path)
                assert answers[0][2].replace(id.encode(), b"") == answers[1][2].replace(unknown.encode(), b"")
                checked += 1
    assert checked >= 10
    body = {"model": "demo", "training_file": file.id}
    assert refused(service, body, tenant="other")[1]["code"] == "file_not_found"
    body = {"model": model, "training_file": file.id}
    assert refused(service, body, tenant="other")[1]["code"] == "model_not_found"
    other = service.client("other")
    assert file.id not in [one.id for one in other.files.list()]
    assert job.id not in [one.id for one in other.fine_tuning.jobs.list()]
    assert list(other.files.list(after=file.id)) == []
    assert model not in [one.id for one in other.models.list()]


@pytest.mark.parametrize(
    "payloads", [PAYLOADS[::4], pytest.param(PAYLOADS, marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_fault_10_names_and_ids_never_become_paths(payloads, service, client):
    from urllib.parse import quote

    outside = service.settings.store.parent / "outside.jsonl"
    outside.write_bytes(rows(1))
    files = set(service.settings.store.rglob("*"))
    for payload in payloads:
        name = payload.replace("\0", "")
        made = client.files.create(file=(name or "a", rows(1)), purpose="fine-tune")
        assert "/" not in made.filename
        assert client.files.delete(made.id).deleted
        for path in (f"/v1/files/{quote(payload, safe='')}", f"/v1/files/{quote(payload, safe='')}/content"):
            assert service.call("GET", path)[0] in (400, 404, 405)
        assert service.call("GET", f"/v1/models/{quote(payload, safe='')}")[0] in (200, 400, 404)
        body = {"model": "demo", "training_file": payload, "suffix": payload or None}
        assert service.call("POST", JOBS, body)[0] == 400
    appeared = set(service.settings.store.rglob("*")) - files
    assert {path.parent.name for path in appeared} <= {"store", "files"}


def test_quotas_have_typed_errors(tmp_path):
    service = start_service(
        tmp_path,
        quotas={"queued_jobs": 1, "stored_bytes": 5000, "file_bytes": 4000, "file_rows": 30},
    )
    try:
        client = service.client()
        file = client.files.create(file=("a.jsonl", rows(20)), purpose="fine-tune")
        for content, code in ((rows(60), "file_too_large"), (rows(20) * 2, "storage_quota_exceeded")):
            with pytest.raises(openai.APIStatusError) as error:
                client.files.create(file=("a.jsonl", content[:3990]), purpose="fine-tune") if code.startswith(
                    "s"
                ) else client.files.create(file=("a.jsonl", content), purpose="fine-tune")
            assert (error.value.status_code, error.value.code) == (413, code)
        client.fine_tuning.jobs.create(model="demo", training_file=file.id)
        with pytest.raises(openai.RateLimitError) as error:
            client.fine_tuning.jobs.create(model="demo", training_file=file.id)
        assert error.value.code == "queued_jobs_quota_exceeded"
        assert int(error.value.response.headers["retry-after"]) > 0
        assert [path.suffix for path in service.settings.files.iterdir()] == [".jsonl"]
    finally:
        service.stop()


def test_a_file_with_too_many_rows_is_refused(tmp_path):
    service = start_service(tmp_path, quotas={"file_rows": 30})
    try:
        with pytest.raises(openai.BadRequestError) as error:
            service.client().files.create(file=("a.jsonl", rows(31)), purpose="fine-tune")
        assert "more than 30 rows" in error.value.body["message"]
    finally:
        service.stop()


def test_every_adapter_kind_is_taken(client, file):
    for kind in KINDS:
        extension = {"weftune": {"adapter": {"kind": kind}}}
        job = client.fine_tuning.jobs.create(model="demo", training_file=file.id, extra_body=extension)
        assert job.weftune["job"]["adapter"]["kind"] == kind


@pytest.mark.timed
def test_ten_megabytes_of_rows_are_checked_within_two_seconds_of_processor_time(tmp_path):
    from weftune.service.preparer import check_file

    path = tmp_path / "rows.jsonl"
    row = ROW.replace("It is %d.", "It is %d. " + "yes " * 100) % (1, 1)
    path.write_text(row * (10_000_000 // len(row)))

    def check() -> None:
        assert check_file(path, "rows.jsonl", 10**6) == 10_000_000 // len(row)

    assert takes_less(2, check)


def test_a_mistake_of_the_service_is_a_typed_500_with_the_id_that_its_log_has(tmp_path):
    service = start_service(tmp_path)
    try:
        file = service.client().files.create(file=("a.jsonl", rows(1)), purpose="fine-tune")
        service.settings.file_path(file.id).unlink()
        service.settings.file_path(file.id).mkdir()
        status, headers, content = service.call("DELETE", f"/v1/files/{file.id}")
        assert status == 500
        assert json.loads(content)["error"]["code"] == "internal_error"
        assert headers["content-security-policy"]
        log = service.log.read_text()
        assert "IsADirectoryError" in log
        assert headers["x-request-id"] in log
        assert service.keys["acme"] not in log
    finally:
        service.stop()
