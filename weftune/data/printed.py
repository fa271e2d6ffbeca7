"""A check that a chat template prints all parts of a row: contents, tool calls and tool results.

A template may trim, escape or move a text, so looking for it would raise false alarms. Instead one part of a
message is changed and rendered again: if not a character differs, the template does not print that part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weftune.data.row import BadRow, CommonBadRow
from weftune.data.turns import Renderer

if TYPE_CHECKING:
    from weftune.data.formats import Chat
    from weftune.data.messages import Message

PROBE = "zq"
"""Text that is added to a part to change it; any letters would do."""
THINKING_END = "</think>"
MOST_SHAPES = 10_000
REMEDY = (
    "name a template that does with `data.chat_template` (a Jinja file, or `chatml`, which prints all "
    "of them), or leave such rows out with `data.skip_bad_rows: true`"
)


@dataclass(frozen=True, slots=True)
class _PrintedPart:
    """A part of a message, and the message with that part changed."""

    name: str
    changed: Message


class PrintCheck:
    """A check that refuses rows if the template drops a part of them.

    Templates depend on roles and fields, hardly ever on words. So the parts of a chat are tried one by one
    only if no chat of its shape was tried before, or if a text is not found verbatim.
    """

    def __init__(self, template: Renderer) -> None:
        self._template = template
        self._sound: set[tuple[object, ...]] = set()
        """Shapes of chats whose parts are all printed."""

    def refuse_dropped(self, chat: Chat, text: str) -> None:
        """Raise CommonBadRow if the template drops a part of the chat. `text` is what it printed for this
        chat."""
        start = 0
        for stop in _stops(chat.messages):
            shape = (bool(chat.tools), *map(_shape, chat.messages[:stop]))
            messages = chat.messages[start:stop]
            if shape not in self._sound or not all(_found(message, text) for message in messages):
                self._try(chat, start, stop)
                if len(self._sound) < MOST_SHAPES:
                    self._sound.add(shape)
            start = stop

    def _try(self, chat: Chat, start: int, stop: int) -> None:
        """Try each part of the messages from `start` to `stop`, in the chat that ends with them.

        Parts that a template drops once the chat continues, such as old thinking, are dropped on purpose.
        """
        before = self._render(chat.messages[:stop], chat)
        stop = stop if before is not None else len(chat.messages)
        before = before if before is not None else self._render(chat.messages, chat)
        for at in range(start, stop):
            message = chat.messages[at]
            for part in _parts(message, supervised=at in chat.turns):
                changed = (*chat.messages[:at], part.changed, *chat.messages[at + 1 : stop])
                if self._render(changed, chat) == before:
                    sentence = f"the chat template does not print the {part.name} of message {at + 1}"
                    raise CommonBadRow(f"{sentence} ({message['role']})", kind=part.name, remedy=REMEDY)

    def _render(self, messages: Sequence[Message], chat: Chat) -> str | None:
        """Return the rendered text, or None if the template refuses these messages."""
        try:
            return self._template.render(messages, chat.tools, prompt=False)
        except BadRow:
            return None


def _stops(messages: Sequence[Message]) -> list[int]:
    """Return the indices after each assistant message and at the end: many templates refuse a chat that ends
    elsewhere."""
    stops = {at + 1 for at, message in enumerate(messages) if message["role"] == "assistant"}
    return sorted({*stops, len(messages)})


def _shape(message: Message) -> tuple[object, ...]:
    thinking, spoken = _thinking_and_spoken(message)
    calls = tuple(bool(_body(call).get("arguments")) for call in message.get("tool_calls") or ())
    return (message["role"], bool(thinking), bool(spoken), calls, *message)


def _thinking_and_spoken(message: Message) -> tuple[str, str]:
    content = message.get("content") or ""
    thinking, mark, spoken = content.rpartition(THINKING_END)
    return (thinking.replace("<think>", "").strip(), spoken.strip()) if mark else ("", content.strip())


def _found(message: Message, text: str) -> bool:
    spoken = _thinking_and_spoken(message)[1]
    return spoken in text or json.dumps(spoken, ensure_ascii=False)[1:-1] in text


def _parts(message: Message, supervised: bool) -> Iterator[_PrintedPart]:
    thinking, spoken = _thinking_and_spoken(message)
    content = message.get("content")
    if spoken:
        yield _PrintedPart("content", {**message, "content": f"{content}{PROBE}"})
    if thinking and supervised and message["role"] == "assistant":
        longer = f"{PROBE}{THINKING_END}".join(str(content).rsplit(THINKING_END, 1))
        yield _PrintedPart("thinking", {**message, "content": longer})
    for at, call in enumerate(message.get("tool_calls") or ()):
        for changed in _changed_calls(call):
            calls = [*message["tool_calls"][:at], changed, *message["tool_calls"][at + 1 :]]
            yield _PrintedPart("tool calls", {**message, "tool_calls": calls})


def _changed_calls(call: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the call with another name, and with other arguments if it has some."""
    body = _body(call)
    changes: list[dict[str, Any]] = [{"name": f"{body.get('name')}{PROBE}"}]
    arguments = body.get("arguments")
    if arguments:
        changes.append({"arguments": _more_of(arguments)})
    for change in changes:
        changed = {**body, **change}
        yield {**call, "function": changed} if body is not call else changed


def _body(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _more_of(arguments: Any) -> Any:
    if isinstance(arguments, Mapping):
        return {**arguments, PROBE: PROBE}
    if isinstance(arguments, list | tuple):
        return [*arguments, PROBE]
    return f"{arguments}{PROBE}"
