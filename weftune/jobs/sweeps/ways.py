"""The dotted keys of `over` as ways into a job's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weftune.jobs.spec.places import Loc
from weftune.jobs.sweeps.spec import Choices, ValueRange


def way_of(key: str) -> Loc:
    """`adapter.rank` as `("adapter", "rank")`; what follows is one name: patterns hold dots themselves."""
    return tuple(key.split(".", 2))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """A trial's values as keys of a job: `{"adapter.rank": 8}` is `{"adapter": {"rank": 8}}`."""
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
    """What a value of the key at `way` sets: itself, or what a mapping holds."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from leaves((*way, name), below)
    else:
        yield way, value


def leaves_of(key: str, choices: Choices) -> list[Loc]:
    """The ways to everything that some value of `choices` sets."""
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
