"""The shapes of two bases, which studies and tests of the planner use without weights."""

from __future__ import annotations

from weftune.base.architecture import model_shape

CONFIG_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
"""Llama-3.1-8B."""
CONFIG_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""SmolLM2-135M."""
SHAPE_8B, SHAPE_135M = model_shape(CONFIG_8B, "8B", 2), model_shape(CONFIG_135M, "135M", 4)
