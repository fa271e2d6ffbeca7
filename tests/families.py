"""Tiny random models of every family, shared by all tests.

Small enough for float64 on one thread, and with nothing left at its initial 0 or 1: norms, biases and
position tables are all random, so that leaving one out changes the numbers.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForImageTextToText

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

WRAPPERS = ("gemma3", "mistral3", "qwen3_vl", "qwen3_5")
"""Models that see images too, whose text towers are trained."""

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

IMAGES: dict[str, Any] = {"image_token_index": 3, "boi_token_index": 4, "eoi_token_index": 5}
IMAGE_ROPE_KEYS = {
    "rope_type": "default",
    "rope_theta": 5e5,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
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
        case "qwen3_5":
            linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3}
            linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
            kinds = ["linear_attention", "full_attention", "linear_attention"]
            more = {"num_hidden_layers": 3, "layer_types": kinds, "head_dim": 16}
            rope = IMAGE_ROPE_KEYS | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
            return Qwen3_5TextConfig(**GROUPED | more, **linear, rope_parameters=rope)
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


def wrapper_config(family: str) -> PretrainedConfig:
    """A text model with a tiny vision tower beside it, whose linears have names that the text model has."""
    match family:
        case "gemma3":
            vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
            vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
            # The wrapper does not cap its logits.
            text = config("gemma3").to_dict() | {"final_logit_softcapping": None}
            return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **IMAGES)
        case "mistral3":
            vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
            vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
            text = config("mistral").to_dict()
            return Mistral3Config(
                text_config=text, vision_config=vision, image_token_index=3, tie_word_embeddings=False
            )
        case "qwen3_vl":
            vision = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2}
            vision |= {"out_hidden_size": 32, "num_position_embeddings": 4, "deepstack_visual_indexes": []}
            text = GROUPED | {"head_dim": 16, "rope_parameters": IMAGE_ROPE_KEYS}
            images = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5}
            return Qwen3VLConfig(text_config=text, vision_config=vision, vision_end_token_id=6, **images)
        case "qwen3_5":
            vision = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2}
            vision |= {"out_hidden_size": 32, "num_position_embeddings": 4}
            images = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5}
            text = config("qwen3_5").to_dict()
            return Qwen3_5Config(text_config=text, vision_config=vision, vision_end_token_id=6, **images)
    raise AssertionError(f"no wrapper {family}")


def tiny_wrapper(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    model = randomised(wrapper_config(family), dtype, seed, AutoModelForImageTextToText)
    return with_exact_norms(model) if dtype is torch.float64 else model


def tiny(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model of the family in eval mode; the same seed gives the same weights in every dtype."""
    return copy.deepcopy(first_tiny(family, dtype, seed))


@cache
def first_tiny(family: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """To be copied, in half of the time in which another one is built."""
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
        self.shift = 1.0 if type(norm).__name__.startswith(("Gemma", "Qwen3_5")) else 0.0
        self.eps = self.variance_epsilon = norm.eps if self.shift else norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.shift + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def randomised(
    model_config: PretrainedConfig,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    kind: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """The causal language model (or another kind) of `model_config` with every parameter drawn at random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(model_config, dtype=torch.float64)
        if model_config.model_type in MIXTURES and dtype is torch.float64:
            model.set_experts_implementation("eager")  # torch groups no products in float64
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                else:
                    parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()
