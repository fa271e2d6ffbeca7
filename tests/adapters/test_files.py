"""Adapter folders: what is written is read back, and what cannot be used is one sentence."""

from __future__ import annotations

import json
import random
import shlex
import sys
from dataclasses import replace

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from tests.adapters.attached_banks import weights_of
from tests.base.packs import base_of
from tests.families import FAMILIES, tiny
from tests.oracle import lora_config, write_start
from weftune.adapters.folder import missing_weights_message
from weftune.adapters.kind import JobAdapter, NewAdapter
from weftune.adapters.lora.files import read_adapter, read_start
from weftune.adapters.lora.spec import LoraSpec, weight_names
from weftune.adapters.registry import get_kind, kind_of_folder
from weftune.base.shape import model_shape
from weftune.errors import AdapterError

LORA = get_kind("lora")
SPEC = LoraSpec(rank=4, alpha=6.0, targets=("q_proj", "down_proj"))


@pytest.fixture(scope="module")
def llama():
    return tiny("llama", torch.float32)


@pytest.fixture
def start(tmp_path, llama):
    """A folder as PEFT writes it, for `SPEC`."""
    config = lora_config(llama, SPEC.rank, SPEC.alpha, list(SPEC.targets))
    return write_start(tmp_path / "start", llama, config, b_scale=0.1)


def sites_of(model):
    return model_shape(model, torch.float32).sites


def change_config(folder, **keys):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def change_weights(folder, change):
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def refused(folder, sites, spec=SPEC):
    """The sentence with which `folder` is refused as the start of a job."""
    with pytest.raises(AdapterError) as caught:
        LORA.check_start(replace(spec, init_from=str(folder)), sites)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_read_back_bit_for_bit(family, tmp_path):
    base = base_of(tiny(family, torch.float32))
    ending = base.shape.sites[-1].name.rpartition(".")[2]
    spec = LoraSpec(rank=3, alpha=4.5, rslora=True, rank_pattern={ending: 5}, alpha_pattern={ending: 8.0})
    layout = LORA.layout(spec, base.shape.sites)
    weights = torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    LORA.save(tmp_path, spec, layout.parameter_views(weights), base.shape.sites, "some/base")
    read_spec, _ = read_adapter(tmp_path)
    for site in base.shape.sites:
        assert read_spec.targets_site(site.name)
        assert read_spec.rank_at(site.name) == spec.rank_at(site.name)
        assert read_spec.scale_at(site.name) == spec.scale_at(site.name)
    again = weights_of(base, "a", replace(spec, init_from=str(tmp_path)))
    assert torch.equal(again, weights)


def test_the_files_have_the_names_and_values_that_servers_look_for(tmp_path, llama):
    layout = LORA.layout(SPEC, sites_of(llama))
    LORA.save(tmp_path, SPEC, layout.parameter_views(torch.randn(layout.size)), sites_of(llama), "some/base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {
        key: config[key] for key in ("peft_type", "task_type", "r", "bias", "use_rslora", "use_dora")
    } == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
    }
    assert (config["lora_alpha"], type(config["lora_alpha"])) == (6, int)
    assert (config["modules_to_save"], config["base_model_name_or_path"]) == (None, "some/base")
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj"]
    shapes = {
        name: tuple(value.shape) for name, value in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    assert shapes["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"] == (4, 48)
    assert shapes["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"] == (32, 4)
    assert len(shapes) == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_is_written_as_names_that_peft_reads_as_the_same_sites(family, tmp_path):
    model = tiny(family, torch.float32)
    sites, spec = sites_of(model), LoraSpec(rank=2)
    layout = LORA.layout(spec, sites)
    LORA.save(tmp_path, spec, layout.parameter_views(torch.zeros(layout.size)), sites, "b")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert isinstance(config["target_modules"], list)
    peft = get_peft_model(model, lora_config(model, 2, 4, config["target_modules"]))
    names = {name for name, _ in peft.named_parameters() if "lora_A" in name}
    assert names == {f"base_model.model.{site.name}.lora_A.default.weight" for site in sites}


def test_a_folder_of_peft_is_a_start(start, llama):
    weights = read_start(replace(SPEC, init_from=str(start)), sites_of(llama))
    assert set(weights) == {
        f"model.layers.{i}.{s}" for i in (0, 1) for s in ("self_attn.q_proj", "mlp.down_proj")
    }


def test_a_folder_that_is_none_is_a_sentence(tmp_path, llama, start):
    sites = sites_of(llama)
    assert "is no adapter folder: it holds no adapter_config.json" in refused(tmp_path / "nowhere", sites)
    assert "is no adapter folder" in refused(start / "adapter_config.json", sites)
    (start / "adapter_model.safetensors").rename(start / "adapter_model.bin")
    assert "Weftune opens safetensors only; if you trust it, convert it: python -c" in refused(start, sites)
    (start / "adapter_model.bin").unlink()
    assert "holds no adapter_model.safetensors" in refused(start, sites)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "nul",
        "\udcff",
        '{"peft_type": "LORA"}',
        "[" * 100_000,
        '{"peft_type": "LORA", "r": 0}',
    ],
)
def test_a_config_that_is_no_config_is_a_sentence(start, llama, text):
    (start / "adapter_config.json").write_text(text, errors="surrogateescape")
    assert "adapter_config.json" in refused(start, sites_of(llama))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"peft_type": "VERA"}, "holds a VERA adapter, not LoRA"),
        ({"use_dora": True}, "is a DoRA adapter"),
        ({"bias": "all"}, "sets bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "belongs to a base that PEFT has changed"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"alora_invocation_tokens": [1, 2]}, "sets alora_invocation_tokens"),
        ({"r": 8}, "its config says rank 8"),
        ({"r": "four"}, "is damaged"),
        ({"r": -4}, "a rank is below 1"),
        ({"lora_alpha": None}, "is damaged"),
        ({"rank_pattern": {"(": 4}}, "is damaged"),
        ({"rank_pattern": [4]}, "is damaged"),
        ({"rank_pattern": {"q_proj": 2}}, "its config says rank 2"),
    ],
)
def test_a_config_of_something_else_is_a_sentence(start, llama, keys, sentence):
    change_config(start, **keys)
    assert sentence in refused(start, sites_of(llama))


def test_another_kind_is_named(start):
    change_config(start, peft_type="LOHA")
    with pytest.raises(AdapterError, match="holds a LOHA adapter, a kind that Weftune does not know"):
        kind_of_folder(start)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(rank=8), "has rank 4 at model.layers.0.self_attn.q_proj, the job asks for 8"),
        (dict(rank_pattern={r"layers\.1.*": 2}), "has rank 4 at model.layers.1"),
        (dict(targets="all-linear"), "is not in the folder, and 9 more differ; set adapter.targets"),
        (dict(targets=("q_proj",)), "model.layers.0.mlp.down_proj is only in the folder, and 1 more differ"),
    ],
)
def test_a_job_that_asks_for_something_else_is_a_sentence(start, llama, change, sentence):
    assert sentence in refused(start, sites_of(llama), replace(SPEC, **change))


def test_another_base_is_a_sentence(start, llama):
    wider = [replace(site, in_features=site.in_features + 1) for site in sites_of(llama)]
    assert "is for another base: at model.layers.0.self_attn.q_proj it goes from 32 to 32" in refused(
        start, wider
    )


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.update({NAME: w[NAME][:1]}), "is for another base"),
        (lambda w: w.update({NAME: w[NAME][:, :1].contiguous()}), "B [32, 1], but its config says rank 4"),
        (lambda w: w.update({NAME: w[NAME].flatten()}), "B [128], but its config"),
        (lambda w: w.update({NAME: w[NAME] * float("nan")}), "holds values that are no finite numbers"),
        (lambda w: w[NAME].view(-1)[7].fill_(float("inf")), "holds values that are no finite numbers"),
        (lambda w: w.update({NAME: w[NAME].to(torch.int32)}), "holds values that are no finite numbers"),
        (lambda w: w.pop(NAME), f"{NAME} is missing"),
        (
            lambda w: w.update({"lm_head.weight": w[NAME].clone()}),
            "lm_head.weight is no LoRA weight of a linear",
        ),
        (lambda w: w.clear(), "holds no weights"),
    ],
)
def test_weights_that_do_not_fit_are_a_sentence(start, llama, change, sentence):
    change_weights(start, change)
    assert sentence in refused(start, sites_of(llama))


def test_a_damaged_weights_file_is_refused_or_read_and_nothing_else(start, llama):
    """A flipped byte inside a tensor is another number; everywhere else it is a sentence."""
    whole = (start / "adapter_model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    refusals = 0
    for trial in range(300):
        damaged = bytearray(whole)
        if trial % 3 == 0:
            damaged = damaged[: rng.randrange(len(whole))]
        else:
            for _ in range(rng.randrange(1, 4)):
                damaged[rng.randrange(header if trial % 3 == 1 else len(whole))] = rng.randrange(256)
        (start / "adapter_model.safetensors").write_bytes(damaged)
        try:
            LORA.check_start(replace(SPEC, init_from=str(start)), sites_of(llama))
        except AdapterError:
            refusals += 1
    assert refusals >= 150


def test_a_start_is_copied_and_a_new_adapter_is_drawn_from_its_seed(start):
    base = base_of(tiny("llama", torch.float32))
    own = LORA.layout(SPEC, base.shape.sites).parameter_views(weights_of(base, "a", SPEC, seed=3))
    again = LORA.layout(SPEC, base.shape.sites).parameter_views(weights_of(base, "b", SPEC, seed=3))
    other = LORA.layout(SPEC, base.shape.sites).parameter_views(weights_of(base, "a", SPEC, seed=4))
    for (site, name), value in own.items():
        assert torch.equal(value, again[site, name])
        if name.startswith("b"):
            assert not value.any()
        else:
            assert not torch.equal(value, other[site, name])
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < value.abs().max() <= bound
    flat = torch.zeros(LORA.layout(SPEC, base.shape.sites).size)
    views = LORA.layout(SPEC, base.shape.sites).parameter_views(flat)
    adapter = JobAdapter("a", replace(SPEC, init_from=str(start)), 0)
    LORA.initialise(NewAdapter(adapter, views), base.shape.sites)
    saved = load_file(start / "adapter_model.safetensors")
    assert torch.equal(views["model.layers.0.self_attn.q_proj", "b_rN"], saved[NAME].T)


def test_the_command_converts_a_pickled_adapter(start, monkeypatch):
    _, weights = read_adapter(start)
    tensors = {
        name: value.contiguous()
        for site, pair in weights.items()
        for name, value in zip(weight_names(site), pair, strict=True)
    }
    torch.save(tensors, start / "adapter_model.bin")
    (start / "adapter_model.safetensors").unlink()
    _, flag, code, *words = shlex.split(missing_weights_message(start).partition("convert it: ")[2])
    monkeypatch.setattr(sys, "argv", [flag, *words])
    exec(code, {})
    for site, pair in read_adapter(start)[1].items():
        assert all(map(torch.equal, pair, weights[site]))
