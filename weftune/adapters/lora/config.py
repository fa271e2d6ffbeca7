"""Conversion of a PEFT config of LoRA to a spec. No torch here: `jobs` imports it too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from weftune.adapters.folder import CONFIG, damage_told, read_config, refuse_slow, target_fields
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.tokens import EMBEDDINGS
from weftune.errors import AdapterError

Spec = TypeVar("Spec", bound=LoraSpec)

BEYOND = (
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
"""Keys that make an adapter compute something other than y = xWᵀ + scale · xAᵀBᵀ at the linears it names."""
CHANGES_BASE = ("pissa", "olora", "corda")
"""Prefixes of `init_lora_weights` with which PEFT subtracts the initial A and B from the base's weights."""


def read_spec(folder: Path) -> LoraSpec:
    """Return the spec that the folder's adapter was trained with. Anything but plain LoRA is refused."""
    config = read_config(folder)
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{folder} holds a {config.get('peft_type')} adapter, not LoRA")
    if config.get("use_dora"):
        raise AdapterError(f"{folder} is a DoRA adapter; only plain LoRA can be used")
    return checked_spec(LoraSpec, folder, config)


def checked_spec(record: type[Spec], folder: Path, config: Mapping[str, Any]) -> Spec:
    """Return the spec of LoRA, or of a kind with its keys. An adapter that changes more than the linears it
    names, or the base itself, is refused."""
    if (start := str(config.get("init_lora_weights", True))).startswith(CHANGES_BASE):
        raise AdapterError(
            f"{folder} belongs to a base that PEFT has changed ({start}); save it in PEFT with "
            "path_initial_model_for_weight_conversion, which makes it a plain LoRA adapter"
        )
    beyond = [key for key in BEYOND if config.get(key)]
    if config.get("bias", "none") != "none":
        beyond.append("bias")
    if beyond:
        raise AdapterError(f"{folder} is more than plain LoRA: its {CONFIG} sets {beyond[0]}")
    with damage_told(folder):
        spec = record(**_fields(config))
        if min((spec.rank, *spec.rank_pattern.values())) < 1:
            raise ValueError("a rank is below 1")
        if not all(map(math.isfinite, (spec.alpha, *spec.alpha_pattern.values()))):
            raise ValueError("an alpha is no finite number")
    refuse_slow(folder, spec)
    return spec


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec from PEFT's config."""
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
    }


def _token_indices(found: Any) -> tuple[int, ...]:
    """Return token ids from PEFT's list for the embedding, or from its mapping of one module, the embedding,
    to a list."""
    if isinstance(found, Mapping):
        if len(found) != 1 or not next(iter(found)).endswith(tuple(EMBEDDINGS.values())):
            raise ValueError(
                f"trainable_token_indices names {', '.join(found)}, and only those of the embedding are known"
            )
        (found,) = found.values()
    ids = tuple(map(int, found))
    if len(set(ids)) != len(ids) or min(ids, default=0) < 0:
        raise ValueError("trainable_token_indices must be different tokens, each at least 0")
    return ids
