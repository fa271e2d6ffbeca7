"""The keys of a bottleneck adapter in a jobs file. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from weftune.adapters.target import ATTENTION, FEEDFORWARD, TargetSpec, ends_with
from weftune.core.bounds import SIZE
from weftune.core.shapes import SiteShape

DOWN, DOWN_BIAS, UP, UP_BIAS = "down", "down_bias", "up", "up_bias"

Activation = Literal["relu", "gelu", "silu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckSpec(TargetSpec):
    """Bottleneck adapters: a narrow MLP y + act(yDᵀ + d)Uᵀ + u on the output y of the last linears of
    attention and feed-forward (Houlsby), or of the feed-forward alone (Pfeiffer); `targets` may name other
    linears instead."""

    implementation: ClassVar[str] = "weftune.adapters.bottleneck.apply:Bottleneck"
    is_mergeable: ClassVar[bool] = False

    kind: Literal["bottleneck"] = "bottleneck"
    placement: Literal["houlsby", "pfeiffer"] = "houlsby"
    targets: str | tuple[str, ...] = (*ATTENTION, *FEEDFORWARD)
    size: Annotated[int, SIZE] = 64
    """Width of the bottleneck: number of outputs of the down projection."""
    activation: Activation = "relu"

    def targets_site(self, name: str) -> bool:
        behind_attention = any(ends_with(name, ending) for ending in ATTENTION)
        if self.placement == "pfeiffer" and behind_attention:
            return False
        return TargetSpec.targets_site(self, name)

    def shapes_at(self, site: SiteShape) -> dict[str, tuple[int, ...]]:
        width = site.out_features
        return {DOWN: (self.size, width), DOWN_BIAS: (self.size,), UP: (width, self.size), UP_BIAS: (width,)}

    def copied_values(self, sites: Sequence[SiteShape]) -> int:
        return sum(site.out_features + self.size for site in sites if self.adapts(site))

    def rank_at(self, name: str) -> int:
        return self.size
