"""Properties of a family's decoder layers that transformers does not state as data. No torch is imported.

A family has one entry in `DECODERS`; in `MIXTURES`, if its layers have experts instead of an MLP; or in
`WRAPPERS`, if its language model is the text tower of a multimodal model. The entries determine the fused
layers (run/passes/layers.py), the sizes known from config.json alone (base/architecture.py), and where the
base can be cut into stages (base/stages.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftune.core.shapes import EXPERT_PARAMETERS, TEXT_TOWER, SiteShape, is_name_in_wrapper


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFacts:
    """The structure of a decoder layer in a model family: norm → q,k,v → rotary → attention → o, and norm →
    gate,up → activation → down, each branch with a residual connection. Names are module paths inside a
    layer; the defaults are Llama's."""

    config: Mapping[str, Any]
    """Default values of keys that the family's config.json may omit."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Paths of q, k and v in this order, or of the single linear that computes all three."""
    output_projection: str = "self_attn.o_proj"
    is_output_first: bool = False
    """Whether o precedes q, k and v among the layer's modules, and therefore in the layouts of adapters."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    qkv_bias: bool | None = None
    """Whether q, k and v have biases. None means that `attention_bias` in the config decides."""
    uses_biases: bool = True
    """Whether the keys `attention_bias` and `mlp_bias` of the model's config decide which linears have
    biases."""
    norm_before_attention: str = "input_layernorm"
    norm_after_attention: str | None = None
    """Path of the norm that is applied to the attention branch's output, before the residual is added. None
    if there is no such norm."""
    norm_before_mlp: str = "post_attention_layernorm"
    norm_after_mlp: str | None = None
    head_norms: tuple[str, str] | None = None
    """Paths of the norms that are applied to every head of q and of k before the rotary embedding. None if
    there are no such norms."""
    norm_offset: float = 0.0
    """Value that is added to the weights of all norms before they are applied."""
    norm_eps: str = "variance_epsilon"
    """Name of the attribute in which the module of a norm keeps its epsilon."""
    activation_key: str = "hidden_act"
    """Key of the model's config whose value names the activation function."""
    activations: tuple[str, ...] = ("silu",)
    """Activation functions that fused layers support. Layers with other activation functions run as in
    transformers."""

    @property
    def norms(self) -> tuple[str, ...]:
        """Paths of the norms that are as wide as the hidden state."""
        every = (
            self.norm_before_attention,
            self.norm_after_attention,
            self.norm_before_mlp,
            self.norm_after_mlp,
        )
        return tuple(name for name in every if name is not None)


COMMON: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Default values of config keys that most model families share."""
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")

DECODERS: Mapping[str, DecoderFacts] = {
    "llama": DecoderFacts(
        config={**COMMON, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048}
    ),
    "mistral": DecoderFacts(
        config={
            **COMMON,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
        }
    ),
    "qwen2": DecoderFacts(
        config={**COMMON, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
        qkv_bias=True,
    ),
    "qwen3": DecoderFacts(
        config={
            **COMMON,
            "intermediate_size": 22016,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "head_dim": 128,
        },
        head_norms=HEAD_NORMS,
    ),
    # Phi 3 and Phi 4 mini. Phi 4 mini rotates parts of heads.
    "phi3": DecoderFacts(
        config={
            **COMMON,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        qkv=("self_attn.qkv_proj",),
        is_output_first=True,
        gate_up=("mlp.gate_up_proj",),
        uses_biases=False,
    ),
    "gemma3_text": DecoderFacts(
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
        norm_after_attention="post_attention_layernorm",
        norm_before_mlp="pre_feedforward_layernorm",
        norm_after_mlp="post_feedforward_layernorm",
        head_norms=HEAD_NORMS,
        norm_offset=1.0,
        norm_eps="eps",
        activation_key="hidden_activation",
        activations=("gelu_pytorch_tanh",),
    ),
}
"""Maps the model type of a Llama-like family to the structure of its layers."""


def extra_value_count(family: str, sites: Sequence[SiteShape]) -> int:
    """Return how many more values per token a fused layer (Weftune's own layer code) of this family keeps for
    its backward pass than a Llama layer with the same linears. 0 if the family's layers are not fused."""
    if (structure := DECODERS.get(family)) is None:
        return 0

    def outputs(name: str) -> int:
        return next((site.out_features for site in sites if site.name.endswith(f".{name}")), 0)

    # The memory model counts the input of every linear: one in the place of three counts two less.
    inputs = (3 - len(structure.qkv)) + (2 - len(structure.gate_up))
    # A norm keeps its input.
    branches = sum(name is not None for name in (structure.norm_after_attention, structure.norm_after_mlp))
    heads = sum(map(outputs, structure.qkv)) if structure.head_norms else 0
    return heads + (inputs + branches) * outputs(structure.output_projection)


def query_width(family: str, sites: Sequence[SiteShape]) -> int:
    """Return the number of values per token of all query heads, which is the width of attention's output. 0
    if the family's layers run as in transformers."""
    mixture = MIXTURES.get(family)
    structure = DECODERS.get(family) if mixture is None else mixture.attention
    if structure is None:
        return 0
    return next(
        (site.in_features for site in sites if site.name.endswith(f".{structure.output_projection}")), 0
    )


# -- mixtures of experts: a router sends every token to a few experts --------------------------------------

EXPERTS, ROUTER = "mlp.experts", "mlp.gate"
"""Module paths of the experts and of the router inside a layer."""
GATE_UP, DOWN = EXPERT_PARAMETERS
"""Names of two parameters of the module with a layer's experts: gate and up together, [experts, 2 · inner,
hidden], and down, [experts, hidden, inner]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureFacts:
    """A mixture-of-experts family with the attention of a dense family. Its layers run as in transformers."""

    attention: DecoderFacts
    inner_width_key: str
    """Config key of an expert's inner width."""
    stored_names: tuple[str, str, str]
    """Names of one expert's gate, up and down projections in weight files."""
    stored_mlp: str = "mlp"
    """Name in weight files of the module that contains the experts."""


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
            uses_biases=False,
        ),
        inner_width_key="intermediate_size",
        stored_names=("w1", "w3", "w2"),
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
            head_norms=HEAD_NORMS,
        ),
        inner_width_key="moe_intermediate_size",
        stored_names=("gate_proj", "up_proj", "down_proj"),
    ),
}
"""Maps the model type of a mixture-of-experts family to the structure of its layers."""


# -- wrappers: only their text tower is trained, under the names that it has in the wrapper, so that PEFT and
# -- vLLM apply its adapters to the whole model -----------------------------------------------------------

WRAPPERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_5": "qwen3_5_text",
}
"""Maps a multimodal model type to the default model type of its text tower."""

SAME_ON_TEXT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_vl_text": ("qwen3", {"max_position_embeddings": 128000}),
}
"""Maps a text tower without its own causal model class to the family that computes the same on text, and
default values that differ. For example, Qwen3-VL rotates by three positions, which are equal for text."""
IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""Keys in a config's RoPE parameters that have an effect on images only."""


def text_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a multimodal model's text tower, with the model type of the family that computes
    the same on text."""
    own = {key: value for key, value in (config.get("text_config") or {}).items() if value is not None}
    kind = str(own.get("model_type") or WRAPPERS[config["model_type"]])
    tied = config.get("tie_word_embeddings")
    family, defaults = SAME_ON_TEXT.get(kind, (kind, {}))
    return {
        **defaults,
        **({} if tied is None else {"tie_word_embeddings": tied}),
        **own,
        "model_type": family,
    }


def name_with_wrapper(name: str) -> str:
    """Return the name that a module or weight of the text model has in the multimodal model."""
    return f"{TEXT_TOWER}.{name.removeprefix('model.')}" if name.startswith("model.") else name


def old_module_name(name: str) -> str:
    """Return the name that a weight of a multimodal wrapper has in files written before transformers 4.52."""
    if is_name_in_wrapper(name):
        return f"language_model.model.{name.removeprefix(f'{TEXT_TOWER}.')}"
    return f"language_model.{name}"
