"""What Weftune must know of a family's decoder layers beyond transformers' own code. No torch here.

A family is one file in this room, and a line in `known.py`. From its facts come the fused layers
(run/passes/layers.py), the sizes that config.json alone tells (base/architecture.py), and where the base can
be cut into stages (base/stages.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftune.core.shapes import SiteShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFacts:
    """A layer is norm → q,k,v → rotary → attention → o, and norm → gate,up → activation → down, each branch
    around a residual. Names are module paths inside a layer; the defaults are Llama's."""

    config: Mapping[str, Any]
    """What a config.json may leave out, because the family has it so."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """In this order, also where they are one linear."""
    o: str = "self_attn.o_proj"
    o_first: bool = False
    """Whether o comes before q, k and v among the layer's modules, as adapters are laid out."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    qkv_bias: bool | None = None
    """None: as `attention_bias` in the config says."""
    heeds_biases: bool = True
    """Whether `attention_bias` and `mlp_bias` in the config mean anything."""
    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    """The norm of the branch's output, before the residual is added."""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None
    head_norms: tuple[str, str] | None = None
    """Norms of every head of q and of k, before the rotation."""
    norm_offset: float = 0.0
    """Added to the weights of all norms."""
    norm_eps: str = "variance_epsilon"
    """Where a norm's module keeps its eps."""
    activation_key: str = "hidden_act"
    """Where the config names the activation."""
    activations: tuple[str, ...] = ("silu",)
    """Those of its activations that fused layers have; a config with another runs as transformers does."""

    def extra_values(self, sites: Sequence[SiteShape]) -> int:
        """What a fused layer keeps of a token beyond what Llama's would with linears of these widths."""

        def outputs(name: str) -> int:
            return next((site.out_features for site in sites if site.name.endswith(f".{name}")), 0)

        # The memory model counts the input of every linear: of one that is three, two times less.
        inputs = (3 - len(self.qkv)) + (2 - len(self.gate_up))
        # A norm keeps what it was given.
        branches = sum(name is not None for name in (self.after_attention, self.after_mlp))
        heads = sum(map(outputs, self.qkv)) if self.head_norms else 0
        return heads + (inputs + branches) * outputs(self.o)

    @property
    def norms(self) -> tuple[str, ...]:
        """Those as wide as the hidden state."""
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
"""What most configs have, if they do not say otherwise."""
