"""The middleware that every request passes first. It assigns an id, checks the API key, limits size and time,
and adds security headers to the response."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weftune.errors import UserError
from weftune.service.api.errors import ApiError, error_response

log = logging.getLogger(__name__)

MAX_JSON_BYTES = 512 << 10
"""Maximum bytes of a request that is not an upload. 200 simultaneous requests need at most 100 MiB."""
MIN_BYTES_PER_SECOND = 16 << 10
"""Minimum rate of an upload in bytes per second, which is enforced once the upload has lasted `body_seconds`.
Slower uploads are ended."""
DRAIN_BYTES, DRAIN_SECONDS = 4 << 20, 2.0
"""Limits for reading the body of a request that has already been refused: maximum bytes, and maximum
seconds."""
GUARDED = re.compile(r"/(v1|api)(/|$)")
"""Prefixes of the paths for which requests need an API key."""
UNLOGGED = ("/healthz", "/readyz", "/metrics")
"""Paths of requests that are not logged, since monitoring sends them every few seconds."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
HEADERS = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]


Observe = Callable[[Scope, int, float], None]
"""Function that is called after each response with the request's scope, the status, and the duration in
seconds."""


class Keys(Protocol):
    def find_tenant(self, key: str) -> str | None:
        """Return the tenant of an API key, or None if the key does not exist."""
        ...


@dataclass(frozen=True, slots=True)
class RequestLimits:
    body_seconds: float = 30.0
    """Maximum seconds between two received parts of a request's body, and maximum seconds in total for a body
    that is not an upload."""
    upload_bytes: int = 512 << 20
    """Maximum bytes of an upload, including its multipart headers."""


class Guard:
    """An ASGI middleware that checks every request before it reaches the application."""

    def __init__(self, app: ASGIApp, keys: Keys, limits: RequestLimits, record_request: Observe) -> None:
        self._app, self._keys, self._limits, self._observe = app, keys, limits, record_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        state = scope.setdefault("state", {})
        state["tenant"] = None
        wanted = headers.get(b"x-request-id", b"").decode("latin-1")
        state["request_id"] = wanted if REQUEST_ID.fullmatch(wanted) else f"req-{secrets.token_hex(12)}"
        begun, status = time.monotonic(), 0

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name.lower() for name, _ in message.get("headers", ())}
                more = [(name, value) for name, value in HEADERS if name not in own]
                more.append((b"x-request-id", state["request_id"].encode()))
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            self._check_request(scope, headers)
        except ApiError as refusal:
            await self._drain_body(receive)
            await refusal.response()(scope, receive, send_guarded)
        else:
            try:
                await self._app(scope, self._limit_receive(scope, receive), send_guarded)
            except ClientDisconnect:
                log.info("%s: the client has gone", state["request_id"])
            except Exception:
                log.exception("%s", state["request_id"])
                if status:
                    raise
                message = "The service has made a mistake, which its log describes."
                await error_response(500, message, "internal_error")(scope, receive, send_guarded)
        seconds = time.monotonic() - begun
        self._observe(scope, status, seconds)
        if scope["path"] not in UNLOGGED:
            words = state["request_id"], state["tenant"] or "-", scope["method"], _raw_path(scope)
            log.info("%s %s %s %s %d %.0f ms", *words, status, seconds * 1e3)

    async def _drain_body(self, receive: Receive) -> None:
        """Read the body of a refused request, up to a limit, since a client does not read the response while
        it is still writing."""
        received = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while received < DRAIN_BYTES:
                    message = await receive()
                    received += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    def _check_request(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise an error if a request must be refused before its body is read, such as for an invalid API
        key. Otherwise store the tenant of its API key in the ASGI scope."""
        if b"%00" in scope.get("raw_path", b"") or b"%00" in scope.get("query_string", b""):
            raise ApiError(400, "The address holds a zero byte.", code="invalid_value")
        scope["state"]["tenant"] = tenant = self._tenant_of_key(headers)
        if tenant is None and GUARDED.match(scope["path"]):
            raise unauthorized_error()
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(415, "Send the body without Content-Encoding: it is not decompressed.")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_bytes(scope):
            raise too_large_error(self._max_bytes(scope))

    def _tenant_of_key(self, headers: dict[bytes, bytes]) -> str | None:
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        try:
            return self._keys.find_tenant(key.strip()) if scheme.lower() == "bearer" and key else None
        except UserError as error:
            log.error("%s", error)
            raise ApiError(
                503, "The keys cannot be read.", code="store_unavailable", headers={"Retry-After": "2"}
            ) from None

    def _max_bytes(self, scope: Scope) -> int:
        return self._limits.upload_bytes if is_upload(scope) else MAX_JSON_BYTES

    def _limit_receive(self, scope: Scope, receive: Receive) -> Receive:
        """Wrap an ASGI `receive` function and return one with limits: a client that sends too many bytes gets
        status 413, and a client that is too slow gets 408."""
        max_bytes, seconds = self._max_bytes(scope), self._limits.body_seconds
        begun, received, is_whole = time.monotonic(), 0, False

        async def receive_limited() -> Message:
            nonlocal received, is_whole
            if is_whole:
                return await receive()
            allowed = seconds + (received / MIN_BYTES_PER_SECOND if is_upload(scope) else 0.0)
            left = min(seconds, begun + allowed - time.monotonic())
            try:
                message = await asyncio.wait_for(receive(), max(0.0, left))
            except TimeoutError:
                raise ApiError(
                    408, "The request's body came too slowly.", code="request_timeout", headers=CLOSE
                ) from None
            received += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if received > max_bytes:
                raise too_large_error(max_bytes)
            return message

        return receive_limited


def _raw_path(scope: Scope) -> str:
    """Return the path of a request in its percent-encoded form, which cannot contain line breaks."""
    return str(scope.get("raw_path", b"").decode("latin-1")[:200])


CLOSE = {"Connection": "close"}


def is_upload(scope: Scope) -> bool:
    return bool(scope["method"] == "POST" and scope["path"].rstrip("/") == "/v1/files")


def unauthorized_error() -> ApiError:
    return ApiError(
        401,
        "The API key is missing or not valid; send Authorization: Bearer KEY, with a key that "
        "`weftune keys create` has printed.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def too_large_error(max_bytes: int) -> ApiError:
    message = f"The request is larger than {max_bytes:,} bytes, which this service does not take."
    return ApiError(413, message, headers=CLOSE)
