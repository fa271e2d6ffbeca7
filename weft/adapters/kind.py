"""What a kind of adapter must offer, and who offers it. A site never names a kind: it asks here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from weft.adapters.folder import read_config
from weft.adapters.layout import Layout
from weft.batch import Microbatch
from weft.errors import AdapterError, SpecError
from weft.ops.lora import Route
from weft.shapes import SiteShape

Parameters = Mapping[tuple[str, str], Tensor]
"""(site, name) → tensor, as `Layout.views` gives them."""


@dataclass(frozen=True, slots=True)
class Member:
    """A job as its kind sees it: its adapter spec and the seed its randomness hangs on."""

    job: str
    spec: Any
    seed: int


class SiteBank(Protocol):
    """At one site, the stacked parameters of all adapters of one kind aboard."""

    def attach(self, member: Member) -> None: ...

    def detach(self, job: str) -> None: ...

    def holds(self, job: str) -> bool: ...

    def parameters(self, job: str) -> dict[str, Tensor]:
        """The job's own part of the bank, by parameter name: what the forward pass reads."""

    def gradients(self, job: str) -> dict[str, Tensor]:
        """The job's own part of the gradient of the microbatch just run; empty if it had none."""

    def clear_gradients(self) -> None: ...

    def scratch(self) -> Sequence[Tensor]:
        """The whole bank's gradients of the microbatch just run."""

    def apply(
        self, x_TK: Tensor, y_TN: Tensor, microbatch: Microbatch, route: Route, training: bool
    ) -> Tensor: ...


class Kind(Protocol):
    name: str

    def layout(self, spec: Any, sites: Sequence[SiteShape]) -> Layout: ...

    def check_start(self, spec: Any, sites: Sequence[SiteShape]) -> None:
        """Raise AdapterError where the spec's `init_from` cannot start an adapter at these sites."""

    def initialise(self, member: Member, sites: Sequence[SiteShape], parameters: Parameters) -> None:
        """Fill the parameters of a new adapter, from the member's seed or from its `init_from`."""

    def bank(self, site: SiteShape, like: Tensor) -> SiteBank: ...

    def save(
        self, folder: Any, spec: Any, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        """Write a PEFT adapter folder."""

    def portable(self, folder: Path, target: Path) -> int:
        """Write the adapter of `folder` again so that servers which know one rank and one alpha compute the
        same with it; returns that rank."""

    def merge(self, folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
        """Add the adapter of `folder` to the weights of the base's `modules`, by site."""


def kind_named(name: str) -> Kind:
    if name == "lora":
        from weft.adapters.lora.apply import Lora

        return Lora()
    raise SpecError(f"adapter.kind: there is no kind {name!r}; known: lora")


def kind_of(folder: Path) -> Kind:
    """The kind of the adapter in a PEFT folder."""
    peft_type = read_config(folder).get("peft_type")
    if peft_type == "LORA":
        return kind_named("lora")
    raise AdapterError(f"{folder} holds a {peft_type} adapter, a kind that Weft does not know")
