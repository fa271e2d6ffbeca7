"""The forms in which a chat can be put to a template: as it is, and as templates want it that refuse that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weftune.data.formats import Chat
    from weftune.data.messages import Message


def forms(chat: Chat) -> Iterator[Chat]:
    """The chat itself comes first: what `apply_chat_template` prints is what others would show the model."""
    yield chat
    useful = [
        change
        for change in (_system_for_developer, _empty_for_null, _text_for_arguments)
        if any(change(message) != message for message in chat.messages)
    ]
    for count in range(len(useful)):
        for changes in combinations(useful, count + 1):
            messages = chat.messages
            for change in changes:
                messages = tuple(change(message) for message in messages)
            yield replace(chat, messages=messages)


def _system_for_developer(message: Message) -> Message:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _empty_for_null(message: Message) -> Message:
    """Beside tool calls content may be null, which many templates cannot add to a text."""
    return message if message.get("content") is not None else {**message, "content": ""}


def _text_for_arguments(message: Message) -> Message:
    """As OpenAI writes the arguments of a call: JSON text. Most templates want an object."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_text(call) for call in calls]} if calls else message


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments", ""), str):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
