"""A quantised base is read tensor by tensor, and computes what its matrices do."""

from __future__ import annotations

import json
import weakref
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from tests.base.packs import base_of, packed, random_samples
from tests.base.quant.bases import (
    CONFIG,
    in_layers,
    plain_folder,
    quantised_base,
    quantised_model,
    stood_for,
    stored_folder,
)
from tests.base.quant.emulated import emulated
from tests.cases import slow_but
from tests.families import FAMILIES, MIXTURES, tiny, tiny_wrapper
from tests.run.models import LAYERS, deep
from weftune.base.architecture import spec_shape
from weftune.base.config import read_config
from weftune.base.host.streamed import load_streamed, weights_in_files
from weftune.base.load import inspect, load_base, load_plain
from weftune.base.model import Base
from weftune.base.quant.formats import Nf4
from weftune.base.quant.linear import QuantLinear, QuantWeight, quant_paths
from weftune.base.spec import BaseSpec
from weftune.base.stages import load_stage
from weftune.core.shapes import LayerRange
from weftune.errors import BaseModelError
from weftune.plan.cost.estimate import Speed, base_layers, base_pass_time
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.program.layout import Layout, StageLayers

CPU = torch.device("cpu")


def spec_of(folder, quantize=None, dtype="float32"):
    return BaseSpec(model=str(folder), dtype=dtype, quantize=quantize)


def logits(base):
    with torch.no_grad():
        return base.head().logits(base.hidden(packed(random_samples())))


def tensors(base, paths):
    """The tensors of quantised weights, by path and name."""
    modules = {path: base.model.get_submodule(path) for path in paths}
    return {f"{path}.{name}": value for path, one in modules.items() for name, value in one.parts.items()}


def same_bytes(mine, other):
    return torch.equal(*(one.contiguous().view(-1).view(torch.uint8) for one in (mine, other)))


@pytest.mark.parametrize("family", slow_but(FAMILIES, ["llama", "gpt2", "opt"]))
def test_in_fp8_it_computes_what_linears_do_that_multiply_so(family, tmp_path):
    model = with_linears(tiny(family, torch.float64))
    base = quantised_base(tiny(family, torch.float64), "fp8")
    other = Base.from_model(emulated(model), spec_of(tmp_path), CPU)
    torch.testing.assert_close(logits(base), logits(other), rtol=1e-9, atol=1e-9)
    plain = Base.from_model(stood_for(model, "fp8"), spec_of(tmp_path), CPU)
    assert 1e-3 < (logits(base) - logits(plain)).norm() / logits(plain).norm() < 0.1
    read = load_base(spec_of(plain_folder(tmp_path, tiny(family, torch.float64)), "fp8", "float64"), CPU)
    assert quant_paths(read.model) == in_layers(model)
    paths = quant_paths(read.model)
    found, wanted = tensors(read, paths), tensors(base, paths)
    assert all(same_bytes(found[name], value) for name, value in wanted.items())


def with_linears(model):
    """In the place of what is stored the other way round."""
    for path in in_layers(model):
        module = model.get_submodule(path)
        if isinstance(module, Conv1D):
            made = torch.nn.Linear(module.nx, module.nf, bias=True, device="meta")
            made.weight = torch.nn.Parameter(module.weight.T.contiguous(), requires_grad=False)
            made.bias = module.bias
            model.set_submodule(path, made)
    return model


@pytest.mark.parametrize(
    ("family", "quantize"),
    slow_but(
        product(FAMILIES, ("nf4", "int8")),
        [("llama", "nf4"), ("gpt2", "nf4"), ("gpt2", "int8"), ("opt", "int8")],
    ),
)
def test_a_base_that_is_quantised_while_it_is_read_computes_what_its_matrices_do(family, quantize, tmp_path):
    model = tiny(family, torch.float32)
    base = load_base(spec_of(plain_folder(tmp_path, model), quantize), CPU)
    assert quant_paths(base.model) == in_layers(model)
    plain = Base.from_model(stood_for(model, quantize), spec_of(tmp_path), CPU)
    torch.testing.assert_close(logits(base), logits(plain), rtol=1e-5, atol=1e-5)
    assert base.shape.sites == plain.shape.sites
    assert base.shape.parameters == plain.shape.parameters


@pytest.mark.parametrize(
    ("family", "quantize"),
    slow_but(
        product(FAMILIES, ("nf4", "int8", "fp8")),
        [("llama", "nf4"), ("llama", "fp8"), ("opt", "int8"), ("opt", "nf4")],
    ),
)
def test_its_bytes_are_foretold_from_its_config_alone(family, quantize, tmp_path):
    model = tiny(family, torch.bfloat16)
    spec = spec_of(plain_folder(tmp_path, model), quantize, "bfloat16")
    base = load_base(spec, CPU)
    held = sum(value.nbytes for value in base.model.parameters())
    assert quantize == "fp8" or held < sum(value.nbytes for value in model.parameters())
    for shape in (base.shape, inspect(spec, CPU), spec_shape(spec, read_config(spec), 2)):
        assert abs(shape.base_bytes - held) <= 1
    assert inspect(spec, CPU) == base.shape


def test_of_plain_weights_one_matrix_at_a_time_is_in_memory(tmp_path, monkeypatch):
    model = tiny("llama", torch.float32)
    folder = plain_folder(tmp_path, model)
    alive, most = weakref.WeakSet(), [0]
    quantise = Nf4.quantise

    def watched(self, weight_NK):
        alive.add(weight_NK)
        most[0] = max(most[0], len(alive))
        return quantise(self, weight_NK)

    monkeypatch.setattr(Nf4, "quantise", watched)
    load_plain(spec_of(folder, "nf4"), CPU)
    assert most[0] == 1


def test_no_layer_is_read_by_transformers_as_it_lies_there(tmp_path, monkeypatch):
    """Which would have all of it in memory."""
    folder = plain_folder(tmp_path, tiny("llama", torch.float32))
    monkeypatch.setattr("weftune.base.load.AutoModelForCausalLM.from_pretrained", None)
    load_plain(spec_of(folder, "nf4"), CPU)


def test_files_with_names_that_only_transformers_knows_are_quantised_in_memory(tmp_path, monkeypatch):
    model = tiny("llama", torch.float32)
    folder = plain_folder(tmp_path, model)
    monkeypatch.setattr("weftune.base.load.missing_parameters", lambda model, files: ["strange"])
    found = load_plain(spec_of(folder, "nf4"), CPU)
    wanted = quantised_model(model)
    for name, value in wanted.named_parameters():
        assert torch.equal(value, found.get_parameter(name)), name


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("family", slow_but(FAMILIES, ["llama", "gpt2"]))
def test_a_folder_in_the_form_of_bitsandbytes_is_loaded_bit_by_bit(family, nested, tmp_path):
    model = with_weights_of_linears(tiny(family, torch.float32))
    spec = spec_of(stored_folder(tmp_path, model, nested))
    base = load_base(spec, CPU)
    assert quant_paths(base.model) == in_layers(model)
    for path in in_layers(model):
        parts = Nf4(nested).quantise(model.get_submodule(path).weight.detach())
        found = base.model.get_submodule(path).parts
        assert found.keys() == parts.keys()
        assert all(torch.equal(found[part], value) for part, value in parts.items())
    assert load_plain(spec_of(tmp_path, "nf4"), CPU) is not None
    assert inspect(spec, CPU) == base.shape
    assert abs(spec_shape(spec, read_config(spec), 4).base_bytes - base.shape.base_bytes) <= 1


@pytest.mark.parametrize("nested", [True, False])
def test_a_folder_that_bitsandbytes_itself_has_stored_is_loaded_bit_by_bit(nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    model = tiny("llama", torch.float32)
    base = load_base(spec_of(stored_folder(tmp_path, model, nested, theirs=True)), CPU)
    for path in in_layers(model):
        module, weight = base.model.get_submodule(path), model.get_submodule(path).weight.detach()
        packed, state = functional.quantize_4bit(weight, compress_statistics=nested, quant_type="nf4")
        assert isinstance(module, QuantLinear)
        assert torch.equal(module.weight, packed)
        assert torch.equal(module.absmax, state.absmax)
        assert torch.equal(module.frozen_weight().matrix(), functional.dequantize_4bit(packed, state))


def with_weights_of_linears(model):
    """A Conv1D is stored the other way round, as the linear that it stands for."""
    for path in in_layers(model):
        module = model.get_submodule(path)
        if isinstance(module, Conv1D):
            module.weight = torch.nn.Parameter(module.weight.T.contiguous(), requires_grad=False)
    return model


def test_linears_that_such_a_folder_has_left_alone_stay_plain(tmp_path):
    model = tiny("llama", torch.float32)
    file = stored_folder(tmp_path, model) / "model.safetensors"
    skipped = "model.layers.1.mlp.down_proj.weight"
    weights = {name: value for name, value in load_file(file).items() if not name.startswith(skipped)}
    save_file(weights | {skipped: model.state_dict()[skipped]}, file, metadata={"format": "pt"})
    base = load_base(spec_of(tmp_path), CPU)
    assert torch.equal(base.model.state_dict()[skipped], model.state_dict()[skipped])
    assert len(quant_paths(base.model)) == len(in_layers(model)) - 1


def test_a_damaged_state_of_such_a_folder_is_one_sentence(tmp_path):
    file = stored_folder(tmp_path, tiny("llama", torch.float32)) / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight.quant_state.bitsandbytes__nf4"
    for state in (b"{", b"[]", json.dumps({"quant_type": "nf4", "blocksize": 4096}).encode()):
        changed = {name: torch.tensor(list(state), dtype=torch.uint8)}
        save_file(weights | changed, file, metadata={"format": "pt"})
        with pytest.raises(BaseModelError, match=r"down_proj\.weight is stored with"):
            load_plain(spec_of(tmp_path), CPU)


@pytest.mark.parametrize(
    ("config", "quantize", "sentence"),
    [
        ({"quant_method": "gptq", "bits": 4}, None, r"quantised weights \(gptq\)"),
        ({"quant_method": "awq"}, "nf4", r"\(awq\), which Weftune cannot read; name the unquantised model"),
        (CONFIG, "int8", "is stored in nf4 and cannot be quantised to int8"),
        (CONFIG | {"bnb_4bit_quant_type": "fp4"}, None, "fp4 of bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None, "LLM.int8 of bitsandbytes"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(config, quantize, sentence, tmp_path):
    folder = plain_folder(tmp_path, tiny("llama", torch.float32))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    for load in (read_config, inspect):
        with pytest.raises(BaseModelError, match=sentence):
            load(spec_of(folder, quantize))


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts_are_refused(family, tmp_path):
    folder = plain_folder(tmp_path, tiny(family, torch.float32))
    for load in (read_config, inspect):
        with pytest.raises(BaseModelError, match="mixture of experts, which Weftune trains in plain weights"):
            load(spec_of(folder, "nf4"))


def test_a_format_that_there_is_not_is_one_sentence(tmp_path):
    folder = plain_folder(tmp_path, tiny("llama", torch.float32))
    with pytest.raises(BaseModelError, match="quantize must be nf4, int8 or fp8, got 'q4_0'"):
        inspect(spec_of(folder, "q4_0"))


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_the_text_tower_of_a_wrapper_is_quantised_too(quantize, tmp_path):
    folder = plain_folder(tmp_path, tiny_wrapper("gemma3", torch.float32))
    base = load_base(spec_of(folder, quantize), CPU)
    assert len(quant_paths(base.model)) == len(base.shape.sites)
    plain = load_plain(spec_of(folder), CPU)
    path = quant_paths(base.model)[0]
    found = base.model.get_submodule(path).frozen_weight().matrix()
    assert 0 < (found - plain.get_submodule(path).weight).abs().max() < 0.2


@pytest.mark.parametrize("quantize", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_stages_have_the_bits_of_the_whole_wherever_they_are(family, quantize, tmp_path):
    folder = plain_folder(tmp_path, deep(family, torch.bfloat16))
    spec = spec_of(folder, quantize, "bfloat16")
    whole = load_base(spec, CPU)
    paths = quant_paths(whole.model)
    wanted = tensors(whole, paths)
    stages = [load_stage(spec, CPU, LayerRange(start, start + 2, LAYERS)) for start in (0, 2)]
    assert [one.dtype for one in stages] == [torch.bfloat16] * 2
    found = {}
    for stage in stages:
        found |= tensors(stage, quant_paths(stage.model))
    assert found.keys() == wanted.keys()
    assert all(same_bytes(found[name], value) for name, value in wanted.items())
    cut = Layout(tuple(StageLayers(n, n + 1) for n in range(LAYERS)), slot_counts=(2,))
    streamed = load_streamed(spec, CPU, cut)
    assert streamed.whole.dtype is torch.bfloat16
    for stage, source in streamed.sources.items():
        source.copy_to(streamed.slot(stage))
        here = tensors(streamed.whole, [path for path in paths if f".{stage}." in path])
        assert here
        assert all(same_bytes(wanted[name], value) for name, value in here.items())


def test_streamed_stages_carry_the_quantised_bytes(tmp_path):
    folder = plain_folder(tmp_path, deep("llama", torch.bfloat16))
    cut = Layout(tuple(StageLayers(n, n + 1) for n in range(LAYERS)), slot_counts=(1,))
    sizes = {}
    for quantize in (None, "int8", "nf4"):
        streamed = load_streamed(spec_of(folder, quantize, "bfloat16"), CPU, cut)
        sizes[quantize] = streamed.sources[0].size
        layer = streamed.whole.shape.weight_bytes_per_value * sum(
            site.weight_count for site in streamed.whole.shape.sites if ".0." in site.name
        )
        # Norms, and what lies between two tensors.
        assert 0 <= sizes[quantize] - layer <= 7 * 6 * 16 + 2 * 2 * 32
    assert sizes["int8"] < 0.6 * sizes[None]


def test_quantised_weights_are_not_read_from_their_files_in_every_step(tmp_path):
    folder = plain_folder(tmp_path, deep("llama", torch.float32))
    with pytest.raises(BaseModelError, match="quantised weights are made when they are loaded"):
        weights_in_files(spec_of(folder, "nf4"), CPU)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_the_memory_model_counts_the_bytes_and_the_largest_matrix_of_a_product(quantize, monkeypatch):
    base = quantised_base(tiny("llama", torch.float32), quantize)
    alive, most, write = weakref.WeakSet(), [0], QuantWeight.write

    def watched(self, out_NK):
        alive.add(out_NK)
        most[0] = max(most[0], sum(one.nbytes for one in alive))
        write(self, out_NK)

    monkeypatch.setattr(QuantWeight, "write", watched)
    x_TK = torch.randn(3, 32, requires_grad=True)
    for path in quant_paths(base.model):
        module = base.model.get_submodule(path)
        x = x_TK[:, :1].expand(3, module.in_features)
        module(x).sum().backward()
    held = sum(value.nbytes for value in base.model.parameters())
    for fused, matrices in ((False, 1), (True, 2)):
        need = MemoryModel(
            base.shape, budget_bytes=1 << 30, process_bytes=1000, uses_fused_ops=fused
        ).predict_need([], 0)
        assert need.resident_bytes == pytest.approx(1000 + held + matrices * most[0], abs=1)
    assert most[0] == 48 * 32 * 4


def test_a_pass_over_quantised_layers_is_priced_with_the_matrices_that_it_writes_and_reads():
    speed = Speed(flops=1e9, adapter_flops=1e9, bandwidth=1e6, launch_seconds=0.0, source="made up")
    fixed = {}
    for quantize in (None, "int8"):
        model = tiny("llama", torch.bfloat16)
        base = base_of(model) if quantize is None else quantised_base(model, quantize)
        layers = base_layers(base.shape, 0, has_separate_ends=False)
        weights = sum(layer.weight_bytes for layer in layers if layer.kind != "embedding")
        fixed[quantize] = base_pass_time(layers, speed).fixed - weights / speed.bandwidth
    values = sum(site.weight_count for site in base.shape.sites)
    assert fixed[None] == pytest.approx(0)
    assert fixed["int8"] == pytest.approx(2 * 2 * values / speed.bandwidth)
