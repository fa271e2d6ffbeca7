"""A base in host memory: every byte where the plan wants it, and the same numbers out of it."""

from itertools import pairwise

import pytest
import torch

from tests.base.folders import model_folder
from tests.base.packs import CPU, base_of, packed, random_samples
from tests.families import EVERY, config, randomised, tiny
from weftune.adapters.banks import Banks
from weftune.base.host.pinned import host_vectors
from weftune.base.host.streamed import load_streamed, stream_model
from weftune.base.load import load_base
from weftune.base.spec import BaseSpec
from weftune.plan.program.layout import Layout, StageLayers


def a_layer_each(family, resident=()):
    layers = config(family).num_hidden_layers
    return Layout(tuple(StageLayers(n, n + 1, n in resident) for n in range(layers)), slot_counts=(1,))


def through(base, microbatch):
    """The last hidden states, each stage brought when its turn comes."""
    given_TD = None
    for number, stage in enumerate(base.stages):
        if number in base.sources:
            base.sources[number].copy_to(base.slot(number))
        given_TD = stage.hidden(microbatch, input_TD=given_TD)
    return given_TD


@pytest.mark.parametrize("family", EVERY)
def test_stages_that_take_turns_in_one_place_give_the_bits_of_the_whole_base(family):
    whole, microbatch = base_of(tiny(family)), packed(random_samples())
    base = stream_model(tiny(family), whole.spec, CPU, a_layer_each(family))
    h_TD = through(base, microbatch)
    assert torch.equal(h_TD, whole.hidden(microbatch))
    assert torch.equal(base.whole.head().logits(h_TD), whole.head().logits(h_TD))
    assert base.whole.shape == whole.shape
    assert sorted(site for stage in base.stages for site in stage.sites()) == sorted(whole.sites())


@pytest.mark.parametrize("family", EVERY)
def test_read_from_files_it_is_the_same(family, tmp_path):
    spec = BaseSpec(model=str(model_folder(tmp_path, family, torch.float64)), dtype="float64")
    whole, microbatch = load_base(spec, CPU), packed(random_samples())
    base = load_streamed(spec, CPU, a_layer_each(family, resident={1}))
    h_TD = through(base, microbatch)
    assert torch.equal(h_TD, whole.hidden(microbatch))
    assert torch.equal(base.whole.head().logits(h_TD), whole.head().logits(h_TD))


def test_files_in_shards_and_another_dtype_than_theirs(tmp_path):
    model = randomised(config("gemma3"), torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    spec = BaseSpec(model=str(tmp_path), dtype="bfloat16")
    base, microbatch = load_streamed(spec, CPU, a_layer_each("gemma3")), packed(random_samples())
    assert torch.equal(through(base, microbatch), load_base(spec, CPU).hidden(microbatch))


def test_a_tied_head_is_the_embedding():
    base = stream_model(tiny("gpt2"), BaseSpec(model="tiny"), CPU, a_layer_each("gpt2"))
    model = base.whole.model
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_only_streamed_layers_have_bytes_on_the_host_and_no_layer_has_them_twice():
    base = stream_model(tiny("gemma3"), BaseSpec(model="tiny"), CPU, a_layer_each("gemma3", resident={1}))
    layers = base.whole.model.base_model.layers
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers]
    assert {stage: source.size for stage, source in base.sources.items()} == {0: sizes[0], 2: sizes[2]}
    assert base.arena.shape == (1, max(sizes[0], sizes[2]))
    inside = range(base.arena.data_ptr(), base.arena.data_ptr() + base.arena.numel())
    assert all(p.data_ptr() in inside for index in (0, 2) for p in layers[index].parameters())
    assert not any(p.data_ptr() in inside for p in layers[1].parameters())


def test_what_shares_its_input_lies_side_by_side():
    base = stream_model(tiny("qwen2"), BaseSpec(model="tiny"), CPU, a_layer_each("qwen2"))
    attention = base.whole.model.base_model.layers[0].self_attn
    for kind in ("weight", "bias"):
        parts = [getattr(getattr(attention, name), kind) for name in ("q_proj", "k_proj", "v_proj")]
        for before, after in pairwise(parts):
            assert after.data_ptr() == before.data_ptr() + before.numel() * before.element_size()


def test_sites_that_were_copied_out_of_their_slot_to_be_multiplied_together_are_refused():
    """Their copies would never hear of a stage that comes."""
    base = stream_model(tiny("llama"), BaseSpec(model="tiny"), CPU, a_layer_each("llama"))
    base.refuse_copies()
    whole = base.whole
    apart = [name for name in whole.sites() if ".0." in name and name.endswith(("q_proj", "o_proj"))]
    assert len(apart) == 2
    Banks(whole.sites(), whole.shape.sites, next(whole.model.parameters()), [apart])
    with pytest.raises(AssertionError, match="has left its slot"):
        base.refuse_copies()


def test_vectors_of_one_piece_of_host_memory_are_apart_and_aligned():
    one, other = host_vectors([(5, torch.float32), (3, torch.float64)], CPU)
    one.fill_(1.0)
    assert other.tolist() == [0.0] * 3
    assert one.data_ptr() % 256 == other.data_ptr() % 256 == 0
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
