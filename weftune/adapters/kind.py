"""The data classes that adapter kinds exchange with banks (the parameters of all jobs of a kind) and sites
(adapted linears).

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
from weftune.core.weights import Weight, frozen_product, slice_weight
from weftune.ops.draw import parameter_key
from weftune.ops.lora.choice import Choices
from weftune.ops.lora.computed import ComputedPair
from weftune.ops.lora.routes import Route
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.scales import SiteScale
from weftune.ops.lora.table import LowRank
from weftune.ops.site import GatheredRows, RowScale, unrounded_product

Parameters = Mapping[tuple[str, str], Tensor]
"""Maps (site, name) to a parameter of an adapter. A site is the name of an adapted linear, or SHARED for
parameters that all linears share."""

WeightOf = Callable[[str], Tensor]
"""Function that returns the frozen weight [N, K] of a module, given its name, wherever the weight is
stored."""


@dataclass(frozen=True, slots=True)
class JobAdapter:
    """A job's adapter: its spec (kind and settings), the seed of its random numbers, and other values that
    its kind needs."""

    job: str
    spec: Any
    seed: int
    steps: int = 0
    """Number of optimizer steps of the job's whole training, for kinds whose training has phases."""
    start_tokens: tuple[int, ...] = ()
    """Tokens of the text from which virtual tokens are initialised. Empty if the spec has no such text."""


@dataclass(frozen=True, slots=True)
class NewAdapter:
    """A new adapter: the parameters to initialise, and the values from which they are initialised."""

    adapter: JobAdapter
    parameters: Parameters
    """Parameters at all adapted linears, or at the adapted linears of one stage (a range of layers), on any
    device."""
    draw_device: torch.device | None = None
    """Device on which random numbers are drawn. None draws them on the device of the parameters."""
    frozen: WeightOf | None = None
    """Function that returns the base's weight of a linear, for kinds that are initialised from it. None if it
    is not available."""

    @property
    def sites(self) -> list[str]:
        return list(dict.fromkeys(site for site, _ in self.parameters))

    def key(self, site: str, name: str) -> int:
        """Return the random key of a parameter, a hash of the job's seed, the linear and the parameter's
        name."""
        return parameter_key(self.adapter.seed, site, name)

    def weight_at(self, site: str) -> Tensor:
        """Return the base's weight [N, K] of a linear."""
        assert self.frozen is not None, "the weights of the base are not known"
        return self.frozen(site)


@dataclass(frozen=True, slots=True)
class Frozen:
    """The stacked frozen weights and biases of linears that share their input."""

    weight: Weight
    """Stacked frozen weights of all linears of the group, [N, K]."""
    bias_N: Tensor | None

    def product(self, x_TK: Tensor) -> Tensor:
        """Compute xWᵀ + b into a new tensor, never a view, since the adapters add to the result in place."""
        return frozen_product(x_TK, self.weight, self.bias_N)

    def unrounded_product(self, x_TK: Tensor) -> Tensor:
        """Compute xWᵀ without the bias, in at least float32. Adapter kinds add to the result in place."""
        return unrounded_product(x_TK, self.weight)

    def part(self, low: int, high: int) -> Frozen:
        bias_N = None if self.bias_N is None else self.bias_N[low:high]
        return Frozen(slice_weight(self.weight, low, high), bias_N)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass through the base: its microbatch, and how the adapted linears (sites) compute it."""

    microbatch: Microbatch
    route: Route
    training: bool
    anchor: Tensor
    """A scalar that requires a gradient, so that the outputs of adapted linears require a gradient, too
    (`ops.lora.routes.Blocks`)."""
    totals: Mapping[str, Parameters]
    """Maps each job to the accumulators of its gradients, by parameter."""
    rows: Rows | None = None
    """The assignment of rows to the programs of the tiled kernels. None if the pass does not use these
    kernels."""
    choices: Choices | None = None
    """Choices between methods of the kernels, measured on this device."""
    gathered_rows: Mapping[str, GatheredRows] = field(default_factory=dict)
    """Maps each job whose rows a CUDA graph selects by index, not as a range, to these rows."""
    sum_over_shards: Callable[[Tensor], None] | None = None
    """Function that replaces a tensor by its sum over all shards (workers among which linears are divided).
    None if linears are not divided."""
    graph_only: bool = False
    """Whether linears need not compute their outputs, because only their backward will be run."""


@dataclass(frozen=True, slots=True)
class SiteParts:
    """The changes that all jobs of one kind make to a linear in one pass, each to its own rows: y = residual
    + after(g_out ⊙ ((x ⊙ g_in)Wᵀ + added outputs) + b), with scales g_in and g_out and functions `after` of
    the outputs. Any of these changes may be absent."""

    add: Callable[[Tensor, Tensor], Tensor] | None = None
    """Function of (x_TK, y_TN) that returns y_TN plus the output that every job's adapter adds for x_TK. It
    may overwrite y_TN."""
    g_in: tuple[RowScale, ...] = ()
    g_out: tuple[RowScale, ...] = ()
    output_changes: tuple[tuple[slice | GatheredRows, Callable[[Tensor], Tensor]], ...] = ()
    """Pairs of a job's rows and a function that maps their outputs y_LN to the outputs that replace them."""


class SiteBank:
    """The parameters of all attached adapters of one kind, at linears that share their input."""

    def __init__(self, sites: Sequence[SiteShape]) -> None:
        self._sites = {site.name: site for site in sites}
        self._attached: dict[str, tuple[JobAdapter, Any]] = {}
        """Maps each job to its adapter and its weights at these linears."""

    def attach(self, adapter: JobAdapter, weights: Parameters) -> None:
        """Attach a job. `weights` are the trained parameters and the constants of the kind that passes
        read."""
        self._attached[adapter.job] = adapter, weights

    def detach(self, job: str) -> None:
        del self._attached[job]

    def segments(self, active_pass: Pass) -> list[Segment]:
        """Return the segments (ranges of one job's rows) of the pass whose jobs have an adapter of this
        bank's kind at these linears."""
        return [
            segment for segment in active_pass.microbatch.segments if segment.adapter_job in self._attached
        ]

    def parts(self, site: str, frozen: Frozen, active_pass: Pass) -> SiteParts:
        """Return the changes that the adapters in this bank (the parameters of all jobs of a kind) make to
        the linear `site`, whose weights in the base are `frozen`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TiledPart:
    """A job's adapter at one linear in the form that the tiled kernels compute, LoRA with scales: y = g_out ⊙
    ((x ⊙ g_in)Wᵀ + scale · drop(x)AᵀB) + b. A field is None if its term is absent."""

    low_rank: LowRank | None = None
    g_out: SiteScale | None = None
    g_in: SiteScale | None = None
    computed_pair: ComputedPair | None = None
    """Vectors and constants from which A and B are computed, for kinds that do not train A and B themselves
    (VeRA)."""


@dataclass(frozen=True, slots=True)
class SiteTensors:
    """A job's tensors at one linear, from which the adapter kind builds a `TiledPart`, the input of the tiled
    kernels."""

    adapter: JobAdapter
    site: SiteShape
    weights: Parameters
    """Tensors that passes read: trained parameters and the kind's constants."""
    totals: Parameters
    """Accumulators of the parameters' gradients."""
    scratch: dict[Hashable, Tensor] = field(default_factory=dict)
    """Temporary tensors that all linears of the job share. The adapter kind chooses the keys."""

    def weight(self, name: str) -> Tensor:
        return self.weights[self.site.name, name]

    def total(self, name: str) -> Tensor:
        return self.totals[self.site.name, name]
