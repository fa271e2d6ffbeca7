"""The form in which the tiled kernels take adapters: LoRA with scales. A kind that can be brought into it
needs no kernels of its own.

Shapes: K inputs, N outputs of a site.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weftune.core.shapes import SiteShape
from weftune.ops.lora.computed import ComputedPair
from weftune.ops.lora.scales import SiteScale
from weftune.ops.lora.table import Entry


@dataclass(frozen=True, slots=True)
class TiledPart:
    """A job's adapter at one site: y = g_out ⊙ ((x ⊙ g_in)Wᵀ + scale · drop(x)AᵀB) + b. Parts may be
    absent."""

    low_rank: Entry | None = None
    g_out: SiteScale | None = None
    g_in: SiteScale | None = None
    computed: ComputedPair | None = None
    """Source from which A and B are computed, if the job does not train A and B themselves."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Tensors of one job that its sites share. Each is used only between two kernels of one site."""

    like: Tensor
    tensors: dict[Hashable, Tensor] = field(default_factory=dict)

    def zeros(self, name: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if (name, shape) not in self.tensors:
            self.tensors[name, shape] = torch.zeros(shape, dtype=dtype, device=self.like.device)
        return self.tensors[name, shape]


@dataclass(frozen=True, slots=True)
class SiteTensors:
    """A job's tensors at one site."""

    site: SiteShape
    weights: Mapping[tuple[str, str], Tensor]
    """(site, name) → tensor that passes read: trained parameters and the kind's constants."""
    totals: Mapping[tuple[str, str], Tensor]
    """(site, name) → accumulator of the gradient."""
    scratch: Scratch

    def weight(self, name: str) -> Tensor:
        return self.weights[self.site.name, name]

    def total(self, name: str) -> Tensor:
        return self.totals[self.site.name, name]
