"""The forms in which a chat can be passed to a template: unchanged, and as some stricter templates require
it."""

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
    """Yield the forms of a chat. The unchanged chat comes first: it gives the text that `apply_chat_template`
    prints at inference."""
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
    """Replace null content, which is allowed beside tool calls, by an empty text: many templates cannot
    concatenate null."""
    return message if message.get("content") is not None else {**message, "content": ""}


def _text_for_arguments(message: Message) -> Message:
    """Convert the arguments of calls to JSON text, as OpenAI writes them. Most templates expect an object."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_text(call) for call in calls]} if calls else message


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments", ""), str):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
