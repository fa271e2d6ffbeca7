"""Toy kinds in plain torch, and a plain model with one job's adapter in it: what they must compute.

Shapes: K inputs, N outputs of a site, r ranks; L rows of one job.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.families import tiny
from weftune.adapters import registry
from weftune.adapters.kind import JobAdapter, NewAdapter
from weftune.adapters.lora.spec import A, B
from weftune.adapters.plain import JobAt, JobPart, PlainBank
from weftune.adapters.target import ROWS
from weftune.adapters.vector import SHARED, ParameterShape, VectorLayout
from weftune.base.shape import linears, site_shape
from weftune.core.shapes import SiteShape


class ToyKind:
    """What the toys have in common: nothing is saved, nothing is merged."""

    def check_start(self, spec: Any, sites: Sequence[SiteShape]) -> None: ...

    def rows_before(self, spec: Any) -> int:
        return 0

    def constants_key(self, spec: Any) -> Hashable | None:
        return None

    def constants(self, spec: Any, sites: Sequence[SiteShape], like: Tensor) -> Mapping[str, Tensor]:
        return {}

    def adapts(self, spec: Any, site: str) -> bool:
        return site.endswith(spec.targets)

    def initialise(self, new: NewAdapter, sites: Any) -> None:
        for value in new.parameters.values():
            value.normal_(generator=torch.Generator().manual_seed(new.adapter.seed))

    def before_step(self, *_: Any) -> None: ...

    def save(self, *_: Any) -> None: ...

    def portable(self, *_: Any) -> int:
        raise NotImplementedError

    def merge(self, *_: Any) -> None: ...

    def is_tiled(self, spec: Any) -> bool:
        return False

    def gathers(self, spec: Any) -> bool:
        return False

    def tiled_part(self, *_: Any) -> None: ...


@dataclass(frozen=True)
class GateSpec:
    """y = g_out ⊙ ((x ⊙ g_in)Wᵀ + u) + b, or with b scaled, too."""

    targets: tuple[str, ...] = ("proj",)
    kind: str = "gate"
    scales_bias: bool = False
    u_rate: float = 1.0
    """u learns at so many times the job's rate."""


class Gate(ToyKind):
    name = "gate"

    def layout(self, spec: GateSpec, sites: Sequence[SiteShape]) -> VectorLayout:
        shapes = []
        for site in sites:
            if self.adapts(spec, site.name):
                shapes.append(ParameterShape(site.name, "g_in", (site.in_features,)))
                shapes.append(ParameterShape(site.name, "g_out", (site.out_features,)))
                shapes.append(ParameterShape(site.name, "u", (site.out_features,), spec.u_rate))
        return VectorLayout(tuple(shapes))

    def bank(self, sites: Sequence[SiteShape]) -> PlainBank:
        return PlainBank(sites, self._part)

    def _part(self, at: JobAt) -> JobPart:
        if not self.adapts(at.adapter.spec, at.site.name):
            return JobPart()
        u_N = at.trained("u")
        return JobPart(
            add=lambda x_LK: u_N.expand(len(x_LK), -1),
            g_in_K=at.trained("g_in"),
            g_out_N=at.trained("g_out"),
            scales_bias=at.adapter.spec.scales_bias,
        )


@dataclass(frozen=True)
class TiedSpec:
    """y = xWᵀ + (xAᵀ ⊙ d)B ⊙ e + b: A and B are drawn and never trained, d is one for all sites."""

    targets: tuple[str, ...] = ("proj",)
    kind: str = "tied"
    rank: int = 3
    draw: int = 0


class Tied(ToyKind):
    name = "tied"
    drawn = 0
    """How often constants were made."""

    def layout(self, spec: TiedSpec, sites: Sequence[SiteShape]) -> VectorLayout:
        own = [site for site in sites if self.adapts(spec, site.name)]
        each = [ParameterShape(site.name, "e", (site.out_features,)) for site in own]
        return VectorLayout((ParameterShape(SHARED, "d", (spec.rank,)), *each))

    def constants_key(self, spec: TiedSpec) -> Hashable:
        return spec.rank, spec.draw

    def constants(self, spec: TiedSpec, sites: Sequence[SiteShape], like: Tensor) -> dict[str, Tensor]:
        self.drawn += 1
        generator = torch.Generator().manual_seed(spec.draw)
        inputs, outputs = max(s.in_features for s in sites), max(s.out_features for s in sites)
        a, b = (torch.randn(spec.rank, size, generator=generator) for size in (inputs, outputs))
        return {"a": a.to(like) / inputs**0.5, "b": b.to(like)}

    def bank(self, sites: Sequence[SiteShape]) -> PlainBank:
        return PlainBank(sites, self._part)

    def _part(self, at: JobAt) -> JobPart:
        if not self.adapts(at.adapter.spec, at.site.name):
            return JobPart()
        a_rK = at.constant("a")[:, : at.site.in_features]
        b_rN = at.constant("b")[:, : at.site.out_features]
        d_r, e_N = at.shared("d"), at.trained("e")
        return JobPart(add=lambda x_LK: (x_LK @ a_rK.T * d_r) @ b_rN * e_N)


@dataclass(frozen=True)
class PromptSpec:
    """Rows before every sample, and nothing at any site."""

    rows: int = 3
    kind: str = "prompt"


class Prompt(ToyKind):
    name = "prompt"

    def rows_before(self, spec: PromptSpec) -> int:
        return spec.rows

    def adapts(self, spec: PromptSpec, site: str) -> bool:
        return False

    def layout(self, spec: PromptSpec, sites: Sequence[SiteShape]) -> VectorLayout:
        return VectorLayout((ParameterShape(SHARED, ROWS, (spec.rows, sites[0].in_features)),))

    def bank(self, sites: Sequence[SiteShape]) -> PlainBank:
        raise AssertionError("it is at no site")


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The toy kinds among the known ones, while a test lasts."""
    made: dict[str, Any] = {"gate": Gate(), "tied": Tied(), "prompt": Prompt()}
    for name, kind in made.items():
        monkeypatch.setitem(registry.LOADED_KINDS, name, kind)
    return made


# -- the oracle: one job alone, in plain torch ---------------------------------------------------------------


def plain_model(
    family: str, adapter: JobAdapter, flat: Tensor, dtype: torch.dtype = torch.float64
) -> nn.Module:
    """A model of the family with the job's formula at its sites; `flat` gets the gradients."""
    model = tiny(family, dtype).requires_grad_(False)
    kind = registry.get_kind(adapter.spec.kind)
    modules = linears(model)
    sites = [site_shape(name, module) for name, module in modules.items()]
    views = kind.layout(adapter.spec, sites).parameter_views(flat)
    constants = kind.constants(adapter.spec, sites, flat)
    for site in sites:
        if kind.adapts(adapter.spec, site.name):
            module = modules[site.name]
            weight = module.weight.T if site.fan_in_fan_out else module.weight
            own = {name: value for (where, name), value in views.items() if where in (site.name, SHARED)}
            formula = FORMULAS[adapter.spec.kind]
            module.forward = partial(formula, adapter.spec, site, weight, module.bias, {**own, **constants})
    return model


def _lora(spec: Any, site: SiteShape, w_NK: Tensor, bias: Tensor | None, own: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, w_NK, bias) + spec.scale_at(site.name) * (x @ own[A].T) @ own[B]


def _gate(spec: Any, site: SiteShape, w_NK: Tensor, bias: Tensor | None, own: Any, x: Tensor) -> Tensor:
    bias = torch.zeros(len(w_NK), dtype=x.dtype) if bias is None else bias
    y = (x * own["g_in"]) @ w_NK.T + own["u"]
    return (y + bias) * own["g_out"] if spec.scales_bias else y * own["g_out"] + bias


def _tied(spec: Any, site: SiteShape, w_NK: Tensor, bias: Tensor | None, own: Any, x: Tensor) -> Tensor:
    a, b = own["a"][:, : site.in_features], own["b"][:, : site.out_features]
    return nn.functional.linear(x, w_NK, bias) + (x @ a.T * own["d"]) @ b * own["e"]


FORMULAS: dict[str, Callable[..., Tensor]] = {"lora": _lora, "gate": _gate, "tied": _tied}
