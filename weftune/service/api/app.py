"""The HTTP application of a service: OpenAI's API under /v1, and the endpoints for health, metrics and the
OpenAPI document."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import weftune
from weftune.service.api import chat as chats
from weftune.service.api import errors, files, jobs, models, native, page, sweeps
from weftune.service.api.context import Service, get_service
from weftune.service.api.guard import Guard, Keys, RequestLimits, unauthorized_error
from weftune.service.api.telemetry import Telemetry
from weftune.service.chat import ChatClient
from weftune.service.preparer import Preparer
from weftune.service.settings import ServiceSettings
from weftune.service.store.database import StoreUnavailable
from weftune.service.store.records import TrainingStore
from weftune.service.store.requests import RequestStore

ROUTERS = (files.router, jobs.router, models.router, chats.router, native.router, sweeps.router, page.router)
LOOPBACK = ("127.0.0.1", "::1")
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""HTTP headers whose presence shows that a proxy has forwarded a request, which may come from another
machine."""


def create_app(
    settings: ServiceSettings,
    requests: RequestStore,
    training: TrainingStore,
    keys: Keys,
    chat: ChatClient,
    limits: RequestLimits | None = None,
) -> FastAPI:
    """Return the service's HTTP application. The caller has opened `requests` for writing and `training` for
    reading."""
    preparer = Preparer(settings, requests)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        files.remove_unfinished(settings)
        preparer.start()
        yield
        preparer.close()

    app = FastAPI(
        title="Weftune",
        version=weftune.__version__,
        summary="Fine-tuning of many adapters on one base, with the API of OpenAI.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: (
            f"{route.tags[0] if route.tags else 'Service'}-{route.name}"
        ),
    )
    app.state.service = Service(settings, requests, training, chat, preparer)
    app.state.streams = native.Streams(keys)
    telemetry = Telemetry(requests, training)
    errors.install_error_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    add_health(app, telemetry)
    upload_bytes = settings.quotas.file_bytes + files.MULTIPART_BYTES
    app.add_middleware(
        Guard,
        keys=keys,
        limits=limits or RequestLimits(upload_bytes=upload_bytes),
        record_request=telemetry.record_request,
    )
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
    return app


def add_health(app: FastAPI, telemetry: Telemetry) -> None:
    @app.get("/healthz", tags=["Service"], summary="Whether the HTTP process answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", tags=["Service"], summary="Whether jobs can be submitted and trained")
    def readyz(request: Request) -> JSONResponse:
        """Answer 200 if the stores answer, the base is loaded and jobs can train; 503 with the reasons
        otherwise."""
        reasons = readiness(get_service(request))
        status = {"status": "unavailable" if reasons else "ok", "reasons": reasons}
        return JSONResponse(status, 503 if reasons else 200, {"Retry-After": "2"} if reasons else {})

    @app.get("/metrics", tags=["Service"], response_class=Response, summary="Metrics for Prometheus")
    def metrics(request: Request) -> Response:
        """Return metrics in Prometheus' text format. A request from this machine that no proxy has forwarded
        needs no key."""
        host = request.client.host if request.client else ""
        is_local = host in LOOPBACK and not any(name in request.headers for name in FORWARDED)
        if not is_local and request.state.tenant is None:
            raise unauthorized_error()
        content, kind = telemetry.text()
        return Response(content, headers={"content-type": kind})


def readiness(service: Service) -> list[str]:
    """Return the reasons why jobs cannot be submitted or trained now. The result is empty if they can."""
    reasons: list[str] = []
    try:
        service.requests.recent_submission("", "", 0.0)
    except StoreUnavailable as error:
        reasons.append(str(error))
    try:
        lease = service.training.lease()
        if lease is None or not lease.holder or lease.expires_at < time.time():
            reasons.append("The training process does not run.")
        elif not service.chat.has_server():
            reasons.append("The training process is loading the base.")
    except StoreUnavailable as error:
        reasons.append(str(error))
    return reasons


def openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document. It declares status 400 with OpenAI's error for invalid requests, instead
    of FastAPI's 422."""
    if app.openapi_schema is None:
        app.openapi_schema = FastAPI.openapi(app)
        for path in app.openapi_schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        parts = app.openapi_schema["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            parts.pop(name, None)
    return app.openapi_schema
