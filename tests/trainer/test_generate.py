"""Greedy answers of the base and of its adapters."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch

from tests.base.folders import model_folder, word_tokenizer
from tests.base.packs import CPU
from tests.base.quant.bases import plain_folder, stood_for
from tests.families import tiny
from weftune.base.spec import BaseSpec
from weftune.data.tokenise import prompt_tokens
from weftune.errors import AdapterError
from weftune.trainer.generate import generate_answers


def adapter_folder(folder: Path, seed: int, family: str = "llama") -> Path:
    """A PEFT adapter strong enough to change what is said."""
    model = peft.get_peft_model(
        tiny(family, torch.float32), peft.LoraConfig(target_modules="all-linear", r=4)
    )
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def spoken_by_peft(base: Path, adapter: Path | None, prompt: str) -> str:
    """The same by hand: one forward pass a token, no cache."""
    model = tiny("llama", torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    tokenizer = word_tokenizer()
    tokens = tokenizer(f"<s> user {prompt} </s> <s> assistant")["input_ids"]
    start = len(tokens)
    with torch.no_grad():
        while len(tokens) < start + 8 and tokens[-1] != tokenizer.eos_token_id:
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return str(tokenizer.decode(tokens[start:], skip_special_tokens=True))


def test_the_base_and_each_adapter_answer_for_themselves(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    adapters = {f"job.{seed}": adapter_folder(tmp_path / str(seed), seed) for seed in (1, 2)}
    said = generate_answers(
        BaseSpec(model=str(base)), adapters, "w10 w20 w30", tokenise=prompt_tokens, max_tokens=8, device=CPU
    )
    assert list(said) == ["base", "job.1", "job.2"]
    assert said["base"] == spoken_by_peft(base, None, "w10 w20 w30")
    for name, folder in adapters.items():
        assert said[name] == spoken_by_peft(base, folder, "w10 w20 w30")
    assert len(set(said.values())) == 3


def test_on_a_quantised_base_adapters_answer_as_on_the_weights_that_it_stands_for(tmp_path: Path) -> None:
    adapter = {"job": adapter_folder(tmp_path / "adapter", 1)}
    plain = stood_for(tiny("llama", torch.float32), "int8")
    said = []
    for folder, model, quantize in (("q", tiny("llama", torch.float32), "int8"), ("p", plain, None)):
        spec = BaseSpec(model=str(plain_folder(tmp_path / folder, model)), quantize=quantize)
        said.append(
            generate_answers(spec, adapter, "w10 w20", tokenise=prompt_tokens, max_tokens=8, device=CPU)
        )
    assert said[0] == said[1]
    assert said[0]["base"] != said[0]["job"]


def test_a_folder_that_is_no_adapter_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"is no adapter folder: it holds no adapter_config\.json"):
        generate_answers(
            BaseSpec(model="never/loaded"), {"job": tmp_path}, "w10", tokenise=prompt_tokens, device=CPU
        )


def test_an_adapter_of_another_base_is_a_sentence(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", "opt")
    adapter = adapter_folder(tmp_path / "adapter", 1, "llama")
    with pytest.raises(AdapterError, match="does not fit this base"):
        generate_answers(
            BaseSpec(model=str(base)),
            {"job": adapter},
            "w10",
            tokenise=prompt_tokens,
            max_tokens=2,
            device=CPU,
        )


def test_an_adapter_of_a_kind_that_peft_lacks_is_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "diff"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"weftune_kind": "diff"}')
    (folder / "adapter_model.safetensors").write_bytes(b"")
    base = BaseSpec(model=str(model_folder(tmp_path / "base")))
    with pytest.raises(AdapterError, match=r"holds a diff adapter, a kind that PEFT does not have.*--merged"):
        generate_answers(base, {"diff": folder}, "w5", tokenise=prompt_tokens, with_base=False, device=CPU)
