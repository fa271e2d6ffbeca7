"""The shards of a base together compute what the whole base computes, and are as large as planned."""

from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.base.folders import model_folder, wrapper_folder
from tests.base.packs import CPU, base_of, packed, random_samples
from tests.base.quant.bases import stored_folder
from tests.base.quant.test_loaded import same_bytes
from tests.cases import slow_but
from tests.families import config, tiny
from tests.shards import on_shards
from weftune.base import weights
from weftune.base.host.streamed import load_streamed, stream_model
from weftune.base.load import load_base, load_plain
from weftune.base.quant.linear import QuantLinear
from weftune.base.shards import cut_shard, load_shard, refuse_sharding
from weftune.base.spec import BaseSpec
from weftune.core.shapes import LayerRange, shard_shape
from weftune.core.shards import ShardTeam, indices_in_whole
from weftune.errors import BaseModelError
from weftune.plan.cost.streamed_memory import token_bytes
from weftune.plan.program.layout import Layout, StageLayers
from weftune.plan.program.program import NOTHING

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3")
SPEC = BaseSpec(model="tiny")


def cut(family, shards, dtype=torch.float32):
    """A function that cuts a base for one shard. Random models are made one after another, not in threads."""
    models = [tiny(family, dtype) for _ in range(shards)]
    layers = models[0].config.num_hidden_layers
    return lambda team: cut_shard(models[team.shard], SPEC, CPU, team, LayerRange(0, layers, layers))


@pytest.mark.parametrize(
    ("family", "shards"),
    slow_but(product(FAMILIES, (2, 4)), [*((family, 2) for family in FAMILIES), ("llama", 4), ("gemma3", 4)]),
)
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
    assert all(base.is_tied == whole.shape.ties_head == (family == "gemma3") for base in found)
    assert all(base.shape.vocabulary == 97 for base in found)


def test_a_shard_keeps_four_tensors_of_the_hidden_width_per_layer_whole_and_half_of_the_others():
    whole = base_of(tiny("llama", torch.float32)).shape
    shard, layers = shard_shape(whole, 2), whole.layers
    assert shard.whole_values_per_token == whole.values_per_token
    kept, in_half = (token_bytes(shape, layers, True, NOTHING, ()) for shape in (whole, shard))
    hidden_bytes = layers * whole.hidden * whole.bytes_per_value
    assert 2 * in_half - kept == pytest.approx(4 * hidden_bytes, abs=2)


def load(spec, shard, shards, held):
    return load_shard(spec, CPU, ShardTeam(shard, shards, lambda tensor: None), held)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_shards_parts_are_read_from_the_files(family, tmp_path, monkeypatch):
    """With key/value heads that two shards repeat."""
    monkeypatch.setattr("weftune.base.shards.load_plain", lambda *_: pytest.fail("the whole base was read"))
    read = []
    read_slice = weights._read_slice
    monkeypatch.setattr(weights, "_read_slice", lambda *given: read.append(read_slice(*given)) or read[-1])
    spec = BaseSpec(model=str(model_folder(tmp_path, family, torch.float32)), dtype="float32")
    whole, layers = load_base(spec, CPU), config(family).num_hidden_layers
    for shard in range(4):
        team, held = ShardTeam(shard, 4, lambda tensor: None), LayerRange(0, layers, layers)
        read.clear()
        base = load_shard(spec, CPU, team, held)
        assert sum(part.numel() for part in read) == base.shape.parameters
        want = cut_shard(load_plain(spec, CPU), spec, CPU, team, held)
        for parts in (nn.Module.named_parameters, nn.Module.named_buffers):
            got, expected = dict(parts(base.model)), dict(parts(want.model))
            assert got.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in got.items())
        own, original = base.weight_reader(), whole.weight_reader()
        names = (base.shape.sites[0].name, base.shape.sites[-1].name, "model.embed_tokens")
        assert all(torch.equal(own(name), original(name)) for name in names)


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
def test_text_towers_are_read_in_parts(family, tmp_path):
    spec = BaseSpec(model=str(wrapper_folder(tmp_path, family)), dtype="float32")
    whole = load_base(spec, CPU)
    layers = whole.shape.layers
    base, original = load(spec, 1, 2, LayerRange(0, layers, layers)), whole.weight_reader()
    assert torch.equal(base.head().weight_VD, whole.head().weight_VD[48:])
    for site in base.shape.sites:
        want = original(site.name).index_select(
            1 if site.part.cuts_inputs else 0, indices_in_whole(site.part)
        )
        assert torch.equal(base.sites()[site.name].weight, want)


def test_a_shard_of_a_stage_reads_only_what_the_stage_has(tmp_path):
    spec = BaseSpec(model=str(model_folder(tmp_path, "gemma3", torch.float32)), dtype="float32")
    first, last = (load(spec, 1, 2, LayerRange(start, stop, 3)) for start, stop in ((0, 1), (1, 3)))
    whole = load_base(spec, CPU)
    assert torch.equal(first.model.get_input_embeddings().weight, whole.head().weight_VD[48:])
    assert torch.equal(last.head().weight_VD, whole.head().weight_VD[48:])
    assert first.model.get_output_embeddings().__class__ is last.model.get_input_embeddings().__class__


def test_a_file_with_another_vocabulary_than_the_config_is_refused(tmp_path):
    folder = model_folder(tmp_path, "llama", torch.float32)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = torch.zeros(200, 32)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match=r"lm_head.weight is \[200, 32\] in its file, but \[97, 32\]"):
        load(BaseSpec(model=str(folder)), 0, 2, LayerRange(0, 2, 2))


@pytest.mark.parametrize("quantize", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_shards_of_a_quantised_base_have_its_weights(quantize, family, tmp_path):
    """Plain files are quantised while they are read, whole matrices as without shards."""
    folder = model_folder(tmp_path, family, torch.float32)
    spec = BaseSpec(model=str(folder), dtype="float32", quantize=quantize)
    assert_shards_have_the_weights_of(load_base(spec, CPU), spec)


@pytest.mark.parametrize("nested", [True, False])
def test_shards_of_a_base_stored_in_nf4_have_its_weights(nested, tmp_path):
    folder = stored_folder(tmp_path, tiny("llama", torch.float32), nested=nested)
    spec = BaseSpec(model=str(folder), dtype="float32")
    assert_shards_have_the_weights_of(load_base(spec, CPU), spec)


def assert_shards_have_the_weights_of(whole, spec):
    original = whole.weight_reader()
    for shard in range(2):
        base = load(spec, shard, 2, LayerRange(0, 2, 2))
        modules, own = base.sites(), base.weight_reader()
        assert any(isinstance(module, QuantLinear) for module in modules.values())
        assert not any(value.is_meta for value in base.model.parameters())
        for site in base.shape.sites:
            module, want = modules[site.name], original(site.name)
            quantised = isinstance(module, QuantLinear)
            got = module.frozen_weight().matrix() if quantised else module.weight
            dim = 1 if site.part.cuts_inputs else 0
            assert torch.equal(got, want.index_select(dim, indices_in_whole(site.part)))
            assert torch.equal(own(site.name), want)


@pytest.mark.parametrize("quantize", [None, "nf4", "int8", "fp8"])
def test_streamed_shards_have_the_parameters_of_resident_ones(quantize, tmp_path):
    """Read from files, where streamed stages have them on the host."""
    spec = BaseSpec(
        model=str(model_folder(tmp_path, "qwen2", torch.float32)), dtype="float32", quantize=quantize
    )
    cut, original = Layout((StageLayers(0, 1), StageLayers(1, 2, True)), (1,), shards=2), load_base(spec, CPU)
    for shard in range(2):
        team, layers = ShardTeam(shard, 2, lambda tensor: None), LayerRange(0, 2, 2)
        streamed, resident = load_streamed(spec, CPU, cut, team=team), load_shard(spec, CPU, team, layers)
        streamed.sources[0].copy_to(streamed.slot(0))
        base = streamed.whole
        assert (base.shape, base.slices, base.whole_sites) == (
            resident.shape,
            resident.slices,
            original.shape.sites,
        )
        got, expected = dict(base.model.named_parameters()), dict(resident.model.named_parameters())
        assert got.keys() == expected.keys()
        assert all(same_bytes(value, expected[name]) for name, value in got.items())
        held = sum(value.nbytes for name, value in expected.items() if ".layers.0." in name)
        assert held <= streamed.sources[0].size < held + 16 * len(expected)
        own, whole = base.weight_reader(), original.weight_reader()
        assert all(torch.equal(own(site.name), whole(site.name)) for site in base.shape.sites)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_shards_that_take_turns_give_the_bits_of_resident_shards(family):
    layers, microbatch = config(family).num_hidden_layers, packed(random_samples())
    cut_for = cut(family, 2)
    models = [tiny(family, torch.float32) for _ in range(2)]
    stages = Layout(tuple(StageLayers(n, n + 1) for n in range(layers)), (1,), shards=2)

    def on_shard(team):
        streamed = stream_model(models[team.shard], SPEC, CPU, stages, team=team)
        h_TD = None
        for number, stage in enumerate(streamed.stages):
            streamed.sources[number].copy_to(streamed.slot(number))
            h_TD = stage.hidden(microbatch, input_TD=h_TD)
        return h_TD, streamed.whole.head().logits(h_TD)

    def resident(team):
        base = cut_for(team)
        h_TD = base.hidden(microbatch)
        return h_TD, base.head().logits(h_TD)

    for got, want in zip(on_shards(2, on_shard), on_shards(2, resident), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_fp8_is_refused_where_shards_repeat_key_value_heads(tmp_path):
    spec = BaseSpec(model=str(model_folder(tmp_path)), quantize="fp8")
    refuse_sharding(spec, 2)
    with pytest.raises(BaseModelError, match="2 key/value heads, and 4 shards would round parts of their"):
        refuse_sharding(spec, 4)
