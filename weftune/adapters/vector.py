"""The layout of an adapter's parameters in the one flat vector that its optimizer sees."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from weftune.ops.adamw import RateRun

SHARED = ""
"""Site name of parameters that all sites of an adapter share."""


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter of an adapter: its site, its name there, and its shape as the bank holds it."""

    site: str
    name: str
    shape: tuple[int, ...]
    rate: float = field(default=1.0, compare=False)
    """Factor of the job's learning rate for this parameter. The vector's layout does not depend on it."""
    active: int | None = field(default=None, compare=False)
    """Number of experts' matrices (first dimension) that one token uses. None outside experts."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def met(self) -> int:
        return self.size if self.active is None else self.active * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class _Run:
    """Parameters of one shape at equal distances of `apart` values, usually those of one module in every
    layer. One call makes the views of all of them, and an adapter has hundreds."""

    shape: tuple[int, ...]
    start: int
    numbers: tuple[int, ...]
    """Indices of the parameters in the layout."""
    apart: int = 0

    def takes(self, start: int) -> bool:
        """Whether a parameter that begins at `start` continues the run."""
        return len(self.numbers) == 1 or start == self.start + len(self.numbers) * self.apart

    def longer(self, number: int, start: int) -> _Run:
        apart = self.apart if len(self.numbers) > 1 else start - self.start
        return _Run(self.shape, self.start, (*self.numbers, number), apart)

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        inner = [math.prod(self.shape[at + 1 :]) for at in range(len(self.shape))]
        begins = flat.storage_offset() + self.start
        shape = (len(self.numbers), *self.shape)
        return flat.as_strided(shape, (self.apart, *inner), begins).unbind()


@dataclass(frozen=True)
class VectorLayout:
    parameters: tuple[ParameterShape, ...]

    @cached_property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @cached_property
    def met(self) -> int:
        """Number of parameters that a token meets: all except those at experts it is not sent to."""
        return sum(parameter.met for parameter in self.parameters)

    @cached_property
    def rates(self) -> tuple[RateRun, ...]:
        """Runs of neighbouring parameters with equal learning rates. Empty if all have the job's own."""
        runs: list[RateRun] = []
        stop = 0
        for parameter in self.parameters:
            start, stop = stop, stop + parameter.size
            if runs and runs[-1].rate == parameter.rate:
                start = runs.pop().start
            runs.append(RateRun(start, stop, parameter.rate))
        return tuple(runs) if any(run.rate != 1.0 for run in runs) else ()

    @cached_property
    def _runs(self) -> tuple[_Run, ...]:
        """All parameters. Those of one module in several layers form a run if they are equally far apart."""
        runs: dict[tuple[tuple[int, ...], str, str], list[_Run]] = {}
        start = 0
        for number, parameter in enumerate(self.parameters):
            module = parameter.site.rpartition(".")[2]
            same = runs.setdefault((parameter.shape, parameter.name, module), [])
            if same and same[-1].takes(start):
                same[-1] = same[-1].longer(number, start)
            else:
                same.append(_Run(parameter.shape, start, (number,)))
            start += parameter.size
        return tuple(run for same in runs.values() for run in same)

    def views(self, flat: Tensor) -> dict[tuple[str, str], Tensor]:
        """Return the parameters inside `flat`, by (site, name), sharing its memory."""
        assert flat.shape == (self.size,), "the vector does not fit the layout"
        assert flat.is_contiguous()
        found: list[Tensor] = [flat] * len(self.parameters)
        for run in self._runs:
            for number, view in zip(run.numbers, run.views(flat), strict=True):
                found[number] = view
        return {(one.site, one.name): view for one, view in zip(self.parameters, found, strict=True)}

    def slice_of(self, other: VectorLayout, flat: Tensor) -> Tensor:
        """Return the values of this layout's parameters from `flat`, a vector of a layout with them all."""
        if other == self:
            return flat
        views = other.views(flat)
        pieces = [views[parameter.site, parameter.name].flatten() for parameter in self.parameters]
        return torch.cat(pieces) if pieces else flat.new_zeros(0)
