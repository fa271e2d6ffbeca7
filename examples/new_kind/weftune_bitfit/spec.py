"""What a job may say about BitFit. Without torch: `weftune plan` reads it too."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from weftune.adapters.target import TargetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BitFitSpec(TargetSpec):
    """y = xWᵀ + b + u: only u is trained."""

    implementation: ClassVar[str] = "weftune_bitfit.apply:BitFit"

    kind: Literal["bitfit"] = "bitfit"

    def shapes_at(self, site):
        return {"u": (site.out_features,)}
