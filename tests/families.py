"""Tiny random models of every family, shared by all tests.

Small enough for float64 on one thread, and with nothing left at its initial 0 or 1: norms, biases and
position tables are all random, so that leaving one out changes the numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

VOCABULARY = 97
CONTEXT = 64
WINDOW = 6
"""Shorter than the samples that tests use."""

MORE = ("phi4-mini",)
"""Configs of the same families that their layers must know too."""
MIXTURES = ("mixtral", "qwen3_moe")
"""Families with experts in the place of an MLP."""
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "opt", "gpt2")
EVERY = (*FAMILIES, *MIXTURES)

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config(family: str) -> PretrainedConfig:
    match family:
        case "llama":
            return LlamaConfig(**GROUPED)
        case "qwen2":
            return Qwen2Config(**GROUPED)
        case "qwen3":
            return Qwen3Config(**GROUPED, head_dim=16)
        case "mistral":
            return MistralConfig(**GROUPED, sliding_window=WINDOW)
        case "gemma3":
            return Gemma3TextConfig(
                **{**GROUPED, "num_hidden_layers": 3},
                head_dim=16,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                final_logit_softcapping=2.0,
            )
        case "phi3":
            return Phi3Config(**GROUPED)
        case "phi4-mini":
            rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
            rope |= {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
            rope |= {"original_max_position_embeddings": CONTEXT // 2}
            return Phi3Config(**GROUPED, rope_parameters=rope, sliding_window=WINDOW)
        case "mixtral":
            return MixtralConfig(**GROUPED, num_local_experts=4)
        case "qwen3_moe":
            chosen = {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}
            return Qwen3MoeConfig(**GROUPED, head_dim=16, moe_intermediate_size=24, **chosen)
        case "opt":
            return OPTConfig(
                **COMMON,
                hidden_size=32,
                ffn_dim=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                word_embed_proj_dim=24,
            )
        case "gpt2":
            return GPT2Config(**{**COMMON, "n_positions": CONTEXT}, n_embd=32, n_layer=2, n_head=4)
    raise AssertionError(f"no family {family}")


def tiny(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model of the family in eval mode; the same seed gives the same weights in every dtype."""
    model = randomised(config(family), dtype, seed)
    return with_exact_norms(model) if dtype is torch.float64 else model


def with_exact_norms(model: PreTrainedModel) -> PreTrainedModel:
    """transformers' RMSNorms and routers compute in float32 whatever they are given, and a float32 rounding
    that falls the other way is a jump of 1e-8 in a float64 model. Here they keep float64."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("TopKRouter"):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, ExactRouter(module))
        if type(module).__name__.endswith("RMSNorm"):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, ExactNorm(module))
    return model


class ExactRouter(torch.nn.Module):
    def __init__(self, router: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k
        self.norm_topk_prob = getattr(router, "norm_topk_prob", True)

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits_TE = torch.nn.functional.linear(x_TD, self.weight)
        weights_Tk, chosen_Tk = logits_TE.softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)
        return logits_TE, weights_Tk, chosen_Tk


class ExactNorm(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.shift = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0
        self.epsilon = norm.eps if self.shift else norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.shift + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


def randomised(
    model_config: PretrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0
) -> PreTrainedModel:
    """The causal language model of `model_config` with every parameter drawn at random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float64)
        if model_config.model_type in MIXTURES and dtype is torch.float64:
            model.set_experts_implementation("eager")  # torch groups no products in float64
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                else:
                    parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()
