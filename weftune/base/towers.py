"""Text towers: the language model inside a model that also sees images. No torch here.

Only the text tower of such a wrapper is read and trained, but everything in it keeps the name that it has in
the wrapper, so that PEFT and vLLM apply its adapters to the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftune.core.shapes import TEXT_TOWER, in_wrapper

WRAPPERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_5": "qwen3_5_text",
}
"""Model type of a wrapper → that of its text tower, used if config.json does not say."""

SAME_ON_TEXT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_vl_text": ("qwen3", {"max_position_embeddings": 128000}),
}
"""Text tower without a causal language model of its own → the family that computes the same on text, and
default values that differ from that family's. (Qwen3-VL rotates by three positions, which are equal for
text.)"""
ROTATES_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys of the rotary embedding that do not affect text."""


def is_wrapper(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in WRAPPERS


def text_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text tower's values of a wrapper's config.json, for the family that computes it."""
    own = {key: value for key, value in (config.get("text_config") or {}).items() if value is not None}
    kind = str(own.get("model_type") or WRAPPERS[config["model_type"]])
    tied = config.get("tie_word_embeddings")
    family, defaults = SAME_ON_TEXT.get(kind, (kind, {}))
    return {
        **defaults,
        **({} if tied is None else {"tie_word_embeddings": tied}),
        **own,
        "model_type": family,
    }


def within(name: str) -> str:
    """Return the name in the wrapper of a module or weight of the text model."""
    return f"{TEXT_TOWER}.{name.removeprefix('model.')}" if name.startswith("model.") else name


def older_name(name: str) -> str:
    """Return the name of a weight of the wrapper in files from before transformers 4.52."""
    if in_wrapper(name):
        return f"language_model.model.{name.removeprefix(f'{TEXT_TOWER}.')}"
    return f"language_model.{name}"
