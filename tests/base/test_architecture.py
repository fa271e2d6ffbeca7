from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config, Qwen3MoeConfig

from tests.families import COMMON, EVERY, GROUPED, config
from weftune.base.architecture import has_half_layers, model_shape
from weftune.base.decoders import DECODERS
from weftune.base.shape import model_shape as real_shape
from weftune.errors import BaseModelError
from weftune.run.passes.layers import find_layer_structure


def made(model_config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
    return real_shape(model, torch.bfloat16)


@pytest.mark.parametrize("family", [*EVERY, "qwen3_5"])
def test_the_shape_from_the_config_is_that_of_the_model(family):
    asked = config(family)
    assert model_shape(asked.to_diff_dict(), "tiny", 2) == made(asked)


@pytest.mark.parametrize("family", [*EVERY, "qwen3_5"])
def test_what_a_config_leaves_out_is_as_the_family_has_it(family):
    """Only the number of layers is given, so that a model with all other defaults is quickly made."""
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    asked = type(config(family))(**{layers: 1})
    given = {"model_type": asked.model_type, layers: 1}
    assert model_shape(given, "short", 2) == made(asked)


@pytest.mark.parametrize("family", EVERY)
def test_half_layers_are_known_where_layers_are_fused(family):
    asked = config(family)
    fused = asked.model_type in DECODERS and find_layer_structure(asked) is not None
    assert has_half_layers(asked.to_diff_dict()) == fused


def test_half_layers_need_an_activation_that_fused_layers_support():
    assert has_half_layers({"model_type": "llama"})
    assert not has_half_layers({"model_type": "llama", "hidden_act": "relu"})
    assert has_half_layers({"model_type": "gemma3", "text_config": {"hidden_activation": None}})


def test_biases_and_an_untied_head_are_counted():
    asked = type(config("llama"))(**GROUPED, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    assert model_shape(asked.to_diff_dict(), "biased", 2) == made(asked)
    plain = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "word_embed_proj_dim": 32}
    asked = type(config("opt"))(**COMMON, **plain, num_attention_heads=4, enable_bias=False)
    assert model_shape(asked.to_diff_dict(), "opt", 2) == made(asked)


def test_layers_of_a_mixture_without_experts_are_counted():
    dense = {"mlp_only_layers": [0], "decoder_sparse_step": 2}
    asked = Qwen3MoeConfig(**{**GROUPED, "num_hidden_layers": 4}, num_experts=4, **dense)
    shape = made(asked)
    assert [site.name for site in shape.sites if site.experts] == [
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in (1, 3)
        for name in ("gate_up_proj", "down_proj")
    ]
    assert model_shape(asked.to_diff_dict(), "mixed", 2) == shape


def test_a_mixture_counts_all_experts_and_computes_with_few():
    """Qwen3-30B-A3B: 30.5 billion parameters, of which a token meets 3.3 with its embedding."""
    given = {"num_hidden_layers": 48, "head_dim": 128, "num_experts": 128, "norm_topk_prob": True}
    shape = model_shape({"model_type": "qwen3_moe", **given}, "Qwen3-30B-A3B", 2)
    assert round(shape.parameters / 1e9, 1) == 30.5
    assert 3.3e9 < shape.active_parameters < 3.4e9


def test_long_rope_ends_the_context_in_files_of_either_age():
    factors = [1.0] * 4
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = 16
    asked = Phi3Config(**GROUPED, rope_parameters=rope, original_max_position_embeddings=16)
    assert model_shape(asked.to_diff_dict(), "phi", 2).context == made(asked).context == 16
    older = {"model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": {"type": "longrope"}}
    assert model_shape({**older, "original_max_position_embeddings": 2048}, "phi", 2).context == 2048


def test_an_unknown_family_is_named_with_those_that_are_known():
    with pytest.raises(BaseModelError, match=r"mine is a bloom model.*llama.*gpt2"):
        model_shape({"model_type": "bloom"}, "mine", 2)
    with pytest.raises(BaseModelError, match="no whole numbers"):
        model_shape({"model_type": "llama", "hidden_size": "wide"}, "mine", 2)
