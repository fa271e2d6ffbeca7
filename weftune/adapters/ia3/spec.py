"""The keys of an IA³ adapter in a jobs file. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from weftune.adapters.target import FEEDFORWARD, TargetSpec, ends_with
from weftune.core.shapes import SiteShape

SCALE = "scale"
"""Name of the only parameter that IA³ has at an adapted linear."""
KEYS_AND_VALUES = ("k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ia3Spec(TargetSpec):
    """IA³: trained scales of each output of the linears in `targets`, or of each input of the linears in
    `feedforward`."""

    implementation: ClassVar[str] = "weftune.adapters.ia3.apply:Ia3"
    runs_on_shards: ClassVar[bool] = True
    peft_type: ClassVar[str | None] = "IA3"

    kind: Literal["ia3"] = "ia3"
    targets: str | tuple[str, ...] = (*KEYS_AND_VALUES, *FEEDFORWARD)
    """Target modules: by default keys, values and the last linear of the feed-forward block."""
    feedforward: tuple[str, ...] = FEEDFORWARD

    def is_feedforward(self, name: str) -> bool:
        return any(ends_with(name, ending) for ending in self.feedforward)

    def shapes_at(self, site: SiteShape) -> dict[str, tuple[int, ...]]:
        return {SCALE: (site.in_features if self.is_feedforward(site.name) else site.out_features,)}

    def scales_outputs(self, site: SiteShape) -> bool:
        return not self.is_feedforward(site.name)
