"""The keys of a LoRA adapter in a jobs file, and LoRA's names and config in PEFT. This module does not import
torch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from weftune.adapters.folder import (
    CONFIG,
    has_scalar_head,
    read_config,
    refuse_slow_patterns,
    target_fields,
    wrap_config_errors,
)
from weftune.adapters.target import EMBEDDINGS, STORED_TOKENS, TargetSpec, ends_with
from weftune.core.bounds import SIZE, Bound
from weftune.core.limited import suffix_expression
from weftune.core.shapes import EXPERT_PARAMETERS, SCORE, SiteShape
from weftune.errors import AdapterError

A, B = "a_rK", "b_rN"
"""Names of the parameters A and B of an adapted linear. For experts, each of them holds the matrices of all
experts."""
EXPERTS, WRAPPED = ".experts", ".base_layer"
UNSUPPORTED_KEYS = (
    "modules_to_save",
    "lora_bias",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Keys of PEFT's config with which an adapter computes something else than y = xWᵀ + scale · xAᵀBᵀ at its
target linears. Such adapters are refused."""
CHANGES_BASE = ("pissa", "olora", "corda")
"""Prefixes of the values of PEFT's `init_lora_weights` with which PEFT subtracts the initial BA from the
base's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec(TargetSpec):
    """LoRA: y = xWᵀ + scale · drop(x)AᵀBᵀ at every linear that `targets` names."""

    implementation: ClassVar[str] = "weftune.adapters.lora.apply:Lora"
    runs_on_shards: ClassVar[bool] = True
    peft_type: ClassVar[str | None] = "LORA"
    is_served: ClassVar[bool] = True

    kind: Literal["lora"] = "lora"
    rank: Annotated[int, SIZE] = 16
    alpha: Annotated[float, Bound(above=0)] = 32.0
    dropout: Annotated[float, Bound(at_least=0, below=1)] = 0.0
    target_parameters: tuple[str, ...] = ()
    """Path endings of experts' weight parameters that are adapted, with one A and one B per expert."""
    rslora: bool = False
    loraplus_lr_ratio: Annotated[float, Bound(above=0)] = 1.0
    """Factor by which the job's learning rate is multiplied for B (LoRA+)."""
    rank_pattern: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    alpha_pattern: Mapping[str, Annotated[float, Bound(above=0)]] = field(default_factory=dict)
    trainable_token_indices: tuple[int, ...] = ()
    """Ids of the tokens whose embeddings are trained in addition to the linears."""
    modules_to_save: tuple[str, ...] = ()
    """`("score",)` if a scalar head is trained, too, else empty. The job key `objective: reward` sets this
    field; jobs files do not."""

    @property
    def trained_tokens(self) -> tuple[int, ...]:
        return self.trainable_token_indices

    @property
    def scalar_head(self) -> bool:
        return bool(self.modules_to_save)

    def adapts(self, site: SiteShape) -> bool:
        """Return whether the adapter has parameters at the linear. Weights of experts are adapted only if
        `target_parameters` names them."""
        return self.targets_parameter(site.name) if site.experts else self.targets_site(site.name)

    def targets_parameter(self, name: str) -> bool:
        """Return whether PEFT would adapt the experts' parameter `name`."""
        return any(ends_with(name, target) for target in self.target_parameters)

    def expressions(self) -> dict[tuple[str, ...], str]:
        keyed = (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern))
        own = {(key, pattern): suffix_expression(pattern) for key, patterns in keyed for pattern in patterns}
        return TargetSpec.expressions(self) | own

    def rank_at(self, name: str) -> int:
        return self.rank_pattern.get(find_pattern(self.rank_pattern, name), self.rank)

    def scale_at(self, name: str) -> float:
        rank = self.rank_at(name)
        alpha = self.alpha_pattern.get(find_pattern(self.alpha_pattern, name), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def shapes_at(self, site: SiteShape) -> dict[str, tuple[int, ...]]:
        ranks = (*((site.experts,) if site.experts else ()), self.rank_at(site.name))
        return {A: (*ranks, site.in_features), B: (*ranks, site.out_features)}


def find_pattern(patterns: Iterable[str], name: str) -> str:
    """Return the first pattern that matches the end of the module path `name` by PEFT's rules, or `name` if
    no pattern matches."""
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", name):
            return pattern
    return name


def stored_path(site: str, adapted: Collection[str]) -> str:
    """Return the module path at which PEFT stores the A and B of `site`, a weight parameter of experts.
    `adapted` are all parameters that have adapters: PEFT wraps the experts' module once per adapted
    parameter, with the first innermost."""
    module, _, name = site.rpartition(".")
    outside = EXPERT_PARAMETERS[EXPERT_PARAMETERS.index(name) + 1 :]
    return module + WRAPPED * sum(f"{module}.{other}" in adapted for other in outside)


def site_at_path(path: str, spec: LoraSpec) -> str:
    """Return the name of the linear whose A and B PEFT stores at a module path. It is the path itself, except
    for weights of experts."""
    module = path.replace(WRAPPED, "")
    if not module.endswith(EXPERTS):
        return path
    own = [f"{module}.{name}" for name in EXPERT_PARAMETERS if spec.targets_parameter(f"{module}.{name}")]
    outside = path.count(WRAPPED)
    return own[-1 - outside] if outside < len(own) else path


def weight_names(path: str) -> tuple[str, str]:
    """Return the names that A [rank, in] and B [out, rank] of the module at `path` have in a PEFT adapter
    file."""
    stem = f"base_model.model.{path}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def stored_token_name(embedding: str) -> str:
    """Return the name that the trained rows of an embedding have in a PEFT adapter file."""
    return f"base_model.model.{embedding}.{STORED_TOKENS}"


def embedding_of_tokens(name: str) -> str | None:
    """Return the path of the embedding whose trained rows have this name in PEFT's files, or None."""
    found = re.fullmatch(rf"base_model\.model\.(.+)\.{re.escape(STORED_TOKENS)}", name)
    return None if found is None else found[1]


def site_of_weight(weight_name: str) -> str | None:
    """Return the path of the module whose A or B has the name `weight_name` in a PEFT adapter file, or None
    if it is no such name."""
    found = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", weight_name)
    return None if found is None else found[1]


Spec = TypeVar("Spec", bound=LoraSpec)


def read_spec(folder: Path) -> LoraSpec:
    """Return the spec (kind and settings) of the adapter in a folder. Raise AdapterError unless it is plain
    LoRA."""
    config = read_config(folder)
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{folder} holds a {config.get('peft_type')} adapter, not LoRA")
    if config.get("use_dora"):
        raise AdapterError(f"{folder} is a DoRA adapter; only plain LoRA can be used")
    return spec_from_config(LoraSpec, folder, config)


def spec_from_config(spec_class: type[Spec], folder: Path, config: Mapping[str, Any]) -> Spec:
    """Return the spec of LoRA, or of a kind with the same keys, that a PEFT config describes. Raise
    AdapterError if the adapter changes more than its target linears, or changes the base."""
    if (start := str(config.get("init_lora_weights", True))).startswith(CHANGES_BASE):
        raise AdapterError(
            f"{folder} belongs to a base that PEFT has changed ({start}); save it in PEFT with "
            "path_initial_model_for_weight_conversion, which makes it a plain LoRA adapter"
        )
    known = ("modules_to_save",) if has_scalar_head(config) else ()
    beyond = [key for key in UNSUPPORTED_KEYS if config.get(key) and key not in known]
    if config.get("bias", "none") != "none":
        beyond.append("bias")
    if beyond:
        raise AdapterError(f"{folder} is more than plain LoRA: its {CONFIG} sets {beyond[0]}")
    with wrap_config_errors(folder):
        spec = spec_class(**_spec_fields(config))
        if min((spec.rank, *spec.rank_pattern.values())) < 1:
            raise ValueError("a rank is below 1")
        if not all(map(math.isfinite, (spec.alpha, *spec.alpha_pattern.values()))):
            raise ValueError("an alpha is no finite number")
    refuse_slow_patterns(folder, spec)
    return spec


def _spec_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a LoRA spec from PEFT's config."""
    return {
        "rank": int(config["r"]),
        "alpha": float(config["lora_alpha"]),
        "dropout": float(config.get("lora_dropout", 0.0)),
        **target_fields(config),
        "target_parameters": tuple(sorted(map(str, config.get("target_parameters") or ()))),
        "rslora": bool(config.get("use_rslora")),
        "rank_pattern": {key: int(rank) for key, rank in (config.get("rank_pattern") or {}).items()},
        "alpha_pattern": {key: float(one) for key, one in (config.get("alpha_pattern") or {}).items()},
        "trainable_token_indices": _token_indices(config.get("trainable_token_indices") or ()),
        "modules_to_save": (SCORE,) if has_scalar_head(config) else (),
    }


def _token_indices(value: Any) -> tuple[int, ...]:
    """Return the token ids in PEFT's `trainable_token_indices`, which is a list, or a dict with the embedding
    as its only key."""
    if isinstance(value, Mapping):
        if len(value) != 1 or not next(iter(value)).endswith(tuple(EMBEDDINGS.values())):
            raise ValueError(
                f"trainable_token_indices names {', '.join(value)}, and only those of the embedding are known"
            )
        (value,) = value.values()
    ids = tuple(map(int, value))
    if len(set(ids)) != len(ids) or min(ids, default=0) < 0:
        raise ValueError("trainable_token_indices must be different tokens, each at least 0")
    return ids
