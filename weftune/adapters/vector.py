"""The layout of an adapter's parameters in one flat vector, which the optimizer updates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from weftune.ops.adamw import RateRun

SHARED = ""
"""Name in place of a linear's name for parameters that all linears of an adapter share."""


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter of an adapter: the linear (site) to which it belongs, its name there, and its shape."""

    site: str
    name: str
    shape: tuple[int, ...]
    rate: float = field(default=1.0, compare=False)
    """Factor by which the job's learning rate is multiplied for this parameter. Layouts that differ only in
    such factors are equal."""
    active_experts: int | None = field(default=None, compare=False)
    """Number of experts that one token uses, of the experts along the first dimension. None if the parameter
    does not belong to experts."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def active_size(self) -> int:
        return self.size if self.active_experts is None else self.active_experts * math.prod(self.shape[1:])


@dataclass(frozen=True)
class VectorLayout:
    parameters: tuple[ParameterShape, ...]

    @cached_property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @cached_property
    def active_size(self) -> int:
        """Number of parameters that one token uses: all except the parameters of experts that the token is
        not routed to."""
        return sum(parameter.active_size for parameter in self.parameters)

    @cached_property
    def rates(self) -> tuple[RateRun, ...]:
        """Runs of neighbouring parameters with equal learning rates. Empty if all parameters have the job's
        learning rate."""
        runs: list[RateRun] = []
        stop = 0
        for parameter in self.parameters:
            start, stop = stop, stop + parameter.size
            if runs and runs[-1].rate == parameter.rate:
                start = runs.pop().start
            runs.append(RateRun(start, stop, parameter.rate))
        return tuple(runs) if any(run.rate != 1.0 for run in runs) else ()

    @cached_property
    def _contiguous_runs(self) -> list[list[tuple[int, int]]]:
        """All parameters, each as (index, start in the flat vector), grouped into runs of equal shapes and
        equal distances, usually the same parameter in every layer. One call creates all views of a run, which
        saves time for the hundreds of parameters of an adapter."""
        runs_by_shape: dict[tuple[tuple[int, ...], str, str], list[tuple[int, int]]] = {}
        runs, start = [], 0
        for index, parameter in enumerate(self.parameters):
            kind = parameter.shape, parameter.name, parameter.site.rpartition(".")[2]
            run = runs_by_shape.setdefault(kind, [])
            if len(run) > 1 and start - run[-1][1] != run[1][1] - run[0][1]:
                run = runs_by_shape[kind] = []
            if not run:
                runs.append(run)
            run.append((index, start))
            start += parameter.size
        return runs

    def parameter_views(self, vector: Tensor) -> dict[tuple[str, str], Tensor]:
        """Return a dict from (linear's name, parameter name) to the parameter in `vector`, as a view of its
        memory."""
        assert vector.shape == (self.size,), "the vector does not fit the layout"
        assert vector.is_contiguous()
        parameter_views: list[Tensor] = [vector] * len(self.parameters)
        for run in self._contiguous_runs:
            (first, start), apart = run[0], run[1][1] - run[0][1] if len(run) > 1 else 0
            shape = self.parameters[first].shape
            strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
            views = vector.as_strided((len(run), *shape), (apart, *strides), vector.storage_offset() + start)
            for (index, _), view in zip(run, views.unbind(), strict=True):
                parameter_views[index] = view
        return {
            (one.site, one.name): view for one, view in zip(self.parameters, parameter_views, strict=True)
        }

    def slice_vector(self, other_layout: VectorLayout, vector: Tensor) -> Tensor:
        """Return a flat vector of this layout with the values that `vector` has for the same parameters.
        `other_layout`, the layout of `vector`, contains all parameters of this layout."""
        if other_layout == self:
            return vector
        views = other_layout.parameter_views(vector)
        pieces = [views[parameter.site, parameter.name].flatten() for parameter in self.parameters]
        return torch.cat(pieces) if pieces else vector.new_zeros(0)
