"""Names and values in messages: how a value is written, which known name is near, which names
a job may have."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from weftune.core.bounds import show

CUTOFF = 0.8
"""Minimum similarity of a suggestion. It is above three quarters since one letter of four may make another
word, as in dora and lora."""
LEAST_LETTERS = 3


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that `word` misspells, or the only one that it abbreviates or is an anagram
    of."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=CUTOFF)
    if not near and len(word) >= LEAST_LETTERS:
        near = [name for name in names if name.startswith(word) or sorted(name) == sorted(word)]
    return near.pop() if len(near) == 1 else None


LONGEST = 64

DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}
"""Names that Windows reserves, whatever follows the first dot."""

OURS = {
    "metrics.jsonl", "windows.jsonl", "status.json", "learned.json", "promise.json", "shares.json",
    "report.html", "ranks", "tensorboard", "wandb", "mlruns",
}  # fmt: skip
"""Names of files and folders that Weftune writes beside the jobs' folders."""


def name_fault(name: Any) -> str | None:
    """Return the error message for a job's name, or None if it is valid."""
    if not isinstance(name, str):
        hint = "" if name is None or isinstance(name, list | tuple | dict) else "; write it in quotes"
        return f"must be text, got {show(name)}{hint}"
    if not name:
        return "must not be empty"
    if len(name) > LONGEST:
        return f"must have at most {LONGEST} letters, got {len(name)}"
    if "/" in name or "\\" in name or name in (".", ".."):
        return f"must be a plain name and no path, got {show(name)}"
    if name[0] in ".-":
        return f"must not start with a dot or a dash, got {show(name)}"
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name.endswith("."):
        return f"must be made of ASCII letters, digits, . _ and - and not end with a dot, got {show(name)}"
    if name.lower() in OURS or name.lower().partition(".")[0] in DEVICES:
        return f"{show(name)} is a reserved name; choose another"
    return None


def repeated(names: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Yield the position of every name that an earlier job has taken, with the error message."""
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if not isinstance(name, str):
            continue
        earlier = first.setdefault(name.lower(), index)
        if earlier == index:
            continue
        if names[earlier] == name:
            yield index, f"{show(name)} is already the name of jobs[{earlier}]; choose another"
        else:
            yield index, f"{show(name)} differs from the name of jobs[{earlier}] only by case; choose another"
