"""Weights that stay in their files: the same bits, no memory of the host, and a sentence if files fail."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.base.folders import model_folder
from tests.base.host.test_streamed import a_layer_each, through
from tests.base.packs import CPU, packed, random_samples
from tests.families import COMMON, EVERY, config, randomised
from weftune.base.host.source import MappedFile, MappedStage, SourcePart, Staging
from weftune.base.host.streamed import load_streamed, weights_in_files
from weftune.base.load import load_base
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError


def assert_same(spec, base):
    whole, microbatch = load_base(spec, CPU), packed(random_samples())
    h_TD = through(base, microbatch)
    assert torch.equal(h_TD, whole.hidden(microbatch))
    assert torch.equal(base.whole.head().logits(h_TD), whole.head().logits(h_TD))
    assert all(isinstance(source, MappedStage) for source in base.sources.values())


@pytest.mark.parametrize("family", EVERY)
def test_every_family_gives_the_bits_of_the_whole_base(family, tmp_path):
    spec = BaseSpec(model=str(model_folder(tmp_path, family, torch.float64)), dtype="float64")
    assert_same(spec, load_streamed(spec, CPU, a_layer_each(family, resident={1}), keeps_files_mapped=True))


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_files_in_shards_and_tied_heads(family, tmp_path):
    model = randomised(config(family), torch.bfloat16)
    assert model.config.tie_word_embeddings
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    spec = BaseSpec(model=str(tmp_path), dtype="bfloat16")
    base = load_streamed(spec, CPU, a_layer_each(family), keeps_files_mapped=True)
    assert_same(spec, base)
    tied = base.whole.model
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight


def test_a_stage_may_come_while_another_is_between_its_forward_and_its_backward(tmp_path):
    spec = BaseSpec(model=str(model_folder(tmp_path, "llama", torch.float64)), dtype="float64")
    cut = a_layer_each("llama")
    base = load_streamed(spec, CPU, replace(cut, slot_counts=(2,)), keeps_files_mapped=True)
    base.sources[0].copy_to(base.slot(0))
    weight = base.whole.model.base_model.layers[0].self_attn.q_proj.weight
    x = torch.ones(3, weight.shape[1], dtype=weight.dtype, requires_grad=True)
    y = x @ weight.T
    base.sources[1].copy_to(base.slot(1))
    y.sum().backward()
    assert torch.allclose(x.grad[0], weight.sum(0))


# -- chunks ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A file of a few tensors whose bytes are all told apart from their neighbours."""
    path = tmp_path_factory.mktemp("numbered") / "a.safetensors"
    bytes_of = lambda size, start: (torch.arange(start, start + size) % 251).to(torch.uint8)  # noqa: E731
    tensors = {"a": bytes_of(5000, 0), "b": bytes_of(13, 7), "c": bytes_of(9000, 100), "d": bytes_of(1, 5)}
    save_file(tensors, path)
    return MappedFile(path), tensors


@settings(max_examples=60, deadline=None)
@given(st.integers(100, 16_000), st.lists(st.integers(0, 15), min_size=4, max_size=4))
def test_in_chunks_of_any_size_all_bytes_come_to_their_places(numbered, chunk, gaps):
    file, tensors = numbered
    parts, start = [], 0
    for gap, (name, value) in zip(gaps, tensors.items(), strict=True):
        found = file.tensors[name]
        parts.append(SourcePart(start + gap, found))
        start += gap + len(value)
    slot = torch.zeros(start, dtype=torch.uint8)
    for staging in (None, Staging(CPU, chunk)):
        stage = MappedStage(tuple(parts), staging)
        assert stage.size == len(slot)
        stage.copy_to(slot.zero_())
        for part, value in zip(parts, tensors.values(), strict=True):
            assert torch.equal(slot[part.start : part.stop], value)


# -- memory ----------------------------------------------------------------------------------------------

LAYERS, WIDTH = 4, 1024
WATCHED = """
import sys, torch
from weftune.base.spec import BaseSpec
from weftune.base.host.streamed import load_streamed
from weftune.plan.program.layout import Layout, StageLayers

def held(*kinds):
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return sum(int(lines[kind].split()[0]) * 1024 for kind in kinds)

folder, layers = sys.argv[1], int(sys.argv[2])
cut = Layout(tuple(StageLayers(n, n + 1) for n in range(layers)), slot_counts=(1,))
bases = []
for mapped in (True, False):
    before = held("RssAnon", "RssShmem"), held("RssFile")
    base = load_streamed(BaseSpec(model=folder, dtype="float32"), torch.device("cpu"), cut, mapped)
    for stage, source in base.sources.items():
        source.copy_to(base.slot(stage))
    bases.append(base)
    print(held("RssAnon", "RssShmem") - before[0], held("RssFile") - before[1])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Layers of 50 MiB."""
    folder = tmp_path_factory.mktemp("large")
    settings = LlamaConfig(
        **COMMON,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(settings)
    model.to_empty(device="cpu").save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")
def test_a_mapped_base_takes_no_memory_for_the_layers_that_are_not_on_the_device(large):
    """The device is pretended: its one slot is memory of the process, too. The same base kept in memory shows
    that this is where it would be seen."""
    words = [sys.executable, "-c", WATCHED, str(large), str(LAYERS)]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    memory, in_files, kept, _ = (int(word) for word in told.split())
    layer = 13 * WIDTH**2 * 4
    assert memory < 1.5 * layer
    assert in_files < layer
    assert kept > (LAYERS + 1) * layer * 0.95


# -- files that fail -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path, "llama", torch.float32)


def spec_of(folder, dtype="float32"):
    return BaseSpec(model=str(folder), dtype=dtype)


def cut_off(path):
    os.truncate(path, path.stat().st_size - 100)


def test_a_file_cut_off_before_the_start_is_told(folder):
    cut_off(folder / "model.safetensors")
    with pytest.raises(BaseModelError, match=r"cannot be loaded: .*file not fully covered|incomplete"):
        load_streamed(spec_of(folder), CPU, a_layer_each("llama"), keeps_files_mapped=True)


def test_a_shard_that_is_missing_is_named(tmp_path):
    randomised(config("llama"), torch.float32).save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(BaseModelError, match=f"{gone.name} is missing"):
        load_streamed(spec_of(tmp_path), CPU, a_layer_each("llama"), keeps_files_mapped=True)


def test_weights_of_another_dtype_cannot_stay_in_their_files(folder):
    with pytest.raises(
        BaseModelError, match=r"is stored as F32 and the run computes in BF16; set the base's"
    ):
        weights_in_files(spec_of(folder, "bfloat16"), CPU)


def test_weights_that_the_model_knows_by_other_names_cannot_either(folder):
    path = folder / "model.safetensors"
    save_file({name.replace("q_proj", "query"): value for name, value in load_file(path).items()}, path)
    with pytest.raises(BaseModelError, match="in no safetensors files that name them as the model does"):
        weights_in_files(spec_of(folder), CPU)


def test_a_file_that_loses_its_name_under_way_can_still_be_read(folder):
    base = load_streamed(spec_of(folder), CPU, a_layer_each("llama"), keeps_files_mapped=True)
    base.sources[0].copy_to(base.slot(0))
    before = base.slot(0).clone()
    (folder / "model.safetensors").unlink()
    base.sources[0].copy_to(base.slot(0).zero_())
    assert before.any()
    assert torch.equal(base.slot(0), before)


def test_a_file_that_changes_under_way_is_told_and_not_touched(folder):
    base = load_streamed(spec_of(folder), CPU, a_layer_each("llama"), keeps_files_mapped=True)
    cut_off(folder / "model.safetensors")
    with pytest.raises(
        BaseModelError, match=r"model\.safetensors has changed while weights are read from it"
    ):
        base.sources[0].copy_to(base.slot(0))


def pages_can_be_asked_for():
    return sys.platform == "linux" and tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14)


@pytest.mark.skipif(not pages_can_be_asked_for(), reason="older systems end the process")
def test_pages_that_cannot_be_read_are_told_and_do_not_end_the_process(tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(bytes(1 << 20))
    file = MappedFile(path)
    os.truncate(path, 1 << 12)
    file._first_status = file._file_status()  # as if the file had been looked at just before
    with pytest.raises(BaseModelError, match=r"pages can no longer be read \(Bad address\)"):
        file.read(1 << 19, 1 << 20, torch.zeros(1 << 19, dtype=torch.uint8))


def test_what_the_header_says_is_what_safetensors_reads(folder):
    path = folder / "model.safetensors"
    file = MappedFile(path)
    values = load_file(path)
    assert file.tensors.keys() == values.keys()
    for name, value in values.items():
        stored = file.tensors[name]
        out = torch.zeros(stored.stop - stored.start, dtype=torch.uint8)
        file.read(stored.start, stored.stop, out)
        assert torch.equal(out.view(torch.float32).view(stored.shape), value)
