"""Strict reading of rows from JSON: JSON Lines, or one large array read piece by piece.

`json.loads` alone would accept NaN, 1e400 and duplicate keys, which do not belong in training data.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from weftune.data.row import TOO_DEEP, Row, is_deep_json, to_row
from weftune.errors import DataError, Mistake

MAX_ROW_SIZE = 16 * 2**20
"""Maximum size of a row, in bytes or characters. Parsing a row needs many times as much memory."""
CHUNK_SIZE = 2**20
SPACE = " \t\r\n"
LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s,:\[\]{}"]+')
"""Pattern that matches a literal in JSON text: a string, or a number or name between punctuation."""


class _RefusedLiteral(ValueError):
    """An exception for a literal that `json` accepts but Weftune refuses, such as NaN. The position of the
    literal is not known."""

    def __init__(self, sentence: str, text: str) -> None:
        super().__init__(sentence)
        self.literal = text


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedLiteral(f"{name} is not a number that JSON knows", name)


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _RefusedLiteral(f"{text} is too large for a number", text)
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return value


DECODER = json.JSONDecoder(
    object_pairs_hook=_refuse_duplicates,
    parse_constant=_refuse_constant,
    parse_float=_parse_finite,
    strict=True,
)


def read_lines(path: Path, label: str) -> Iterator[Row]:
    """Yield the rows of a file with one JSON object per line; blank lines are skipped but counted."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_ROW_SIZE):
            number += 1
            location = f"{label}:{number}"
            if len(line) == MAX_ROW_SIZE and not line.endswith(b"\n"):
                while (rest := file.readline(CHUNK_SIZE)) and not rest.endswith(b"\n"):
                    pass
                yield Row(location, {}, f"the row is longer than {MAX_ROW_SIZE // 2**20} MiB")
            elif line.strip():
                yield _parse_line(line, location, is_first_line=number == 1)


def _parse_line(line: bytes, location: str, is_first_line: bool) -> Row:
    try:
        text = line.decode("utf-8-sig" if is_first_line else "utf-8")
    except UnicodeDecodeError:
        return Row(location, {}, "the line is not valid UTF-8")
    try:
        # Without the line ending: otherwise missing text would be reported at column 1 of the next line.
        value = DECODER.decode(text.rstrip(SPACE))
    except (ValueError, RecursionError) as problem:
        return Row(location, {}, json_error_text(problem, text))
    if is_deep_json(text, value):
        return Row(location, {}, f"not usable JSON: {TOO_DEEP}")
    return Row(location, value) if type(value) is dict else to_row(location, value)


def json_error_text(problem: Exception, line: str = "") -> str:
    """Return an error message for the user, with the column if the line is given."""
    if isinstance(problem, json.JSONDecodeError):
        return f"not valid JSON: {_error_reason(problem)} at column {problem.colno}"
    if isinstance(problem, RecursionError):
        return f"not usable JSON: {TOO_DEEP}"
    if isinstance(problem, _RefusedLiteral):
        # The first occurrence of the literal outside a text.
        found = (one.start() for one in LITERAL.finditer(line) if one.group() == problem.literal)
        if (position := next(found, None)) is not None:
            return f"not valid JSON: {problem} at column {position + 1}"
    return f"not valid JSON: {problem}"


def _error_reason(problem: json.JSONDecodeError) -> str:
    """Return the message of a JSON error. A trailing word `at`, with which some messages end, is removed."""
    return problem.msg.lower().removesuffix(" at")


def read_json(path: Path, label: str) -> Iterator[Row]:
    """Yield the rows of an array of objects; a file that starts with an object is read as JSON Lines."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        head = file.read(CHUNK_SIZE).lstrip()
    return read_array(path, label) if head.startswith("[") else read_lines(path, label)


def read_array(path: Path, label: str) -> Iterator[Row]:
    # Undecodable bytes become lone surrogates, which the check of every text reports per row.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        window = _TextWindow(file, label)
        window.expect("[")
        if window.peek() == "]":
            return
        while True:
            window.peek()
            line = window.line
            yield to_row(f"{label}:{line}", window.value())
            if window.peek() == "]":
                break
            window.expect(",")
        window.expect("]")
        if window.peek():
            window.raise_error("something stands after the end of the array")


class _TextWindow:
    """A buffer with the part of a large JSON text that is in memory, at most a few rows."""

    def __init__(self, file: TextIO, label: str) -> None:
        self._file = file
        self._label = label
        self._text = ""
        self._at = 0
        self._line_start = 0
        """Offset of the current line's first character in the text in memory. Negative if that character is
        no longer in memory."""
        self.line = 1

    def raise_error(self, sentence: str) -> NoReturn:
        raise DataError(Mistake(f"{self._label}:{self.line}", sentence))

    def _raise_error_at(self, position: int, sentence: str) -> NoReturn:
        """Raise DataError with the line and column of `position` in the text in memory."""
        self._skip_characters(position)
        self.raise_error(f"not valid JSON: {sentence} at column {position - self._line_start + 1}")

    def _read_more(self) -> bool:
        piece = self._file.read(max(CHUNK_SIZE, len(self._text) - self._at))
        self._text = self._text[self._at :] + piece
        self._line_start -= self._at
        self._at = 0
        return bool(piece)

    def _skip_characters(self, stop: int) -> None:
        breaks = self._text.count("\n", self._at, stop)
        if breaks:
            self.line += breaks
            self._line_start = self._text.rindex("\n", self._at, stop) + 1
        self._at = stop

    def peek(self) -> str:
        """Return the next character that is not whitespace; empty at the end of the text."""
        while True:
            stop = self._at
            while stop < len(self._text) and self._text[stop] in SPACE:
                stop += 1
            self._skip_characters(stop)
            if stop < len(self._text):
                return self._text[stop]
            if not self._read_more():
                return ""

    def expect(self, character: str) -> None:
        found = self.peek()
        if found != character:
            self._raise_error_at(
                self._at, f"expected {character!r}, found {found or 'the end of the file'!r}"
            )
        self._skip_characters(self._at + 1)

    def value(self) -> Any:
        while True:
            try:
                value, stop = DECODER.raw_decode(self._text, self._at)
                # A number at the very end of the window may continue in the next piece.
                if stop < len(self._text) or not self._read_more():
                    if is_deep_json(self._text[self._at : stop], value):
                        self.raise_error(f"not usable JSON: {TOO_DEEP}")
                    self._skip_characters(stop)
                    return value
            except json.JSONDecodeError as problem:
                self._read_more_or_raise(problem)
            except (ValueError, RecursionError) as problem:
                self.raise_error(json_error_text(problem))

    def _read_more_or_raise(self, problem: json.JSONDecodeError) -> None:
        into_row = problem.pos - self._at  # `_read_more` moves the text in memory
        cut_short = problem.msg.startswith("Unterminated") or problem.pos >= len(self._text) - 16
        if len(self._text) - self._at > MAX_ROW_SIZE:
            self.raise_error(f"the row is longer than {MAX_ROW_SIZE // 2**20} MiB")
        if not cut_short or not self._read_more():
            self._raise_error_at(self._at + into_row, _error_reason(problem))
