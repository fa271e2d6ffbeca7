"""The place in the file where each key of a job was written, so that a mistake can point at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weftune.errors import Mistake

Loc = tuple[str | int, ...]
"""Location of a value as keys and indices: `("jobs", 2, "adapter", "rank")`."""

ROWS = "rows"
"""Key of rows given from Python; its value is never read here, since there may be millions of rows."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file and the dotted name of the value there; without a file if the spec was made in
    Python."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return " ".join(part for part in (where, self.name) if part)


Places = dict[Loc, Place]


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake whose place is not known yet: the location of the value, and the message."""

    loc: Loc
    sentence: str


ABSENT: Any = object()


def step_into(value: Any, part: str | int) -> Any:
    """Return the value at `part` of a mapping or list, or ABSENT."""
    if isinstance(value, Mapping):
        return value.get(part, ABSENT)
    if isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
        return value[part]
    return ABSENT


def dotted(loc: Loc) -> str:
    """Return `("jobs", 2, "adapter")` as `jobs[2].adapter`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def places_of(tree: Any, root: Loc = (), file: str = "", lines: Mapping[Loc, int] | None = None) -> Places:
    """Return the place of every value below `root`, keyed by its location from there; a value without a line
    has its parent's."""
    places: Places = {}
    known = lines or {}

    def visit(value: Any, loc: Loc, line: int) -> None:
        line = known.get(root + loc, line)
        places[loc] = Place(file, line, dotted(root + loc))
        if loc and loc[-1] == ROWS:
            return
        if isinstance(value, Mapping):
            for key, below in value.items():
                visit(below, (*loc, key), line)
        elif isinstance(value, list | tuple):
            for index, below in enumerate(value):
                visit(below, (*loc, index), line)

    visit(tree, (), known.get(root, 0))
    return places


def place_of(places: Places, loc: Loc) -> Place:
    """Return the place of `loc`, or of the nearest value around it that was written."""
    while loc and loc not in places:
        loc = loc[:-1]
    return places[loc]


def wrap(places: Places, at: Loc, key: str) -> None:
    """Expand a shorthand: everything written at `at` gets a place one level deeper, under `key`."""
    for loc, place in list(places.items()):
        if loc[: len(at)] == at:
            places[(*at, key, *loc[len(at) :])] = place


@dataclass(frozen=True, slots=True)
class Placed:
    """A mistake whose place is still a record, so that a list of mistakes can be sorted by line."""

    place: Place
    sentence: str

    @property
    def mistake(self) -> Mistake:
        return Mistake(str(self.place), self.sentence)


def in_file_order(found: list[Placed]) -> list[Mistake]:
    """Return the mistakes by line, each once: one in `defaults` would otherwise be repeated for every job."""
    once = dict.fromkeys(sorted(found, key=lambda placed: placed.place.line))
    return [placed.mistake for placed in once]
