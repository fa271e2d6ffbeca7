"""The dotted keys of `over` as locations in a job's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weftune.jobs.spec.places import Loc
from weftune.jobs.sweeps.spec import Choices, ValueRange


def way_of(key: str) -> Loc:
    """Return `adapter.rank` as `("adapter", "rank")`; the rest is one name, since patterns contain dots
    themselves."""
    return tuple(key.split(".", 2))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's values as keys of a job: `{"adapter.rank": 8}` becomes `{"adapter": {"rank": 8}}`."""
    whole: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = way_of(key)
        inner = whole
        for part in above:
            inner = inner.setdefault(str(part), {})
        held = inner.get(str(last))
        inner[str(last)] = _joined(held, value) if isinstance(held, dict) else _copied(value)
    return whole


def leaves(way: Loc, value: Any) -> Iterator[tuple[Loc, Any]]:
    """Yield the locations and values that a value of the key at `way` sets: itself, or the content of a
    mapping."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from leaves((*way, name), below)
    else:
        yield way, value


def leaves_of(key: str, choices: Choices) -> list[Loc]:
    """Return the locations of everything that some value of `choices` sets."""
    if isinstance(choices, ValueRange):
        return [way_of(key)]
    return list(dict.fromkeys(way for value in choices for way, _ in leaves(way_of(key), value)))


def _joined(one: dict[str, Any], other: Any) -> Any:
    if not isinstance(other, Mapping):
        return other
    whole = dict(one)
    for name, value in other.items():
        held = whole.get(name)
        whole[name] = _joined(held, value) if isinstance(held, dict) else _copied(value)
    return whole


def _copied(value: Any) -> Any:
    return {name: _copied(below) for name, below in value.items()} if isinstance(value, Mapping) else value
