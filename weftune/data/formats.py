"""The format of rows, detected from their columns, and each row converted to one of four forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weftune.data.messages import Message, clean_messages, clean_sharegpt, clean_tools, list_of, text_of
from weftune.data.row import BadRow, kind_name
from weftune.data.spec import DataSpec, Format
from weftune.errors import DataError, Mistake

COLUMNS: dict[Format, tuple[str, ...]] = {
    "tokens": ("input_ids", "labels"),
    "messages": ("messages", "tools"),
    "sharegpt": ("conversations", "tools"),
    "preference": ("prompt", "chosen", "rejected", "input", "preferred_output", "non_preferred_output"),
    "kto": ("prompt", "completion", "label"),
    "prompt_completion": ("prompt", "completion", "tools"),
    "alpaca": ("instruction", "input", "output", "system"),
    "text": ("text",),
}
NEEDED: dict[Format, tuple[tuple[str, ...], ...]] = {
    "tokens": (("input_ids",),),
    "messages": (("messages",),),
    "sharegpt": (("conversations",),),
    "preference": (("chosen", "rejected"), ("preferred_output", "non_preferred_output")),
    "kto": (("prompt", "completion", "label"),),
    "prompt_completion": (("prompt", "completion"),),
    "alpaca": (("instruction", "output"),),
    "text": (("text",),),
}
"""Maps each format to its alternative sets of required columns, in the order of detection. The original
Alpaca file also has a `text` column, so `text` comes last."""


@dataclass(frozen=True, slots=True)
class Chat:
    messages: tuple[Message, ...]
    tools: list[Any] | None
    turns: tuple[int, ...]
    """Indices of the assistant's messages that are trained on; ignored with `train_on: all`."""


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]


Content = Chat | Pair | Text | Tokens


def check_columns(columns: Mapping[str, str]) -> None:
    known = sorted({name for names in COLUMNS.values() for name in names})
    for name in columns:
        if name not in known:
            raise DataError(
                Mistake("data.columns", f"{name!r} is no column of ours; known are {', '.join(known)}")
            )


def renamed(value: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the row with its columns renamed; a renamed column is no longer found under its old name."""
    if not columns:
        return value
    taken = set(columns.values())
    row = {name: cell for name, cell in value.items() if name not in taken}
    row.update({ours: value[theirs] for ours, theirs in columns.items() if theirs in value})
    return row


def detect(row: Mapping[str, Any]) -> Format | None:
    for format, choices in NEEDED.items():
        if any(all(row.get(name) is not None for name in names) for names in choices):
            if format == "kto" and not isinstance(row["label"], bool):
                continue
            return format
    return None


def refuse_untrainable(format: Format, label: str) -> None:
    if format in ("preference", "kto"):
        named = "preference pairs (chosen and rejected)" if format == "preference" else "KTO rows (label)"
        sentence = f"these rows are {named}; the only objective so far is sft, which cannot use them"
        raise DataError(Mistake(label, sentence))


def normalise(value: Mapping[str, Any], format: Format, spec: DataSpec) -> Content:
    """Return the row's content. Raise BadRow if it cannot be used."""
    row = renamed(value, spec.columns)
    _check_present(row, format, value, spec)
    if format == "text":
        return Text(_filled(row["text"], "text"))
    if format == "tokens":
        return _tokens(row)
    if format == "alpaca":
        return _alpaca(row, spec)
    if format == "prompt_completion":
        return _prompt_completion(row, spec)
    if format == "messages":
        return _chat(clean_messages(row["messages"], "messages"), row, spec)
    assert format == "sharegpt", format
    return _chat(clean_sharegpt(row["conversations"], "conversations"), row, spec)


def _check_present(row: Mapping[str, Any], format: Format, value: Mapping[str, Any], spec: DataSpec) -> None:
    choices = NEEDED[format]
    if any(all(row.get(name) is not None for name in names) for names in choices):
        return
    missing = next(name for name in choices[0] if row.get(name) is None)
    wanted = spec.columns.get(missing, missing)
    found = ", ".join(value) or "none"
    raise BadRow(f"the row has no `{wanted}`, which {format} rows need (its columns: {found[:200]})")


def _filled(value: object, name: str) -> str:
    text = text_of(value, name)
    if not text.strip():
        raise BadRow(f"`{name}` is empty")
    return text


def _chat(messages: tuple[Message, ...], row: Mapping[str, Any], spec: DataSpec, first: int = 0) -> Chat:
    turns = tuple(
        at
        for at, message in enumerate(messages)
        if at >= first and message["role"] == "assistant" and message.get("weight") != 0
    )
    if not turns and spec.train_on != "all":
        raise BadRow("the row has no supervised token: it holds no assistant message to train on")
    if spec.train_on == "completion":
        turns = turns[-1:]
    bare = tuple({key: value for key, value in message.items() if key != "weight"} for message in messages)
    return Chat(bare, clean_tools(row.get("tools")), turns)


def _alpaca(row: Mapping[str, Any], spec: DataSpec) -> Chat:
    asked = _filled(row["instruction"], "instruction")
    given = row.get("input")
    if given is not None and text_of(given, "input").strip():
        asked = f"{asked}\n\n{given}"
    messages = [{"role": "user", "content": asked}]
    messages.append({"role": "assistant", "content": _filled(row["output"], "output")})
    system = row.get("system")
    if system is not None and text_of(system, "system").strip():
        messages.insert(0, {"role": "system", "content": system})
    return _chat(tuple(messages), {}, spec)


def _prompt_completion(row: Mapping[str, Any], spec: DataSpec) -> Chat | Pair:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Pair(text_of(prompt, "prompt"), _filled(completion, "completion"))
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str | list | tuple):
            raise BadRow(f"`{name}` must be text or a list of messages, not {kind_name(value)}")
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRow("`prompt` and `completion` must both be text or both be lists of messages")
    before = clean_messages(prompt, "prompt")
    return _chat(before + clean_messages(completion, "completion"), row, spec, first=len(before))


def _integers(value: object, name: str) -> NDArray[np.int64]:
    listed = list_of(value, name)
    if not {int}.issuperset(map(type, listed)):
        at = next(at for at, number in enumerate(listed) if type(number) is not int)
        raise BadRow(f"`{name}[{at}]` must be a whole number, not {kind_name(listed[at])}")
    try:
        return np.array(listed, dtype=np.int64)
    except OverflowError:
        raise BadRow(f"`{name}` holds a number that is no token") from None


def _tokens(row: Mapping[str, Any]) -> Tokens:
    """Return tokens and mask. Labels are not kept, since a supervised token's label is the token itself."""
    tokens = _integers(row["input_ids"], "input_ids")
    labels = _integers(row["labels"], "labels") if row.get("labels") is not None else tokens
    shown = row.get("attention_mask")
    seen = np.ones_like(tokens) if shown is None else _integers(shown, "attention_mask")
    if not len(tokens):
        raise BadRow("`input_ids` is empty")
    if len(labels) != len(tokens) or len(seen) != len(tokens):
        raise BadRow("`input_ids`, `labels` and `attention_mask` must be equally long")
    wrong = np.flatnonzero((labels != -100) & (labels != tokens))
    if len(wrong):
        at = wrong[0]
        raise BadRow(
            f"`labels[{at}]` must be -100 or repeat `input_ids[{at}]`: Weftune shifts the labels itself"
        )
    kept = seen != 0
    return Tokens(tokens[kept], labels[kept] != -100)
