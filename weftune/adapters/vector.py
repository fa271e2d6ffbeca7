"""Where each parameter of an adapter stands in the one flat vector that its optimizer sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter of an adapter: the site it belongs to, its name there, its shape as the bank holds it."""

    site: str
    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class VectorLayout:
    parameters: tuple[ParameterShape, ...]

    @cached_property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

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
