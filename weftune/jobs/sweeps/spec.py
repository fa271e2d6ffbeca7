"""Dataclasses for the key `sweep` of a job and for its trials, and the conversion of dotted keys in `over` to
locations in a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from weftune.core.bounds import Bound
from weftune.jobs.spec.layer import Layer, Loc

Search = Literal["grid", "random", "tpe"]
Mode = Literal["min", "max"]
Judge = Literal["mean", "last"]
MAX_TRIALS = 1000
"""Maximum number of trials in a sweep, all of which are checked before the first one starts."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """A range of numbers from `min` to `max`, from which a sweep draws values. The values are integers if
    both ends are. With `log`, their logarithms are distributed uniformly."""

    min: float
    max: float
    log: bool = False


Choices = tuple[Any, ...] | ValueRange
"""Values that a key may have in a sweep: a range, or a list, whose items may be mappings."""


@dataclass(frozen=True, slots=True)
class Halving:
    """The rule of successive halving: all trials are evaluated at the fractions `at` of their steps, and a
    fraction `keep` of them continues."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    at: tuple[Annotated[float, Bound(above=0, below=1, meaning="a share of the steps")], ...]
    keep: Annotated[float, Bound(above=0, below=1, meaning="a share of the trials")]
    judge: Judge = "mean"
    """Weights with which trials are compared: their mean over the last quarter of a trial's steps so far, or
    the latest weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    over: Mapping[str, Choices]
    """Maps each dotted key that the sweep varies, such as `adapter.rank`, to the values that the key may
    have."""
    search: Search = "grid"
    trials: Annotated[int | None, Bound(at_least=1, at_most=MAX_TRIALS)] = None
    """Number of trials to draw. None for a grid, which has a trial for every combination."""
    metric: str = "eval_loss"
    """Metric by which trials are compared: one of `read.BEST_MODES`, or `eval_` and the name of the job's
    `eval.metric`."""
    mode: Mode = "min"
    halving: Halving | None = None
    keep: Annotated[int, Bound(at_least=1, at_most=MAX_TRIALS)] = 1
    """Number of best trials whose adapters are kept in the folder `best`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A job of a sweep: its name, and the values in which it differs from the sweep's other jobs."""

    name: str
    values: Mapping[str, Any]
    """Maps each dotted key that the sweep varies to the value in this trial."""


Ends = Sequence[tuple[Trial, float | None]]
"""Sequence of pairs: a trial that has ended, and its last metric, which is None if the trial has none."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep: a job with the key `sweep`, and its trials, which become jobs of the run."""

    name: str
    spec: SweepSpec
    trials: tuple[Trial, ...]
    """Trials of the sweep. With `tpe`, these are only the trials of the first generation, since later ones
    depend on their results."""
    keys: Layer = field(default_factory=lambda: Layer({}, {}), repr=False, compare=False)
    """Keys of the job as the user wrote them, including `sweep`. The values of a trial are merged over
    them."""
    folder: Path = field(default=Path(), repr=False, compare=False)
    """Folder that the job's paths are relative to."""


def location_of(key: str) -> Loc:
    """Return the location of a dotted key, such as `("adapter", "rank")` for `adapter.rank`. Only the last
    part may contain dots itself, as patterns do."""
    return tuple(key.split(".", 2))


def nest_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's values as nested keys of a job, such as `{"adapter": {"rank": 8}}` for
    `{"adapter.rank": 8}`."""
    whole: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = location_of(key)
        inner = whole
        for part in above:
            inner = inner.setdefault(str(part), {})
        previous = inner.get(str(last))
        inner[str(last)] = (
            _merge_values(previous, value) if isinstance(previous, dict) else _copy_value(value)
        )
    return whole


def leaf_values(location: Loc, value: Any) -> Iterator[tuple[Loc, Any]]:
    """Yield the locations and values that `value` sets for the key at `location`. A mapping sets several
    values."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from leaf_values((*location, name), below)
    else:
        yield location, value


def leaf_locations(key: str, choices: Choices) -> list[Loc]:
    """Return the locations of all values in a job that any value in `choices` sets for `key`."""
    if isinstance(choices, ValueRange):
        return [location_of(key)]
    return list(dict.fromkeys(loc for value in choices for loc, _ in leaf_values(location_of(key), value)))


def _merge_values(first_values: dict[str, Any], second_values: Any) -> Any:
    if not isinstance(second_values, Mapping):
        return second_values
    whole = dict(first_values)
    for name, value in second_values.items():
        previous = whole.get(name)
        whole[name] = _merge_values(previous, value) if isinstance(previous, dict) else _copy_value(value)
    return whole


def _copy_value(value: Any) -> Any:
    return (
        {name: _copy_value(below) for name, below in value.items()} if isinstance(value, Mapping) else value
    )
