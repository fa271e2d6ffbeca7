"""Loading: folders that work, and a sentence for each thing that can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaConfig

from tests.base.folders import model_folder
from tests.base.packs import CPU, packed, random_samples
from tests.families import EVERY, config, tiny
from weftune.base.load import base_dtype, inspect, load_base, load_tokenizer
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError

STORIES = Path(__file__).parents[2].parent / "shared" / "models" / "stories15m"


@pytest.mark.parametrize("family", EVERY)
def test_a_folder_loads_to_the_model_that_was_saved(family: str, tmp_path: Path) -> None:
    base = load_base(BaseSpec(model=str(model_folder(tmp_path, family))), CPU)
    saved = tiny(family, torch.float32)
    assert base.dtype == torch.float32
    samples = random_samples()
    logits_TV = base.head().logits(base.hidden(packed(samples)))
    expected = torch.cat([saved(tokens_L[None]).logits[0] for tokens_L in samples])
    torch.testing.assert_close(logits_TV, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("family", EVERY)
def test_inspecting_tells_the_loaded_shape_without_reading_weights(family: str, tmp_path: Path) -> None:
    spec = BaseSpec(model=str(model_folder(tmp_path, family)))
    loaded = load_base(spec, CPU).shape
    (tmp_path / "model.safetensors").unlink()
    assert inspect(spec, CPU) == loaded


def test_the_dtype_is_bfloat16_on_a_gpu_and_float32_on_a_cpu_unless_told(tmp_path: Path) -> None:
    silent, told = BaseSpec(model="any"), BaseSpec(model=str(model_folder(tmp_path)), dtype="float64")
    assert base_dtype(silent, torch.device("cuda", 0)) == torch.bfloat16
    assert base_dtype(silent, CPU) == torch.float32
    base = load_base(told, CPU)
    assert base.dtype == torch.float64
    assert base.shape.bytes_per_value == 8


def test_a_missing_folder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"^There is no folder .*nowhere\.$"):
        load_base(BaseSpec(model=str(tmp_path / "nowhere")), CPU)


def test_a_folder_without_a_config_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"holds no config\.json"):
        inspect(BaseSpec(model=str(tmp_path)))


def test_a_missing_gguf_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"^There is no GGUF file .*model\.gguf\.$"):
        load_tokenizer(BaseSpec(model=str(tmp_path / "model.gguf")))


def test_a_file_that_is_no_gguf_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model at all, not even close to one")
    with pytest.raises(BaseModelError, match=r"model\.gguf cannot be read"):
        load_tokenizer(BaseSpec(model=str(tmp_path / "model.gguf")))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(BaseModelError, match="is a file, but a base is a folder"):
        load_tokenizer(BaseSpec(model=str(tmp_path / "model.bin")))


def test_a_hub_that_cannot_be_reached_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for load in (load_tokenizer, inspect):
        with pytest.raises(
            BaseModelError, match="There is no folder nobody/nothing here, and the Hub cannot"
        ):
            load(BaseSpec(model="nobody/nothing"))


def test_files_that_lack_a_weight_are_refused(tmp_path: Path) -> None:
    file = model_folder(tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        BaseModelError, match=r"lack 1 weights of a llama model, model\.layers\.1\.mlp\.up_proj"
    ):
        load_base(BaseSpec(model=str(tmp_path)), CPU)


def test_torn_files_are_a_sentence(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BaseModelError, match=r"model\.safetensors is damaged or cut off"):
        load_base(BaseSpec(model=str(folder)), CPU)
    (folder / "config.json").write_text("{")
    with pytest.raises(BaseModelError, match="cannot be loaded"):
        inspect(BaseSpec(model=str(folder)))


def test_a_folder_of_an_unknown_model_type_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(BaseModelError, match=r"cannot be loaded: .*abacus"):
        inspect(BaseSpec(model=str(tmp_path)))


def test_a_vision_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    LlavaConfig(text_config=config("llama")).save_pretrained(tmp_path)
    with pytest.raises(BaseModelError, match="is a vision model"):
        load_base(BaseSpec(model=str(tmp_path)), CPU)


@pytest.mark.skipif(not STORIES.is_dir(), reason="stories15m is not there")
def test_a_real_model_loads_and_has_learnt_something() -> None:
    spec = BaseSpec(model=str(STORIES))
    base, tokenizer = load_base(spec, CPU), load_tokenizer(spec)
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    tokens_T = torch.tensor(tokenizer(story)["input_ids"])
    logits_TV = base.head().logits(base.hidden(packed([tokens_T])))
    assert torch.nn.functional.cross_entropy(logits_TV[:-1], tokens_T[1:]) < 2.0
    assert inspect(spec, CPU) == base.shape
