"""Paths of a spec, relative to the file they are written in and distinguished from ids of the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weftune.adapters.folder import CONFIG, WEIGHTS, no_weights
from weftune.jobs.spec.near import nearest
from weftune.jobs.spec.show import show

HUB_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
FILE_SUFFIXES = (
    ".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".zip", ".xz",
    ".bz2", ".yaml", ".yml", ".gguf", ".safetensors", ".bin", ".pt", ".jinja", ".md",
)  # fmt: skip


CHATML = "chatml"
"""Name of the chat template that needs no file."""


@dataclass(frozen=True, slots=True)
class Located:
    """The absolute path that a written path leads to, or the reason why it leads nowhere."""

    path: str
    fault: str = ""


Locate = Callable[[Path, str], Located]


def is_hub_id(text: str) -> bool:
    """Whether `text` can be `owner/name` or `name` on the Hub, and not a file that is missing."""
    return re.fullmatch(f"(?:{HUB_PART}/)?{HUB_PART}", text) is not None and not text.lower().endswith(
        FILE_SUFFIXES
    )


def is_revision(text: str) -> bool:
    """Whether `text` can name a revision on the Hub, whose client builds a path from it."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", text) is not None


def place_in(folder: Path, text: str) -> Path:
    """Return `text`, as written in a file in `folder`, as an absolute path, so that the working folder does
    not matter.

    Links are not followed: in the Hub's cache a GGUF file is a link to a name without a suffix.
    """
    return Path(os.path.normpath((folder / Path(os.path.expanduser(text))).absolute()))


def exists(path: Path) -> bool:
    """Return whether a path exists. Path.exists would raise for paths that no system can have."""
    return os.path.exists(path)


def missing(folder: Path, text: str, what: str = "file") -> str:
    """Return the message for a path that leads nowhere, with the nearest file that does exist."""
    if "\0" in text:
        return "holds a zero byte, which no path can"
    path = place_in(folder, text)
    sentence = f"there is no {what} {show(text)} in {folder.absolute()}"
    if Path(os.path.expanduser(text)).is_absolute():
        sentence = f"there is no {what} {show(text)}"
    try:
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError:
        beside = []
    # Compared without the suffix: a suffix that they share would make all of them near.
    by_stem = {Path(name).stem: name for name in beside if Path(name).suffix == path.suffix}
    by_stem |= {name: name for name in beside if Path(name).stem == path.stem}
    near = nearest(path.stem, by_stem) or nearest(path.name, by_stem)
    if near:
        return f"{sentence}; did you mean {Path(text).parent / by_stem[near]}?"
    return f"{sentence}; write a path relative to the jobs file, or an absolute one"


def locate_rows(folder: Path, text: str) -> Located:
    """Locate an existing file or folder, or else an id on the Hub."""
    path = place_in(folder, text)
    if exists(path):
        return Located(str(path))
    return Located(text) if is_hub_id(text) else Located(text, missing(folder, text))


def locate_template(folder: Path, text: str) -> Located:
    path = place_in(folder, text)
    if text == CHATML:
        return Located(text)
    if exists(path) and path.is_file():
        return Located(str(path))
    if "." not in text and "/" not in text:
        return Located(text, f"must be chatml or a Jinja file, got {show(text)}")
    return Located(text, missing(folder, text))


def locate_adapter(folder: Path, text: str) -> Located:
    path = place_in(folder, text)
    if not exists(path):
        return Located(text, missing(folder, text, "folder"))
    if not exists(path / CONFIG):
        return Located(text, f"{show(text)} holds no {CONFIG}; name a PEFT adapter folder")
    if not exists(path / WEIGHTS):
        return Located(text, no_weights(path))
    return Located(str(path))
