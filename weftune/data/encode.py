"""Tokenisation by the base's tokenizer. Special tokens are parsed only in text that a chat template prints; a
user's text is always tokenised as plain text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weftune.data.row import BadRow
from weftune.errors import DataError

SPACE_MARKS = ("Ġ", "▁", " ")
"""Characters that stand for a leading space in the tokens of a tokenizer's vocabulary."""
PRIVATE = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a text, and for each token the [start, stop) span of characters that it covers."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


class Encoder:
    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError("the base's tokenizer gives no character offsets; Weftune needs a fast tokenizer")
        self.tokenizer = tokenizer
        """The transformers tokenizer; None in a worker process."""
        self._backend = tokenizer.backend_tokenizer
        self.size = len(tokenizer)
        self.eos: int | None = tokenizer.eos_token_id
        self.bos: int | None = tokenizer.bos_token_id
        self.prefix_tokens = self._find_prefix_tokens()
        """Tokens that the tokenizer inserts before a text: usually BOS, with some tokenizers none."""
        self._prefixes = self._adds_leading_space()
        added = tokenizer.added_tokens_decoder.values()
        self.added = frozenset(str(token) for token in added)
        special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        longest_first = sorted(filter(None, special), key=lambda text: (-len(text), text))
        self.control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        """Pattern that matches the text of any control token, such as an end-of-turn token."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the encoder's state for pickling, with the tokenizer serialised as text, so that loading it
        needs no transformers."""
        return {**self.__dict__, "tokenizer": None, "_backend": self._backend.to_str()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

        self.__dict__ |= {**state, "_backend": Tokenizer.from_str(state["_backend"])}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the tokenizer. The hash is cached, since hashing a large vocabulary is slow."""
        state = json.loads(self._backend.to_str())
        # Truncation and padding depend on the last call of the tokenizer and are not part of its identity.
        state["truncation"] = state["padding"] = None
        identity = [
            state,
            sorted(map(str, self.tokenizer.special_tokens_map.items())),
            self.prefix_tokens,
            self.eos,
        ]
        return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()

    def encode_texts(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the tokens of users' texts, each tokenised as the beginning of a sample."""
        # Without offsets, which would take longer than the tokens.
        parts = self._reset_tokenizer(parses_special_tokens=False).encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [np.array(part.ids, dtype=np.int32) for part in parts]

    def encode_continuations(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Tokenise texts that are appended to other texts, so that the tokenizer adds no leading space."""
        if not self._prefixes:
            return self.encode_texts(texts)
        return [part.tokens for part in self._encode_continuations(texts, parses_special_tokens=False)]

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the tokens of texts that a chat template printed."""
        return self._encode(texts, parses_special_tokens=True)

    def encode_with_placeholders(self, text: str, placeholders: Mapping[str, str]) -> Encoded:
        """Return the tokens of a text that a template printed, split at every placeholder.

        A placeholder is a private-use character that replaces a control token in a user's text. A placeholder
        is tokenised as the plain text of the control token that it replaces.
        """
        if not text:
            return _to_encoded([], [])
        borders = {0, len(text)}
        for at, character in enumerate(text):
            if character in placeholders:
                borders |= {at, at + 1}
        tokens, starts, stops = [], [], []
        for start, stop in pairwise(sorted(borders)):
            piece = text[start:stop]
            if piece in placeholders:
                (part,) = self._encode_continuations([placeholders[piece]], parses_special_tokens=False)
                starts.append(np.full(len(part.tokens), start))
                stops.append(np.full(len(part.tokens), stop))
            else:
                (part,) = (self._encode if start == 0 else self._encode_continuations)(
                    [piece], parses_special_tokens=True
                )
                starts.append(part.starts + start)
                stops.append(part.stops + start)
            tokens.append(part.tokens)
        return Encoded(np.concatenate(tokens), np.concatenate(starts), np.concatenate(stops))

    def splits_token(self, encoded: Encoded, boundary: int) -> bool:
        """Return whether a token covers characters on both sides of the position `boundary`."""
        after = int(np.searchsorted(encoded.starts, boundary, side="left"))
        stop_before = encoded.stops[after - 1] if after > 0 else boundary
        if stop_before > boundary:
            return True
        if after == len(encoded.starts) or encoded.starts[after] != boundary:
            return False
        # Some tokenizers leave a token's own leading space out of its offsets: then there is a gap before it.
        token: str = self._backend.id_to_token(int(encoded.tokens[after]))
        return bool(stop_before < boundary) and token.startswith(SPACE_MARKS)

    def _encode(self, texts: Sequence[str], *, parses_special_tokens: bool) -> list[Encoded]:
        if not texts:
            return []
        parts = self._reset_tokenizer(parses_special_tokens).encode_batch(
            list(texts), add_special_tokens=False
        )
        return [_to_encoded(part.ids, part.offsets) for part in parts]

    def _reset_tokenizer(self, parses_special_tokens: bool) -> Any:
        """Reset the settings of the Rust tokenizer, which persist between calls, and return it. It parses
        special tokens only if `parses_special_tokens`, and neither truncates nor pads."""
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = not parses_special_tokens
        return self._backend

    def _encode_continuations(self, texts: Sequence[str], *, parses_special_tokens: bool) -> list[Encoded]:
        if not self._prefixes:
            return self._encode(texts, parses_special_tokens=parses_special_tokens)
        # Neither anchor merges with the text after it: a letter before a space, a line break before anything
        # else.
        anchors = ["x" if text[:1].isspace() else "\n" for text in texts]
        anchored = self._encode(
            [anchor + text for anchor, text in zip(anchors, texts, strict=True)],
            parses_special_tokens=parses_special_tokens,
        )
        parts = []
        for text, part in zip(texts, anchored, strict=True):
            if np.any((part.starts < 1) & (part.stops > 1)):
                parts += self._encode([text], parses_special_tokens=parses_special_tokens)
                continue
            kept = part.starts >= 1
            parts.append(Encoded(part.tokens[kept], part.starts[kept] - 1, part.stops[kept] - 1))
        return parts

    def _find_prefix_tokens(self) -> tuple[int, ...]:
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        full = self.tokenizer("a")["input_ids"]
        for at in range(len(full)):
            if full[at : at + len(bare)] == bare:
                return tuple(full[:at])
        return ()

    def _adds_leading_space(self) -> bool:
        alone, line, after = (
            part.tokens.tolist() for part in self._encode(["x", "\n", "\nx"], parses_special_tokens=True)
        )
        return after[len(line) :] != alone


def _to_encoded(tokens: list[int], offsets: list[tuple[int, int]]) -> Encoded:
    spans = np.array(offsets, dtype=np.int64).reshape(len(tokens), 2)
    return Encoded(np.array(tokens, dtype=np.int32), spans[:, 0], spans[:, 1])


def replace_control_tokens(value: Any, control_pattern: re.Pattern[str]) -> tuple[Any, dict[str, str]]:
    """Replace control tokens in all strings of `value` by private-use characters. Return the new value, and a
    dict from each of these characters to the control token that it replaces."""
    used = set(json.dumps(value, ensure_ascii=False, default=str))
    free = (chr(code) for code in PRIVATE if chr(code) not in used)
    placeholders: dict[str, str] = {}
    character_by_token: dict[str, str] = {}

    def replace_match(match: re.Match[str]) -> str:
        found = match.group()
        if found not in character_by_token:
            character = next(free, None)
            if character is None:
                raise BadRow("the row holds control tokens and every private-use character")
            character_by_token[found] = character
            placeholders[character] = found
        return character_by_token[found]

    def replace_nested(nested: Any) -> Any:
        if isinstance(nested, str):
            return control_pattern.sub(replace_match, nested)
        if isinstance(nested, Mapping):
            return {replace_nested(key): replace_nested(item) for key, item in nested.items()}
        if isinstance(nested, list | tuple):
            return [replace_nested(item) for item in nested]
        return nested

    return replace_nested(value), placeholders


def contains_control_token(value: Any, control_pattern: re.Pattern[str]) -> bool:
    if isinstance(value, str):
        return control_pattern.search(value) is not None
    if isinstance(value, Mapping):
        return any(
            contains_control_token(key, control_pattern) or contains_control_token(item, control_pattern)
            for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return any(contains_control_token(item, control_pattern) for item in value)
    return False
