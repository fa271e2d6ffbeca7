"""Mistral: Llama's layers, with a sliding window in some versions."""

from __future__ import annotations

from weftune.base.decoders.facts import COMMON, DecoderFacts

MISTRAL = DecoderFacts(
    config={
        **COMMON,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    }
)
