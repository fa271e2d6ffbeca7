"""Combinations of values: all of a grid, or some at random."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from random import Random
from typing import Any

from weftune.jobs.sweeps.spec import Choices, ValueRange

GENERATIONS = 4
"""Number of TPE's generations; each is proposed when the one before has ended."""
PATIENCE = 20
"""Draws in a row that may repeat others before ranges are drawn with one digit more."""


def grid(over: Mapping[str, Choices]) -> list[dict[str, Any]]:
    """Return every combination, the last key changing fastest."""
    lists = [choices for choices in over.values() if not isinstance(choices, ValueRange)]
    assert len(lists) == len(over), "a grid has no ranges"
    return [dict(zip(over, values, strict=True)) for values in product(*lists)]


def combinations(over: Mapping[str, Choices]) -> float:
    """Return the number of distinct trials; infinite if a range has more than whole numbers."""
    return math.prod(_count(choices) for choices in over.values())


def _count(choices: Choices) -> float:
    if not isinstance(choices, ValueRange):
        return len(choices)
    return choices.max - choices.min + 1 if is_whole(choices) else math.inf


def draws(
    over: Mapping[str, Choices], count: int, seed: int, known: Iterable[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return `count` random combinations, distinct from one another and from those that are `known`.

    Only `Random.random` is used, whose sequence Python promises to keep. Numbers from a range have three
    digits, so that names contain them in full and the last bit of a machine's logarithm decides nothing.
    """
    uniform = Random(seed).random
    seen = {identity(values) for values in known}
    drawn: list[dict[str, Any]] = []
    repeats = 0
    while len(drawn) < count:
        digits = 3 + repeats // PATIENCE
        values = {key: _drawn(choices, uniform(), digits) for key, choices in over.items()}
        if identity(values) in seen:
            repeats += 1
            continue
        repeats = 0
        seen.add(identity(values))
        drawn.append(values)
    return drawn


def identity(values: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal combinations, whatever the order of their keys: records sort
    them."""
    return json.dumps(values, sort_keys=True, default=repr)


def _drawn(choices: Choices, uniform: float, digits: int) -> Any:
    """Return the value of `choices` at `uniform`, from 0 up to but not including 1."""
    if not isinstance(choices, ValueRange):
        return choices[int(uniform * len(choices))]
    low, high = choices.min, choices.max
    if is_whole(choices):
        count = int(high) - int(low) + 1
        value = _between_logs(low, low + count, uniform) if choices.log else low + int(uniform * count)
        return min(max(int(value), int(low)), int(high))
    value = _between_logs(low, high, uniform) if choices.log else low + uniform * (high - low)
    return tidy(choices, value, digits)


def _between_logs(low: float, high: float, uniform: float) -> float:
    return math.exp(math.log(low) + uniform * (math.log(high) - math.log(low)))


def is_whole(choices: ValueRange) -> bool:
    return isinstance(choices.min, int) and isinstance(choices.max, int)


def tidy(choices: ValueRange, value: float, digits: int = 3) -> float:
    """Round a value of a range to `digits` digits of the range's width or, on a logarithmic range, of the
    value itself if that is smaller."""
    first = _power_of_ten(choices.max - choices.min)
    if choices.log:
        first = min(first, _power_of_ten(value))
    return float(min(max(round(value, digits - 1 - first), choices.min), choices.max))


def _power_of_ten(value: float) -> int:
    """Return the power of ten of the first digit; `math.log10` may err by a bit, and then by a digit."""
    return int(f"{value:.17e}".partition("e")[2])


def generations(trials: int) -> Iterator[int]:
    """Yield the sizes of TPE's generations: a quarter of the trials each, and the remainder in the last."""
    size = -(-trials // GENERATIONS)
    for start in range(0, trials, size):
        yield min(size, trials - start)
