"""The protocol of a kind of adapter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weftune.adapters.form import SiteTensors, WovenPart
from weftune.adapters.vector import VectorLayout
from weftune.core.batch import Microbatch, Segment
from weftune.core.shapes import SiteShape
from weftune.core.weight import Weight, frozen_product, part_of
from weftune.ops.draw import parameter_key
from weftune.ops.experts import ExpertPart
from weftune.ops.lora.choice import Choices
from weftune.ops.lora.routes import Route
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import Group
from weftune.ops.site import GatheredRows, RowScale, summed_product

Parameters = Mapping[tuple[str, str], Tensor]
"""(site, name) → tensor, as `VectorLayout.views` gives them; what all sites share has the site SHARED."""

WeightOf = Callable[[str], Tensor]
"""A site's name → its frozen weight [N, K], wherever that is kept."""


@dataclass(frozen=True, slots=True)
class Member:
    """A job as its kind sees it: its adapter spec and the seed of its random numbers."""

    job: str
    spec: Any
    seed: int
    steps: int = 0
    """Of the whole run, for kinds that have phases."""
    start_tokens: tuple[int, ...] = ()
    """Those of the text that its virtual tokens start from, where its spec has one."""


@dataclass(frozen=True, slots=True)
class NewAdapter:
    """An adapter about to begin: the parameters to fill, and what a kind may fill them from."""

    member: Member
    parameters: Parameters
    """Of all its sites, or of those that one stage has; on any device."""
    drawn_on: torch.device | None = None
    """Where random numbers are drawn; None: where the parameters are."""
    frozen: WeightOf | None = None
    """The base's weights at those sites, for kinds that start from them."""

    @property
    def sites(self) -> list[str]:
        return list(dict.fromkeys(site for site, _ in self.parameters))

    def key(self, site: str, name: str) -> int:
        """What the random numbers of a parameter are drawn from: the job's seed and the parameter's place."""
        return parameter_key(self.member.seed, site, name)

    def weight_at(self, site: str) -> Tensor:
        """The base's own weight [N, K]."""
        assert self.frozen is not None, "the weights of the base are not known"
        return self.frozen(site)


@dataclass(frozen=True, slots=True)
class Frozen:
    """The base's own weights at a group of sites, stacked."""

    weight: Weight
    """[N, K]."""
    bias_N: Tensor | None

    def product(self, x_TK: Tensor) -> Tensor:
        """xWᵀ + b as a tensor of its own, never a view: the kinds add to it in place."""
        return frozen_product(x_TK, self.weight, self.bias_N)

    def summed(self, x_TK: Tensor) -> Tensor:
        """xWᵀ without the bias, in at least float32: the kinds add to it in place."""
        return summed_product(x_TK, self.weight)

    def part(self, low: int, high: int) -> Frozen:
        bias_N = None if self.bias_N is None else self.bias_N[low:high]
        return Frozen(part_of(self.weight, low, high), bias_N)


@dataclass(frozen=True, slots=True)
class Pass:
    """The pass that a site is in."""

    microbatch: Microbatch
    route: Route
    training: bool
    anchor: Tensor
    """A scalar that requires a gradient and never gets one; see `ops.lora.Blocks`."""
    totals: Mapping[str, Parameters]
    """The accumulators of each job's gradients."""
    rows: Rows | None = None
    """The assignment of rows to programs, for the tiled route."""
    choices: Choices | None = None
    """Measured choices between kernels on this device."""
    gathered: Mapping[str, GatheredRows] = field(default_factory=dict)
    """By job, the rows of those that the pass finds by their numbers: where it is captured, and segments do
    not say where they are."""


@dataclass(frozen=True, slots=True)
class SiteParts:
    """What the jobs of one kind do at one site in one pass, any of it absent:
    y = residual + after(g_out ⊙ ((x ⊙ g_in)Wᵀ + what is added) + b), every job to its own rows."""

    add: Callable[[Tensor, Tensor], Tensor] | None = None
    """(x_TK, y_TN) → y with every job's part added; x is the site's own input, y may be overwritten."""
    g_in: tuple[RowScale, ...] = ()
    g_out: tuple[RowScale, ...] = ()
    after: tuple[tuple[slice | GatheredRows, Callable[[Tensor], Tensor]], ...] = ()
    """(rows of a job, y_LN → what it makes of the outputs of the linear there, the bias in them)."""


class SiteBank(Protocol):
    """At a group of sites that share their input, the parameters of all adapters of one kind aboard."""

    def attach(self, member: Member, weights: Parameters) -> None:
        """Attach a job; `weights` is what passes read: trained parameters and the kind's constants."""

    def detach(self, job: str) -> None: ...

    def segments(self, bound: Pass) -> list[Segment]:
        """The rows of its jobs in the pass."""

    def parts(self, site: str, frozen: Frozen, bound: Pass) -> SiteParts:
        """What its jobs do at one site, over whole tensors; `frozen` is the base's own part there."""


class ExpertBank(Protocol):
    """At the experts of a layer, the parameters of all adapters of one kind aboard."""

    tiled: bool

    def attach(self, member: Member, weights: Parameters, totals: Parameters) -> None:
        """The same; `totals` are the accumulators of its gradients."""

    def detach(self, job: str) -> None: ...

    def present(self, bound: Pass) -> bool:
        """Whether any of its jobs has rows in the pass."""

    def parts(self, site: str, bound: Pass) -> Iterable[ExpertPart]:
        """What its jobs add at one of the experts' parameters, with the gradients of their weights
        accumulated."""

    def group(self, site: str, device: torch.device) -> Group | None:
        """All adapters at one of the experts' parameters, as the tiled kernels find them: slot n · E + e is
        the n-th at expert e. None where there are none."""

    def numbers(self, jobs: tuple[str | None, ...], device: torch.device) -> Tensor:
        """int32: the number of each job's adapter there, −1 where it has none."""


class Kind(Protocol):
    name: str

    def layout(self, spec: Any, sites: Sequence[SiteShape]) -> VectorLayout: ...

    def adapts(self, spec: Any, site: str) -> bool:
        """Whether the adapter changes what this site computes."""

    def rows_before(self, spec: Any) -> int:
        """How many rows of its own (virtual tokens) the adapter puts before every sample, in the place of
        embeddings: those of its parameter ROWS, shared by all sites."""

    def constants_key(self, spec: Any) -> Hashable | None:
        """The key of the constants: jobs with equal keys share them. None: there are none."""

    def constants(self, spec: Any, sites: Sequence[SiteShape], like: Tensor) -> Mapping[str, Tensor]:
        """Tensors that are read at all sites and never trained nor saved in a checkpoint, by name; in the
        dtype and on the device of `like`."""

    def check_start(self, spec: Any, sites: Sequence[SiteShape]) -> None:
        """Raise AdapterError where the folder in the spec's `init_from` cannot start an adapter at these
        sites."""

    def initialise(self, new: NewAdapter, sites: Sequence[SiteShape]) -> None:
        """Fill the parameters of a new adapter, from its job's seed or from its `init_from`.

        `sites` are those of the whole base."""

    def before_step(self, member: Member, step: int, masters: Callable[[], Parameters]) -> None:
        """Change the master weights, if need be, before a step of the job is made with the gradients that are
        there: for kinds with phases."""

    def bank(self, sites: Sequence[SiteShape]) -> SiteBank: ...

    def weaves(self, spec: Any) -> bool:
        """Whether adapters of this spec have the form that the tiled kernels take; others compute by the
        parts of their bank on every route."""

    def gathers(self, spec: Any) -> bool:
        """Whether passes with such an adapter can be captured although it does not weave: at linears it does
        nothing but change outputs, by an `ops.site.RowChange`."""

    def woven(self, member: Member, at: SiteTensors) -> WovenPart | None:
        """The adapter in that form at one site; None where it has none. Asked only of kinds that weave."""

    def expert_bank(self, sites: Sequence[SiteShape]) -> ExpertBank:
        """Only asked for where an adapter's layout has parameters at experts."""

    def save(
        self, folder: Any, spec: Any, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        """Write a PEFT adapter folder."""

    def portable(self, folder: Path, target: Path) -> int:
        """Write the adapter of `folder` again so that servers which know one rank and one alpha compute the
        same with it; returns that rank."""

    def merge(self, folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
        """Add the adapter of `folder` to the weights of the base's `modules`, by site."""
