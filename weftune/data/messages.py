"""A row's list of messages, checked and brought to the one form that chat templates expect."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from weftune.data.row import TOO_DEEP, BadRow, is_deep_json, kind_name

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}

THINKING_NAMES = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


def text_of(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"`{name}` must be text, not {kind_name(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"`{name}` holds a lone surrogate or a byte that is not UTF-8") from None
    return value


def list_of(value: object, name: str) -> Sequence[Any]:
    """Return a list, which a CSV or Parquet column may hold as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        text = value
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise BadRow(f"`{name}` starts like a JSON list but is not one") from None
        if is_deep_json(text, value):
            raise BadRow(f"`{name}` is {TOO_DEEP}")
    if not isinstance(value, list | tuple):
        raise BadRow(f"`{name}` must be a list, not {kind_name(value)}")
    return value


def clean_messages(value: object, name: str) -> tuple[Message, ...]:
    listed = list_of(value, name)
    if not listed:
        raise BadRow(f"`{name}` is empty")
    return tuple(_clean(message, f"{name}[{at}]") for at, message in enumerate(listed))


def clean_sharegpt(value: object, name: str) -> tuple[Message, ...]:
    listed = list_of(value, name)
    if not listed:
        raise BadRow(f"`{name}` is empty")
    messages = []
    for at, turn in enumerate(listed):
        if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
            raise BadRow(f"`{name}[{at}]` must be an object with `from` and `value`")
        speaker = turn["from"]
        if speaker not in SHAREGPT_ROLES:
            raise BadRow(_unknown(f"{name}[{at}].from", speaker, tuple(SHAREGPT_ROLES)))
        message = {"role": SHAREGPT_ROLES[speaker], "content": turn["value"], "weight": turn.get("weight")}
        messages.append(_clean(message, f"{name}[{at}]", content="value"))
    return tuple(messages)


def clean_tools(value: object) -> list[Any] | None:
    if value is None or value == "":
        return None
    tools = list(list_of(value, "tools"))
    for at, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise BadRow(f"`tools[{at}]` must be an object, not {kind_name(tool)}")
    check_values(tools, "tools")
    return tools or None


def check_values(value: object, name: str) -> None:
    """Raise BadRow unless every text inside is encodable and every number is finite."""
    if isinstance(value, str):
        text_of(value, name)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"`{name}` holds a number that is not finite")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            text_of(key, name)
            check_values(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            check_values(inner, f"{name}[{at}]")


def _unknown(name: str, role: object, known: tuple[str, ...]) -> str:
    near = _nearest(role, known) if isinstance(role, str) and len(role) < 30 else None
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"
    return f"`{name}` is {repr(role)[:80]}, which is not a role; {hint}"


@lru_cache(maxsize=1024)  # the same mistake usually occurs in every row of a file
def _nearest(role: str, known: tuple[str, ...]) -> str | None:
    return next(iter(difflib.get_close_matches(role.lower(), known)), None)


def _clean(message: object, name: str, content: str = "content") -> Message:
    if not isinstance(message, Mapping):
        raise BadRow(f"`{name}` must be an object with `role` and `content`, not {kind_name(message)}")
    clean = {key: value for key, value in message.items() if value is not None}
    role = clean.get("role")
    if role is None:
        raise BadRow(f"`{name}` has no `role`")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(_unknown(f"{name}.role", role, ROLES))
    if "weight" in clean and clean["weight"] not in (0, 1):
        raise BadRow(f"`{name}.weight` must be 0 or 1")
    if "tool_calls" in clean:
        clean["tool_calls"] = [
            _clean_call(call, f"{name}.tool_calls[{at}]")
            for at, call in enumerate(list_of(clean["tool_calls"], f"{name}.tool_calls"))
        ]
        if not clean["tool_calls"]:
            del clean["tool_calls"]
    text = _clean_content(clean, f"{name}.{content}")
    if text is not None or "content" in message:
        clean["content"] = text
    clean = _with_thinking(clean)
    check_values({key: value for key, value in clean.items() if key not in ("role", "content")}, name)
    return clean


def _with_thinking(message: Message) -> Message:
    """Return the message with its thinking under each name that chat templates read, as in transformers."""
    thinking = next((message[name] for name in THINKING_NAMES if name in message), None)
    if thinking is None:
        return message
    return {"thinking": thinking, **message, "reasoning_content": thinking}


def _clean_content(message: Message, name: str) -> str | None:
    """Return the text, or None if the message has tool calls only."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_part(part, f"{name}[{at}]") for at, part in enumerate(content))
    calls = message["role"] == "assistant" and "tool_calls" in message
    if content is None:
        if calls:
            return None
        raise BadRow(f"`{name}` is missing")
    text = text_of(content, name)
    if message["role"] == "assistant" and not calls and not text.strip():
        raise BadRow(f"`{name}` is empty: an assistant's message must say something")
    return text


def _part(part: object, name: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        shown = part.get("type") if isinstance(part, Mapping) else kind_name(part)
        raise BadRow(f"`{name}` is {shown!r}, but only text can be trained on")
    return text_of(part.get("text"), f"{name}.text")


def _clean_call(call: object, name: str) -> Mapping[str, Any]:
    """Return the call with its arguments parsed: OpenAI writes them as JSON text, and chat templates print an
    object."""
    if not isinstance(call, Mapping):
        raise BadRow(f"`{name}` must be an object, not {kind_name(call)}")
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    text_of(function.get("name"), f"{name}.function.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        raise BadRow(f"`{name}.function.arguments` is not valid JSON") from None
    if is_deep_json(arguments, parsed):
        raise BadRow(f"`{name}.function.arguments` is {TOO_DEEP}")
    return {**call, "function": {**function, "arguments": parsed}}
