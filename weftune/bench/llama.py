"""Bases of real sizes with random weights, and the least time that a step on them can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from weftune.bench.timing import BenchPlace


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
    biased: bool = False
    """Whether q, k and v have biases, as Qwen2's do."""

    @property
    def sites(self) -> tuple[tuple[int, int], ...]:
        """In and out features of the seven linears of a layer."""
        kv = self.hidden // self.heads * self.kv_heads
        return (
            (self.hidden, self.hidden),
            (self.hidden, kv),
            (self.hidden, kv),
            (self.hidden, self.hidden),
            (self.hidden, self.intermediate),
            (self.hidden, self.intermediate),
            (self.intermediate, self.hidden),
        )


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
            biased=True,
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


def build(size: Size, place: BenchPlace) -> PreTrainedModel:
    """Made where it will run, in the dtype it will run in: the 8B shape never passes through the host."""
    torch.manual_seed(0)
    return outline(size, place.device, place.dtype)


def outline(size: Size, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """On the meta device it has names and shapes, and takes no memory."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config(size), dtype=dtype, attn_implementation="sdpa"
        )
    return model.requires_grad_(False)


def config(size: Size) -> PretrainedConfig:
    made = Qwen2Config if size.biased else LlamaConfig
    return made(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.intermediate,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.context,
        rope_parameters={"rope_type": "default", "rope_theta": size.rope_theta},
        tie_word_embeddings=False,
        use_cache=False,
    )


def random_ids(size: Size, rows: int, length: int, place: BenchPlace) -> Tensor:
    return torch.randint(size.vocabulary, (rows, length), device=place.device)


def base_bytes(size: Size, bytes_per_value: int = 2) -> int:
    linears = size.layers * sum(k * n for k, n in size.sites)
    return (linears + 2 * size.hidden * size.vocabulary) * bytes_per_value


def floor_seconds(
    size: Size, rate: float, lengths: Sequence[int], rank: int, recomputed: float = 0.0
) -> float:
    """The arithmetic of one step over samples of these lengths, at `rate` operations a second.

    Forward and dX of the frozen linears and the head; causal attention, whose backward costs 2.5 of its
    forward; and the six products of the adapters' two factors. Rank 0 is the base alone. `recomputed` is the
    share of the layers whose forward is made twice.
    """
    tokens = sum(lengths)
    linears = size.layers * sum(k * n for k, n in size.sites)
    head = size.hidden * size.vocabulary
    attention = 2 * size.layers * size.hidden * sum(length * length for length in lengths)
    adapters = 6 * tokens * rank * size.layers * sum(k + n for k, n in size.sites)
    again = recomputed * (2 * tokens * linears + attention + adapters / 3)
    return (4 * tokens * (linears + head) + 3.5 * attention + adapters + again) / rate
