"""The models endpoints of OpenAI's API. They list the base model, finished adapters, and checkpoints, each
under a name of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from weftune.base.spec import DEMO
from weftune.jobs.store.status import State
from weftune.service.api.context import BEARER, ERRORS, Service, ServiceHere, StrictRoute, Tenant
from weftune.service.api.errors import ApiError, invalid_request
from weftune.service.api.schemas import Model, ModelDeleted, ModelPage
from weftune.service.ids import AdapterName, parse_adapter_name

router = APIRouter(
    prefix="/v1/models", tags=["Models"], route_class=StrictRoute, dependencies=[BEARER], responses=ERRORS
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that can answer prompts: the finished adapter of a job, or a checkpoint of the job."""

    job: str
    step: int | None
    """Step of a checkpoint. None for the finished adapter."""
    created_at: float
    folder: Path


def find_adapter(service: Service, tenant: str, name: str) -> Adapter | None:
    """Return the tenant's adapter with this name, or None if it does not exist or has been deleted."""
    parsed = parse_adapter_name(name)
    if parsed is None:
        return None
    row = service.training.job(parsed.job, tenant)
    if row is None or _is_deleted(service, row.id):
        return None
    folder = service.settings.jobs / row.id
    if parsed.step is None:
        return Adapter(row.id, None, row.finished_at or row.created_at, folder) if row.model == name else None
    for one in service.training.checkpoints(row.id):
        if one.model == name:
            return Adapter(row.id, one.step, one.at, folder / one.folder)
    return None


def find_training_adapter(service: Service, tenant: str, name: str) -> Adapter | None:
    """Return the adapter of a job that is training, found by the model name that the adapter will have when
    it is finished. None if the tenant trains no such job."""
    parsed = parse_adapter_name(name)
    row = None if parsed is None else service.training.job(parsed.job, tenant)
    if parsed is None or parsed.step is not None or row is None or row.state is not State.RUNNING:
        return None
    submission = service.requests.submission(tenant, row.id)
    suffix = None if submission is None else submission.suffix
    if name != str(AdapterName(service.settings.base_name, tenant, suffix or "", row.id)):
        return None
    return Adapter(row.id, None, row.created_at, service.settings.jobs / row.id)


def adapter_keys(service: Service, adapter: Adapter) -> dict[str, Any]:
    """Return the adapter keys, as in jobs.yaml, of a new adapter that starts from `adapter`: the keys of
    `adapter`, and its folder as `init_from`."""
    submission = service.requests.submission(None, adapter.job)
    assert submission is not None, f"{adapter.job} has been submitted"
    return {**submission.job["adapter"], "init_from": str(adapter.folder)}


@router.get("", response_model=ModelPage, summary="List models")
def list_models(tenant: Tenant, service: ServiceHere) -> ModelPage:
    """List the base and the tenant's finished adapters, the newest first."""
    deleted = _deleted_jobs(service)
    rows = service.training.jobs(tenant, states=[State.SUCCEEDED], limit=None)
    found = [
        Model(id=row.model, created=int(row.finished_at or row.created_at), owned_by=tenant)
        for row in rows
        if row.model is not None and row.id not in deleted
    ]
    return ModelPage(data=[_base_model(service), *found])


@router.get("/{model:path}", response_model=Model, summary="Get a model")
def get_model(model: str, tenant: Tenant, service: ServiceHere) -> Model:
    if is_base(service, model):
        return _base_model(service)
    adapter = find_adapter(service, tenant, model)
    if adapter is None:
        raise model_not_found(model)
    return Model(id=model, created=int(adapter.created_at), owned_by=tenant)


@router.delete("/{model:path}", response_model=ModelDeleted, summary="Delete a fine-tuned model")
def delete_model(model: str, tenant: Tenant, service: ServiceHere) -> ModelDeleted:
    """Delete a finished adapter with its checkpoints. The job and its events stay."""
    if is_base(service, model):
        raise invalid_request("The base cannot be deleted.", param="model", code="model_not_deletable")
    adapter = find_adapter(service, tenant, model)
    if adapter is None:
        raise model_not_found(model)
    if adapter.step is not None:
        raise invalid_request(
            "A checkpoint is deleted with its job's model; name that.",
            param="model",
            code="model_not_deletable",
        )
    service.requests.add_command(tenant, adapter.job, "delete")
    return ModelDeleted(id=model)


def is_base(service: Service, model: str) -> bool:
    """Return whether `model` is the name of the base, or `demo`, the alias of the built-in base."""
    settings = service.settings
    return model == settings.base_name or model == settings.base.model == DEMO


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"The model {model[:200]} does not exist.", code="model_not_found", param="model")


def _base_model(service: Service) -> Model:
    return Model(id=service.settings.base_name, created=0, owned_by="weftune")


def _deleted_jobs(service: Service) -> set[str]:
    """Return the jobs whose adapters will be deleted by commands that the training process has not read
    yet."""
    read = service.training.cursors().get("commands", 0)
    return {one.job for one in service.requests.commands_after(read) if one.verb == "delete"}


def _is_deleted(service: Service, job: str) -> bool:
    return job in _deleted_jobs(service)
