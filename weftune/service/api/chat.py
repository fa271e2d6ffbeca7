"""The endpoints of OpenAI's chat and text completions, streamed or in one response. The base, finished
adapters, checkpoints and adapters that are being trained can answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from weftune.core.bounds import format_value
from weftune.core.files import json_text
from weftune.service.api.context import BEARER, ERRORS, Service, ServiceHere, StrictRoute, Tenant
from weftune.service.api.errors import ApiError, invalid_request
from weftune.service.api.models import Adapter, find_adapter, find_training_adapter, is_base, model_not_found
from weftune.service.api.schemas import Body, Count, Error, Seconds
from weftune.service.chat_requests import ChatEnd, ChatError, ChatRequest, ChatSampling

MAX_MESSAGES = 1000
MAX_STOPS = 16
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0, 0.0),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Maps each parameter of OpenAI's API that is not supported to the values that are accepted, because they
have no effect."""
EXAMPLE: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 16,
}
STATUSES = {"model_not_found": 404, "invalid_request": 400, "unavailable": 503}

router = APIRouter(
    prefix="/v1", tags=["Chat"], route_class=StrictRoute, dependencies=[BEARER], responses=ERRORS
)


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a chat. Keys whose value is null are ignored, since answers that are sent back contain
    some, such as `refusal`."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="after")
    def _refuse_other_keys(self) -> ChatMessage:
        for key, value in (self.model_extra or {}).items():
            if value not in (None, [], {}):
                raise ValueError(f"the key {format_value(key)} of a message is not supported")
        return self


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = Field(default=False, description="Ignored.")


class SamplingBody(Body):
    """The parameters that chat and text completions share."""

    model: str = Field(min_length=1, max_length=512)
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, description="Ignored.")
    metadata: dict[str, str] | None = Field(default=None, description="Ignored.")
    n: Any = Field(default=None, description="1 only.")
    frequency_penalty: Any = Field(default=None, description="0 only.")
    logprobs: Any = Field(default=None, description="Not supported.")
    top_logprobs: Any = Field(default=None, description="Not supported.")
    logit_bias: Any = Field(default=None, description="Not supported.")
    tools: Any = Field(default=None, description="Not supported.")
    tool_choice: Any = Field(default=None, description="Not supported.")
    parallel_tool_calls: Any = Field(default=None, description="Not supported.")
    response_format: Any = Field(default=None, description="Text only.")
    modalities: Any = Field(default=None, description="Text only.")
    store: Any = Field(default=None, description="Not supported.")
    service_tier: Any = Field(default=None, description="Ignored if it is auto or default.")

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> SamplingBody:
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise ValueError(f"{name} is not supported")
        return self


class ChatBody(SamplingBody):
    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_000_000)


class TextBody(SamplingBody):
    """A request for a text completion: the prompt is continued as it is, without a chat template."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    best_of: Any = Field(default=None, description="1 only.")
    echo: Any = Field(default=None, description="False only.")
    suffix: Any = Field(default=None, description="Not supported.")


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: str | None = None


FinishReason = Literal["stop", "length"]


class ChatChoice(BaseModel):
    index: Count = 0
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: None = None


class Usage(BaseModel):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class TextChoice(BaseModel):
    index: Count = 0
    text: str
    finish_reason: FinishReason
    logprobs: None = None


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Seconds
    model: str
    choices: list[TextChoice]
    usage: Usage


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Seconds
    model: str
    choices: list[ChatChoice]
    usage: Usage


UNCACHED = {"Cache-Control": "no-cache"}
COMPLETION_TOKENS = 16
"""Default maximum number of tokens of a text completion, as in OpenAI's API."""
STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    responses={200: STREAM},
    summary="Answer a chat",
)
async def complete_chat(body: ChatBody, tenant: Tenant, service: ServiceHere) -> Any:
    """Answer with the base, or with an adapter of the tenant. With `stream`, the pieces of the answer come as
    server-sent events, and `[DONE]` at the end."""
    adapter = await run_in_threadpool(_find_adapter, service, tenant, body.model)
    request = ChatRequest(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        job=None if adapter is None else adapter.job,
        step=None if adapter is None else adapter.step,
        messages=[_message_values(one) for one in body.messages],
        sampling=_read_sampling(body, body.max_completion_tokens),
    )
    if body.stream:
        return await _stream_answer(service, request, body, _chat_chunk)
    text, end = await _collect_answer(service.chat.ask(request))
    return ChatCompletion(
        id=request.id,
        created=int(time.time()),
        model=body.model,
        choices=[ChatChoice(message=AnswerMessage(content=text), finish_reason=end.finish_reason)],
        usage=token_usage(end),
    )


@router.post(
    "/completions", response_model=TextCompletion, responses={200: STREAM}, summary="Continue a text"
)
async def complete_text(body: TextBody, tenant: Tenant, service: ServiceHere) -> Any:
    """Continue a text with the base, or with an adapter of the tenant. No chat template is applied."""
    adapter = await run_in_threadpool(_find_adapter, service, tenant, body.model)
    request = ChatRequest(
        id=f"cmpl-{secrets.token_hex(12)}",
        job=None if adapter is None else adapter.job,
        step=None if adapter is None else adapter.step,
        prompt=body.prompt if isinstance(body.prompt, str) else body.prompt[0],
        sampling=_read_sampling(body, COMPLETION_TOKENS if body.max_tokens is None else None),
    )
    if body.stream:
        return await _stream_answer(service, request, body, _text_chunk)
    text, end = await _collect_answer(service.chat.ask(request))
    return TextCompletion(
        id=request.id,
        created=int(time.time()),
        model=body.model,
        choices=[TextChoice(text=text, finish_reason=end.finish_reason)],
        usage=token_usage(end),
    )


def _find_adapter(service: Service, tenant: str, model: str) -> Adapter | None:
    """Return the adapter that `model` names, or None if it names the base model. Raise an error with status
    404 for any other name."""
    if is_base(service, model):
        return None
    adapter = find_adapter(service, tenant, model) or find_training_adapter(service, tenant, model)
    if adapter is None:
        raise model_not_found(model)
    return adapter


def _message_values(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": text, **named}


def _read_sampling(body: SamplingBody, max_completion_tokens: int | None) -> ChatSampling:
    values: dict[str, Any] = {
        "max_tokens": max_completion_tokens or body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "presence_penalty": body.presence_penalty,
        # As without a seed, each answer is drawn anew.
        "seed": secrets.randbelow(2**31) if body.seed is None else body.seed,
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
    }
    return ChatSampling(**{name: value for name, value in values.items() if value is not None})


def token_usage(end: ChatEnd) -> Usage:
    return Usage(
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.completion_tokens,
        total_tokens=end.prompt_tokens + end.completion_tokens,
    )


async def _first_piece(pieces: AsyncIterator[str | ChatEnd]) -> str | ChatEnd:
    try:
        return await anext(pieces)
    except ChatError as error:
        raise api_error(error) from None


async def _collect_answer(pieces: Any) -> tuple[str, ChatEnd]:
    text: list[str] = []
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, ChatEnd):
                    return "".join(text), piece
                text.append(piece)
    except ChatError as error:
        raise api_error(error) from None
    raise AssertionError("an answer ends with a ChatEnd or a ChatError")


def api_error(error: ChatError) -> ApiError:
    if error.code == "invalid_request":
        return invalid_request(str(error), code="invalid_request")
    headers = {"Retry-After": "2"} if error.code == "unavailable" else {}
    return ApiError(STATUSES[error.code], str(error), code=error.code, headers=headers)


Chunk = Callable[[str, str | None, bool], dict[str, Any]]
"""Function that returns one piece of a streamed answer without its id, given the generated string, the finish
reason, and whether it is the first piece."""


def _chat_chunk(text: str, finish_reason: str | None, is_first_chunk: bool) -> dict[str, Any]:
    delta = {"role": "assistant"} if is_first_chunk else {}
    if finish_reason is None:
        delta["content"] = text
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return {"object": "chat.completion.chunk", "choices": [choice]}


def _text_chunk(text: str, finish_reason: str | None, is_first_chunk: bool) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}
    return {"object": "text_completion", "choices": [choice]}


async def _stream_answer(service: Service, request: ChatRequest, body: SamplingBody, chunk: Chunk) -> Any:
    pieces = service.chat.ask(request)
    # The first piece is awaited, so that an error is an answer with its status.
    first = await _first_piece(pieces)
    events = _answer_events(
        {"id": request.id, "model": body.model}, chunk, first, pieces, body.stream_options
    )
    return StreamingResponse(events, media_type="text/event-stream", headers=UNCACHED)


async def _answer_events(
    ids: dict[str, Any], chunk: Chunk, first: str | ChatEnd, pieces: Any, options: StreamOptions | None
) -> AsyncIterator[str]:
    """Yield the answer as server-sent events in the format of OpenAI's chunks."""
    ids["created"] = int(time.time())
    if options is not None and options.include_usage:
        ids["usage"] = None

    def event(values: dict[str, Any]) -> str:
        return f"data: {json_text({**ids, **values})}\n\n"

    async with aclosing(pieces):
        yield event(chunk("", None, True))
        piece: str | ChatEnd = first
        try:
            while not isinstance(piece, ChatEnd):
                yield event(chunk(piece, None, False))
                piece = await anext(pieces)
        except ChatError as error:
            content = {"message": str(error), "type": "server_error", "param": None, "code": error.code}
            yield f"data: {Error.model_validate({'error': content}).model_dump_json()}\n\n"
            return
        end = chunk("", piece.finish_reason, False)
        yield event(end)
        if "usage" in ids:
            yield event({**end, "choices": [], "usage": token_usage(piece).model_dump()})
        yield "data: [DONE]\n\n"
