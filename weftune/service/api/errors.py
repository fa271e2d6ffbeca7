"""Errors of the HTTP API in OpenAI's form, `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from weftune.core.bounds import format_value
from weftune.jobs.spec.layer import ABSENT, child_value
from weftune.service.store.database import StoreUnavailable

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Maps an HTTP status to the `type` of the error object in the response. Statuses below 500 that are missing
here get the type `INVALID`."""
CODES: Mapping[int, str] = {
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}
UNKNOWN_KEY = "unknown_key"
"""Type of the pydantic errors for unknown keys in a request."""


class ApiError(HTTPException):
    """An error response. The message is a sentence that says what is wrong and how to correct it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code, self.param = code or CODES.get(status), param

    def response(self) -> JSONResponse:
        return error_response(self.status_code, str(self.detail), self.code, self.param, self.headers)


def invalid_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that can never succeed."""
    return ApiError(400, message, param=param, code=code)


def not_found(kind: str, id: str) -> ApiError:
    """Return the error for an id that does not exist or belongs to another tenant."""
    return ApiError(404, f"No such {kind}: {format_value(id)[1:-1]}", code=f"{kind}_not_found", param="id")


def quota_error(message: str, code: str, seconds: int) -> ApiError:
    """Return the error for an exceeded quota. The client may try again after `seconds`."""
    return ApiError(429, message, code=code, headers={"Retry-After": str(seconds)})


def error_response(
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    kind = "server_error" if status >= 500 else TYPES.get(status, INVALID)
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, headers=dict(headers or {}))


def install_error_handlers(app: FastAPI) -> None:
    """Register handlers that answer all kinds of errors in OpenAI's form."""

    @app.exception_handler(ApiError)
    def on_api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(StarletteHTTPException)
    def on_http_error(_: Request, error: StarletteHTTPException) -> JSONResponse:
        sentences = {404: "There is no such path.", 405: "This path does not take this method."}
        sentence = sentences.get(error.status_code, str(error.detail))
        code = CODES.get(error.status_code)
        return error_response(error.status_code, sentence, code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        param, message = describe_errors(error.errors(), error.body)
        return error_response(400, message, "invalid_value", param)

    @app.exception_handler(StoreUnavailable)
    def on_store_error(_: Request, error: StoreUnavailable) -> JSONResponse:
        log.warning("%s", error)
        seconds = max(1, math.ceil(error.retry_seconds))
        return error_response(503, str(error), "store_unavailable", headers={"Retry-After": str(seconds)})


# -- messages about wrong values ------------------------------------------------------------------------


def describe_errors(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str | None, str]:
    """Return the key of the first invalid value in a request, and a sentence about its errors. Pydantic
    reports one error per member of a union type; the sentence joins them."""
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for error in errors:
        key = _error_location(error["loc"], body, str(error["type"]))
        key = (*key, error["ctx"]["key"]) if error["type"] == UNKNOWN_KEY else key
        found.setdefault(key, []).append(error)
    # Members of a union that take a mapping report what is wrong inside: the deepest key is the one meant.
    around = {key[:length] for key in found for length in range(len(key))}
    key = next(key for key in found if key not in around)
    param = ".".join(key) or None
    return param, ": ".join(filter(None, (param, _error_sentence(found[key]))))


def _error_location(loc: Sequence[str | int], body: Any, kind: str) -> tuple[str, ...]:
    """Return the path of keys to an invalid value of a request: pydantic's location without the prefix `body`
    and without the names of union members."""
    if not loc or loc[0] != "body":
        return tuple(map(str, loc[1:]))
    key: list[str] = []
    for at, part in enumerate(loc[1:], start=1):
        value = child_value(body, part)
        if value is not ABSENT:
            body = value
        elif not (at == len(loc) - 1 and kind == "missing"):
            continue
        key.append(str(part))
    return tuple(key)


def _error_sentence(errors: Sequence[Mapping[str, Any]]) -> str:
    first = errors[0]
    if first["type"] == "missing":
        return "is required"
    if first["type"] == "json_invalid":
        return "The body is not valid JSON."
    if first["type"] == UNKNOWN_KEY:
        return str(first["msg"])
    said = [str(error["msg"]).removeprefix("Value error, ") for error in errors]
    said = [one.removeprefix("Input should be ").replace("a valid integer", "a whole number") for one in said]
    got = first.get("input")
    shown = "" if isinstance(got, Mapping | list) else f", got {format_value(got)}"
    starts = all("should be" in str(error["msg"]) for error in errors)
    return f"{'must be ' if starts else ''}{' or '.join(dict.fromkeys(said))}{shown}"
