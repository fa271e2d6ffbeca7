from __future__ import annotations

import json

import pytest

from tests.data import families
from weftune.base.config import bytes_per_value, read_config, read_tokenizer
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError


def test_a_folder_gives_its_config_and_its_tokenizer(tmp_path):
    families.smollm2().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    spec = BaseSpec(model=str(tmp_path))
    assert read_config(spec) == {"model_type": "llama"}
    assert read_tokenizer(spec).get_vocab() == families.smollm2().get_vocab()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, r"holds no config\.json"),
        ("{", "cannot be read"),
        ("[]", "holds no mapping"),
        (json.dumps({"model_type": "llama", "quantization_config": {}}), "quantised weights"),
    ],
)
def test_a_config_that_says_nothing_useful_gets_a_sentence(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(BaseModelError, match=sentence):
        read_config(BaseSpec(model=str(tmp_path)))


def test_a_folder_without_a_tokenizer_gets_a_sentence(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BaseModelError, match=r"The tokenizer of .* cannot be read"):
        read_tokenizer(BaseSpec(model=str(tmp_path)))


@pytest.mark.parametrize(("model", "folder"), [("demo", "demo/Smol-1"), ("tiny.gguf", "gguf/tiny-abc")])
def test_a_base_that_must_be_converted_is_read_once_it_is(tmp_path, monkeypatch, model, folder):
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path))
    with pytest.raises(BaseModelError, match="run `weftune preview` once"):
        read_config(BaseSpec(model=model))
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(BaseSpec(model=model)) == {"model_type": "llama"}


def test_a_hub_id_that_cannot_be_fetched_gets_a_sentence():
    with pytest.raises(BaseModelError, match="no folder owner/name here, and the Hub cannot be reached"):
        read_config(BaseSpec(model="owner/name"))


def test_values_are_as_wide_as_the_device_likes_unless_told():
    assert bytes_per_value(BaseSpec(model="m"), on_gpu=True) == 2
    assert bytes_per_value(BaseSpec(model="m"), on_gpu=False) == 4
    assert bytes_per_value(BaseSpec(model="m", dtype="float64"), on_gpu=True) == 8
