"""The keys of a job as the user wrote them, with the file and line of each key. Shorthands are expanded, and
the keys are merged over the defaults."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from weftune.errors import Mistake

Loc = tuple[str | int, ...]
"""Location of a value as keys and indices: `("jobs", 2, "adapter", "rank")`."""

ROWS = "rows"
"""Name of a job's key whose value is rows that are passed from Python. Checks of a job never inspect them,
since there may be millions."""


@dataclass(frozen=True, slots=True)
class Place:
    """The source location of a value: the file and line in which the user wrote it, if any, and the value's
    dotted name."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return " ".join(part for part in (where, self.name) if part)

    def mistake(self, sentence: str) -> Mistake:
        return Mistake(str(self), sentence, self.line)


Places = dict[Loc, Place]


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in a value of a job whose file and line are not known yet. The record has the value's location
    in the job, and a message."""

    loc: Loc
    sentence: str


ABSENT: Any = object()


def child_value(value: Any, part: str | int) -> Any:
    """Return the value at the key or index `part` of a mapping or list, or `ABSENT`."""
    if isinstance(value, Mapping):
        return value.get(part, ABSENT)
    if isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
        return value[part]
    return ABSENT


def dotted_name(location: Loc) -> str:
    """Return a location as a dotted name: `jobs[2].adapter` for `("jobs", 2, "adapter")`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def source_locations(
    values: Any, root: Loc = (), file: str = "", lines: Mapping[Loc, int] | None = None
) -> Places:
    """Map the location of every value, relative to `root`, to the file and line where it was written. A value
    without a line gets the line of its parent."""
    places: Places = {}
    known = lines or {}

    def visit(value: Any, location: Loc, line: int) -> None:
        line = known.get(root + location, line)
        places[location] = Place(file, line, dotted_name(root + location))
        if location and location[-1] == ROWS:
            return
        if isinstance(value, Mapping):
            for key, below in value.items():
                visit(below, (*location, key), line)
        elif isinstance(value, list | tuple):
            for index, below in enumerate(value):
                visit(below, (*location, index), line)

    visit(values, (), known.get(root, 0))
    return places


def find_source_location(places: Places, location: Loc) -> Place:
    """Return the file and line where the value at `location` was written or, if there is none, those of the
    nearest enclosing value."""
    while location and location not in places:
        location = location[:-1]
    return places[location]


def nest_source_locations(places: Places, outer_location: Loc, key: str) -> None:
    """Move the source locations of all values at `outer_location` one level deeper, under `key`, since the
    shorthand at this location was expanded."""
    for loc, place in list(places.items()):
        if loc[: len(outer_location)] == outer_location:
            places[(*outer_location, key, *loc[len(outer_location) :])] = place


def sort_mistakes(mistakes: list[Mistake]) -> list[Mistake]:
    """Return the errors in a jobs file sorted by line, without repetitions. An error in `defaults` would
    otherwise be repeated for every job."""
    return list(dict.fromkeys(sorted(mistakes, key=lambda mistake: mistake.line)))


ALTERNATIVES: Mapping[Loc, tuple[str, str]] = {(): ("epochs", "steps"), ("eval",): ("path", "fraction")}
"""Maps the location of a section of a job to two keys of the section that exclude each other. If a job sets
one of them, the default of the other is ignored."""


@dataclass(frozen=True, slots=True)
class Layer:
    values: dict[str, Any]
    places: Places


def expand_shorthands(values: Mapping[str, Any], places: Places) -> Layer:
    """Return a job's keys and their source locations with shorthands (such as a path instead of a mapping)
    expanded, so that the keys can be merged with defaults one by one."""
    whole, places = dict(values), dict(places)
    data = whole.get("data")
    if isinstance(data, str | list | tuple):
        whole["data"] = data = {"path": data}
        nest_source_locations(places, ("data",), "path")
    if isinstance(data, Mapping) and isinstance(data.get("path"), list | tuple):
        sources = [{"path": item} if isinstance(item, str) else item for item in data["path"]]
        plain = {index for index, item in enumerate(data["path"]) if isinstance(item, str)}
        places |= {
            (*loc, "path"): place
            for loc, place in places.items()
            if loc[:2] == ("data", "path") and len(loc) == 3 and loc[2] in plain
        }
        whole["data"] = {**data, "path": sources}
    if isinstance(whole.get("objective"), str):
        whole["objective"] = {"kind": whole["objective"]}
        nest_source_locations(places, ("objective",), "kind")
    stop = whole.get("early_stop")
    if isinstance(stop, numbers.Real) and not isinstance(stop, bool):
        whole["early_stop"] = {"patience": stop}
        nest_source_locations(places, ("early_stop",), "patience")
    return Layer(whole, places)


def merge_over_defaults(defaults: Layer, layer: Layer) -> Layer:
    """Return the keys of `layer` merged over those of `defaults`. Where both have a mapping, the mappings are
    merged recursively; any other value of `layer` replaces the default."""
    values = _merge_values_at(defaults.values, layer.values, ())
    places = {loc: place for loc, place in defaults.places.items() if loc and _has_value(values, loc)}
    return Layer(values, places | layer.places)


def _merge_values_at(defaults: Mapping[str, Any], values: Mapping[str, Any], location: Loc) -> dict[str, Any]:
    result = dict(defaults)
    one, other = ALTERNATIVES.get(location, ("", ""))
    if values.get(one) is not None:
        result.pop(other, None)
    if values.get(other) is not None:
        result.pop(one, None)
    for key, value in values.items():
        lower = result.get(key)
        both = isinstance(lower, Mapping) and isinstance(value, Mapping)
        result[key] = _merge_values_at(lower, value, (*location, key)) if both else value  # type: ignore[arg-type]
    return result


def _has_value(values: Any, location: Loc) -> bool:
    for part in location:
        values = child_value(values, part)
    return values is not ABSENT


def keys_from_keywords(keywords: Mapping[str, Any]) -> Layer:
    """Return the keyword arguments of a `JobSpec` as plain keys and values, in the form in which a job is
    read from a file."""
    values = dict(keywords)
    if is_row_data(values.get("data")):
        values["data"] = {ROWS: values["data"]}
    values = {key: plain_values(value) for key, value in values.items()}
    return expand_shorthands(values, source_locations(values))


def is_row_data(data: Any) -> bool:
    """Return whether the list `data` contains rows. A list without rows is a mixture of datasets: paths, or
    {path, weight}."""
    if isinstance(data, list | tuple):
        return not data or not all(isinstance(item, str | Path) or _is_data_source(item) for item in data)
    is_path_or_keys = isinstance(data, str | bytes | Path | Mapping) or is_dataclass(data)
    return not is_path_or_keys and hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _is_data_source(item: Any) -> bool:
    if is_dataclass(item):
        return hasattr(item, "weight")
    return isinstance(item, Mapping) and "path" in item and len(item) <= 2


def plain_values(value: Any) -> Any:
    """Convert dataclasses to mappings, paths to strings and NumPy numbers to Python numbers. Rows stay
    unchanged."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
        value = {key: below for key, below in value.items() if below is not None and below != ()}
    if isinstance(value, Mapping):
        return {str(key): below if key == ROWS else plain_values(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    return value
