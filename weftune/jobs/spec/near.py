"""Suggestions for a mistyped name: the nearest known one, or none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.8
"""Minimum similarity of a suggestion. It is above three quarters since one letter of four may make another
word, as in dora and lora."""
LEAST_LETTERS = 3


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that `word` misspells, or the only one that it abbreviates or is an anagram of;
    None if there is none."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=CUTOFF)
    if not near and len(word) >= LEAST_LETTERS:
        near = [name for name in names if name.startswith(word) or sorted(name) == sorted(word)]
    return near.pop() if len(near) == 1 else None
