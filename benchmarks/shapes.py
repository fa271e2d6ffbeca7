"""The configs of models that people fine-tune, for folders with random weights."""

from __future__ import annotations

from collections.abc import Callable

from transformers import Gemma3TextConfig, PretrainedConfig, Qwen3Config

from weftune.bench.llama import SIZES, config


def _qwen3_8b() -> PretrainedConfig:
    return Qwen3Config(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
    )


def _gemma3_4b() -> PretrainedConfig:
    """The text tower."""
    return Gemma3TextConfig(
        hidden_size=2560,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=10240,
        vocab_size=262208,
        max_position_embeddings=131072,
        sliding_window=1024,
        tie_word_embeddings=True,
    )


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    **{name: lambda size=size: config(size) for name, size in SIZES.items() if name != "toy"},
    "qwen3-8b": _qwen3_8b,
    "gemma3-4b": _gemma3_4b,
}


def toy_config(vocabulary: int) -> PretrainedConfig:
    """A Llama for the CPU, as small as its vocabulary lets it be."""
    made = config(SIZES["toy"])
    made.vocab_size = vocabulary
    return made
