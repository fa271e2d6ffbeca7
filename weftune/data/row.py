"""Rows as they were read, and exceptions for unusable rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class BadRow(Exception):
    """An exception for an unusable row. The message is a sentence for the user, without the row's
    location."""

    def to_json(self) -> dict[str, Any]:
        """Return the error as JSON values, from which `bad_row_from_json` restores it in another process."""
        return {"bad": str(self)}


class CommonBadRow(BadRow):
    """An exception for a row that is unusable for a reason that many rows share. Rows with the same reason
    are reported together."""

    def __init__(self, sentence: str, *, kind: str, remedy: str, needed_tokens: int = 0) -> None:
        super().__init__(sentence)
        self.kind = kind
        """Kind of the problem that makes the row unusable. Rows with the same kind of problem are reported
        together."""
        self.remedy = remedy
        """Advice for the user. The text `{needed_tokens}` in it is replaced by the largest number of tokens
        that a row with this problem needs."""
        self.needed_tokens = needed_tokens

    def to_json(self) -> dict[str, Any]:
        common = {"kind": self.kind, "remedy": self.remedy, "needed_tokens": self.needed_tokens}
        return {"bad": str(self), "common": common}


def bad_row_from_json(json_values: Mapping[str, Any]) -> BadRow:
    common = json_values.get("common")
    return BadRow(json_values["bad"]) if common is None else CommonBadRow(json_values["bad"], **common)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of data and its location (`file.jsonl:LINE`). `problem` is the reason why the row could not be
    read, if there is one."""

    location: str
    value: Mapping[str, Any]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A source of rows that can be iterated repeatedly, with a hash of its content."""

    label: str
    digest: str
    rows: Callable[[], Iterator[Row]]
    weight: float = 1.0
    """Number of times that each sample is shown per epoch."""


MAX_DEPTH = 64
"""Maximum nesting depth of lists and objects in a row, since the code that processes rows is recursive."""
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"


def is_nested_deeply(value: object, max_depth: int = MAX_DEPTH) -> bool:
    """Return whether lists and objects in `value` are nested more than `max_depth` deep. The check itself
    recurses no deeper than that."""
    if isinstance(value, Mapping):
        children: Collection[object] = value.values()
    elif isinstance(value, list | tuple):
        children = value
    else:
        return False
    holds_more = any(issubclass(kind, Mapping | list | tuple) for kind in set(map(type, children)))
    return max_depth == 0 or (holds_more and any(is_nested_deeply(item, max_depth - 1) for item in children))


def is_deep_json(text: str, value: object) -> bool:
    """Return whether `value`, which was parsed from `text`, is nested deeper than `MAX_DEPTH`. To save time,
    the value is not searched if the text has few brackets."""
    return text.count("[") + text.count("{") > MAX_DEPTH and is_nested_deeply(value)


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """Return bytes that are equal for equal rows, whatever the order of the columns."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
    except (TypeError, ValueError, RecursionError):  # rows from Python can hold keys that JSON cannot
        return repr(value).encode(errors="replace")


def row_hash(value: Mapping[str, Any]) -> int:
    """Return a 64-bit hash of the row, which decides whether the row is held out."""
    return int.from_bytes(hashlib.blake2b(canonical_json(value), digest_size=8).digest(), "little")


def to_row(location: str, value: object) -> Row:
    if not isinstance(value, Mapping):
        return Row(location, {}, f"a row must be an object with named columns, not {json_type_name(value)}")
    if not all(isinstance(name, str) for name in value):
        return Row(location, {}, "the names of the columns must be text")
    return Row(location, value)


def json_type_name(value: object) -> str:
    """Return the type of a JSON value in words for the user."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return f"a {type(value).__name__}"
