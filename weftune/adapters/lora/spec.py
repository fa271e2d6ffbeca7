"""The adapter keys of a LoRA job, its cost, and its names in PEFT."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from weftune.core.shapes import SiteShape

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """y = xWᵀ + scale · drop(x)AᵀBᵀ at every site that `targets` names."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    kind: Literal["lora"] = "lora"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | tuple[str, ...] = ALL_LINEAR
    """`all-linear`, a regular expression that must match a whole module path, or a list of path endings."""
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    init_from: str | None = None
    """A PEFT adapter folder to start from."""

    def targets_site(self, name: str) -> bool:
        """Whether PEFT would put an adapter on the module `name` (the output layer is no site at all)."""
        if isinstance(self.targets, str):
            return self.targets.lower() == ALL_LINEAR or re.fullmatch(self.targets, name) is not None
        return any(name == target or name.endswith(f".{target}") for target in self.targets)

    def adapts(self, site: SiteShape) -> bool:
        """Experts have no adapter unless the job asks for one."""
        return not site.experts and self.targets_site(site.name)

    def rank_at(self, name: str) -> int:
        return self.rank_pattern.get(pattern_for(self.rank_pattern, name), self.rank)

    def alpha_at(self, name: str) -> float:
        return self.alpha_pattern.get(pattern_for(self.alpha_pattern, name), self.alpha)

    def scale_at(self, name: str) -> float:
        rank = self.rank_at(name)
        return self.alpha_at(name) / (math.sqrt(rank) if self.rslora else rank)

    def parameters_at(self, site: SiteShape) -> int:
        return self.rank_at(site.name) * (site.in_features + site.out_features)


def pattern_for(patterns: Iterable[str], name: str) -> str:
    """The first pattern whose regular expression ends the module path, as PEFT chooses it."""
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", name):
            return pattern
    return name


def weight_names(site: str) -> tuple[str, str]:
    """The names of A [rank, in] and B [out, rank] in a PEFT adapter file."""
    stem = f"base_model.model.{site}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def site_of(weight_name: str) -> str | None:
    """The site whose A or B is called so in a PEFT adapter file; None for any other name."""
    found = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", weight_name)
    return None if found is None else found[1]
