"""The adapter keys of a LoRA job, its cost, and its names in PEFT."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from weftune.adapters.target import TargetSpec, ends_with
from weftune.adapters.tokens import STORED
from weftune.core.bounds import SIZE, Bound
from weftune.core.limited import ending
from weftune.core.shapes import EXPERT_PARAMETERS, SiteShape

A, B = "a_rK", "b_rN"
"""Parameters of an adapter at a site, as a bank holds them; at experts, those of all experts together."""
EXPERTS, WRAPPED = ".experts", ".base_layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec(TargetSpec):
    """y = xWᵀ + scale · drop(x)AᵀBᵀ at every site that `targets` names."""

    implementation: ClassVar[str] = "weftune.adapters.lora.apply:Lora"
    peft_type: ClassVar[str | None] = "LORA"
    served: ClassVar[bool] = True

    kind: Literal["lora"] = "lora"
    rank: Annotated[int, SIZE] = 16
    alpha: Annotated[float, Bound(above=0)] = 32.0
    dropout: Annotated[float, Bound(at_least=0, below=1)] = 0.0
    target_parameters: tuple[str, ...] = ()
    """Endings of the paths of experts' parameters, each of which gets an adapter for every expert."""
    rslora: bool = False
    loraplus_lr_ratio: Annotated[float, Bound(above=0)] = 1.0
    """Factor of the job's learning rate for B (LoRA+)."""
    rank_pattern: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    alpha_pattern: Mapping[str, Annotated[float, Bound(above=0)]] = field(default_factory=dict)
    trainable_token_indices: tuple[int, ...] = ()
    """Ids of tokens whose embeddings are trained, too."""

    @property
    def trained_tokens(self) -> tuple[int, ...]:
        return self.trainable_token_indices

    def adapts(self, site: SiteShape) -> bool:
        """Whether the adapter has parameters at the site; at experts only if the job requests it."""
        return self.targets_parameter(site.name) if site.experts else self.targets_site(site.name)

    def targets_parameter(self, name: str) -> bool:
        """Whether PEFT would put an adapter on the experts' parameter `name`."""
        return any(ends_with(name, target) for target in self.target_parameters)

    def expressions(self) -> dict[tuple[str, ...], str]:
        keyed = (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern))
        own = {(key, pattern): ending(pattern) for key, patterns in keyed for pattern in patterns}
        return TargetSpec.expressions(self) | own

    def rank_at(self, name: str) -> int:
        return self.rank_pattern.get(pattern_for(self.rank_pattern, name), self.rank)

    def alpha_at(self, name: str) -> float:
        return self.alpha_pattern.get(pattern_for(self.alpha_pattern, name), self.alpha)

    def scale_at(self, name: str) -> float:
        rank = self.rank_at(name)
        return self.alpha_at(name) / (math.sqrt(rank) if self.rslora else rank)

    def shapes_at(self, site: SiteShape) -> dict[str, tuple[int, ...]]:
        ranks = (*((site.experts,) if site.experts else ()), self.rank_at(site.name))
        return {A: (*ranks, site.in_features), B: (*ranks, site.out_features)}


def pattern_for(patterns: Iterable[str], name: str) -> str:
    """Return the first pattern whose regular expression matches the end of the module path, as in PEFT."""
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", name):
            return pattern
    return name


def stored_path(site: str, adapted: Collection[str]) -> str:
    """Return the path at which PEFT stores the weights of an adapter with these sites on experts: it wraps
    their module once for every parameter, the first innermost."""
    module, _, name = site.rpartition(".")
    outside = EXPERT_PARAMETERS[EXPERT_PARAMETERS.index(name) + 1 :]
    return module + WRAPPED * sum(f"{module}.{other}" in adapted for other in outside)


def site_stored_at(path: str, spec: LoraSpec) -> str:
    """Return the site whose weights PEFT stores at a path: the path itself, unless it is that of experts."""
    module = path.replace(WRAPPED, "")
    if not module.endswith(EXPERTS):
        return path
    own = [f"{module}.{name}" for name in EXPERT_PARAMETERS if spec.targets_parameter(f"{module}.{name}")]
    outside = path.count(WRAPPED)
    return own[-1 - outside] if outside < len(own) else path


def weight_names(path: str) -> tuple[str, str]:
    """Return the names of A [rank, in] and B [out, rank] in a PEFT adapter file."""
    stem = f"base_model.model.{path}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def stored_tokens(embedding: str) -> str:
    """Return the name of trained rows of the embedding in a PEFT adapter file."""
    return f"base_model.model.{embedding}.{STORED}"


def tokens_stored_at(name: str) -> str | None:
    """Return the embedding whose trained rows have this name in a PEFT adapter file; None for any other."""
    found = re.fullmatch(rf"base_model\.model\.(.+)\.{re.escape(STORED)}", name)
    return None if found is None else found[1]


def site_of(weight_name: str) -> str | None:
    """Return the path whose A or B has this name in a PEFT adapter file; None for any other name."""
    found = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", weight_name)
    return None if found is None else found[1]
