"""The facts about a family's decoder layers that transformers' own code does not tell. No torch here.

A family is one file in this package, and a line in `known.py`. Its facts determine the fused layers
(run/passes/layers.py), the sizes known from config.json alone (base/architecture.py), and where the base can
be cut into stages (base/stages.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftune.core.shapes import SiteShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFacts:
    """The structure of a layer: norm → q,k,v → rotary → attention → o, and norm → gate,up → activation →
    down, each branch around a residual. Names are module paths inside a layer; the defaults are Llama's."""

    config: Mapping[str, Any]
    """Default values of keys that the family's config.json may omit."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Paths of q, k and v in this order, also if they are one linear."""
    o: str = "self_attn.o_proj"
    o_first: bool = False
    """Whether o comes before q, k and v among the layer's modules, and so in adapters' layouts."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    qkv_bias: bool | None = None
    """Whether q, k and v have biases. None means that `attention_bias` in the config decides."""
    heeds_biases: bool = True
    """Whether `attention_bias` and `mlp_bias` in the config have an effect."""
    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    """Norm of the branch's output, before the residual is added."""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None
    head_norms: tuple[str, str] | None = None
    """Norms of every head of q and of k, before the rotation."""
    norm_offset: float = 0.0
    """Value added to the weights of all norms."""
    norm_eps: str = "variance_epsilon"
    """Name of the attribute in which a norm's module keeps its eps."""
    activation_key: str = "hidden_act"
    """Key of the activation in the config."""
    activations: tuple[str, ...] = ("silu",)
    """Activations that fused layers support; a config with another one runs as in transformers."""

    def extra_values(self, sites: Sequence[SiteShape]) -> int:
        """Return the number of values per token that a fused layer keeps beyond those of a Llama layer with
        linears of these widths."""

        def outputs(name: str) -> int:
            return next((site.out_features for site in sites if site.name.endswith(f".{name}")), 0)

        # The memory model counts the input of every linear: one in the place of three counts two less.
        inputs = (3 - len(self.qkv)) + (2 - len(self.gate_up))
        # A norm keeps its input.
        branches = sum(name is not None for name in (self.after_attention, self.after_mlp))
        heads = sum(map(outputs, self.qkv)) if self.head_norms else 0
        return heads + (inputs + branches) * outputs(self.o)

    @property
    def norms(self) -> tuple[str, ...]:
        """Norms that are as wide as the hidden state."""
        every = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in every if name is not None)


COMMON: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Default values that most configs have in common."""
