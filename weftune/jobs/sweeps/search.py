"""The trials of a sweep: all of a grid, random draws, or generation after generation as TPE proposes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any, Protocol

from weftune.jobs.sweeps.names import trial_names
from weftune.jobs.sweeps.spec import Choices, Sweep, SweepSpec, Trial, ValueRange

Ended = Sequence[tuple[Trial, float | None]]
"""Trials with the last value that was evaluated of each; None where there is none."""
"""Of TPE: each is proposed when the one before has ended."""
PATIENCE = 20
"""Draws in a row that may repeat others before ranges are drawn with one digit more."""


class Proposer(Protocol):
    """Where trials come from. It keeps nothing: told the same it proposes the same, so a run can resume."""

    def first(self) -> tuple[Trial, ...]: ...

    def next(self, ended: Ended) -> tuple[Trial, ...]:
        """The generation after all of `ended`, which are all trials so far; empty when there are no more."""
        ...


def proposer(sweep: Sweep, taken: Iterable[str] = ()) -> Proposer:
    """Of a sweep that was read; `taken` are the names of the run's other jobs."""
    return propose(sweep.name, sweep.spec, int(sweep.keys.values.get("seed", 0)), taken)


def propose(name: str, spec: SweepSpec, seed: int, taken: Iterable[str] = ()) -> Proposer:
    if spec.search == "tpe":
        from weftune.jobs.sweeps.tpe import Tpe

        return Tpe(name, spec, seed, tuple(taken))
    return AtOnce(name, spec, seed, tuple(taken))


@dataclass(frozen=True, slots=True)
class AtOnce:
    """A grid or random draws: all trials are known before the first is trained."""

    name: str
    spec: SweepSpec
    seed: int
    taken: tuple[str, ...] = ()

    def first(self) -> tuple[Trial, ...]:
        over, trials = self.spec.over, self.spec.trials
        drawn = grid(over) if trials is None else draws(over, trials, self.seed)
        return named(self.name, self.spec, drawn, self.taken)

    def next(self, ended: Ended) -> tuple[Trial, ...]:
        return ()


def named(
    sweep: str, spec: SweepSpec, drawn: Sequence[Mapping[str, Any]], taken: Iterable[str]
) -> tuple[Trial, ...]:
    names = trial_names(sweep, spec.over, drawn, taken)
    return tuple(map(Trial, names, drawn))


def grid(over: Mapping[str, Choices]) -> list[dict[str, Any]]:
    """Every combination, the last key changing fastest."""
    lists = [choices for choices in over.values() if not isinstance(choices, ValueRange)]
    assert len(lists) == len(over), "a grid has no ranges"
    return [dict(zip(over, values, strict=True)) for values in product(*lists)]


def combinations(over: Mapping[str, Choices]) -> float:
    """How many trials can differ: infinite where a range has more than whole numbers."""
    return math.prod(_count(choices) for choices in over.values())


def _count(choices: Choices) -> float:
    if not isinstance(choices, ValueRange):
        return len(choices)
    return choices.max - choices.min + 1 if is_whole(choices) else math.inf


def draws(
    over: Mapping[str, Choices], count: int, seed: int, known: Iterable[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """So many combinations at random, distinct from one another and from those that are `known`.

    Only `Random.random` is asked: its sequence is the one that Python promises to keep. Numbers from a range
    have three digits: names tell them whole, and the last bit of a machine's power function decides nothing.
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
    """What two equal combinations have in common."""
    return repr(sorted(values.items()))


def _drawn(choices: Choices, uniform: float, digits: int) -> Any:
    """The value of `choices` at `uniform`, from 0 up to but not including 1."""
    if not isinstance(choices, ValueRange):
        return choices[int(uniform * len(choices))]
    low, high = choices.min, choices.max
    if is_whole(choices):
        if choices.log:
            return min(int(high), int(low * ((high + 1) / low) ** uniform))
        return int(low) + int(uniform * (int(high) - int(low) + 1))
    value = low * (high / low) ** uniform if choices.log else low + uniform * (high - low)
    return tidy(choices, value, digits)


def is_whole(choices: ValueRange) -> bool:
    return isinstance(choices.min, int) and isinstance(choices.max, int)


def tidy(choices: ValueRange, value: float, digits: int = 3) -> float:
    """A value of a range in few digits: so many of the range's width, and on a logarithmic one of its own."""
    first = _power_of_ten(choices.max - choices.min)
    if choices.log:
        first = min(first, _power_of_ten(value))
    return float(min(max(round(value, digits - 1 - first), choices.min), choices.max))


def _power_of_ten(value: float) -> int:
    """Of the first digit; `math.log10` may err by a bit, and then by a digit."""
    return int(f"{value:.17e}".partition("e")[2])


def generations(trials: int) -> Iterator[int]:
    """The sizes of TPE's generations: a quarter of the trials each, and at last what is left."""
    size = -(-trials // GENERATIONS)
    for start in range(0, trials, size):
        yield min(size, trials - start)


GENERATIONS = 4
