"""The keys of a PiSSA adapter in a jobs file: the keys of a LoRA adapter and `svd_iterations`. This module
does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from weftune.adapters.lora.spec import A, B, LoraSpec
from weftune.core.bounds import Bound
from weftune.core.shapes import SiteShape

FIRST_A, FIRST_B = "first_a_rK", "first_b_rN"
"""Names of the parameters A₀ and B₀, the initial values of A and B. They are never trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PissaSpec(LoraSpec):
    """PiSSA: y = xWᵀ + scale · (drop(x)AᵀBᵀ − xA₀ᵀB₀ᵀ). A and B start at A₀ and B₀, the principal part of
    W."""

    implementation: ClassVar[str] = "weftune.adapters.pissa.apply:Pissa"
    runs_on_shards: ClassVar[bool] = True

    kind: Literal["pissa"] = "pissa"  # type: ignore[assignment]
    svd_iterations: Annotated[int | None, Bound(at_least=0, at_most=1000)] = None
    """Number of iterations of a randomised SVD, given in PEFT as `pissa_niter_…`. None selects the exact
    SVD."""

    def shapes_at(self, site: SiteShape) -> dict[str, tuple[int, ...]]:
        own = LoraSpec.shapes_at(self, site)
        return {**own, FIRST_A: own[A], FIRST_B: own[B]}

    def as_lora(self) -> LoraSpec:
        """Return the spec of the equivalent LoRA adapter of the unchanged base. That adapter has the matrices
        [A; A₀] and [B, −B₀], twice the rank and the same scale."""
        keys: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(LoraSpec)}
        more = 2.0**0.5 if self.rslora else 2.0
        return LoraSpec(
            **keys
            | {
                "kind": "lora",
                "rank": 2 * self.rank,
                "alpha": more * self.alpha,
                "rank_pattern": {key: 2 * rank for key, rank in self.rank_pattern.items()},
                "alpha_pattern": {key: more * alpha for key, alpha in self.alpha_pattern.items()},
            }
        )
