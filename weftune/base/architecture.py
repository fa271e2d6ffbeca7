"""The sizes of a base model (a `ModelShape`), computed from its config.json alone. They equal the sizes of
the loaded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weftune.base.decoders import (
    DECODERS,
    DOWN,
    EXPERTS,
    GATE_UP,
    MIXTURES,
    WRAPPERS,
    DecoderFacts,
    MixtureFacts,
    extra_value_count,
    name_with_wrapper,
    query_width,
    text_values,
)
from weftune.base.quant.stored import MULTIPLIED_AS_STORED, Quantised, read_quantisation, site_bytes_per_value
from weftune.base.rope import Config, context_length, scaled_rope_values, unscaled_context
from weftune.base.spec import BaseSpec
from weftune.core.shapes import ModelShape, SiteShape
from weftune.errors import BaseModelError

_Linears = Sequence[tuple[str, int, int, bool]]
"""Linears of a layer in the model's order, each as a tuple: path inside the layer, input width, output width,
whether it has a bias."""


_Layer = tuple[tuple[SiteShape, ...], int]
"""The sites (adaptable linears) of a layer, named by their paths inside the layer, and the layer's parameter
count."""


def _layer_sites(
    linears: _Linears, other_parameters: int, experts: Sequence[SiteShape] = (), transposed: bool = False
) -> _Layer:
    """Return a `_Layer` with the given linears and experts. `other_parameters` is the number of the layer's
    parameters that belong to neither."""
    sites = (
        *(SiteShape(name, inputs, outputs, transposed) for name, inputs, outputs, _ in linears),
        *experts,
    )
    biases = sum(outputs for _, _, outputs, bias in linears if bias)
    return sites, sum(site.weight_count for site in sites) + biases + other_parameters


@dataclass(frozen=True, slots=True)
class _Parts:
    """The layers of a model, and its sites (adaptable linears) and parameters outside the layers."""

    hidden_width: int
    layers: tuple[_Layer, ...]
    outer_parameter_count: int
    """Number of parameters outside the layers: embeddings, untied output layer, last norm."""
    layers_path: str = "model.layers"
    """Module path of the list of layers."""
    embedding_projections: tuple[SiteShape, ...] = ()
    """Sites (adaptable linears) next to the embedding, outside the layers. These sites come first in the
    order of all sites."""


DEFAULTS: Mapping[str, Config] = {
    **{family: structure.config for family, structure in DECODERS.items()},
    **{family: structure.attention.config for family, structure in MIXTURES.items()},
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
"""Maps each model family to default values of keys that its config.json may omit."""


def spec_shape(spec: BaseSpec, config: Config, bytes_per_value: int) -> ModelShape:
    """Return the sizes of the base model with this config.json, quantised as `spec` requests. Raise
    BaseModelError if the model's family is unknown, or if its positions cannot be scaled as `spec`
    requests."""
    shape, found = model_shape(config, spec.model, bytes_per_value), read_quantisation(config, spec)
    if spec.rope_scaling is not None:
        text = text_values(config) if config.get("model_type") in WRAPPERS else config
        scaled = {**DEFAULTS[str(text["model_type"])], **_configured_values(text)}
        scaled |= scaled_rope_values(scaled, spec)
        shape = replace(shape, context=context_length(scaled), unscaled_context=unscaled_context(scaled))
    if found is None:
        return shape
    stored = site_bytes_per_value(shape.sites, found.quantize, bytes_per_value, found.is_nested)
    as_stored = found.quantize in MULTIPLIED_AS_STORED
    return replace(shape, site_bytes_per_value=stored, multiplies_stored_format=as_stored)


def refuse_shards(spec: BaseSpec, config: Config, shards: int) -> None:
    """Raise BaseModelError if the layers of a base with this config.json cannot be divided into `shards`
    shards (tensor parallelism)."""
    if shards == 1:
        return
    text = text_values(config) if config.get("model_type") in WRAPPERS else config
    family = str(text.get("model_type"))
    refuse_family_on_shards(family, spec.model)
    whole = {**DEFAULTS[family], **_configured_values(text)}
    heads = int(whole["num_attention_heads"])
    keys = int(whole.get("num_key_value_heads") or heads)
    refuse_uneven_shards(heads, keys, int(whole["intermediate_size"]), spec.model, shards)
    refuse_repeated_heads(read_quantisation(config, spec), keys, spec.model, shards)


def refuse_repeated_heads(quantisation: Quantised | None, key_heads: int, name: str, shards: int) -> None:
    """Raise BaseModelError if several shards would hold the same key/value head and the quantisation format
    (fp8) rounds gradients. Each shard would round its part of the head's gradient, and the sum of rounded
    parts differs from the rounded sum."""
    if quantisation is not None and quantisation.quantize in MULTIPLIED_AS_STORED and key_heads % shards:
        raise BaseModelError(
            f"{name} in {quantisation.quantize} has {key_heads} key/value heads, and {shards} shards would "
            f"round parts of their gradients; choose a divisor of {key_heads} for --shards, or write "
            "quantize: nf4 or int8"
        )


def can_be_sharded(spec: BaseSpec, config: Config, shards: int) -> bool:
    """Return whether the layers of a base with this config.json can be divided into `shards` shards (tensor
    parallelism)."""
    try:
        refuse_shards(spec, config, shards)
    except BaseModelError:
        return False
    return True


def has_half_layers(config: Config) -> bool:
    """Return whether the layers of a base with this config.json can run in two halves (attention and
    feed-forward), so that the sums over shards (tensor parallelism) of one microbatch overlap with the
    computation of another microbatch. This requires fused layers."""
    text = text_values(config) if config.get("model_type") in WRAPPERS else config
    structure = DECODERS.get(str(text.get("model_type")))
    return (
        structure is not None
        and text.get(structure.activation_key, structure.activations[0]) in structure.activations
    )


def refuse_family_on_shards(family: str, name: str) -> None:
    if family not in DECODERS:
        raise BaseModelError(
            f"{name} ({family}) cannot be divided into shards; Weftune knows how to divide "
            f"{', '.join(sorted(DECODERS))}. Train it without --shards."
        )


def refuse_uneven_shards(heads: int, key_heads: int, intermediate_size: int, name: str, shards: int) -> None:
    """Raise BaseModelError if the heads or the feed-forward, whose width is `intermediate_size`, cannot be
    divided evenly among the shards."""
    if heads % shards or intermediate_size % shards or (key_heads % shards and shards % key_heads):
        raise BaseModelError(
            f"{name} has {heads} attention heads, {key_heads} key/value heads and a feed-forward of "
            f"width {intermediate_size}, which {shards} shards cannot divide evenly; choose another "
            "number for --shards"
        )


def model_shape(config: Config, name: str, bytes_per_value: int) -> ModelShape:
    """Return the sizes of the base model `name` without quantisation. Raise BaseModelError if the model's
    family is unknown."""
    wrapped = config.get("model_type") in WRAPPERS
    config = text_values(config) if wrapped else config
    family = str(config.get("model_type"))
    if family not in DEFAULTS:
        known = ", ".join(DEFAULTS)
        raise BaseModelError(
            f"{name} is a {family} model, whose sizes cannot be determined from config.json alone; "
            f"known: {known}"
        )
    whole = {**DEFAULTS[family], **_configured_values(config)}
    try:
        parts = FAMILIES[family](whole)
        longest, unscaled = context_length(whole), unscaled_context(whole)
    except (TypeError, ValueError, ArithmeticError):
        raise BaseModelError(f"The config.json of {name} has sizes that are no whole numbers.") from None
    sites = [
        *parts.embedding_projections,
        *(
            replace(
                site,
                name=f"{parts.layers_path}.{number}.{site.name}",
                in_last_layer=number == len(parts.layers) - 1,
            )
            for number, (own, _) in enumerate(parts.layers)
            for site in own
        ),
    ]
    if wrapped:
        sites = [replace(site, name=name_with_wrapper(site.name)) for site in sites]
    outer_site_weights = sum(site.weight_count for site in parts.embedding_projections)
    return ModelShape(
        layers=len(parts.layers),
        hidden=parts.hidden_width,
        vocabulary=whole["vocab_size"],
        parameters=sum(count for _, count in parts.layers) + parts.outer_parameter_count + outer_site_weights,
        bytes_per_value=bytes_per_value,
        sites=tuple(sites),
        context=longest,
        unscaled_context=unscaled,
        extra_values=extra_value_count(family, sites),
        query_width=query_width(family, sites),
    )


def _configured_values(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _decoder_parts(structure: DecoderFacts, config: Config) -> _Parts:
    """Return the sizes of the layers of a Llama-like model, and of its other parameters. Each layer has q, k,
    v and o, then gate, up and down."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    bias = structure.uses_biases and bool(config["mlp_bias"])
    gate_up = (inner, inner) if len(structure.gate_up) == 2 else (2 * inner,)
    linears = _attention_linears(structure, config)
    linears += [(name, hidden, out, bias) for name, out in zip(structure.gate_up, gate_up, strict=True)]
    linears.append((structure.down, inner, hidden, bias))
    layer = _layer_sites(linears, _norm_parameters(structure, config))
    return _Parts(
        hidden, (layer,) * int(config["num_hidden_layers"]), _vocabulary_parameters(config, hidden) + hidden
    )


def _attention_linears(structure: DecoderFacts, config: Config) -> list[tuple[str, int, int, bool]]:
    hidden = int(config["hidden_size"])
    _, wide, narrow = _head_counts(config)
    bias = structure.uses_biases and bool(config["attention_bias"])
    qkv_bias = bias if structure.qkv_bias is None else structure.qkv_bias
    qkv = (wide, narrow, narrow) if len(structure.qkv) == 3 else (wide + 2 * narrow,)
    linears = [(name, hidden, out, qkv_bias) for name, out in zip(structure.qkv, qkv, strict=True)]
    linears.insert(
        0 if structure.is_output_first else len(linears), (structure.output_projection, wide, hidden, bias)
    )
    return linears


def _norm_parameters(structure: DecoderFacts, config: Config) -> int:
    head, _, _ = _head_counts(config)
    return len(structure.norms) * int(config["hidden_size"]) + (2 * head if structure.head_norms else 0)


def _mixture_parts(structure: MixtureFacts, config: Config) -> _Parts:
    """Return the sizes of the layers of a mixture of experts, and of its other parameters. Each layer has
    Llama-like attention, then a router and experts or, in some models, an MLP that cannot be adapted."""
    hidden, inner, layers = (
        int(config[key]) for key in ("hidden_size", structure.inner_width_key, "num_hidden_layers")
    )
    count = int(config.get("num_experts") or config["num_local_experts"])
    active = int(config["num_experts_per_tok"])
    every, named = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    attention, norms = (
        _attention_linears(structure.attention, config),
        _norm_parameters(structure.attention, config),
    )
    experts = (
        SiteShape(f"{EXPERTS}.{GATE_UP}", hidden, 2 * inner, experts=count, active_matrices=active),
        SiteShape(f"{EXPERTS}.{DOWN}", inner, hidden, experts=count, active_matrices=active),
    )
    sparse = _layer_sites(attention, norms + count * hidden, experts)
    dense = _layer_sites(attention, norms + 3 * hidden * int(config["intermediate_size"]))
    found = tuple(dense if at in named or (at + 1) % every else sparse for at in range(layers))
    return _Parts(hidden, found, _vocabulary_parameters(config, hidden) + hidden)


def _head_counts(config: Config) -> tuple[int, int, int]:
    """Return the width of one head, and the total widths of all query heads and of all key heads."""
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or config["hidden_size"] // heads)
    return head, heads * head, int(config.get("num_key_value_heads") or heads) * head


def _vocabulary_parameters(config: Config, hidden: int) -> int:
    """Return the number of parameters of the embedding plus, unless the two are tied, of the output layer."""
    return int(config["vocab_size"]) * hidden * (1 if config["tie_word_embeddings"] else 2)


def _opt_parts(config: Config) -> _Parts:
    hidden, inner, bias = int(config["hidden_size"]), int(config["ffn_dim"]), bool(config["enable_bias"])
    word = int(config.get("word_embed_proj_dim") or hidden)
    norm = 2 * hidden if config["layer_norm_elementwise_affine"] else 0
    last = norm if config["do_layer_norm_before"] and not config["_remove_final_layer_norm"] else 0
    # OPT's positions begin at 2.
    positions = (int(config["max_position_embeddings"]) + 2) * hidden
    projections = (
        SiteShape("model.decoder.project_out", hidden, word),
        SiteShape("model.decoder.project_in", word, hidden),
    )
    attention = ("k_proj", "v_proj", "q_proj", "out_proj")
    linears = [(f"self_attn.{one}", hidden, hidden, bias) for one in attention]
    layer = _layer_sites([*linears, ("fc1", hidden, inner, bias), ("fc2", inner, hidden, bias)], 2 * norm)
    return _Parts(
        hidden,
        (layer,) * int(config["num_hidden_layers"]),
        _vocabulary_parameters(config, word) + positions + last,
        layers_path="model.decoder.layers",
        embedding_projections=projections if word != hidden else (),
    )


def _gpt2_parts(config: Config) -> _Parts:
    hidden = int(config["n_embd"])
    inner = int(config.get("n_inner") or 4 * hidden)
    linears = (
        ("attn.c_attn", hidden, 3 * hidden, True),
        ("attn.c_proj", hidden, hidden, True),
        ("mlp.c_fc", hidden, inner, True),
        ("mlp.c_proj", inner, hidden, True),
    )
    layer = _layer_sites(linears, 4 * hidden, transposed=True)
    outer_parameter_count = (
        _vocabulary_parameters(config, hidden) + int(config["n_positions"]) * hidden + 2 * hidden
    )
    return _Parts(
        hidden, (layer,) * int(config["n_layer"]), outer_parameter_count, layers_path="transformer.h"
    )


def _qwen3_5_parts(config: Config) -> _Parts:
    """Return the sizes of the layers, and of the other parameters, of a model with Gated DeltaNet in most
    layers and attention with a gated q in all other layers."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    head, wide, narrow = _head_counts(config)
    bias = bool(config["attention_bias"])
    mlp = (
        ("mlp.gate_proj", hidden, inner, False),
        ("mlp.up_proj", hidden, inner, False),
        ("mlp.down_proj", inner, hidden, False),
    )
    attention = (
        ("self_attn.q_proj", hidden, 2 * wide, bias),
        ("self_attn.k_proj", hidden, narrow, bias),
        ("self_attn.v_proj", hidden, narrow, bias),
        ("self_attn.o_proj", wide, hidden, bias),
    )
    every, number = int(config["full_attention_interval"]), int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [
        "linear_attention" if (at + 1) % every else "full_attention" for at in range(number)
    ]
    heads, width = int(config["linear_num_value_heads"]), int(config["linear_value_head_dim"])
    mixed = 2 * int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"]) + heads * width
    inputs = (("qkv", mixed), ("z", heads * width), ("b", heads), ("a", heads))
    delta_net = (
        ("linear_attn.out_proj", heads * width, hidden, False),
        *((f"linear_attn.in_proj_{one}", hidden, out, False) for one, out in inputs),
    )
    mixer = mixed * int(config["linear_conv_kernel_dim"]) + 2 * heads + width
    full = _layer_sites((*attention, *mlp), 2 * hidden + 2 * head)
    linear = _layer_sites((*delta_net, *mlp), 2 * hidden + mixer)
    layers = tuple(full if kind == "full_attention" else linear for kind in kinds[:number])
    return _Parts(hidden, layers, _vocabulary_parameters(config, hidden) + hidden)


FAMILIES: Mapping[str, Callable[[Config], _Parts]] = {
    **{family: partial(_decoder_parts, structure) for family, structure in DECODERS.items()},
    **{family: partial(_mixture_parts, structure) for family, structure in MIXTURES.items()},
    "opt": _opt_parts,
    "gpt2": _gpt2_parts,
    "qwen3_5_text": _qwen3_5_parts,
}
