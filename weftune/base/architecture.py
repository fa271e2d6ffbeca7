"""The sizes of a base from its config.json alone: the same ModelShape that the model itself would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weftune.base.decoders import (
    DECODERS,
    DOWN,
    EXPERTS,
    GATE_UP,
    MIXTURES,
    DecoderFacts,
    MixtureFacts,
    extra_values,
    is_wrapper,
    text_values,
    within,
)
from weftune.base.quant.stored import MULTIPLIED_AS_STORED, quantised, site_bytes_per_value
from weftune.base.spec import BaseSpec
from weftune.core.shapes import ModelShape, SiteShape
from weftune.errors import BaseModelError

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Linear:
    name: str
    in_features: int
    out_features: int
    bias: bool = False
    experts: int = 0
    active: int = 1

    @property
    def parameters(self) -> int:
        return self.site().weights + (self.out_features if self.bias else 0)

    def site(self, path: str = "", transposed: bool = False) -> SiteShape:
        return SiteShape(
            path or self.name, self.in_features, self.out_features, transposed, self.experts, self.active
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    linears: tuple[_Linear, ...]
    """Linears in the order of the model's modules."""
    others: int
    """Number of all other parameters, mostly those of norms."""

    @property
    def parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears) + self.others


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a family's model."""

    hidden: int
    stem: str
    """Module path of the list of layers."""
    layers: tuple[_Layer, ...]
    around: int
    """Number of parameters outside the layers: embeddings, untied output layer, last norm."""
    outside: tuple[_Linear, ...] = ()
    """Sites that belong to no layer; they come first."""
    transposed: bool = False


DEFAULTS: Mapping[str, Config] = {
    **{family: facts.config for family, facts in DECODERS.items()},
    **{family: facts.attention.config for family, facts in MIXTURES.items()},
    "opt": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
    },
    "gpt2": {
        "n_embd": 768,
        "n_layer": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
        "tie_word_embeddings": True,
    },
    "qwen3_5_text": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
}
"""Family → default values of keys that its config.json may omit."""

LONG_ROPE = ("longrope", "su")
"""Names of the long rope type; "su" is the name in early files."""


def spec_shape(spec: BaseSpec, config: Config, bytes_per_value: int) -> ModelShape:
    """Return the shape of a base with that config.json, quantised as requested. Raise BaseModelError if its
    family is not known here."""
    shape, found = model_shape(config, spec.model, bytes_per_value), quantised(config, spec)
    if found is None:
        return shape
    stored = site_bytes_per_value(shape.sites, found.quantize, bytes_per_value, found.nested)
    as_stored = found.quantize in MULTIPLIED_AS_STORED
    return replace(shape, site_bytes_per_value=stored, multiplied_as_stored=as_stored)


def model_shape(config: Config, name: str, bytes_per_value: int) -> ModelShape:
    """Return the shape of the base `name` in plain weights. Raise BaseModelError for an unknown family."""
    wrapped = is_wrapper(config)
    config = text_values(config) if wrapped else config
    family = str(config.get("model_type"))
    if family not in DEFAULTS:
        known = ", ".join(DEFAULTS)
        raise BaseModelError(
            f"{name} is a {family} model, whose sizes cannot be told from config.json alone; known: {known}"
        )
    given = {key: value for key, value in config.items() if value is not None}
    whole = {**DEFAULTS[family], **given}
    try:
        parts = FAMILIES[family](whole)
    except (TypeError, ValueError, ArithmeticError):
        raise BaseModelError(f"The config.json of {name} has sizes that are no whole numbers.") from None
    sites = _sites(parts, wrapped)
    return ModelShape(
        layers=len(parts.layers),
        hidden=parts.hidden,
        vocabulary=whole["vocab_size"],
        parameters=_parameters(parts),
        bytes_per_value=bytes_per_value,
        sites=sites,
        context=_context(whole),
        extra_values=extra_values(family, sites),
    )


def _parameters(parts: _Parts) -> int:
    layers = sum(layer.parameters for layer in parts.layers)
    return layers + parts.around + sum(linear.parameters for linear in parts.outside)


def _sites(parts: _Parts, wrapped: bool) -> tuple[SiteShape, ...]:
    def site(path: str, linear: _Linear) -> SiteShape:
        return linear.site(within(path) if wrapped else path, parts.transposed)

    return (
        *(site(linear.name, linear) for linear in parts.outside),
        *(
            site(f"{parts.stem}.{number}.{linear.name}", linear)
            for number, layer in enumerate(parts.layers)
            for linear in layer.linears
        ),
    )


def _context(config: Config) -> int:
    """Return the context length, as for the model itself: long rope ends at its original length, whose key
    depends on the file's age."""
    longest = int(config.get("max_position_embeddings") or config["n_positions"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for one in [rope, *(value for value in rope.values() if isinstance(value, Mapping))]:
        if (one.get("rope_type") or one.get("type")) in LONG_ROPE:
            original = one.get("original_max_position_embeddings")
            longest = min(longest, int(original or config["original_max_position_embeddings"]))
    return longest


def _decoder(facts: DecoderFacts, config: Config) -> _Parts:
    """Return the parts of a Llama-like model: q, k, v and o, then gate, up and down."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    mlp_bias = facts.heeds_biases and bool(config["mlp_bias"])
    gate_up = (inner, inner) if len(facts.gate_up) == 2 else (2 * inner,)
    layer = _Layer(
        linears=(
            *_attention(facts, config),
            *(_Linear(name, hidden, out, mlp_bias) for name, out in zip(facts.gate_up, gate_up, strict=True)),
            _Linear(facts.down, inner, hidden, mlp_bias),
        ),
        others=_norms(facts, config),
    )
    return _Parts(
        hidden=hidden,
        stem="model.layers",
        layers=(layer,) * int(config["num_hidden_layers"]),
        around=_ends(config, hidden) + hidden,
    )


def _attention(facts: DecoderFacts, config: Config) -> list[_Linear]:
    hidden = int(config["hidden_size"])
    _, wide, narrow = _heads(config)
    bias = facts.heeds_biases and bool(config["attention_bias"])
    qkv_bias = bias if facts.qkv_bias is None else facts.qkv_bias
    qkv = (wide, narrow, narrow) if len(facts.qkv) == 3 else (wide + 2 * narrow,)
    linears = [_Linear(name, hidden, out, qkv_bias) for name, out in zip(facts.qkv, qkv, strict=True)]
    linears.insert(0 if facts.o_first else len(linears), _Linear(facts.o, wide, hidden, bias))
    return linears


def _norms(facts: DecoderFacts, config: Config) -> int:
    head, _, _ = _heads(config)
    return len(facts.norms) * int(config["hidden_size"]) + (2 * head if facts.head_norms else 0)


def _mixture(facts: MixtureFacts, config: Config) -> _Parts:
    """Return the parts of a model with Llama-like attention, then a router and experts; some layers may have
    an MLP instead, which is no site."""
    hidden, inner, layers = (int(config[key]) for key in ("hidden_size", facts.inner, "num_hidden_layers"))
    count = int(config.get("num_experts") or config["num_local_experts"])
    active = int(config["num_experts_per_tok"])
    every, named = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    attention, norms = tuple(_attention(facts.attention, config)), _norms(facts.attention, config)
    experts = (
        _Linear(f"{EXPERTS}.{GATE_UP}", hidden, 2 * inner, experts=count, active=active),
        _Linear(f"{EXPERTS}.{DOWN}", inner, hidden, experts=count, active=active),
    )
    sparse = _Layer((*attention, *experts), norms + count * hidden)
    dense = _Layer(attention, norms + 3 * hidden * int(config["intermediate_size"]))
    return _Parts(
        hidden=hidden,
        stem="model.layers",
        layers=tuple(dense if at in named or (at + 1) % every else sparse for at in range(layers)),
        around=_ends(config, hidden) + hidden,
    )


def _heads(config: Config) -> tuple[int, int, int]:
    """Return the width of one head, of all query heads, and of all key heads."""
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or config["hidden_size"] // heads)
    return head, heads * head, int(config.get("num_key_value_heads") or heads) * head


def _ends(config: Config, hidden: int) -> int:
    """Return the number of parameters of the embedding, and of the output layer unless they are tied."""
    return int(config["vocab_size"]) * hidden * (1 if config["tie_word_embeddings"] else 2)


def _opt(config: Config) -> _Parts:
    hidden, inner, bias = int(config["hidden_size"]), int(config["ffn_dim"]), bool(config["enable_bias"])
    word = int(config.get("word_embed_proj_dim") or hidden)
    norm = 2 * hidden if config["layer_norm_elementwise_affine"] else 0
    last = norm if config["do_layer_norm_before"] and not config["_remove_final_layer_norm"] else 0
    # OPT's positions begin at 2.
    positions = (int(config["max_position_embeddings"]) + 2) * hidden
    projections = (
        _Linear("model.decoder.project_out", hidden, word),
        _Linear("model.decoder.project_in", word, hidden),
    )
    attention = ("k_proj", "v_proj", "q_proj", "out_proj")
    layer = _Layer(
        linears=(
            *(_Linear(f"self_attn.{one}", hidden, hidden, bias) for one in attention),
            _Linear("fc1", hidden, inner, bias),
            _Linear("fc2", inner, hidden, bias),
        ),
        others=2 * norm,
    )
    return _Parts(
        hidden=hidden,
        stem="model.decoder.layers",
        layers=(layer,) * int(config["num_hidden_layers"]),
        around=_ends(config, word) + positions + last,
        outside=projections if word != hidden else (),
    )


def _gpt2(config: Config) -> _Parts:
    hidden = int(config["n_embd"])
    inner = int(config.get("n_inner") or 4 * hidden)
    layer = _Layer(
        linears=(
            _Linear("attn.c_attn", hidden, 3 * hidden, bias=True),
            _Linear("attn.c_proj", hidden, hidden, bias=True),
            _Linear("mlp.c_fc", hidden, inner, bias=True),
            _Linear("mlp.c_proj", inner, hidden, bias=True),
        ),
        others=4 * hidden,
    )
    return _Parts(
        hidden=hidden,
        stem="transformer.h",
        layers=(layer,) * int(config["n_layer"]),
        around=_ends(config, hidden) + int(config["n_positions"]) * hidden + 2 * hidden,
        transposed=True,
    )


def _qwen3_5(config: Config) -> _Parts:
    """Return the parts of a model with three layers of Gated DeltaNet to one of attention, whose q has a gate
    beside it."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    head, wide, narrow = _heads(config)
    bias = bool(config["attention_bias"])
    gate_up = (_Linear(f"mlp.{one}_proj", hidden, inner) for one in ("gate", "up"))
    mlp = (*gate_up, _Linear("mlp.down_proj", inner, hidden))
    outputs = (("q", 2 * wide), ("k", narrow), ("v", narrow))
    attention = (
        *(_Linear(f"self_attn.{one}_proj", hidden, out, bias) for one, out in outputs),
        _Linear("self_attn.o_proj", wide, hidden, bias),
    )
    every, number = int(config["full_attention_interval"]), int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [
        "linear_attention" if (at + 1) % every else "full_attention" for at in range(number)
    ]
    mixer = _delta_net(config, hidden)
    full = _Layer((*attention, *mlp), 2 * hidden + 2 * head)
    linear = _Layer((*mixer.linears, *mlp), 2 * hidden + mixer.others)
    return _Parts(
        hidden=hidden,
        stem="model.layers",
        layers=tuple(full if kind == "full_attention" else linear for kind in kinds[:number]),
        around=_ends(config, hidden) + hidden,
    )


def _delta_net(config: Config, hidden: int) -> _Layer:
    heads, width = int(config["linear_num_value_heads"]), int(config["linear_value_head_dim"])
    mixed = 2 * int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"]) + heads * width
    inputs = (("qkv", mixed), ("z", heads * width), ("b", heads), ("a", heads))
    return _Layer(
        linears=(
            _Linear("linear_attn.out_proj", heads * width, hidden),
            *(_Linear(f"linear_attn.in_proj_{one}", hidden, out) for one, out in inputs),
        ),
        others=mixed * int(config["linear_conv_kernel_dim"]) + 2 * heads + width,
    )


FAMILIES: Mapping[str, Callable[[Config], _Parts]] = {
    **{family: partial(_decoder, facts) for family, facts in DECODERS.items()},
    **{family: partial(_mixture, facts) for family, facts in MIXTURES.items()},
    "opt": _opt,
    "gpt2": _gpt2,
    "qwen3_5_text": _qwen3_5,
}
