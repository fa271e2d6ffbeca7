"""Text towers: the language model inside a model that sees images too. No torch here.

Of such a wrapper only the text tower is read and trained, but everything in it keeps the name that it has in
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
"""The model type of a wrapper → that of its text tower, where config.json does not tell."""

SAME_ON_TEXT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_vl_text": ("qwen3", {"max_position_embeddings": 128000}),
}
"""Text towers without a causal language model of their own → the family that computes the same on text, and
what a config.json may leave out where that family has it otherwise. (Qwen3-VL rotates by three positions,
which are one and the same for text.)"""
ROTATES_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys of the rotary embedding that say nothing about text."""


def is_wrapper(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in WRAPPERS


def text_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the config.json of a wrapper says about its text tower, as one of the family that computes it."""
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
    """The name in the wrapper of a module or weight of the text model."""
    return f"{TEXT_TOWER}.{name.removeprefix('model.')}" if name.startswith("model.") else name


def older_name(name: str) -> str:
    """What files from before transformers 4.52 call a weight of the wrapper."""
    if in_wrapper(name):
        return f"language_model.model.{name.removeprefix(f'{TEXT_TOWER}.')}"
    return f"language_model.{name}"
