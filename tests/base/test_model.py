"""The base as a frozen thing with sites, a shape and a head."""

from __future__ import annotations

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers.pytorch_utils import Conv1D

from tests.base.packs import base_of, packed, random_samples
from tests.families import CONTEXT, FAMILIES, VOCABULARY, tiny
from weftune.base.rope import context_length


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sites_are_what_peft_calls_all_linear(family: str) -> None:
    lora = peft.LoraConfig(target_modules="all-linear", r=2, fan_in_fan_out=family == "gpt2")
    tuned = peft.get_peft_model(tiny(family), lora).base_model.model
    expected = [name for name, module in tuned.named_modules() if isinstance(module, BaseTunerLayer)]
    assert list(base_of(tiny(family)).sites()) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_says_the_sizes_of_every_site(family: str) -> None:
    base = base_of(tiny(family))
    sites = base.sites()
    assert [site.name for site in base.shape.sites] == list(sites)
    for site in base.shape.sites:
        module = sites[site.name]
        assert module(torch.zeros(1, site.in_features, dtype=torch.float64)).shape == (1, site.out_features)
        assert site.fan_in_fan_out == isinstance(module, Conv1D)
    assert base.shape.vocabulary == VOCABULARY
    assert base.shape.context == CONTEXT
    assert base.shape.base_bytes == 8 * sum(p.numel() for p in set(base.model.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_is_frozen_and_its_own_dropout_is_off(family: str) -> None:
    base = base_of(tiny(family).train())
    assert not any(module.training for module in base.model.modules())
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    microbatch = packed(random_samples())
    torch.testing.assert_close(base.hidden(microbatch), base.hidden(microbatch), rtol=0.0, atol=0.0)


def test_a_config_that_others_hold_is_not_changed() -> None:
    model = tiny("llama")
    shared = model.config
    other = type(model)(shared)
    base = base_of(model)
    assert base.model.config._attn_implementation == "weftune"
    assert shared._attn_implementation == other.config._attn_implementation == "sdpa"
    other(torch.arange(4)[None])


def test_the_head_of_a_tied_base_is_its_embedding() -> None:
    base = base_of(tiny("gpt2"))
    assert base.head().weight_VD is base.model.get_input_embeddings().weight


def test_long_rope_ends_the_context_where_it_would_change_the_rotation_of_neighbours() -> None:
    config = tiny("phi3").config
    factors = [1.0] * 4
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 16,
    }
    assert context_length(config.to_dict()) == 16


def test_a_sample_longer_than_the_context_is_a_bug_that_shows() -> None:
    base = base_of(tiny("opt"))
    with pytest.raises(AssertionError, match="longer than the base has positions for"):
        base.hidden(packed(random_samples((CONTEXT + 1,))))
