"""A family's facts name what its layers really have."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import FAMILIES, MORE, config
from weftune.base.decoders import DECODERS

WITHOUT_FACTS = {"opt", "gpt2"}
"""Their layers run as transformers runs them."""
TYPES = {family: config(family).model_type for family in (*FAMILIES, *MORE) if family not in WITHOUT_FACTS}


@pytest.fixture(params=[family for family, kind in TYPES.items() if kind in DECODERS])
def model(request):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(request.param))


def test_every_module_that_the_facts_name_is_there(model):
    facts, layer = DECODERS[model.config.model_type], model.base_model.layers[0]
    linears = (*facts.qkv, facts.output_projection, *facts.gate_up, facts.down)
    norms = (*facts.norms, *(facts.head_norms or ()))
    assert all(isinstance(layer.get_submodule(name), torch.nn.Linear) for name in linears)
    assert all(getattr(layer.get_submodule(name), facts.norm_eps) > 0.0 for name in norms)
    assert getattr(model.config, facts.activation_key) in facts.activations


def test_no_norm_and_no_linear_of_a_layer_is_left_out(model):
    facts, layer = DECODERS[model.config.model_type], model.base_model.layers[0]
    named = {*facts.qkv, facts.output_projection, *facts.gate_up, facts.down}
    named |= {*facts.norms, *(facts.head_norms or ())}
    found = {name for name, module in layer.named_modules() if any(True for _ in module.parameters(False))}
    assert found == named
