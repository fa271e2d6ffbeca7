"""Chat requests and answers that the HTTP process and the training process exchange."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from weftune.errors import WeftuneError

BOUNDS = {
    "max_tokens": (1, 1 << 30),
    "temperature": (0, 1e6),
    "top_p": (0, 1),
    "presence_penalty": (-1e6, 1e6),
    "seed": (-(1 << 63), (1 << 63) - 1),
}
"""Maps each sampling parameter of a chat request to its minimum and maximum, both allowed. `top_p` must also
be above 0."""
SURROGATE = re.compile("[\ud800-\udfff]")
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

ErrorCode = Literal["model_not_found", "invalid_request", "unavailable"]


class ChatError(WeftuneError):
    """An error that ends one answer. The field `code` says why: the model does not exist, the request is
    invalid, or the service cannot answer now."""

    def __init__(self, sentence: str, code: ErrorCode) -> None:
        self.code = code
        super().__init__(sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling:
    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    id: str
    job: str | None = None
    """Job whose adapter answers. None selects the bare base."""
    step: int | None = None
    """Step of the checkpoint that answers. None selects the finished adapter or, for a job that trains, its
    latest weights."""
    messages: Sequence[Mapping[str, Any]] = ()
    prompt: str | None = None
    """String that the model continues without a chat template. Used instead of `messages`."""
    sampling: ChatSampling = field(default_factory=ChatSampling)


@dataclass(frozen=True, slots=True)
class ChatEnd:
    """The last message of an answer: why the answer ended, and its numbers of tokens."""

    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int


def request_values(request: ChatRequest) -> dict[str, Any]:
    sampling = {one.name: getattr(request.sampling, one.name) for one in fields(ChatSampling)}
    model = None if request.job is None else {"job": request.job, "step": request.step}
    asked = {"messages": request.messages} if request.prompt is None else {"prompt": request.prompt}
    return {"id": request.id, "model": model, **asked, "sampling": sampling}


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object. Raise ChatError if the line contains anything else."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ChatError(f"The request is no JSON: {error}.", "invalid_request") from error
    if not isinstance(values, dict):
        raise ChatError("The request is no JSON object.", "invalid_request")
    return values


def parse_request(values: Mapping[str, Any]) -> ChatRequest:
    """Create a chat request from the keys and values of its JSON. Raise ChatError if they are not a valid
    request."""
    if not isinstance(values.get("id"), str):
        raise ChatError("The request has no id.", "invalid_request")
    job, step = _parse_model(values.get("model"))
    sampling = _parse_sampling(values.get("sampling") or {})
    if (prompt := values.get("prompt")) is not None:
        if not isinstance(prompt, str) or SURROGATE.search(prompt):
            raise ChatError("prompt must be a text.", "invalid_request")
        return ChatRequest(id=values["id"], job=job, step=step, prompt=prompt, sampling=sampling)
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ChatError(
            "messages must be a list of at least one message, each with the texts role and content.",
            "invalid_request",
        )
    return ChatRequest(id=values["id"], job=job, step=step, messages=messages, sampling=sampling)


def _is_message(value: Any) -> bool:
    """Return whether a value is a message whose strings are valid Unicode."""
    if not isinstance(value, dict) or not {"role", "content"} <= value.keys():
        return False
    return all(isinstance(text, str) and not SURROGATE.search(text) for text in value.values())


def _parse_model(model: Any) -> tuple[str | None, int | None]:
    if model is None:
        return None, None
    job, step = (model.get("job"), model.get("step")) if isinstance(model, dict) else (None, None)
    is_number = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 10**9
    if not isinstance(job, str) or not JOB_ID.fullmatch(job) or not (step is None or is_number):
        raise ChatError("There is no such model.", "model_not_found")
    return job, step


def _parse_sampling(values: Any) -> ChatSampling:
    known = {one.name for one in fields(ChatSampling)}
    if not isinstance(values, dict) or not values.keys() <= known:
        raise ChatError(f"sampling may have the keys {', '.join(sorted(known))}.", "invalid_request")
    given = {name: value for name, value in values.items() if value is not None}
    stop = given.pop("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
    if not isinstance(stop, tuple) or not all(isinstance(one, str) and one for one in stop):
        raise ChatError("stop must be a list of texts that are not empty.", "invalid_request")
    for name, value in given.items():
        is_whole = name in ("max_tokens", "seed")
        if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
            raise ChatError(f"{name} must be a number.", "invalid_request")
        low, high = BOUNDS[name]
        if not low <= value <= high or (name == "top_p" and not value):
            raise ChatError(f"{name} cannot be {value}.", "invalid_request")
    return ChatSampling(stop=stop, **given)
