"""The OpenAPI document: it is what the client's own types say, and what the service does."""

from __future__ import annotations

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import openai.types as theirs
import openai.types.fine_tuning as tuning
import pytest
from openai.types.fine_tuning import job_create_params
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint
from pydantic import BaseModel

ANSWERS = {
    ("get", "/v1/files/{file_id}"): theirs.FileObject,
    ("post", "/v1/files"): theirs.FileObject,
    ("delete", "/v1/files/{file_id}"): theirs.FileDeleted,
    ("post", "/v1/fine_tuning/jobs"): tuning.FineTuningJob,
    ("get", "/v1/fine_tuning/jobs/{job_id}"): tuning.FineTuningJob,
    ("post", "/v1/fine_tuning/jobs/{job_id}/cancel"): tuning.FineTuningJob,
    ("post", "/v1/fine_tuning/jobs/{job_id}/pause"): tuning.FineTuningJob,
    ("post", "/v1/fine_tuning/jobs/{job_id}/resume"): tuning.FineTuningJob,
    ("get", "/v1/models/{model}"): theirs.Model,
    ("delete", "/v1/models/{model}"): theirs.ModelDeleted,
}
PAGES = {
    "/v1/files": theirs.FileObject,
    "/v1/fine_tuning/jobs": tuning.FineTuningJob,
    "/v1/fine_tuning/jobs/{job_id}/events": tuning.FineTuningJobEvent,
    "/v1/fine_tuning/jobs/{job_id}/checkpoints": FineTuningJobCheckpoint,
    "/v1/models": theirs.Model,
}
REQUESTS = {("post", "/v1/fine_tuning/jobs"): job_create_params.JobCreateParams}
REFUSED = {
    "FineTuningJob.method.reinforcement": "the service has no reinforcement fine-tuning",
    "FineTuningJob.method.type reinforcement": "the service has no reinforcement fine-tuning",
    "FineTuningJob.integrations.type": "a job has no integrations",
    "FineTuningJob.integrations.wandb": "a job has no integrations",
    "JobCreateParams.integrations.type": "integrations are refused with a typed error",
    "JobCreateParams.integrations.wandb": "integrations are refused with a typed error",
    "JobCreateParams.method.reinforcement.grader": "reinforcement is refused with a typed error",
    "JobCreateParams.method.reinforcement.hyperparameters": "reinforcement is refused with a typed error",
    "FileObject.purpose": "files have the purposes fine-tune and fine-tune-results only",
    "Model.shutdown_date": "models are not shut down",
}
"""Maps keys and values of the client that the service does not have to the reason."""


class Document:
    """The OpenAPI document, whose references are followed."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def follow(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self.content["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def variants(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        schema = self.follow(schema)
        inner = schema.get("anyOf") or schema.get("oneOf")
        return [schema] if inner is None else [found for one in inner for found in self.variants(one)]

    def answer(self, method: str, path: str) -> dict[str, Any]:
        content = self.content["paths"][path][method]["responses"]["200"]["content"]
        return self.follow(content["application/json"]["schema"])

    def request(self, method: str, path: str) -> dict[str, Any]:
        content = self.content["paths"][path][method]["requestBody"]["content"]
        return self.follow(content["application/json"]["schema"])


@pytest.fixture(scope="module")
def document(service):
    status, headers, content = service.call("GET", "/openapi.json", tenant=None)
    assert (status, headers["content-type"]) == (200, "application/json")
    return Document(json.loads(content))


def members(hint: Any) -> list[Any]:
    """Return the members of a union, without annotations."""
    if get_origin(hint) is Annotated:
        return members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [found for one in get_args(hint) for found in members(one)]
    name = getattr(get_origin(hint), "__name__", "")
    return members(get_args(hint)[0]) if name in ("Required", "NotRequired") else [hint]


def fields_of(record: Any) -> dict[str, Any]:
    if isinstance(record, type) and issubclass(record, BaseModel):
        return {name: field.annotation for name, field in record.model_fields.items()}
    return get_type_hints(record, include_extras=True)


def is_record(hint: Any) -> bool:
    return is_typeddict(hint) or (isinstance(hint, type) and issubclass(hint, BaseModel))


JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def compare(document: Document, schema: dict[str, Any], hint: Any, name: str) -> dict[str, bool]:
    """Return for every key of the client's type whether the document has it with a fitting type."""
    found: dict[str, bool] = {}
    variants = document.variants(schema)
    for member in members(hint):
        if is_record(member):
            objects = [one for one in variants if "properties" in one]
            for key, below in fields_of(member).items():
                below_name = f"{name}.{key}"
                having = [one["properties"][key] for one in objects if key in one["properties"]]
                if name.endswith(".metadata") or not having:
                    found[below_name] = bool(having)
                    continue
                found |= compare(document, having[0], below, below_name)
        elif get_origin(member) is list or getattr(get_origin(member), "__name__", "") in (
            "Iterable",
            "Sequence",
        ):
            items = [one.get("items", {}) for one in variants if one.get("type") == "array"]
            inner = get_args(member)[0]
            found[name] = bool(items)
            if items and any(map(is_record, members(inner))):
                found |= compare(document, items[0], inner, name)
        elif get_origin(member) is Literal:
            own = {value for one in variants for value in one.get("enum", [one.get("const")])}
            free = any(one.get("type") == "string" and "enum" not in one for one in variants)
            for value in get_args(member):
                if value in own or free:
                    found.setdefault(name, True)
                else:
                    found[f"{name} {value}" if f"{name} {value}" in REFUSED else name] = False
        elif get_origin(member) is dict:
            found[name] = any(one.get("type") == "object" for one in variants)
        elif member in JSON_TYPES and not (member is type(None) and len(members(hint)) > 1):
            kinds = {one.get("type") for one in variants}
            wider = {"number", "integer"} if member is float else {JSON_TYPES[member]}
            found[name] = found.get(name, True) and (bool(kinds & wider) or not any(kinds))
        else:
            found.setdefault(name, True)
    return found


def test_the_document_has_every_key_of_the_clients_types_that_is_not_refused(document, capsys):
    found: dict[str, bool] = {}
    for (method, path), record in ANSWERS.items():
        found |= compare(document, document.answer(method, path), record, record.__name__)
    for path, record in PAGES.items():
        page = document.answer("get", path)
        assert {"data", "has_more", "object"} <= page["properties"].keys()
        found |= compare(document, page["properties"]["data"]["items"], record, record.__name__)
    for (method, path), record in REQUESTS.items():
        found |= compare(document, document.request(method, path), record, record.__name__)
    offered = {name: fits for name, fits in found.items() if name not in REFUSED}
    score = sum(offered.values()) / len(offered)
    with capsys.disabled():
        print(f"\nconformance with openai's types: {score:.1%} of {len(offered)} keys; refused:")
        for name, reason in REFUSED.items():
            print(f"  {name}: {reason}")
    assert [name for name, fits in offered.items() if not fits] == []
    assert len(offered) > 60
    # A refusal that is offered meanwhile no longer belongs in the list.
    assert [name for name in REFUSED if found.get(name, False)] == []


def test_every_key_that_a_client_requires_in_an_answer_is_required_in_the_document(document):
    for (method, path), record in ANSWERS.items():
        if issubclass(record, BaseModel):
            required = {name for name, field in record.model_fields.items() if field.is_required()}
            own = document.answer(method, path)
            # A key with a default is always there too, since answers are written whole.
            assert required <= own["properties"].keys(), (path, required)


def test_the_document_names_a_key_and_an_example_for_what_is_not_obvious(document):
    assert document.content["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    request = document.content["components"]["schemas"]["JobRequest"]
    assert request["examples"][0]["training_file"]
    for path, operations in document.content["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            assert "422" not in operation["responses"]


def test_the_example_of_the_document_is_taken(document, service, client, file):
    body = document.content["components"]["schemas"]["JobRequest"]["examples"][0]
    job = client.fine_tuning.jobs.create(
        **{
            **{key: value for key, value in body.items() if key != "weftune"},
            "training_file": file.id,
            "extra_body": {"weftune": body["weftune"]},
        }
    )
    assert job.status == "validating_files"


def answers_without_5xx(context: Any, response: Any, case: Any) -> None:
    """Chat alone may answer 503 here, since there is no training process."""
    is_chat = case.operation.path.endswith("/completions")
    allowed = is_chat and response.status_code == 503 and "retry-after" in response.headers
    assert response.status_code < 500 or allowed, response.status_code


CALLS, MANY_CALLS = 80, 10_000


@pytest.mark.parametrize("calls", [CALLS, pytest.param(MANY_CALLS, marks=pytest.mark.slow)])
def test_fault_15_random_calls_find_no_5xx_and_no_violation_of_the_document(calls, service):
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        answers_without_5xx,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    # A stream has no end that a call could wait for.
    left_out = ("/readyz", "/api/stream")
    operations = [found.ok() for found in schema.get_all_operations() if found.ok().path not in left_out]
    strategies = [
        operation.as_strategy(generation_mode=mode)
        for operation in operations
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    ]
    made = 0

    @given(case=st.one_of(strategies))
    @settings(
        max_examples=calls,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def call(case: Any) -> None:
        nonlocal made
        made += 1
        case.headers["Authorization"] = f"Bearer {service.keys['acme']}"
        case.call_and_validate(checks=checks)

    call()
    assert made >= calls * 0.9
