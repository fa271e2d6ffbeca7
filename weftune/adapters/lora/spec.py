"""The adapter keys of a LoRA job, its cost, and its names in PEFT."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from weftune.adapters.start import FromJob
from weftune.core.shapes import EXPERT_PARAMETERS, SiteShape

ALL_LINEAR = "all-linear"
A, B = "a_rK", "b_rN"
"""The parameters of an adapter at a site, as a bank holds them; at experts, those of all of them."""
EXPERTS, WRAPPED = ".experts", ".base_layer"


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
    target_parameters: tuple[str, ...] = ()
    """Endings of the paths of experts' parameters, each of which gets an adapter for every expert."""
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    init_from: str | FromJob | None = None
    """A PEFT adapter folder to start from, or the job of the same run whose adapter is waited for."""

    def targets_site(self, name: str) -> bool:
        """Whether PEFT would put an adapter on the module `name` (the output layer is no site at all)."""
        if isinstance(self.targets, str):
            return self.targets.lower() == ALL_LINEAR or re.fullmatch(self.targets, name) is not None
        return any(name == target or name.endswith(f".{target}") for target in self.targets)

    def adapts(self, site: SiteShape) -> bool:
        """Experts have no adapter unless the job asks for one."""
        return self.targets_parameter(site.name) if site.experts else self.targets_site(site.name)

    def targets_parameter(self, name: str) -> bool:
        """Whether PEFT would put an adapter on the experts' parameter `name`."""
        return any(name == target or name.endswith(f".{target}") for target in self.target_parameters)

    def rank_at(self, name: str) -> int:
        return self.rank_pattern.get(pattern_for(self.rank_pattern, name), self.rank)

    def alpha_at(self, name: str) -> float:
        return self.alpha_pattern.get(pattern_for(self.alpha_pattern, name), self.alpha)

    def scale_at(self, name: str) -> float:
        rank = self.rank_at(name)
        return self.alpha_at(name) / (math.sqrt(rank) if self.rslora else rank)

    def parameters_at(self, site: SiteShape) -> int:
        return max(1, site.experts) * self.rank_at(site.name) * (site.in_features + site.out_features)


def pattern_for(patterns: Iterable[str], name: str) -> str:
    """The first pattern whose regular expression ends the module path, as PEFT chooses it."""
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", name):
            return pattern
    return name


def stored_path(site: str, adapted: Collection[str]) -> str:
    """Where PEFT stores what an adapter with these sites has on experts: it wraps their module once for every
    parameter, the first innermost."""
    module, _, name = site.rpartition(".")
    outside = EXPERT_PARAMETERS[EXPERT_PARAMETERS.index(name) + 1 :]
    return module + WRAPPED * sum(f"{module}.{other}" in adapted for other in outside)


def site_stored_at(path: str, spec: LoraSpec) -> str:
    """The site whose weights PEFT stores at a path: itself, unless it is that of experts."""
    module = path.replace(WRAPPED, "")
    if not module.endswith(EXPERTS):
        return path
    own = [f"{module}.{name}" for name in EXPERT_PARAMETERS if spec.targets_parameter(f"{module}.{name}")]
    outside = path.count(WRAPPED)
    return own[-1 - outside] if outside < len(own) else path


def weight_names(path: str) -> tuple[str, str]:
    """The names of A [rank, in] and B [out, rank] in a PEFT adapter file."""
    stem = f"base_model.model.{path}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def site_of(weight_name: str) -> str | None:
    """The path whose A or B is called so in a PEFT adapter file; None for any other name."""
    found = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", weight_name)
    return None if found is None else found[1]
