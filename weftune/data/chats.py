"""Rendering of chats by a template: which characters are supervised, the forms of a chat that strict
templates require, and a check that the template prints all parts of a row.

Supervised characters are found by rendering the prefixes of a chat. The text that the template prints for the
messages before a turn, with the generation prompt, is the model's input at inference; the text that it adds
for the turn is the output that the model must learn.

A template may trim, escape or move a text, so searching for the text would raise false alarms. Instead, one
part of a message is changed and the chat rendered again: if the result is equal, the part is not printed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Protocol

from weftune.data.formats import Chat, Message
from weftune.data.row import BadRow, CommonBadRow

PROBE = "zq"
"""Arbitrary text that is inserted into a part of a message to change it."""
THINKING_END = "</think>"
MAX_SHAPES = 10_000
REMEDY = (
    "name a template that does with `data.chat_template` (a Jinja file, or `chatml`, which prints all "
    "of them), or leave such rows out with `data.skip_bad_rows: true`"
)


class Renderer(Protocol):
    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompt: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of one sample, rendered from a chat by its template. A chat has several texts if each of its
    turns becomes a sample."""

    text: str
    spans: tuple[tuple[int, int], ...] | None
    """Supervised characters of the text as [start, stop) spans. None means all characters."""
    prompt_differs: bool = False
    """Whether the generation prompt differs from the text that the template prints before an assistant's
    turn."""
    lacks_end_token: bool = False
    """Whether a turn ends without an end-of-turn token."""

    @classmethod
    def from_json(cls, json_values: Mapping[str, Any]) -> Rendered:
        spans = json_values["spans"]
        return cls(
            **{**json_values, "spans": None if spans is None else tuple((low, high) for low, high in spans)}
        )


def render_everything(chat: Chat, template: Renderer) -> tuple[Rendered, ...]:
    return (Rendered(template.render(chat.messages, chat.tools, prompt=False), None),)


def render_answer(chat: Chat, template: Renderer) -> tuple[Rendered, ...]:
    """Render one side of a preference pair twice: the prompt alone, as the model reads it at inference, and
    the prompt together with the answer."""
    given = template.render(chat.messages[: chat.answer], chat.tools, prompt=True)
    text = template.render(chat.messages, chat.tools, prompt=False)
    return Rendered(given, None), Rendered(text, None)


def render_turns(chat: Chat, template: Renderer, end_strings: Collection[str]) -> tuple[Rendered, ...]:
    """Render a chat and find its supervised turns. All turns are in one text, unless the template prints a
    turn differently within a longer chat; in that case, each turn has its own text. A single text contains
    the whole chat, unless the messages after the last turn change how a turn is printed; in that case, it
    ends with that turn. `end_strings` are the end-of-turn tokens."""
    turns = [_render_turn(chat, at, template, end_strings) for at in chat.turns]
    texts = [turns[-1].text]
    if chat.turns[-1] + 1 < len(chat.messages):
        texts = [template.render(chat.messages, chat.tools, prompt=False), *texts]
    for text in texts:
        spans = [_find_turn(text, turn, end_strings) for turn in turns]
        found = tuple(span for span in spans if span is not None)
        if len(found) == len(turns):
            prompt_differs = any(turn.prompt_differs for turn in turns)
            lacks_end_token = any(turn.lacks_end_token for turn in turns)
            return (Rendered(text, found, prompt_differs, lacks_end_token),)
    return tuple(turns)


def _render_turn(chat: Chat, index: int, template: Renderer, end_strings: Collection[str]) -> Rendered:
    """Render the chat up to and including message `index`, the only supervised turn."""
    text = template.render(chat.messages[: index + 1], chat.tools, prompt=False)
    given = template.render(chat.messages[:index], chat.tools, prompt=True)
    start = len(given)
    prompt_differs = not text.startswith(given)
    if prompt_differs:
        pairs = enumerate(zip(given, text, strict=False))
        start = next((index for index, (one, other) in pairs if one != other), len(text))
        before = template.render(chat.messages[:index], chat.tools, prompt=False)
        if not text.startswith(before) or start < len(before):
            raise BadRow(
                f"the chat template does not print message {index + 1} after what it prints for those before "
                "it, so what the assistant says cannot be told from what it is given"
            )
    bare = text.rstrip()
    ended = bare.endswith(tuple(end_strings)) and len(bare) > start
    return Rendered(text, ((start, len(bare) if ended else len(text)),), prompt_differs, not ended)


def _find_turn(text: str, turn: Rendered, end_strings: Collection[str]) -> tuple[int, int] | None:
    """Return the span of a turn in the text of a longer chat, or None if the longer chat prints the turn
    differently."""
    assert turn.spans is not None
    ((start, stop),) = turn.spans
    if text.startswith(turn.text):
        return start, stop
    # Phi-3 prints EOS after the last message only: the turn is the same up to its own end-of-turn token.
    said = turn.text[:stop]
    for end in end_strings:
        closed = said.removesuffix(end)
        if (
            closed != said
            and text.startswith(closed)
            and closed[start:].rstrip().endswith(tuple(end_strings))
        ):
            return start, len(closed.rstrip())
    return None


def equivalent_chats(chat: Chat) -> Iterator[Chat]:
    """Yield the chat itself, which is the form used at inference, and then equivalent forms of it for
    templates that cannot print it."""
    yield chat
    useful = [
        change
        for change in (_rename_developer_role, _replace_null, _text_for_arguments)
        if any(change(message) != message for message in chat.messages)
    ]
    for count in range(len(useful)):
        for changes in combinations(useful, count + 1):
            messages = chat.messages
            for change in changes:
                messages = tuple(change(message) for message in messages)
            yield replace(chat, messages=messages)


def _rename_developer_role(message: Message) -> Message:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _replace_null(message: Message) -> Message:
    """Replace null content, as in messages with tool calls, by an empty string, which more templates can
    print."""
    return message if message.get("content") is not None else {**message, "content": ""}


def _text_for_arguments(message: Message) -> Message:
    """Convert the arguments of tool calls from objects to JSON strings, as in OpenAI's API, for templates
    that do not print objects."""

    def with_arguments_as_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if not isinstance(function, Mapping) or isinstance(function.get("arguments", ""), str):
            return call
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [with_arguments_as_text(call) for call in calls]} if calls else message


class PrintCheck:
    """A check that refuses rows if the template drops a part of them.

    Templates depend on roles and fields, rarely on words. So the parts of a chat are tested one by one only
    if no chat with the same roles and fields was tested before, or if a text is not printed verbatim.
    """

    def __init__(self, template: Renderer) -> None:
        self._template = template
        self._printed_shapes: set[tuple[object, ...]] = set()
        """Shapes (roles and fields) of chats whose parts are all printed."""

    def refuse_dropped(self, chat: Chat, text: str) -> None:
        """Raise CommonBadRow if a part of the chat is missing in `text`, which the template has printed for
        the chat."""
        start = 0
        # Chats are tested up to each assistant message and as a whole: many templates refuse other ends.
        stops = {at + 1 for at, message in enumerate(chat.messages) if message["role"] == "assistant"}
        for stop in sorted({*stops, len(chat.messages)}):
            shape = (bool(chat.tools), *map(_message_shape, chat.messages[:stop]))
            messages = chat.messages[start:stop]
            if shape not in self._printed_shapes or not all(
                _is_rendered(message, text) for message in messages
            ):
                self._test_parts(chat, start, stop)
                if len(self._printed_shapes) < MAX_SHAPES:
                    self._printed_shapes.add(shape)
            start = stop

    def _test_parts(self, chat: Chat, start: int, stop: int) -> None:
        """Raise BadRow if a part of the messages from `start` to `stop` is not in the text of the chat.

        Parts that a template drops once the chat continues, such as old thinking, are dropped on purpose.
        """
        before = self._render(chat.messages[:stop], chat)
        stop = stop if before is not None else len(chat.messages)
        before = before if before is not None else self._render(chat.messages, chat)
        for at in range(start, stop):
            message = chat.messages[at]
            for part, changed in _changed_messages(message, supervised=at in chat.turns):
                messages = (*chat.messages[:at], changed, *chat.messages[at + 1 : stop])
                if self._render(messages, chat) == before:
                    sentence = f"the chat template does not print the {part} of message {at + 1}"
                    raise CommonBadRow(f"{sentence} ({message['role']})", kind=part, remedy=REMEDY)

    def _render(self, messages: Sequence[Message], chat: Chat) -> str | None:
        """Return the text that the template prints for `messages`, or None if it refuses them."""
        try:
            return self._template.render(messages, chat.tools, prompt=False)
        except BadRow:
            return None


def _message_shape(message: Message) -> tuple[object, ...]:
    thinking, spoken = _split_thinking(message)
    calls = tuple(bool(_call_function(call).get("arguments")) for call in message.get("tool_calls") or ())
    return (message["role"], bool(thinking), bool(spoken), calls, *message)


def _split_thinking(message: Message) -> tuple[str, str]:
    content = message.get("content") or ""
    thinking, mark, spoken = content.rpartition(THINKING_END)
    return (thinking.replace("<think>", "").strip(), spoken.strip()) if mark else ("", content.strip())


def _is_rendered(message: Message, text: str) -> bool:
    spoken = _split_thinking(message)[1]
    return spoken in text or json.dumps(spoken, ensure_ascii=False)[1:-1] in text


def _changed_messages(message: Message, supervised: bool) -> Iterator[tuple[str, Message]]:
    """Yield, for each part of a message, the name of the part, and the message with that part changed."""
    thinking, spoken = _split_thinking(message)
    content = message.get("content")
    if spoken:
        yield "content", {**message, "content": f"{content}{PROBE}"}
    if thinking and supervised and message["role"] == "assistant":
        longer = f"{PROBE}{THINKING_END}".join(str(content).rsplit(THINKING_END, 1))
        yield "thinking", {**message, "content": longer}
    for at, call in enumerate(message.get("tool_calls") or ()):
        for changed in _changed_calls(call):
            calls = [*message["tool_calls"][:at], changed, *message["tool_calls"][at + 1 :]]
            yield "tool calls", {**message, "tool_calls": calls}


def _changed_calls(call: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield changed copies of a tool call: one with another name and, if the call has arguments, one with
    other arguments."""
    body = _call_function(call)
    changed_functions: list[dict[str, Any]] = [{"name": f"{body.get('name')}{PROBE}"}]
    arguments = body.get("arguments")
    if arguments:
        changed_functions.append({"arguments": _extend_arguments(arguments)})
    for change in changed_functions:
        changed = {**body, **change}
        yield {**call, "function": changed} if body is not call else changed


def _call_function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _extend_arguments(arguments: Any) -> Any:
    if isinstance(arguments, Mapping):
        return {**arguments, PROBE: PROBE}
    if isinstance(arguments, list | tuple):
        return [*arguments, PROBE]
    return f"{arguments}{PROBE}"
