"""The protocol of a kind of adapter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weftune.adapters.form import SiteTensors, TiledPart
from weftune.adapters.vector import VectorLayout
from weftune.core.batch import Microbatch, Segment
from weftune.core.shapes import SiteShape
from weftune.core.weights import Weight, frozen_product, part_of
from weftune.ops.draw import parameter_key
from weftune.ops.experts import ExpertPart
from weftune.ops.lora.choice import Choices
from weftune.ops.lora.routes import Route
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import Group
from weftune.ops.site import GatheredRows, RowScale, summed_product

Parameters = Mapping[tuple[str, str], Tensor]
"""(site, name) → tensor, as `VectorLayout.views` gives them. Parameters that all sites share have the site
SHARED."""

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
    """A scalar that requires a gradient and never gets one; see `ops.lora.Blocks`."""
    totals: Mapping[str, Parameters]
    """Job → the accumulators of its gradients."""
    rows: Rows | None = None
    """The assignment of rows to programs, for the tiled route."""
    choices: Choices | None = None
    """Measured choices between kernels on this device."""
    gathered: Mapping[str, GatheredRows] = field(default_factory=dict)
    """Job → its rows, for the jobs whose rows a captured pass finds by their indices, because segments do not
    say where they are."""


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


class SiteBank(Protocol):
    """The parameters of all attached adapters of one kind at a group of sites that share their input."""

    def attach(self, adapter: JobAdapter, weights: Parameters) -> None:
        """Attach a job; `weights` are what passes read: trained parameters and the kind's constants."""

    def detach(self, job: str) -> None: ...

    def segments(self, bound: Pass) -> list[Segment]:
        """Return the segments of its jobs in the pass."""

    def parts(self, site: str, frozen: Frozen, bound: Pass) -> SiteParts:
        """Return the changes that its jobs make at one site, over whole tensors; `frozen` is the base's own
        part there."""


class ExpertBank(Protocol):
    """The parameters of all attached adapters of one kind at the experts of a layer."""

    tiled: bool

    def attach(self, adapter: JobAdapter, weights: Parameters, totals: Parameters) -> None:
        """Attach a job; `weights` are what passes read, and `totals` the accumulators of its gradients."""

    def detach(self, job: str) -> None: ...

    def present(self, bound: Pass) -> bool:
        """Whether any of its jobs has rows in the pass."""

    def parts(self, site: str, bound: Pass) -> Iterable[ExpertPart]:
        """Return what its jobs add at one of the experts' parameters; the gradients of their weights are
        accumulated."""

    def group(self, site: str, device: torch.device) -> Group | None:
        """Return all adapters at one of the experts' parameters as the tiled kernels find them: slot n · E +
        e is the n-th at expert e. None if there are none."""

    def numbers(self, jobs: tuple[str | None, ...], device: torch.device) -> Tensor:
        """Return the index of each job's adapter there as int32, −1 for a job without one."""


class Kind(Protocol):
    name: str

    def layout(self, spec: Any, sites: Sequence[SiteShape]) -> VectorLayout: ...

    def adapts(self, spec: Any, site: str) -> bool:
        """Whether the adapter changes what this site computes."""

    def rows_before(self, spec: Any) -> int:
        """Number of rows of its own (virtual tokens) that the adapter puts before every sample in the place
        of embeddings: the rows of its parameter ROWS, shared by all sites."""

    def constants_key(self, spec: Any) -> Hashable | None:
        """Return the key of the constants: jobs with equal keys share them. None if there are none."""

    def constants(self, spec: Any, sites: Sequence[SiteShape], like: Tensor) -> Mapping[str, Tensor]:
        """Return tensors, by name, that are read at all sites and are neither trained nor saved in a
        checkpoint, in the dtype and on the device of `like`."""

    def check_start(self, spec: Any, sites: Sequence[SiteShape]) -> None:
        """Raise AdapterError if the folder in the spec's `init_from` cannot start an adapter at these
        sites."""

    def initialise(self, new: NewAdapter, sites: Sequence[SiteShape]) -> None:
        """Fill the parameters of a new adapter, from its job's seed or from its `init_from`.

        `sites` are those of the whole base.
        """

    def before_step(self, adapter: JobAdapter, step: int, masters: Callable[[], Parameters]) -> None:
        """Change the master weights, if necessary, before the job takes a step with the accumulated
        gradients. For kinds with phases."""

    def bank(self, sites: Sequence[SiteShape]) -> SiteBank: ...

    def is_tiled(self, spec: Any) -> bool:
        """Whether adapters of this spec have the form that the tiled kernels take. Others are computed from
        the parts of their bank on every route."""

    def gathers(self, spec: Any) -> bool:
        """Whether passes with such an adapter can be captured although it is not tiled: at linears it only
        changes outputs, with an `ops.site.RowChange`."""

    def tiled_part(self, adapter: JobAdapter, at: SiteTensors) -> TiledPart | None:
        """Return the adapter in that form at one site, or None if it has none there. Called only for kinds
        that are tiled."""

    def expert_bank(self, sites: Sequence[SiteShape]) -> ExpertBank:
        """Return a bank for experts. Called only if an adapter's layout has parameters at experts."""

    def save(
        self, folder: Any, spec: Any, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        """Write a PEFT adapter folder."""

    def portable(self, folder: Path, target: Path) -> int:
        """Write the adapter of `folder` in a form with one rank and one alpha, with which servers that know
        no other compute the same, and return that rank."""

    def merge(self, folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
        """Add the adapter of `folder` to the weights of the base's `modules`, by site."""
