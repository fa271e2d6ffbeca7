"""All banks of a base: woven into its sites, bound to one microbatch around each pass.

Each site's linear gets a forward of ours: it multiplies all rows by the frozen weight once and hands input
and output to every kind that has somebody aboard there. Outside a bound pass it is the base's own forward.

Shapes: T rows, K inputs, N outputs of a site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from weft.adapters.kind import Member, SiteBank, kind_named
from weft.adapters.layout import Layout
from weft.batch import Microbatch
from weft.ops.lora import Route
from weft.shapes import SiteShape


@dataclass(frozen=True, slots=True)
class Pass:
    """What a site must know of the pass it is in."""

    microbatch: Microbatch
    route: Route
    training: bool


class Banks:
    def __init__(self, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape], like: Tensor) -> None:
        self.sites = {site.name: site for site in sites}
        self.layouts: dict[str, Layout] = {}
        self._like = like
        self._kinds: dict[str, str] = {}
        self._banks: dict[str, dict[str, SiteBank]] = {site: {} for site in self.sites}
        self._pass: Pass | None = None
        self._modules = {name: modules[name] for name in self.sites}
        for name, module in self._modules.items():
            module.forward = partial(self._weave, name, module, module.forward)

    def unweave(self) -> None:
        """Give every site its own forward back: the base is as it was."""
        for module in self._modules.values():
            del module.forward

    def attach(self, member: Member, layout: Layout, weights: Tensor) -> None:
        """Give a job its slots and fill them from the flat vector `weights`."""
        kind = kind_named(member.spec.kind)
        self._kinds[member.job] = kind.name
        self.layouts[member.job] = layout
        for site in dict.fromkeys(parameter.site for parameter in layout.parameters):
            banks = self._banks[site]
            if kind.name not in banks:
                banks[kind.name] = kind.bank(self.sites[site], self._like)
            banks[kind.name].attach(member)
        self.write(member.job, weights)

    def detach(self, job: str) -> None:
        for bank in self._banks_of(job).values():
            bank.detach(job)
        del self._kinds[job], self.layouts[job]

    def write(self, job: str, weights: Tensor) -> None:
        """Copy a job's flat vector into its slots, in the base's dtype."""
        banks = self._banks_of(job)
        for (site, name), value in self.layouts[job].views(weights).items():
            banks[site].parameters(job)[name].copy_(value)

    def zero(self, job: str) -> None:
        """A dead job's slots hold zeros until it is detached, so that nothing of it can spread."""
        for bank in self._banks_of(job).values():
            for value in bank.parameters(job).values():
                value.zero_()

    def add_gradients(self, job: str, into: Tensor) -> None:
        """Add the job's gradients of the microbatch just run to the flat vector `into`."""
        banks = self._banks_of(job)
        totals, parts = [], []
        for (site, name), total in self.layouts[job].views(into).items():
            if (part := banks[site].gradients(job).get(name)) is not None:
                totals.append(total)
                parts.append(part.to(total.dtype))
        if totals:
            torch._foreach_add_(totals, parts)

    def gradients_are_finite(self) -> bool:
        scratch = [grad for bank in self._all() for grad in bank.scratch()]
        if not scratch:
            return True
        return bool(torch.stack(torch._foreach_norm(scratch)).isfinite().all())

    def clear_gradients(self) -> None:
        for bank in self._all():
            bank.clear_gradients()

    @contextmanager
    def bound(self, microbatch: Microbatch, route: Route, training: bool) -> Iterator[None]:
        """Weave the adapters of `microbatch` through every forward inside, recomputation included."""
        assert self._pass is None, "a pass is already bound"
        self._pass = Pass(microbatch, route, training)
        try:
            yield
        finally:
            self._pass = None

    def _weave(self, name: str, module: nn.Module, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self._pass is None or not self._banks[name]:
            return plain(x)
        x_TK = x.flatten(0, -2)
        y_TN = self._frozen(name, module, x_TK)
        for bank in self._banks[name].values():
            y_TN = bank.apply(x_TK, y_TN, self._pass.microbatch, self._pass.route, self._pass.training)
        return y_TN.view(*x.shape[:-1], -1)

    def _frozen(self, name: str, module: nn.Module, x_TK: Tensor) -> Tensor:
        """xWᵀ + b as a tensor of its own, never a view: the kinds add to it in place."""
        weight, bias = cast(Tensor, module.weight), cast(Tensor | None, module.bias)
        if self.sites[name].fan_in_fan_out:
            assert bias is not None
            return torch.addmm(bias, x_TK, weight)
        return nn.functional.linear(x_TK, weight, bias)

    def _banks_of(self, job: str) -> dict[str, SiteBank]:
        kind = self._kinds[job]
        return {
            site: banks[kind]
            for site, banks in self._banks.items()
            if kind in banks and banks[kind].holds(job)
        }

    def _all(self) -> Iterator[SiteBank]:
        for banks in self._banks.values():
            yield from banks.values()
