"""Gemma 3, text only: norms on both sides of each branch and of heads, with weights relative to 1."""

from __future__ import annotations

from weftune.base.decoders.facts import COMMON, DecoderFacts

GEMMA3 = DecoderFacts(
    config={
        **COMMON,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    norm_offset=1.0,
    norm_eps="eps",
    activation_key="hidden_activation",
    activations=("gelu_pytorch_tanh",),
)
