"""The records of a job's key `sweep`, and of the trials that result from it."""

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
    """Numbers from `min` to `max`, whole ones if both ends are whole. `log` spaces them evenly in their
    logarithms."""

    min: float
    max: float
    log: bool = False


Choices = tuple[Any, ...] | ValueRange
"""Values that a key may have: those of a list (which may be mappings), or a range."""


@dataclass(frozen=True, slots=True)
class Halving:
    """A rule by which all trials are evaluated at each share `at` of their steps, and only a share `keep` of
    them continues."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    at: tuple[float, ...]
    keep: float
    judge: Judge = "mean"
    """Weights that are evaluated there: the mean of a trial's weights over the last quarter of its steps, or
    the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    over: Mapping[str, Choices]
    """Dotted key of the job → the values that it may have."""
    search: Search = "grid"
    trials: int | None = None
    """Number of trials that are drawn. None for a grid, which has all of its combinations."""
    metric: Metric = "eval_loss"
    mode: Mode = "min"
    halving: Halving | None = None
    keep: int = 1
    """Number of winners whose adapters are kept in `best`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A job of a sweep: its name, and the values in which it differs from the others."""

    name: str
    values: Mapping[str, Any]
    """Key of `over` as it is written there, dots included → this trial's value."""


Ends = Sequence[tuple[Trial, float | None]]
"""Trials, each with its last evaluated value; None if there is none."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A job with the key `sweep`: its trials are jobs of the run."""

    name: str
    spec: SweepSpec
    trials: tuple[Trial, ...]
    """Trials of the sweep. For `tpe`, those of the first generation: later ones depend on how these end."""
    keys: Layer = field(default_factory=lambda: Layer({}, {}), repr=False, compare=False)
    """The job's own keys, including `sweep`, over which a trial's values are merged."""
    folder: Path = field(default=Path(), repr=False, compare=False)
    """Folder that the job's paths are relative to."""
