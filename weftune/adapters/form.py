"""The form that the tiled kernels take adapters in: LoRA with scales. A kind that can be brought to it needs
no kernels of its own.

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
class WovenPart:
    """What a job's adapter comes to at one site, any of it absent:
    y = g_out ⊙ ((x ⊙ g_in)Wᵀ + scale · drop(x)AᵀB) + b."""

    low_rank: Entry | None = None
    g_out: SiteScale | None = None
    g_in: SiteScale | None = None
    computed: ComputedPair | None = None
    """What A and B are computed from, where the job does not train themselves."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Tensors of one job that its sites share: each is used between two kernels of one site only."""

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
    """By site and name, what passes read: trained parameters and the kind's constants."""
    totals: Mapping[tuple[str, str], Tensor]
    """The accumulators of their gradients."""
    scratch: Scratch

    def weight(self, name: str) -> Tensor:
        return self.weights[self.site.name, name]

    def total(self, name: str) -> Tensor:
        return self.totals[self.site.name, name]
