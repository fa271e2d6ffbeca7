"""The names of trials, which say what sets each apart: `sql-r16-lr3e-4`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weftune.jobs.spec.names import LONGEST
from weftune.jobs.spec.places import Loc
from weftune.jobs.sweeps.spec import Choices, SweepSpec, Trial, ValueRange
from weftune.jobs.sweeps.ways import leaves, leaves_of, way_of

SHORT: Mapping[str, str] = {
    "rank": "r",
    "learning_rate": "lr",
    "alpha": "a",
    "dropout": "d",
    "batch_size": "b",
    "epochs": "e",
    "steps": "s",
    "weight_decay": "wd",
    "warmup": "w",
}
BY_VALUE = ("schedule", "targets")
"""Keys whose values are clear without the key."""
LEAST_OF_SWEEP = 16
"""Minimum number of letters that a long list of values leaves of the sweep's name."""


def named(
    sweep: str, spec: SweepSpec, drawn: Sequence[Mapping[str, Any]], taken: Iterable[str]
) -> tuple[Trial, ...]:
    names = trial_names(sweep, spec.over, drawn, taken)
    return tuple(map(Trial, names, drawn))


def trial_names(
    sweep: str,
    over: Mapping[str, Choices],
    drawn: Sequence[Mapping[str, Any]],
    taken: Iterable[str] = (),
) -> list[str]:
    """Return a name for each of `drawn`, none of them in `taken`; a number distinguishes names that would be
    equal."""
    told = _told(over)
    used = {sweep.lower(), *(name.lower() for name in taken)}
    names = []
    for values in drawn:
        name = _unique(_name(sweep, told, values), used)
        used.add(name.lower())
        names.append(name)
    return names


def _told(over: Mapping[str, Choices]) -> list[Loc]:
    """Return the locations of the values that names contain: those that differ, and only the first of several
    that change together. For a single trial, one value of each key."""
    told: list[Loc] = []
    for key, choices in over.items():
        if isinstance(choices, ValueRange):
            told.append(way_of(key))
        elif len(choices) > 1:
            told += _telling(key, choices)
    return told or [way for key, choices in over.items() for way in leaves_of(key, choices)[:1]]


def _telling(key: str, choices: Sequence[Any]) -> list[Loc]:
    told: list[Loc] = []
    apart = 1
    for way in leaves_of(key, tuple(choices)):
        kinds = {
            tuple(repr(dict(leaves(way_of(key), value)).get(one)) for one in (*told, way))
            for value in choices
        }
        if len(kinds) > apart:
            told.append(way)
            apart = len(kinds)
    return told


def _name(sweep: str, told: Sequence[Loc], values: Mapping[str, Any]) -> str:
    held = {way: value for key, value in values.items() for way, value in leaves(way_of(key), value)}
    tail = "-".join(part for way in told if way in held and (part := _part(way, held[way])))
    head = sweep[: max(LEAST_OF_SWEEP, LONGEST - 1 - len(tail))]
    return f"{head}-{tail}"[:LONGEST].rstrip("-.") if tail else head


def _part(way: Loc, value: Any) -> str:
    key, text = str(way[-1]), value_text(value)
    if key in BY_VALUE:
        return text
    if isinstance(value, bool):
        return _plain(key if value else f"no-{key}")
    short = SHORT.get(key, _plain(key)) if len(way) < 3 else _plain(key)
    is_number = isinstance(value, int | float)
    return f"{short}{text}" if is_number else f"{short}-{text}"


def value_text(value: Any) -> str:
    """Return a value in the few characters that a name may have: `3e-4`, `0.05`, `cosine`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, list | tuple):
        return "_".join(value_text(item).removesuffix("_proj") for item in value)
    if isinstance(value, Mapping):
        return "_".join(value_text(item) for item in value.values())
    return _plain(str(value).rstrip("/").rpartition("/")[2])


def number_text(value: float) -> str:
    """Return a number in at most four digits, with an exponent if that is shorter, or as short and without
    many zeros."""
    plain = f"{value:.4f}".rstrip("0").rstrip(".") if abs(value) >= 1000 else f"{float(f'{value:.4g}')!r}"
    plain = plain.removesuffix(".0")
    digits, _, power = f"{value:.3e}".partition("e")
    digits = digits.rstrip("0").rstrip(".")
    scientific = f"{digits}e{int(power)}"
    is_shorter = len(plain) < len(scientific) or len(plain) == len(scientific) <= len("0.05")
    return plain if is_shorter and "e" not in plain else scientific


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")


def _unique(name: str, used: set[str]) -> str:
    number, found = 1, name
    while found.lower() in used:
        number += 1
        found = f"{name[: LONGEST - 1 - len(str(number))]}-{number}"
    return found
