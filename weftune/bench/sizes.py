"""Base models of real sizes with random weights, and the minimum time of an optimizer step on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from weftune.bench.timing import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int
    rope_theta: float
    family: str = "llama"
    """The `model_type` of the model's config."""
    head: int | None = None
    """Width of a head. None if it is the hidden width divided by the number of heads."""
    tied: bool = False
    """Whether the output layer shares its weights with the embedding."""
    experts: int = 0
    """Number of experts per layer, in place of an MLP; `intermediate` is the width of each expert."""
    active: int = 1
    """Number of experts that each token passes through."""

    @property
    def query_width(self) -> int:
        """Total width of all query heads."""
        return self.heads * self.head_width

    @property
    def head_width(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def sites(self) -> tuple[tuple[int, int], ...]:
        """Input and output widths of the linears that each token passes through in one layer. A dense layer
        has seven linears, or four if some are fused; each active expert has two."""
        kv, o = self.head_width * self.kv_heads, (self.query_width, self.hidden)
        down = (self.intermediate, self.hidden)
        if self.experts:
            qkv = (self.hidden, self.query_width), (self.hidden, kv), (self.hidden, kv)
            return *qkv, o, *self.active * self.expert_sites
        if self.family == "phi3":
            return o, (self.hidden, self.query_width + 2 * kv), (self.hidden, 2 * self.intermediate), down
        gate = (self.hidden, self.intermediate)
        return (self.hidden, self.query_width), (self.hidden, kv), (self.hidden, kv), o, gate, gate, down

    @property
    def expert_sites(self) -> tuple[tuple[int, int], ...]:
        """Input and output widths of the linears of one expert: gate and up, which are fused, and down."""
        return (self.hidden, 2 * self.intermediate), (self.intermediate, self.hidden)

    @property
    def layer_weights(self) -> int:
        """Number of weights of a layer, all experts included."""
        resting = max(0, self.experts - self.active) * sum(k * n for k, n in self.expert_sites)
        return sum(k * n for k, n in self.sites) + resting


SIZES = {
    size.name: size
    for size in (
        Size(
            name="8b",  # Llama-3.1-8B
            hidden=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            intermediate=14336,
            vocabulary=128256,
            context=131072,
            rope_theta=500000.0,
        ),
        Size(
            name="1b",  # TinyLlama-1.1B
            hidden=2048,
            layers=22,
            heads=32,
            kv_heads=4,
            intermediate=5632,
            vocabulary=32000,
            context=2048,
            rope_theta=10000.0,
        ),
        Size(
            name="32b",  # Qwen2.5-32B
            hidden=5120,
            layers=64,
            heads=40,
            kv_heads=8,
            intermediate=27648,
            vocabulary=152064,
            context=32768,
            rope_theta=1000000.0,
            family="qwen2",
        ),
        Size(
            name="70b",  # Llama-3.1-70B
            hidden=8192,
            layers=80,
            heads=64,
            kv_heads=8,
            intermediate=28672,
            vocabulary=128256,
            context=131072,
            rope_theta=500000.0,
        ),
        Size(
            name="qwen3-8b",
            family="qwen3",
            hidden=4096,
            layers=36,
            heads=32,
            head=128,
            kv_heads=8,
            intermediate=12288,
            vocabulary=151936,
            context=40960,
            rope_theta=1000000.0,
        ),
        Size(
            name="phi-4-mini",
            family="phi3",
            hidden=3072,
            layers=32,
            heads=24,
            kv_heads=8,
            intermediate=8192,
            vocabulary=200064,
            context=131072,
            rope_theta=10000.0,
            tied=True,
        ),
        Size(
            name="gemma-3-4b",  # its text tower
            family="gemma3_text",
            hidden=2560,
            layers=34,
            heads=8,
            head=256,
            kv_heads=4,
            intermediate=10240,
            vocabulary=262208,
            context=131072,
            rope_theta=1000000.0,
            tied=True,
        ),
        Size(
            name="qwen3-30b-a3b",
            family="qwen3_moe",
            hidden=2048,
            layers=48,
            heads=32,
            head=128,
            kv_heads=4,
            intermediate=768,
            vocabulary=151936,
            context=40960,
            rope_theta=1000000.0,
            experts=128,
            active=8,
        ),
        Size(
            name="toy",
            hidden=32,
            layers=2,
            heads=4,
            kv_heads=2,
            intermediate=48,
            vocabulary=256,
            context=1024,
            rope_theta=10000.0,
        ),
    )
}


def toy_size(size: Size) -> Size:
    """Return the size of a tiny model of the same family as `size`, for tests."""
    toy = replace(SIZES["toy"], family=size.family, head=size.head and 16, tied=size.tied)
    return replace(toy, experts=4, active=2) if size.experts else toy


def build(size: Size, hardware: Hardware) -> PreTrainedModel:
    """Build the model directly on its device in its dtype, so that large models are never in host memory."""
    torch.manual_seed(0)
    return build_frozen(size, hardware.device, hardware.dtype)


def build_frozen(size: Size, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Build the frozen model. On the meta device it has names and shapes but takes no memory."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config(size), dtype=dtype, attn_implementation="sdpa"
        )
    return model.requires_grad_(False)


def config(size: Size) -> PretrainedConfig:
    return AutoConfig.for_model(
        size.family,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.intermediate,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.context,
        tie_word_embeddings=size.tied,
        use_cache=False,
        **({} if size.head is None else {"head_dim": size.head}),
        **_family_config(size),
    )


def _family_config(size: Size) -> dict[str, Any]:
    """Return the config values of a family that are not sizes: rotary embeddings and attention windows."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": size.rope_theta}
    match size.family:
        case "phi3":
            # As in Phi-4-mini: 3/4 of a head are rotated; all factors are 1 up to the original length.
            factors = [1.0] * (size.head_width * 3 // 4 // 2)
            rope |= {"rope_type": "longrope", "partial_rotary_factor": 0.75}
            rope |= {"short_factor": factors, "long_factor": factors}
            original = min(4096, size.context)
            rope["original_max_position_embeddings"] = original
            return {
                "rope_parameters": rope,
                "original_max_position_embeddings": original,
                "sliding_window": 262144,
                "pad_token_id": 0,
            }
        case "gemma3_text":
            whole = {"rope_type": "linear", "factor": 8.0, "rope_theta": size.rope_theta}
            local = {"rope_type": "default", "rope_theta": 10000.0}
            return {
                "rope_parameters": {"full_attention": whole, "sliding_attention": local},
                "query_pre_attn_scalar": size.head_width,
                "sliding_window": 1024,
            }
        case "qwen3_moe":
            return {
                "rope_parameters": rope,
                "moe_intermediate_size": size.intermediate,
                "num_experts": size.experts,
                "num_experts_per_tok": size.active,
                "norm_topk_prob": True,
            }
    return {"rope_parameters": rope}


def random_ids(size: Size, rows: int, length: int, hardware: Hardware) -> Tensor:
    return torch.randint(size.vocabulary, (rows, length), device=hardware.device)


def base_bytes(size: Size, bytes_per_value: int = 2) -> int:
    linears = size.layers * size.layer_weights
    return (linears + (1 if size.tied else 2) * size.hidden * size.vocabulary) * bytes_per_value


def floor_seconds(
    size: Size, rate: float, lengths: Sequence[int], rank: float, recomputed_fraction: float = 0.0
) -> float:
    """Return the minimum seconds of one step on samples of these lengths at `rate` operations per second.

    The operations counted are the forward and dX of the frozen linears and the head; causal attention, whose
    backward costs 2.5 times its forward; and the six products of the adapters' two factors. Rank 0 means the
    base alone. `recomputed_fraction` is the fraction of the layers whose forward is computed twice.
    """
    tokens = sum(lengths)
    linears = size.layers * sum(k * n for k, n in size.sites)
    head = size.hidden * size.vocabulary
    attention = 2 * size.layers * size.query_width * sum(length * length for length in lengths)
    adapters = 6 * tokens * rank * size.layers * sum(k + n for k, n in size.sites)
    again = recomputed_fraction * (2 * tokens * linears + attention + adapters / 3)
    return (4 * tokens * (linears + head) + 3.5 * attention + adapters + again) / rate
