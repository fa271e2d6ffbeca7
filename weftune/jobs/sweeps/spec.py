"""What the key `sweep` of a job asks for, and the trials that come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from weftune.jobs.spec.layer import Layer

Search = Literal["grid", "random", "tpe"]
Mode = Literal["min", "max"]
Metric = Literal["eval_loss", "eval_mean_token_accuracy"]
Judge = Literal["mean", "last"]


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Numbers from `min` to `max`; whole ones where both ends are whole. `log`: even in their logarithms."""

    min: float
    max: float
    log: bool = False


Choices = tuple[Any, ...] | ValueRange
"""Values that a key may have: those of a list (of mappings, too), or a range."""


@dataclass(frozen=True, slots=True)
class Halving:
    """At each share `at` of a trial's steps all are evaluated, and only a share `keep` of them goes on."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    at: tuple[float, ...]
    keep: float
    judge: Judge = "mean"
    """What is evaluated there: the mean of a trial's weights over the last quarter of its steps, or the last
    ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    over: Mapping[str, Choices]
    """Dotted key of the job → what it may be."""
    search: Search = "grid"
    trials: int | None = None
    """How many are drawn; a grid has all of its own."""
    metric: Metric = "eval_loss"
    mode: Mode = "min"
    halving: Halving | None = None
    keep: int = 1
    """Winners whose adapters are kept in `best`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A job of a sweep: its name, and the values in which it differs from the others."""

    name: str
    values: Mapping[str, Any]
    """Key of `over` as it is written there, dots included → this trial's value."""


Ends = Sequence[tuple[Trial, float | None]]
"""Trials with the last value that was evaluated of each; None where there is none."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A job with the key `sweep`: its trials are jobs of the run."""

    name: str
    spec: SweepSpec
    trials: tuple[Trial, ...]
    """Of `tpe` the first generation: later ones depend on how these end."""
    keys: Layer = field(default_factory=lambda: Layer({}, {}), repr=False, compare=False)
    """The job's own keys, `sweep` among them, over which a trial's values are laid."""
    folder: Path = field(default=Path(), repr=False, compare=False)
    """What the job's paths are relative to."""
