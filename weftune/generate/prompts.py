"""Rows of a file of prompts. A row has a `prompt` or `messages`, and may have an expected answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftune.data.formats import ROLES, Message
from weftune.data.tables import open_path
from weftune.errors import DataError, Mistake


@dataclass(frozen=True, slots=True)
class PromptRow:
    """The prompt of one row of a file: a string, or the messages of a chat."""

    index: int
    prompt: str | tuple[Message, ...]
    expected: str | None = None
    """Content of the assistant's message at the end of the row, which is not part of the prompt but the
    expected answer. None if there is no such message."""


def read_prompts(path: Path) -> list[PromptRow]:
    """Return the prompts of a file. Raise DataError with the row's location if a row has no prompt."""
    found = []
    for index, row in enumerate(open_path(str(path), None, str(path)).rows()):
        problem = row.problem or _prompt_problem(row.value)
        if problem is not None:
            raise DataError(Mistake(row.location, problem))
        prompt = row.value["messages"] if "messages" in row.value else row.value["prompt"]
        found.append(_prompt_row(index, prompt))
    if not found:
        raise DataError(Mistake(str(path), "the file holds no prompts; write one JSON object per line"))
    return found


def _prompt_problem(row: Mapping[str, Any]) -> str | None:
    """Return the reason why a row of a file cannot be used as a prompt, or None if it can."""
    if "messages" not in row and "prompt" not in row:
        names = ", ".join(row) or "none"
        return f"a row of prompts has a column `prompt` or `messages` (its columns: {names[:200]})"
    name = "messages" if "messages" in row else "prompt"
    value = row[name]
    if isinstance(value, str) and name == "prompt":
        return None if value else "the prompt is empty"
    if not isinstance(value, Sequence) or not value or isinstance(value, str):
        return f"`{name}` must be a list of messages"
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            return f"every message in `{name}` has a role, one of {', '.join(ROLES)}, and a content"
    if all(message["role"] == "assistant" for message in value):
        return f"`{name}` has no message that could be answered"
    return None


def _prompt_row(index: int, prompt: str | Sequence[Message]) -> PromptRow:
    if isinstance(prompt, str):
        return PromptRow(index, prompt)
    messages = tuple(dict(message) for message in prompt)
    if messages[-1]["role"] != "assistant":
        return PromptRow(index, messages)
    content = messages[-1].get("content")
    return PromptRow(index, messages[:-1], content if isinstance(content, str) else None)
