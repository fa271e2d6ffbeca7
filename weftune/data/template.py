"""Lookup of chat templates, and their rendering in a process that can be stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from weftune.core.limited import Stopped, run_limited
from weftune.data import sandbox
from weftune.data.formats import Chat
from weftune.data.row import BadRow, bad_row
from weftune.data.sandbox import PLACE
from weftune.data.turns import Rendering, rendering_of
from weftune.errors import DataError, Mistake

CHATML = "chatml"


def template_source(tokenizer: Any, chosen: str | None, *, tools: bool = False) -> str | None:
    """Return the Jinja text: the built-in `chatml`, a file, or the tokenizer's own template; None if there is
    none."""
    if chosen == CHATML:
        return _chatml(tokenizer)
    if chosen is not None:
        try:
            return Path(chosen).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
            raise DataError(Mistake(PLACE, f"the template {chosen} cannot be read: {reason}")) from problem
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, Mapping):
        own = (own.get("tool_use") if tools else None) or own.get("default")
    return own or None


def _chatml(tokenizer: Any) -> str:
    """Return the ChatML template. Without `<|im_end|>` in the vocabulary a turn ends with EOS, since
    generation stops at a single token."""
    source = resources.files("weftune.data").joinpath("templates", "chatml.jinja").read_text(encoding="utf-8")
    if "<|im_end|>" in tokenizer.get_vocab() or not tokenizer.eos_token:
        return source
    return source.replace("<|im_end|>", tokenizer.eos_token)


class Template:
    """A template with the tokenizer's special tokens."""

    def __init__(self, source: str, special: Mapping[str, Any]) -> None:
        self.source = source
        self._special = json.dumps({name: text for name, text in special.items() if isinstance(text, str)})
        known = _facts(source, self._special)
        self.prints_tools = known["prints_tools"]

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompt: bool, now: bool = False
    ) -> str:
        """Return the text of these messages; with `prompt`, up to where the assistant begins to speak. A date
        in it is `sandbox.TODAY`, or the current date with `now`."""
        made = self._ask(sandbox.render_one, messages, tools, prompt, now)
        if "bad" in made:
            raise bad_row(made)
        return str(made["text"])

    def renderings(self, chats: Sequence[Chat], ends: Collection[str] | None) -> list[Rendering | BadRow]:
        """Return the renderings of whole rows with their supervised spans. Without `ends`, everything is
        supervised."""
        made = self._ask(sandbox.render_rows, list(chats), ends) if chats else []
        return [bad_row(row) if "bad" in row else rendering_of(row) for row in made]

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        _refuse_stopped(self.source)
        try:
            return run_limited(function, self.source, self._special, *arguments)
        except Stopped as stopped:
            _STOPPED[self.source] = str(stopped)
            raise _refusal(str(stopped)) from None


_STOPPED: dict[str, str] = {}
"""Maps each template that reached a limit to the reason: many jobs can share one, and it is waited for only
once."""


@lru_cache(maxsize=8)
def _facts(source: str, special: str) -> dict[str, bool]:
    _refuse_stopped(source)
    try:
        known: dict[str, bool] = run_limited(sandbox.facts, source, special)
    except Stopped as stopped:
        _STOPPED[source] = str(stopped)
        raise _refusal(str(stopped)) from None
    return known


def _refuse_stopped(source: str) -> None:
    if source in _STOPPED:
        raise _refusal(_STOPPED[source])


def _refusal(what: str) -> DataError:
    sentence = f"the chat template {what} for one row and was stopped; use another template"
    return DataError(Mistake(PLACE, sentence))
