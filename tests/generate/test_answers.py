"""Answers of the base and of its adapters in text."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.base.folders import model_folder, word_tokenizer
from tests.base.packs import CPU
from tests.base.quant.bases import plain_folder, stood_for
from tests.families import tiny
from weftune.base.spec import BaseSpec
from weftune.errors import AdapterError
from weftune.generate.answers import Answers, StreamedAnswer, generate_answers
from weftune.generate.decoder import Generation
from weftune.generate.sampling import Sampling


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


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


def spoken_by_peft(base: Path, adapter: Path | None, prompt: str, max_tokens: int = 8) -> str:
    """The same by hand: one forward pass a token, no cache."""
    model = tiny("llama", torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    tokenizer = word_tokenizer()
    tokens = tokenizer(f"<s> user {prompt} </s> <s> assistant")["input_ids"]
    start = len(tokens)
    with torch.no_grad():
        while len(tokens) < start + max_tokens and tokens[-1] != tokenizer.eos_token_id:
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return str(tokenizer.decode(tokens[start:], skip_special_tokens=True))


def test_the_base_and_each_adapter_answer_for_themselves(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    adapters = {f"job.{seed}": adapter_folder(tmp_path / str(seed), seed) for seed in (1, 2)}
    said = generate_answers(BaseSpec(model=str(base)), adapters, "w10 w20 w30", max_tokens=8, device=CPU)
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
        said.append(generate_answers(spec, adapter, "w10 w20", max_tokens=8, device=CPU))
    assert said[0] == said[1]
    assert said[0]["base"] != said[0]["job"]


def test_a_folder_that_is_no_adapter_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"is no adapter folder: it holds no adapter_config\.json"):
        generate_answers(BaseSpec(model="never/loaded"), {"job": tmp_path}, "w10", device=CPU)


def test_an_adapter_of_another_base_is_a_sentence(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", "opt")
    adapter = adapter_folder(tmp_path / "adapter", 1, "llama")
    with pytest.raises(AdapterError, match="is for another base: it adapts no module of this one"):
        generate_answers(
            BaseSpec(model=str(base)),
            {"job": adapter},
            "w10",
            max_tokens=2,
            device=CPU,
        )


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    adapters = {f"job{seed}": adapter_folder(tmp_path / str(seed), seed) for seed in (1, 2)}
    answers = Answers(BaseSpec(model=str(base)), adapters, CPU)
    prompts = [(name, answers.encode_prompt(name, "w10 w20 w30")) for name in adapters]
    whole, other = answers.complete_prompts(prompts, Sampling(max_tokens=8))
    words = whole.text.split()
    stop = f"{words[3]} {words[4]}"
    pieces: dict[str, list[str]] = {name: [] for name in adapters}
    stopped, beside = answers.complete_prompts(
        prompts, Sampling(max_tokens=8), [stop], lambda answer, text: pieces[answer.adapter].append(text)
    )
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish_reason, stopped.is_stopped) == ("stop", True)
    assert len(stopped.generation.tokens) < len(whole.generation.tokens)
    assert beside.text == other.text
    for answer in (stopped, beside):
        assert "".join(pieces[answer.adapter]) == answer.text


def test_streamed_pieces_join_to_the_text_although_characters_span_tokens(tmp_path: Path) -> None:
    """Bytes of one character are generated one by one; no piece shows half of it."""
    tokenizer = byte_tokenizer()
    generation = Generation(None, (1,), Sampling(max_tokens=64))
    answer = StreamedAnswer("base", generation, tokenizer)
    pieces = []
    for token in tokenizer.encode("naïve 日本語 🙂!"):
        generation.tokens.append(token)
        pieces.append(answer.update())
    assert "".join(pieces) == answer.text == "naïve 日本語 🙂!"
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize(("text", "shown"), [("abc END. def", "abc "), ("abc EN", "abc EN"), ("EEND", "E")])
def test_a_stop_string_that_spans_tokens_is_never_shown(text: str, shown: str) -> None:
    """Every byte is a token. What could be the beginning of a stop string waits for the next token."""
    tokenizer = byte_tokenizer()
    generation = Generation(None, (1,), Sampling(max_tokens=64))
    answer = StreamedAnswer("base", generation, tokenizer, ("END.", "END"))
    pieces = []
    tokens = tokenizer.encode(text)
    for count, token in enumerate(tokens, 1):
        generation.tokens.append(token)
        generation.finish_reason = "length" if count == len(tokens) else None
        pieces.append(answer.update())
        if answer.is_stopped:
            break
    assert "".join(pieces) == answer.text == shown
    assert answer.finish_reason == ("stop" if "END" in text else "length")
