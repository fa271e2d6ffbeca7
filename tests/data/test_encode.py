"""The quick way to tokens against the tokenizer's own."""

from __future__ import annotations

import pytest

from tests.data import families
from weftune.data.encode import Encoder
from weftune.data.prepare import is_prepared, prepare
from weftune.data.spec import DataSpec

MAKERS = (families.llama3, families.qwen3, families.gemma3, families.smollm2, families.gpt2, families.opt)
TEXTS = ("", "Hello there", " the cat\n\nsat", "two <|im_end|> plus </s> two", "naïve 🙂 x", "1234")


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_text_becomes_the_tokens_that_the_tokenizer_itself_gives(make):
    tokenizer = make()
    tokenizer(
        ["left over"], truncation=True, max_length=2, padding="max_length" if tokenizer.pad_token else False
    )
    encoder = Encoder(tokenizer)
    wanted = make()(list(TEXTS), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert [tokens.tolist() for tokens in encoder.texts(TEXTS)] == wanted
    assert encoder.texts([]) == []


def test_many_calls_may_share_an_encoder(tmp_path):
    rows = [{"text": "Hello there"}, {"text": "the cat sat on mats"}]
    encoder, spec = Encoder(families.smollm2()), DataSpec(rows=rows)
    alone = prepare(spec, None, families.smollm2(), tmp_path / "alone").train
    assert not is_prepared(spec, None, encoder, tmp_path / "shared")
    shared = prepare(spec, None, encoder, tmp_path / "shared").train
    assert is_prepared(spec, None, families.smollm2(), tmp_path / "shared")
    assert shared.fingerprint == alone.fingerprint
    assert [shared.tokens(i).tolist() for i in range(2)] == [alone.tokens(i).tolist() for i in range(2)]
