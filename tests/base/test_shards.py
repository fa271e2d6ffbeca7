"""The shards of a base together compute what the whole base computes, and are as large as planned."""

import pytest
import torch

from tests.base.packs import CPU, base_of, packed, random_samples
from tests.families import tiny
from tests.shards import on_shards
from weftune.base.shards import shard_of
from weftune.base.spec import BaseSpec
from weftune.core.shapes import LayerRange, shard_shape

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3")
SPEC = BaseSpec(model="tiny")


def cut(family, shards, dtype=torch.float32):
    """A function that cuts a base for one shard. Random models are made one after another, not in threads."""
    models = [tiny(family, dtype) for _ in range(shards)]
    layers = models[0].config.num_hidden_layers
    return lambda team: shard_of(models[team.shard], SPEC, CPU, team, LayerRange(0, layers, layers))


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_give_the_hidden_states_and_logits_of_the_whole_base(family, shards):
    """97 tokens are divided unevenly."""
    whole, microbatch = base_of(tiny(family, torch.float64)), packed(random_samples())
    cut_for = cut(family, shards, torch.float64)

    def on_shard(team):
        base = cut_for(team)
        h_TD = base.hidden(microbatch)
        return h_TD, base.head().logits(h_TD)

    hidden, parts = zip(*on_shards(shards, on_shard), strict=True)
    want_TD = whole.hidden(microbatch)
    for h_TD in hidden:
        torch.testing.assert_close(h_TD, want_TD, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole.head().logits(want_TD), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_embeddings_of_shards_have_the_bits_of_the_whole_base(family):
    whole, tokens, cut_for = base_of(tiny(family, torch.float32)), torch.arange(97), cut(family, 4)
    found = on_shards(4, lambda team: cut_for(team).model.get_input_embeddings()(tokens))
    want = whole.model.get_input_embeddings()(tokens)
    assert all(torch.equal(one, want) for one in found)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_largest_shard_has_the_planned_number_of_parameters(family):
    """With a head of its own, and with one that is tied to the embedding."""
    whole = base_of(tiny(family, torch.float32))
    found = on_shards(2, cut(family, 2))
    planned = shard_shape(whole.shape, 2)
    assert planned.vocabulary == 49
    assert max(base.shape.parameters for base in found) == planned.parameters
    assert all(base.tied == whole.shape.ties_head == (family == "gemma3") for base in found)
    assert all(base.shape.vocabulary == 97 for base in found)
