"""The records that kinds of adapters, their banks and the sites exchange.

Shapes: T rows, K inputs, N outputs of a site.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weftune.core.batch import Microbatch, Segment
from weftune.core.shapes import SiteShape
from weftune.core.weights import Weight, frozen_product, part_of
from weftune.ops.draw import parameter_key
from weftune.ops.lora.choice import Choices
from weftune.ops.lora.computed import ComputedPair
from weftune.ops.lora.routes import Route
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.scales import SiteScale
from weftune.ops.lora.table import LowRank
from weftune.ops.site import GatheredRows, RowScale, summed_product

Parameters = Mapping[tuple[str, str], Tensor]
"""(site, name) → tensor, as `VectorLayout.views` gives them; the site of shared parameters is SHARED."""

WeightOf = Callable[[str], Tensor]
"""A site's name → its frozen weight [N, K], wherever it is kept."""


@dataclass(frozen=True, slots=True)
class JobAdapter:
    """A job as its kind sees it: its adapter spec and the seed of its random numbers."""

    job: str
    spec: Any
    seed: int
    steps: int = 0
    """Number of steps of the whole run, for kinds that have phases."""
    start_tokens: tuple[int, ...] = ()
    """Tokens of the text that the virtual tokens start from, if the spec has one."""


@dataclass(frozen=True, slots=True)
class NewAdapter:
    """A new adapter: the parameters to initialise, and what a kind may initialise them from."""

    adapter: JobAdapter
    parameters: Parameters
    """Parameters of all its sites, or of those that one stage has, on any device."""
    drawn_on: torch.device | None = None
    """Device on which random numbers are drawn. None draws them on the device of the parameters."""
    frozen: WeightOf | None = None
    """The base's weights at those sites, for kinds that start from them."""

    @property
    def sites(self) -> list[str]:
        return list(dict.fromkeys(site for site, _ in self.parameters))

    def key(self, site: str, name: str) -> int:
        """Return the key of a parameter's random numbers, from the job's seed and its site and name."""
        return parameter_key(self.adapter.seed, site, name)

    def weight_at(self, site: str) -> Tensor:
        """Return the base's own weight [N, K]."""
        assert self.frozen is not None, "the weights of the base are not known"
        return self.frozen(site)


@dataclass(frozen=True, slots=True)
class Frozen:
    """The base's own weights at a group of sites, stacked."""

    weight: Weight
    """[N, K]."""
    bias_N: Tensor | None

    def product(self, x_TK: Tensor) -> Tensor:
        """Compute xWᵀ + b as a new tensor, never a view: the kinds add to it in place."""
        return frozen_product(x_TK, self.weight, self.bias_N)

    def summed(self, x_TK: Tensor) -> Tensor:
        """Compute xWᵀ without the bias, in at least float32: the kinds add to it in place."""
        return summed_product(x_TK, self.weight)

    def part(self, low: int, high: int) -> Frozen:
        bias_N = None if self.bias_N is None else self.bias_N[low:high]
        return Frozen(part_of(self.weight, low, high), bias_N)


@dataclass(frozen=True, slots=True)
class Pass:
    """The pass in which a site is computed."""

    microbatch: Microbatch
    route: Route
    training: bool
    anchor: Tensor
    """A scalar that requires a gradient and never gets one; see `ops.lora.routes.Blocks`."""
    totals: Mapping[str, Parameters]
    """Job → the accumulators of its gradients."""
    rows: Rows | None = None
    """The assignment of rows to programs, for the tiled route."""
    choices: Choices | None = None
    """Measured choices between kernels on this device."""
    gathered: Mapping[str, GatheredRows] = field(default_factory=dict)
    """Job → its rows, for the jobs whose rows a captured pass finds by their indices, not by segments."""


@dataclass(frozen=True, slots=True)
class SiteParts:
    """The changes that the jobs of one kind make at one site in one pass, each to its own rows: y = residual
    + after(g_out ⊙ ((x ⊙ g_in)Wᵀ + what is added) + b); any part may be absent."""

    add: Callable[[Tensor, Tensor], Tensor] | None = None
    """(x_TK, y_TN) → y with every job's part added; x is the site's own input, y may be overwritten."""
    g_in: tuple[RowScale, ...] = ()
    g_out: tuple[RowScale, ...] = ()
    after: tuple[tuple[slice | GatheredRows, Callable[[Tensor], Tensor]], ...] = ()
    """Pairs of a job's rows and a function y_LN → changed outputs of the linear there, including the bias."""


class SiteBank:
    """The parameters of all attached adapters of one kind at a group of sites that share their input."""

    def __init__(self, sites: Sequence[SiteShape]) -> None:
        self._sites = {site.name: site for site in sites}
        self._attached: dict[str, tuple[JobAdapter, Any]] = {}
        """Job → its adapter and its weights."""

    def attach(self, adapter: JobAdapter, weights: Parameters) -> None:
        """Attach a job; `weights` are what passes read: trained parameters and the kind's constants."""
        self._attached[adapter.job] = adapter, weights

    def detach(self, job: str) -> None:
        del self._attached[job]

    def segments(self, bound: Pass) -> list[Segment]:
        """Return the segments of its jobs in the pass."""
        return [segment for segment in bound.microbatch.segments if segment.through in self._attached]

    def parts(self, site: str, frozen: Frozen, bound: Pass) -> SiteParts:
        """Return its jobs' changes at one site, over whole tensors; `frozen` is the base's own part there."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TiledPart:
    """A job's adapter at one site in the form that the tiled kernels take, LoRA with scales: y = g_out ⊙ ((x
    ⊙ g_in)Wᵀ + scale · drop(x)AᵀB) + b. Parts may be absent."""

    low_rank: LowRank | None = None
    g_out: SiteScale | None = None
    g_in: SiteScale | None = None
    computed: ComputedPair | None = None
    """Source from which A and B are computed, if the job does not train A and B themselves."""


@dataclass(frozen=True, slots=True)
class SiteTensors:
    """A job's tensors at one site, from which its kind makes a `TiledPart`."""

    adapter: JobAdapter
    site: SiteShape
    weights: Parameters
    """Tensors that passes read: trained parameters and the kind's constants."""
    totals: Parameters
    """Accumulators of the gradients."""
    scratch: dict[Hashable, Tensor] = field(default_factory=dict)
    """Tensors that all sites of the job share. Each is used only between two kernels of one site."""

    def weight(self, name: str) -> Tensor:
        return self.weights[self.site.name, name]

    def total(self, name: str) -> Tensor:
        return self.totals[self.site.name, name]
