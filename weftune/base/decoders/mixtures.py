"""Families whose layers have experts in the place of an MLP: a router sends every token to a few of them.

Their attention is that of a dense family, also for adapters. The experts of a layer are two parameters: gate
and up of all experts, and down of all experts. Layers run as in transformers. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weftune.base.decoders.facts import COMMON, DecoderFacts
from weftune.core.shapes import EXPERT_PARAMETERS

EXPERTS, ROUTER = "mlp.experts", "mlp.gate"
"""Module paths inside a layer."""
GATE_UP, DOWN = EXPERT_PARAMETERS
"""Parameters of the experts' module: [experts, 2 · inner, hidden] and [experts, hidden, inner]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureFacts:
    attention: DecoderFacts
    inner: str
    """Key of an expert's width in the config."""
    stored: tuple[str, str, str]
    """Names of gate, up and down of one expert in files."""
    stored_mlp: str = "mlp"
    """Name of the module around the experts in files."""


MIXTURES: Mapping[str, MixtureFacts] = {
    "mixtral": MixtureFacts(
        attention=DecoderFacts(
            config={
                **COMMON,
                "intermediate_size": 14336,
                "vocab_size": 32000,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            heeds_biases=False,
        ),
        inner="intermediate_size",
        stored=("w1", "w3", "w2"),
        stored_mlp="block_sparse_moe",
    ),
    "qwen3_moe": MixtureFacts(
        attention=DecoderFacts(
            config={
                **COMMON,
                "hidden_size": 2048,
                "num_hidden_layers": 24,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "vocab_size": 151936,
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "num_local_experts": 128,
                "num_experts_per_tok": 8,
                "decoder_sparse_step": 1,
                "mlp_only_layers": (),
            },
            head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        ),
        inner="moe_intermediate_size",
        stored=("gate_proj", "up_proj", "down_proj"),
    ),
}
