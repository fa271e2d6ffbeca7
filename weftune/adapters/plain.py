"""A bank for kinds written in plain torch, one job at one site at a time, on every route.

Shapes: T rows, K inputs, N outputs of a site; L rows of one job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.adapters.kind import Frozen, JobAdapter, Parameters, Pass, SiteParts
from weftune.adapters.vector import SHARED
from weftune.core.batch import Segment
from weftune.core.shapes import SiteShape
from weftune.ops.accumulate import accumulated
from weftune.ops.dropout import kept_TK, key
from weftune.ops.site import RowScale, with_rows


@dataclass(frozen=True, slots=True)
class JobAt:
    """A job at one site in one pass: its rows, and its weights as autograd sees them."""

    adapter: JobAdapter
    site: SiteShape
    segment: Segment
    bound: Pass
    weights: Parameters
    frozen: Frozen
    known: dict[tuple[str, str], Tensor]
    """(site, name) → tensor that is computed once and kept."""

    def trained(self, name: str) -> Tensor:
        """Return a parameter of this site; its gradient is accumulated."""
        return self._trained(self.site.name, name)

    def shared(self, name: str) -> Tensor:
        """Return a parameter that all sites share; its gradient is accumulated."""
        return self._trained(SHARED, name)

    def untrained(self, name: str) -> Tensor:
        """Return a parameter of this site as a plain tensor; only `add_gradient` gives it a gradient."""
        return self.weights[self.site.name, name]

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Accumulate the gradient of a parameter of this site."""
        self.bound.totals[self.adapter.job][self.site.name, name].add_(gradient)

    def constant(self, name: str) -> Tensor:
        """Return one of the kind's constants."""
        return self.weights[SHARED, name]

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return what `make` computes from the frozen weight, once: the result is kept."""
        if (self.site.name, name) not in self.known:
            self.known[self.site.name, name] = make()
        return self.known[self.site.name, name]

    @property
    def drops(self) -> bool:
        return self.bound.training and self.adapter.spec.dropout > 0.0

    def dropped(self, x_LK: Tensor) -> Tensor:
        """Apply the job's dropout to x, in training only."""
        probability = self.adapter.spec.dropout
        if not self.drops:
            return x_LK
        index_L = self.bound.microbatch.token_index_T[self.segment.rows]
        own = key(self.adapter.seed, self.segment.step, self.site.name)
        kept = kept_TK(own, index_L, x_LK.shape[1], probability)
        return torch.where(kept, x_LK, 0.0) / (1.0 - probability)

    def _trained(self, site: str, name: str) -> Tensor:
        total = self.bound.totals[self.adapter.job][site, name]
        return accumulated(self.weights[site, name], total, self.bound.anchor)


@dataclass(frozen=True, slots=True)
class JobPart:
    """A job's changes to its rows: y = after(g_out ⊙ ((x ⊙ g_in)Wᵀ + add(x)) + b); any part may be absent."""

    add: Callable[[Tensor], Tensor] | None = None
    """x_LK → what is added, [L, N]."""
    g_in_K: Tensor | None = None
    g_out_N: Tensor | None = None
    scales_bias: bool = False
    """Whether g_out scales b, too."""
    after: Callable[[Tensor], Tensor] | None = None
    """y_LN → changed outputs."""


class PlainBank:
    def __init__(self, sites: Sequence[SiteShape], part: Callable[[JobAt], JobPart]) -> None:
        self._sites = {site.name: site for site in sites}
        self._part = part
        self._aboard: dict[str, tuple[JobAdapter, Parameters]] = {}
        self._known: dict[tuple[str, str], Tensor] = {}

    def attach(self, adapter: JobAdapter, weights: Parameters) -> None:
        self._aboard[adapter.job] = adapter, weights

    def detach(self, job: str) -> None:
        del self._aboard[job]

    def segments(self, bound: Pass) -> list[Segment]:
        return [segment for segment in bound.microbatch.segments if segment.through in self._aboard]

    def parts(self, site: str, frozen: Frozen, bound: Pass) -> SiteParts:
        added, g_in, g_out, behind = [], [], [], []
        for segment in self.segments(bound):
            adapter, weights = self._aboard[segment.through or ""]
            at = JobAt(adapter, self._sites[site], segment, bound, weights, frozen, self._known)
            part = self._part(at)
            others = part.add is part.g_in_K is part.g_out_N is None
            assert others or adapter.job not in bound.gathered, "only outputs are changed in gathered rows"
            start, stop = segment.start, segment.stop
            if part.add is not None:
                added.append((segment.rows, part.add))
            if part.after is not None:
                behind.append((bound.gathered.get(adapter.job, segment.rows), part.after))
            if part.g_in_K is not None:
                g_in.append(RowScale(start, stop, part.g_in_K))
            if part.g_out_N is not None:
                g_out.append(RowScale(start, stop, part.g_out_N, part.scales_bias))

        def add(x_TK: Tensor, y_TN: Tensor) -> Tensor:
            return with_rows(y_TN, [(rows, y_TN[rows] + one(x_TK[rows])) for rows, one in added])

        return SiteParts(add if added else None, tuple(g_in), tuple(g_out), tuple(behind))
