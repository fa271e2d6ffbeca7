"""Phi 3 and Phi 4 mini: q, k and v are one linear, gate and up another. Phi 4 mini rotates parts of heads."""

from __future__ import annotations

from weftune.base.decoders.facts import COMMON, DecoderFacts

PHI3 = DecoderFacts(
    config={
        **COMMON,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    qkv=("self_attn.qkv_proj",),
    o_first=True,
    gate_up=("mlp.gate_up_proj",),
    heeds_biases=False,
)
