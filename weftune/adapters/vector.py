"""The layout of an adapter's parameters in the one flat vector that its optimizer sees."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from weftune.ops.adamw import RateRun

SHARED = ""
"""In the place of a site's name: what all sites of an adapter share."""


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter of an adapter: the site it belongs to, its name there, its shape as the bank holds it."""

    site: str
    name: str
    shape: tuple[int, ...]
    rate: float = field(default=1.0, compare=False)
    """Multiplies the job's learning rate for this parameter. The vector's layout does not depend on it."""
    active: int | None = field(default=None, compare=False)
    """Of the matrices of experts along the first dimension, those that a token meets."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def met(self) -> int:
        return self.size if self.active is None else self.active * math.prod(self.shape[1:])


@dataclass(frozen=True)
class VectorLayout:
    parameters: tuple[ParameterShape, ...]

    @cached_property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @cached_property
    def met(self) -> int:
        """Parameters that a token is multiplied by: all but those at experts that it is not sent to."""
        return sum(parameter.met for parameter in self.parameters)

    @cached_property
    def rates(self) -> tuple[RateRun, ...]:
        """Neighbours that learn at the same rate, taken together; none where all learn at the job's own."""
        runs: list[RateRun] = []
        stop = 0
        for parameter in self.parameters:
            start, stop = stop, stop + parameter.size
            if runs and runs[-1].rate == parameter.rate:
                start = runs.pop().start
            runs.append(RateRun(start, stop, parameter.rate))
        return tuple(runs) if any(run.rate != 1.0 for run in runs) else ()

    def views(self, flat: Tensor) -> dict[tuple[str, str], Tensor]:
        """The parameters inside `flat`, by (site, name), sharing its memory."""
        assert flat.shape == (self.size,), "the vector does not fit the layout"
        pieces = flat.split([parameter.size for parameter in self.parameters])
        return {
            (parameter.site, parameter.name): piece.view(parameter.shape)
            for parameter, piece in zip(self.parameters, pieces, strict=True)
        }

    def slice_of(self, other: VectorLayout, flat: Tensor) -> Tensor:
        """The values of this layout's parameters out of the vector `flat` of another that holds them all."""
        if other == self:
            return flat
        views = other.views(flat)
        pieces = [views[parameter.site, parameter.name].flatten() for parameter in self.parameters]
        return torch.cat(pieces) if pieces else flat.new_zeros(0)
