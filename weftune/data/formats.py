"""Detection of the format of rows from their columns, and conversion of a row to a chat, a text, a preference
pair, a labelled answer, or tokens."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weftune.data.row import TOO_DEEP, BadRow, is_deep_json, json_type_name
from weftune.data.spec import DataSpec, Format, RowKind
from weftune.errors import DataError, Mistake

COLUMNS: dict[Format, tuple[str, ...]] = {
    "tokens": ("input_ids", "labels"),
    "messages": ("messages", "tools"),
    "sharegpt": ("conversations", "tools"),
    "preference": (
        "prompt",
        "chosen",
        "rejected",
        "input",
        "preferred_output",
        "non_preferred_output",
        "tools",
    ),
    "kto": ("prompt", "completion", "label", "tools"),
    "prompt_completion": ("prompt", "completion", "tools"),
    "alpaca": ("instruction", "input", "output", "system"),
    "text": ("text",),
}
REQUIRED_COLUMNS: dict[Format, tuple[tuple[str, ...], ...]] = {
    "tokens": (("input_ids",),),
    "messages": (("messages",),),
    "sharegpt": (("conversations",),),
    "preference": (("chosen", "rejected"), ("preferred_output", "non_preferred_output")),
    "kto": (("prompt", "completion", "label"),),
    "prompt_completion": (("prompt", "completion"),),
    "alpaca": (("instruction", "output"),),
    "text": (("text",),),
}
"""Maps each format of rows to its alternative sets of required columns. Formats are detected in this order.
`text` is last, since the original Alpaca file also has a `text` column."""
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


@dataclass(frozen=True, slots=True)
class Chat:
    messages: tuple[Message, ...]
    tools: list[Any] | None
    turns: tuple[int, ...]
    """Indices of the assistant messages that are supervised; ignored with `train_on: all`."""
    placeholders: Mapping[str, str] = field(default_factory=dict)
    """Maps each private-use character in the chat to the control token whose text it replaces."""
    answer: int | None = None
    """Index of the first message of the answer if the chat is one side of a preference pair or a labelled
    answer. All text from there on is supervised."""


@dataclass(frozen=True, slots=True)
class Text:
    """The content of a row of text: either a text alone, or a prompt and its completion."""

    text: str
    completion: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of one training sample, and a mask that says which of them are supervised."""

    tokens: NDArray[np.integer]
    mask: NDArray[np.bool_]
    desirable: bool = True
    """Whether the sample's answer is labelled desirable. True for data without labels."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference pair: a prompt with the preferred answer, and the same prompt with another answer."""

    chosen: Chat | Text
    rejected: Chat | Text

    @property
    def sides(self) -> tuple[Chat | Text, ...]:
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class Labelled:
    """A prompt with one answer, which is labelled as desirable or undesirable."""

    answer: Chat | Text
    desirable: bool

    @property
    def sides(self) -> tuple[Chat | Text, ...]:
        return (self.answer,)


Content = Chat | Text | Sample | Pair | Labelled
ROW_FORMATS: dict[RowKind, Format] = {"pairs": "preference", "labelled": "kto"}
"""Maps a kind of rows, such as preference pairs, to its format. Kinds that have several formats are left
out."""


def row_kind_name(format: Format | None) -> RowKind:
    return next((kind for kind, own in ROW_FORMATS.items() if own == format), "answers")


def check_columns(columns: Mapping[str, str]) -> None:
    known = sorted({name for names in COLUMNS.values() for name in names})
    for name in columns:
        if name not in known:
            raise DataError(
                Mistake("data.columns", f"{name!r} is no column of ours; known are {', '.join(known)}")
            )


def rename_columns(value: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the row with its columns renamed; the old name of a renamed column is removed."""
    if not columns:
        return value
    taken = set(columns.values())
    row = {name: cell for name, cell in value.items() if name not in taken}
    row.update({ours: value[theirs] for ours, theirs in columns.items() if theirs in value})
    return row


def detect_format(row: Mapping[str, Any], row_kind: RowKind = "answers") -> Format | None:
    """Return the first format whose columns the row has. If `row_kind` has its own format, that format comes
    first, even if the row also has other columns, such as `messages`."""
    needed = ROW_FORMATS.get(row_kind)
    if needed is not None and has_columns(row, needed):
        return needed
    for format in REQUIRED_COLUMNS:
        if has_columns(row, format) and (format != "kto" or isinstance(row["label"], bool)):
            return format
    return None


def has_columns(row: Mapping[str, Any], format: Format) -> bool:
    """Return whether the row has all columns that one variant of the format requires."""
    choices = REQUIRED_COLUMNS[format]
    return any(all(row.get(name) is not None for name in names) for names in choices)


def check_trainable(format: Format, label: str, row_kind: RowKind) -> None:
    """Raise DataError if the job's objective, which needs rows of this kind, cannot use this format."""
    found = row_kind_name(format)
    if found == row_kind:
        return
    names = {"pairs": "preference pairs", "labelled": "labelled answers"}
    columns = {"pairs": "prompt, chosen and rejected", "labelled": "prompt, completion and label"}
    rows = names.get(found, f"{format} rows")
    remedy = {
        "answers": "objective: sft",
        "pairs": "objective: dpo, cpo, orpo or reward",
        "labelled": "objective: kto",
    }
    sentence = (
        f"these rows are {rows} ({columns.get(found)}), which objective sft cannot use; write "
        f"{remedy[found]} in the job, or name other data"
    )
    if row_kind != "answers":
        sentence = (
            f"these are {rows}, and the job's objective needs {names[row_kind]}; name rows with "
            f"{columns[row_kind]}, or write {remedy[found]} in the job"
        )
    raise DataError(Mistake(label, sentence))


def normalise_row(value: Mapping[str, Any], format: Format, spec: DataSpec) -> Content:
    """Check a row and convert it to a chat, text, pair, labelled answer or tokenised sample. Raise BadRow if
    it is invalid."""
    row = rename_columns(value, spec.columns)
    if not has_columns(row, format):
        missing = next(name for name in REQUIRED_COLUMNS[format][0] if row.get(name) is None)
        name, found = spec.columns.get(missing, missing), ", ".join(value) or "none"
        raise BadRow(f"the row has no `{name}`, which {format} rows need (its columns: {found[:200]})")
    if format == "text":
        return Text(_require_filled(row["text"], "text"))
    if format == "tokens":
        return _to_sample(row)
    if format == "alpaca":
        return _alpaca_to_chat(row, spec)
    if format == "prompt_completion":
        return _prompt_to_chat(row, spec)
    if format == "preference":
        return _to_pair(row, spec)
    if format == "kto":
        return _to_labelled_answer(row, spec)
    if format == "messages":
        return _to_chat(clean_messages(row["messages"], "messages"), row, spec)
    assert format == "sharegpt", format
    return _to_chat(clean_sharegpt(row["conversations"], "conversations"), row, spec)


def _require_filled(value: object, name: str) -> str:
    text = require_text(value, name)
    if not text.strip():
        raise BadRow(f"`{name}` is empty")
    return text


def _to_chat(messages: tuple[Message, ...], row: Mapping[str, Any], spec: DataSpec, first: int = 0) -> Chat:
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


def _alpaca_to_chat(row: Mapping[str, Any], spec: DataSpec) -> Chat:
    request, given, system = (
        _require_filled(row["instruction"], "instruction"),
        row.get("input"),
        row.get("system"),
    )
    if given is not None and require_text(given, "input").strip():
        request = f"{request}\n\n{given}"
    messages = [{"role": "user", "content": request}]
    messages.append({"role": "assistant", "content": _require_filled(row["output"], "output")})
    if system is not None and require_text(system, "system").strip():
        messages.insert(0, {"role": "system", "content": system})
    return _to_chat(tuple(messages), {}, spec)


def _prompt_to_chat(row: Mapping[str, Any], spec: DataSpec) -> Chat | Text:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text(require_text(prompt, "prompt"), _require_filled(completion, "completion"))
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str | list | tuple):
            raise BadRow(f"`{name}` must be text or a list of messages, not {json_type_name(value)}")
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRow("`prompt` and `completion` must both be text or both be lists of messages")
    before = clean_messages(prompt, "prompt")
    return _to_chat(before + clean_messages(completion, "completion"), row, spec, first=len(before))


def _to_labelled_answer(row: Mapping[str, Any], spec: DataSpec) -> Labelled:
    label = row["label"]
    if not isinstance(label, bool):
        raise BadRow(f"`label` must be true or false, not {json_type_name(label)}")
    answer = _prompt_to_chat(row, spec)
    if isinstance(answer, Chat):
        answer = replace(answer, answer=len(require_list(row["prompt"], "prompt")))
    return Labelled(answer, label)


def _to_pair(row: Mapping[str, Any], spec: DataSpec) -> Pair:
    names = ("chosen", "rejected")
    prompt, tools = row.get("prompt"), row.get("tools")
    if any(row.get(name) is None for name in names):
        names = ("preferred_output", "non_preferred_output")
        given = row.get("input")
        if not isinstance(given, Mapping) or given.get("messages") is None:
            raise BadRow(f"`input` must be an object with `messages`, not {json_type_name(given)}")
        prompt, tools = given["messages"], given.get("tools")
    answers = [row[name] for name in names]
    for name, value in zip(names, answers, strict=True):
        if not isinstance(value, str | list | tuple):
            raise BadRow(f"`{name}` must be text or a list of messages, not {json_type_name(value)}")
    if len({isinstance(value, str) for value in answers}) > 1:
        raise BadRow(f"`{names[0]}` and `{names[1]}` must both be text or both be lists of messages")
    if isinstance(answers[0], str):
        return Pair(*_text_pair(prompt, answers, names))
    chosen, rejected = (clean_messages(value, name) for name, value in zip(names, answers, strict=True))
    if prompt is None or isinstance(prompt, str):
        # Some rows repeat the last message of an implicit prompt as a text.
        count = _common_prefix_length(chosen, rejected)
        before, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
        if not before:
            raise BadRow("the row has no list of messages as `prompt`, and its answers begin differently")
        if not (chosen and rejected):
            raise BadRow("one answer continues the other, so the row does not show where its prompt ends")
    else:
        before = clean_messages(prompt, "prompt" if names[0] == "chosen" else "input.messages")
    sides = (
        _to_chat(before + side, {"tools": tools}, spec, first=len(before)) for side in (chosen, rejected)
    )
    return Pair(*(replace(side, answer=len(before)) for side in sides))


def _text_pair(prompt: object, answers: Sequence[str], names: Sequence[str]) -> Iterator[Text]:
    """Yield both sides of a preference pair that consists of texts. If the row has no prompt, the prompt is
    the common prefix of both texts."""
    chosen, rejected = (_require_filled(value, name) for name, value in zip(names, answers, strict=True))
    if prompt is None:
        count = _common_prefix_length(chosen, rejected)
        if count and chosen[count - 1] == " ":
            # The space belongs to the answers, as in TRL.
            count -= 1
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
        if not (chosen and rejected):
            raise BadRow("one answer continues the other, so the row does not show where its prompt ends")
    elif not isinstance(prompt, str):
        raise BadRow(f"`prompt`, `{names[0]}` and `{names[1]}` must all be text or all be lists of messages")
    for answer in (chosen, rejected):
        yield Text(require_text(prompt, "prompt"), answer)


def _common_prefix_length(first_items: Sequence[Any], second_items: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences, in items."""
    items = enumerate(zip(first_items, second_items, strict=False))
    return next(
        (index for index, (one, other) in items if one != other), min(len(first_items), len(second_items))
    )


def _require_integers(value: object, name: str) -> NDArray[np.int64]:
    listed = require_list(value, name)
    if not {int}.issuperset(map(type, listed)):
        at = next(at for at, number in enumerate(listed) if type(number) is not int)
        raise BadRow(f"`{name}[{at}]` must be a whole number, not {json_type_name(listed[at])}")
    try:
        return np.array(listed, dtype=np.int64)
    except OverflowError:
        raise BadRow(f"`{name}` holds a number that is no token") from None


def _to_sample(row: Mapping[str, Any]) -> Sample:
    """Convert a row with tokens to a sample. Its labels become a mask, since each label must be -100 or equal
    to its token."""
    tokens = _require_integers(row["input_ids"], "input_ids")
    labels = _require_integers(row["labels"], "labels") if row.get("labels") is not None else tokens
    shown = row.get("attention_mask")
    seen = np.ones_like(tokens) if shown is None else _require_integers(shown, "attention_mask")
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
    return Sample(tokens[kept], labels[kept] != -100)


def require_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"`{name}` must be text, not {json_type_name(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"`{name}` holds a lone surrogate or a byte that is not UTF-8") from None
    return value


def require_list(value: object, name: str) -> Sequence[Any]:
    """Return `value` as a list. In a CSV or Parquet column, `value` may be JSON text, which is parsed."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        text = value
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise BadRow(f"`{name}` starts like a JSON list but is not one") from None
        if is_deep_json(text, value):
            raise BadRow(f"`{name}` is {TOO_DEEP}")
    if not isinstance(value, list | tuple):
        raise BadRow(f"`{name}` must be a list, not {json_type_name(value)}")
    return value


def _require_filled_list(value: object, name: str) -> Sequence[Any]:
    if not (listed := require_list(value, name)):
        raise BadRow(f"`{name}` is empty")
    return listed


def clean_messages(value: object, name: str) -> tuple[Message, ...]:
    return tuple(
        _clean_message(message, f"{name}[{at}]")
        for at, message in enumerate(_require_filled_list(value, name))
    )


def clean_sharegpt(value: object, name: str) -> tuple[Message, ...]:
    messages = []
    for at, turn in enumerate(_require_filled_list(value, name)):
        if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
            raise BadRow(f"`{name}[{at}]` must be an object with `from` and `value`")
        speaker = turn["from"]
        if speaker not in SHAREGPT_ROLES:
            raise BadRow(_unknown_role(f"{name}[{at}].from", speaker, tuple(SHAREGPT_ROLES)))
        message = {"role": SHAREGPT_ROLES[speaker], "content": turn["value"], "weight": turn.get("weight")}
        messages.append(_clean_message(message, f"{name}[{at}]", content="value"))
    return tuple(messages)


def clean_tools(value: object) -> list[Any] | None:
    if value is None or value == "":
        return None
    tools = list(require_list(value, "tools"))
    for at, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise BadRow(f"`tools[{at}]` must be an object, not {json_type_name(tool)}")
    check_values(tools, "tools")
    return tools or None


def check_values(value: object, name: str) -> None:
    """Raise BadRow unless every text in `value` is valid Unicode and every number is finite."""
    if isinstance(value, str):
        require_text(value, name)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"`{name}` holds a number that is not finite")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            require_text(key, name)
            check_values(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            check_values(inner, f"{name}[{at}]")


def _unknown_role(name: str, role: object, known_roles: tuple[str, ...]) -> str:
    near = _nearest_role(role, known_roles) if isinstance(role, str) and len(role) < 30 else None
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(known_roles)}"
    return f"`{name}` is {repr(role)[:80]}, which is not a role; {hint}"


@lru_cache(maxsize=1024)  # the same mistake usually occurs in every row of a file
def _nearest_role(role: str, known_roles: tuple[str, ...]) -> str | None:
    return next(iter(difflib.get_close_matches(role.lower(), known_roles)), None)


def _clean_message(message: object, name: str, content: str = "content") -> Message:
    if not isinstance(message, Mapping):
        raise BadRow(f"`{name}` must be an object with `role` and `content`, not {json_type_name(message)}")
    clean = {key: value for key, value in message.items() if value is not None}
    role = clean.get("role")
    if role is None:
        raise BadRow(f"`{name}` has no `role`")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(_unknown_role(f"{name}.role", role, ROLES))
    if "weight" in clean and clean["weight"] not in (0, 1):
        raise BadRow(f"`{name}.weight` must be 0 or 1")
    if "tool_calls" in clean:
        clean["tool_calls"] = [
            _clean_call(call, f"{name}.tool_calls[{at}]")
            for at, call in enumerate(require_list(clean["tool_calls"], f"{name}.tool_calls"))
        ]
        if not clean["tool_calls"]:
            del clean["tool_calls"]
    text = _clean_content(clean, f"{name}.{content}")
    if text is not None or "content" in message:
        clean["content"] = text
    thinking = next((clean[key] for key in THINKING_NAMES if key in clean), None)
    if thinking is not None:
        # Under each name that chat templates read, as in transformers.
        clean = {"thinking": thinking, **clean, "reasoning_content": thinking}
    check_values({key: value for key, value in clean.items() if key not in ("role", "content")}, name)
    return clean


def _clean_content(message: Message, name: str) -> str | None:
    """Return the text of a message with its content checked, or None if the message has only tool calls."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_part_text(part, f"{name}[{at}]") for at, part in enumerate(content))
    calls = message["role"] == "assistant" and "tool_calls" in message
    if content is None:
        if calls:
            return None
        raise BadRow(f"`{name}` is missing")
    text = require_text(content, name)
    if message["role"] == "assistant" and not calls and not text.strip():
        raise BadRow(f"`{name}` is empty: an assistant's message must say something")
    return text


def _part_text(part: object, name: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        shown = part.get("type") if isinstance(part, Mapping) else json_type_name(part)
        raise BadRow(f"`{name}` is {shown!r}, but only text can be trained on")
    return require_text(part.get("text"), f"{name}.text")


def _clean_call(call: object, name: str) -> Mapping[str, Any]:
    """Return the tool call with its arguments parsed, since chat templates expect an object."""
    if not isinstance(call, Mapping):
        raise BadRow(f"`{name}` must be an object, not {json_type_name(call)}")
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    require_text(function.get("name"), f"{name}.function.name")
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
