"""Qwen 3: Llama's layers, with a norm of every head of q and k, whose width is in the config."""

from __future__ import annotations

from weftune.base.decoders.facts import COMMON, DecoderFacts

QWEN3 = DecoderFacts(
    config={
        **COMMON,
        "intermediate_size": 22016,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "head_dim": 128,
    },
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
)
