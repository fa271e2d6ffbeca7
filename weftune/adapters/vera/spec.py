"""The keys of a VeRA adapter in a jobs file. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from weftune.adapters.target import TargetSpec
from weftune.core.bounds import SEED, SIZE, Bound
from weftune.core.shapes import SiteShape

D, E = "lambda_d", "lambda_b"


@dataclass(frozen=True, slots=True, kw_only=True)
class VeraSpec(TargetSpec):
    """VeRA: y = xWᵀ + e ⊙ (d ⊙ drop(x)Aᵀ)Bᵀ with trained vectors d and e. The random matrices A and B are
    drawn once for all linears."""

    implementation: ClassVar[str] = "weftune.adapters.vera.apply:Vera"
    runs_on_shards: ClassVar[bool] = True
    peft_type: ClassVar[str | None] = "VERA"

    kind: Literal["vera"] = "vera"
    rank: Annotated[int, SIZE] = 256
    dropout: Annotated[float, Bound(at_least=0, below=1)] = 0.0
    d_initial: Annotated[float, Bound()] = 0.1
    projection_prng_key: Annotated[int, SEED] = 0
    """Seed of the random matrices A and B. Jobs with equal seed, rank and targets share A and B."""

    def shapes_at(self, site: SiteShape) -> dict[str, tuple[int, ...]]:
        return {D: (self.rank,), E: (site.out_features,)}

    def rank_at(self, name: str) -> int:
        return self.rank
