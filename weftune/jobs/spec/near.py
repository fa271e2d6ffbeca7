"""Suggestions for a mistyped name: the nearest known one, or none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.8
"""Above three quarters: one letter of four may make another word, as in dora and lora."""
LEAST_LETTERS = 3


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` is a slip of, or the only one that it abbreviates or has the letters of."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=CUTOFF)
    if not near and len(word) >= LEAST_LETTERS:
        near = [name for name in names if name.startswith(word) or sorted(name) == sorted(word)]
    return near.pop() if len(near) == 1 else None
