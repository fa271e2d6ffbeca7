"""What a kind of adapter must offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weftune.adapters.vector import VectorLayout
from weftune.core.batch import Microbatch
from weftune.core.shapes import SiteShape
from weftune.ops.lora.choice import Choices
from weftune.ops.lora.routes import Route
from weftune.ops.lora.rows import Rows

Parameters = Mapping[tuple[str, str], Tensor]
"""(site, name) → tensor, as `VectorLayout.views` gives them."""


@dataclass(frozen=True, slots=True)
class Member:
    """A job as its kind sees it: its adapter spec and the seed its randomness hangs on."""

    job: str
    spec: Any
    seed: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """The base's own weights at a group of sites, stacked."""

    weight_NK: Tensor
    bias_N: Tensor | None

    def product(self, x_TK: Tensor) -> Tensor:
        """xWᵀ + b as a tensor of its own, never a view: the kinds add to it in place."""
        return nn.functional.linear(x_TK, self.weight_NK, self.bias_N)

    def part(self, low: int, high: int) -> Frozen:
        return Frozen(self.weight_NK[low:high], None if self.bias_N is None else self.bias_N[low:high])


@dataclass(frozen=True, slots=True)
class Pass:
    """What a site must know of the pass it is in."""

    microbatch: Microbatch
    route: Route
    training: bool
    anchor: Tensor
    """A scalar that requires a gradient and never gets one; see `ops.lora.Blocks`."""
    totals: Mapping[str, Parameters]
    """Where the gradients of each job add up, for the routes over whole tensors."""
    rows: Rows | None = None
    """How the rows are dealt out, for the tiled route."""
    choices: Choices | None = None
    """What was measured about its kernels on this device."""


class SiteBank(Protocol):
    """At a group of sites that share their input, the parameters of all adapters of one kind aboard."""

    def attach(self, member: Member, slot: int, weights: Parameters, totals: Parameters) -> None:
        """Take a job aboard; `weights` is what passes read, `totals` is where its gradients add up."""

    def detach(self, job: str) -> None: ...

    def resize(self, slots: int) -> None:
        """From now on slots may be numbered up to `slots`."""

    def limits(self) -> object:
        """What kernels were launched for, beside who is aboard: equal limits, equal launches."""

    def add(self, site: str, x_TK: Tensor, y_TN: Tensor, bound: Pass) -> Tensor:
        """The output of one site with every job's part added, by a route over whole tensors."""

    def linear(self, x_TK: Tensor, frozen: Frozen, residual_TN: Tensor | None, bound: Pass) -> Tensor:
        """The frozen product of all sites side by side with every job's part, by the tiled route."""


class Kind(Protocol):
    name: str

    def layout(self, spec: Any, sites: Sequence[SiteShape]) -> VectorLayout: ...

    def check_start(self, spec: Any, sites: Sequence[SiteShape]) -> None:
        """Raise AdapterError where the spec's `init_from` cannot start an adapter at these sites."""

    def initialise(
        self,
        member: Member,
        sites: Sequence[SiteShape],
        parameters: Parameters,
        drawn_on: torch.device | None = None,
    ) -> None:
        """Fill parameters of a new adapter, from the member's seed or from its `init_from`.

        `sites` are those of the whole base; `parameters` may be those of some of them only, on any device;
        random numbers are drawn there, or on the device `drawn_on`.
        """

    def bank(self, sites: Sequence[SiteShape], slots: int) -> SiteBank: ...

    def save(
        self, folder: Any, spec: Any, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        """Write a PEFT adapter folder."""

    def portable(self, folder: Path, target: Path) -> int:
        """Write the adapter of `folder` again so that servers which know one rank and one alpha compute the
        same with it; returns that rank."""

    def merge(self, folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
        """Add the adapter of `folder` to the weights of the base's `modules`, by site."""
