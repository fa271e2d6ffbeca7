"""The supervised characters of a rendered chat, found by rendering its prefixes.

The text that the template prints for the messages before a turn, with the generation prompt, is the model's
input at inference; the text that it adds for the turn is the output that the model must learn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from weftune.data.row import BadRow

if TYPE_CHECKING:
    from weftune.data.formats import Chat


class Renderer(Protocol):
    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompt: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    spans: tuple[tuple[int, int], ...] | None
    """Supervised characters, as [start, stop) spans. None means all of them."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """The samples of one row as text, and remarks for the report."""

    samples: tuple[Rendered, ...]
    split: bool = False
    """Whether each turn became its own sample."""
    parted: bool = False
    """Whether the generation prompt differs from what the template prints before an assistant's turn."""
    endless: bool = False
    """Whether a turn ends without an end-of-turn token."""


def rendering_of(plain: Mapping[str, Any]) -> Rendering:
    """Return a rendering from its JSON values."""
    samples = tuple(
        Rendered(
            made["text"], None if made["spans"] is None else tuple((low, high) for low, high in made["spans"])
        )
        for made in plain["samples"]
    )
    return Rendering(**{**plain, "samples": samples})


@dataclass(frozen=True, slots=True)
class _Turn:
    text: str
    """The chat up to and including this turn."""
    start: int
    stop: int
    parted: bool
    endless: bool


def render_everything(chat: Chat, template: Renderer) -> Rendering:
    return Rendering((Rendered(template.render(chat.messages, chat.tools, prompt=False), None),))


def render_turns(chat: Chat, template: Renderer, ends: Collection[str]) -> Rendering:
    """Render a chat and find its supervised turns. `ends` are the texts of the tokens at which a turn can
    end."""
    turns = [_render_turn(chat, at, template, ends) for at in chat.turns]
    whole = _render_whole(chat, turns, template, ends)
    if whole is not None:
        samples: tuple[Rendered, ...] = (whole,)
    else:
        samples = tuple(Rendered(turn.text, ((turn.start, turn.stop),)) for turn in turns)
    return Rendering(
        samples,
        split=whole is None,
        parted=any(turn.parted for turn in turns),
        endless=any(turn.endless for turn in turns),
    )


def _render_whole(
    chat: Chat, turns: Sequence[_Turn], template: Renderer, ends: Collection[str]
) -> Rendered | None:
    """Return all turns in one text, or None if the template prints one of them differently there.

    The text is that of the whole chat, unless the messages after the last turn change how a turn is printed.
    """
    texts = [turns[-1].text]
    if chat.turns[-1] + 1 < len(chat.messages):
        texts = [template.render(chat.messages, chat.tools, prompt=False), *texts]
    for text in texts:
        spans = [_span_within(text, turn, ends) for turn in turns]
        found = tuple(span for span in spans if span is not None)
        if len(found) == len(turns):
            return Rendered(text, found)
    return None


def _render_turn(chat: Chat, at: int, template: Renderer, ends: Collection[str]) -> _Turn:
    text = template.render(chat.messages[: at + 1], chat.tools, prompt=False)
    given = template.render(chat.messages[:at], chat.tools, prompt=True)
    start = len(given)
    parted = not text.startswith(given)
    if parted:
        start = _common(given, text)
        before = template.render(chat.messages[:at], chat.tools, prompt=False)
        if not text.startswith(before) or start < len(before):
            raise BadRow(
                f"the chat template does not print message {at + 1} after what it prints for those before "
                "it, so what the assistant says cannot be told from what it is given"
            )
    bare = text.rstrip()
    ended = bare.endswith(tuple(ends)) and len(bare) > start
    return _Turn(text, start, len(bare) if ended else len(text), parted, not ended)


def _span_within(text: str, turn: _Turn, ends: Collection[str]) -> tuple[int, int] | None:
    """Return the span of a turn in a longer chat, or None if the template prints it differently there."""
    if text.startswith(turn.text):
        return turn.start, turn.stop
    # Phi-3 prints EOS after the last message only: the turn is the same up to its own end-of-turn token.
    said = turn.text[: turn.stop]
    for end in ends:
        closed = said.removesuffix(end)
        if closed != said and text.startswith(closed) and closed[turn.start :].rstrip().endswith(tuple(ends)):
            return turn.start, len(closed.rstrip())
    return None


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    shared = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        shared += 1
    return shared
