"""The context of a base model (the maximum number of tokens per sample) according to its config, and its
extension by RoPE scaling. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftune.base.spec import ORIGINAL, ROPE_KEYS, BaseSpec
from weftune.errors import BaseModelError

Config = Mapping[str, Any]

LONG_ROPE = ("longrope", "su")
"""Names of the rope type LongRoPE in config.json; "su" is used in early files."""
FULL_ATTENTION_KEY = "full_attention"
"""Key of the RoPE parameters of full-attention layers, in bases whose layers have different RoPE
parameters."""
LEARNED_POSITION_FAMILIES = ("gpt2", "opt")
"""Families with learned position embeddings, whose context cannot be longer than in pretraining."""
LONG_ROPE_FAMILIES = ("phi3",)
"""Families for which transformers accepts no other rope scaling than LongRoPE."""
SCALING_KEYS = {"type", *(key for keys in ROPE_KEYS.values() for key in keys)}


def context_length(config: Config) -> int:
    """Return a model's context: the maximum number of tokens per sample. For a base with LongRoPE this is the
    original context, since a longer sample would change the rotation of all rows of a pack."""
    longest, rope = _position_count(config), _rope_values(config)
    for one in [rope, *(value for value in rope.values() if isinstance(value, Mapping))]:
        if _rope_type(one) in LONG_ROPE:
            longest = min(longest, int(one.get(ORIGINAL) or config[ORIGINAL]))
    return longest


def unscaled_context(config: Config) -> int | None:
    """Return the context (maximum tokens per sample) of a model before any RoPE scaling. The `factor` of a
    RoPE scaling multiplies this number. None if the context cannot be extended."""
    if config.get("model_type") in (*LEARNED_POSITION_FAMILIES, *LONG_ROPE_FAMILIES):
        return None
    return round(_original_context(config))


def scaled_rope_values(config: Config, spec: BaseSpec) -> dict[str, Any]:
    """Return the new values of those keys of the model's config that `spec.rope_scaling` changes. The dict is
    empty if the spec has no rope scaling."""
    scaling = spec.rope_scaling
    if scaling is None:
        return {}
    _refuse_unscalable(config, spec)
    rope, own = _rope_values(config), _full_attention_rope(config)
    kept = {
        key: value
        for key, value in own.items()
        if key not in SCALING_KEYS or key in ROPE_KEYS[scaling.rope_type]
    }
    changed = {**kept, **scaling.values()}
    original = scaling.original_max_position_embeddings or _original_context(config)
    if ORIGINAL in ROPE_KEYS[scaling.rope_type]:
        changed[ORIGINAL] = int(original)
    # What a config says of its context holds for its own rope only.
    same = _rope_type(own) in ("default", scaling.rope_type)
    longest = max(_position_count(config) if same else 0, int(original * scaling.factor))
    return {
        "rope_parameters": {**rope, FULL_ATTENTION_KEY: changed} if FULL_ATTENTION_KEY in rope else changed,
        "max_position_embeddings": longest,
    }


def no_rope_error(family: str, spec: BaseSpec) -> BaseModelError:
    return BaseModelError(
        f"base.rope_scaling: {spec.model} ({family}) has no rotary positions that can be scaled; leave it "
        "out, or choose a base with a longer context."
    )


def _refuse_unscalable(config: Config, spec: BaseSpec) -> None:
    assert spec.rope_scaling is not None
    family, own = config.get("model_type"), _full_attention_rope(config)
    if family in LEARNED_POSITION_FAMILIES:
        raise no_rope_error(str(family), spec)
    if family in LONG_ROPE_FAMILIES:
        raise BaseModelError(
            f"base.rope_scaling: transformers scales {family} models with longrope only, so the positions of "
            f"{spec.model} cannot be scaled here; leave it out."
        )
    named = spec.rope_scaling.original_max_position_embeddings or own.get(ORIGINAL) or config.get(ORIGINAL)
    if ORIGINAL in ROPE_KEYS[spec.rope_scaling.rope_type] and not named and _rope_type(own) != "default":
        raise BaseModelError(
            f"base.rope_scaling: the rope of {spec.model} is {_rope_type(own)} already, and its config does "
            f"not say with which context it was trained before; write {ORIGINAL}, too."
        )


def _rope_values(config: Config) -> Mapping[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling")
    return found if isinstance(found, Mapping) else {}


def _full_attention_rope(config: Config) -> Mapping[str, Any]:
    """Return the RoPE parameters that a config gives for full-attention layers."""
    return _rope_values(config).get(FULL_ATTENTION_KEY) or _rope_values(config)


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _position_count(config: Config) -> int:
    return int(config.get("max_position_embeddings") or config["n_positions"])


def _original_context(config: Config) -> float:
    """Return the context, in tokens, with which the base was trained before its config's own RoPE scaling.
    Without such a scaling, this is the config's context."""
    own = _full_attention_rope(config)
    if original := own.get(ORIGINAL) or config.get(ORIGINAL):
        return float(original)
    return _position_count(config) / (float(own.get("factor") or 1) if _rope_type(own) == "linear" else 1.0)
