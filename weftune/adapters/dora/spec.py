"""The keys of a DoRA adapter in a jobs file: those of a LoRA adapter. They are defined here so that they can
be read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from weftune.adapters.lora.spec import LoraSpec
from weftune.core.shapes import SiteShape

MAGNITUDE = "m_N"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoraSpec(LoraSpec):
    """DoRA: every row of W + scale · BA is scaled to a trained norm."""

    implementation: ClassVar[str] = "weftune.adapters.dora.apply:Dora"
    runs_on_shards: ClassVar[bool] = True
    is_served: ClassVar[bool] = False

    kind: Literal["dora"] = "dora"  # type: ignore[assignment]

    def shapes_at(self, site: SiteShape) -> dict[str, tuple[int, ...]]:
        return {**LoraSpec.shapes_at(self, site), MAGNITUDE: (site.out_features,)}

    def scales_outputs(self, site: SiteShape) -> bool:
        return True
