"""A base in stages computes what the whole base computes, bit for bit, and reads only what it needs."""

from itertools import pairwise

import pytest
import torch

from tests.base.folders import model_folder
from tests.base.packs import CPU, base_of, cut_base, packed, random_samples
from tests.families import EVERY, config, randomised, tiny
from weftune.base.load import load_base
from weftune.base.spec import BaseSpec
from weftune.base.stages import load_stage
from weftune.core.shapes import LayerRange
from weftune.errors import BaseModelError


def ranges(cuts):
    return [LayerRange(start, stop, cuts[-1]) for start, stop in pairwise(cuts)]


def through(stages, microbatch):
    """The last hidden states after all stages, one after another."""
    given_TD = None
    for stage in stages:
        given_TD = stage.hidden(microbatch, input_TD=given_TD)
    return given_TD


def layers_of(family):
    return config(family).num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", EVERY)
def test_two_stages_give_the_bits_of_the_whole_base(family, dtype):
    whole, microbatch = base_of(tiny(family, dtype)), packed(random_samples())
    for cut in range(1, layers_of(family)):
        stages = [
            cut_base(tiny(family, dtype), whole.spec, CPU, held)
            for held in ranges([0, cut, layers_of(family)])
        ]
        h_TD = through(stages, microbatch)
        assert torch.equal(h_TD, whole.hidden(microbatch))
        assert torch.equal(stages[-1].head().logits(h_TD), whole.head().logits(h_TD))
        assert sorted(site for stage in stages for site in stage.sites()) == sorted(whole.sites())
        assert all(stage.whole_sites == whole.shape.sites for stage in stages)


@pytest.mark.parametrize("family", EVERY)
def test_stages_read_from_files_give_the_bits_of_the_whole_base(family, tmp_path, monkeypatch):
    """Only their own tensors are read, also where files hold every expert's apart."""
    monkeypatch.setattr("weftune.base.stages.load_plain", lambda *_: pytest.fail("the whole base was read"))
    spec = BaseSpec(model=str(model_folder(tmp_path, family, torch.float64)), dtype="float64")
    whole, microbatch = load_base(spec, CPU), packed(random_samples())
    stages = [load_stage(spec, CPU, held) for held in ranges([0, 1, layers_of(family)])]
    h_TD = through(stages, microbatch)
    assert torch.equal(h_TD, whole.hidden(microbatch))
    assert torch.equal(stages[-1].head().logits(h_TD), whole.head().logits(h_TD))


def test_a_stage_per_layer_of_a_deeper_base_and_files_with_an_index(tmp_path):
    settings = config("gemma3")
    model = randomised(settings, torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    spec = BaseSpec(model=str(tmp_path), dtype="float32")
    whole, microbatch = load_base(spec, CPU), packed(random_samples())
    stages = [load_stage(spec, CPU, held) for held in ranges([0, 1, 2, 3])]
    assert torch.equal(through(stages, microbatch), whole.hidden(microbatch))


def test_a_stage_holds_its_own_layers_only_and_both_ends_hold_a_tied_matrix(tmp_path):
    spec = BaseSpec(model=str(model_folder(tmp_path, "gemma3")), dtype="float32")
    whole = load_base(spec, CPU)
    first, middle, last = (load_stage(spec, CPU, held) for held in ranges([0, 1, 2, 3]))
    layer = sum(p.numel() for p in whole.model.base_model.layers[1].parameters())
    embedding = whole.model.get_input_embeddings().weight
    assert middle.shape.parameters == layer
    assert first.shape.parameters == layer + embedding.numel()
    assert last.shape.parameters == layer + embedding.numel() + whole.shape.hidden
    assert torch.equal(first.model.get_input_embeddings().weight, embedding)
    assert torch.equal(last.head().weight_VD, embedding)


def test_a_stage_of_pickled_weights_is_refused(tmp_path):
    folder = model_folder(tmp_path, "llama")
    state = {name: value.clone() for name, value in tiny("llama", torch.float32).state_dict().items()}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    spec = BaseSpec(model=str(folder), dtype="float32")
    with pytest.raises(BaseModelError, match=r"weights in pytorch_model\.bin, and Weftune opens safetensors"):
        load_stage(spec, CPU, ranges([0, 1, 2])[0])


def test_a_family_that_nobody_has_cut_is_refused_with_a_sentence():
    from transformers import GPTNeoXConfig

    settings = GPTNeoXConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    model = randomised(settings, torch.float32)
    with pytest.raises(BaseModelError, match=r"gpt_neox.*cannot be cut into stages"):
        cut_base(model, BaseSpec(model="other"), CPU, LayerRange(0, 1, 2))


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = model_folder(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match="lack 1 weights"):
        load_stage(BaseSpec(model=str(folder), dtype="float32"), CPU, LayerRange(1, 2, 2))
