"""Qwen 2 and 2.5: Llama's layers, with biases on q, k and v."""

from __future__ import annotations

from weftune.base.decoders.facts import COMMON, DecoderFacts

QWEN2 = DecoderFacts(
    config={**COMMON, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
    qkv_bias=True,
)
