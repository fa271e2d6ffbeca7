"""Parts that all HTTP routes share: access to the service's stores, the tenant of a request, and a route
class that parses JSON strictly."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from weftune.data.json_rows import DECODER, json_error_text
from weftune.data.row import is_deep_json
from weftune.service.api.errors import invalid_request
from weftune.service.api.schemas import Error
from weftune.service.chat import ChatClient
from weftune.service.preparer import Preparer
from weftune.service.settings import ServiceSettings
from weftune.service.store.records import TrainingStore
from weftune.service.store.requests import RequestStore


@dataclass(frozen=True, slots=True)
class Service:
    settings: ServiceSettings
    requests: RequestStore
    training: TrainingStore
    chat: ChatClient
    preparer: Preparer


def _request_tenant(request: Request) -> str:
    # Guard has refused every request to these paths that has no key.
    tenant: str = request.state.tenant
    return tenant


def get_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Tenant = Annotated[str, Depends(_request_tenant)]
"""Type of a route's parameter that receives the tenant of the request's API key."""
ServiceHere = Annotated[Service, Depends(get_service)]
BEARER = Depends(HTTPBearer(auto_error=False, description="A key that `weftune keys create` has printed."))
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Error, "description": "The request is refused."},
    "5XX": {"model": Error, "description": "The service cannot answer now."},
}


class _StrictRequest(Request):
    async def json(self) -> Any:
        """Return the parsed body. Infinite numbers, NaN, repeated keys and invalid Unicode are refused,
        although `json.loads` accepts them."""
        content = await self.body()
        try:
            text = content.decode()
            value = DECODER.decode(text.strip())
        except UnicodeDecodeError:
            raise invalid_request("The body is not UTF-8.", code="invalid_json") from None
        except (ValueError, RecursionError) as error:
            sentence = json_error_text(error, content.decode())
            raise invalid_request(f"The body is {sentence}.", code="invalid_json") from None
        if is_deep_json(text, value):
            raise invalid_request("The body is nested too deeply.", code="invalid_json")
        _refuse_broken_text(value)
        return value


def _refuse_broken_text(value: Any) -> None:
    """Raise an error if a string in `value` cannot be stored in a database."""
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
            sentence = "The body holds text with a zero character or half a surrogate pair."
            raise invalid_request(sentence, code="invalid_json")
    elif isinstance(value, dict):
        for key, below in value.items():
            _refuse_broken_text(key)
            _refuse_broken_text(below)
    elif isinstance(value, list):
        for below in value:
            _refuse_broken_text(below)


class StrictRoute(APIRoute):
    """A FastAPI route that refuses JSON bodies with NaN, repeated keys or invalid Unicode."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle_request(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle_request
