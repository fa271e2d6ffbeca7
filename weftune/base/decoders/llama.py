"""Llama 1 to 3."""

from __future__ import annotations

from weftune.base.decoders.facts import COMMON, DecoderFacts

LLAMA = DecoderFacts(
    config={**COMMON, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048}
)
