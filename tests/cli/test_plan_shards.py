"""`weftune plan --shards`: what a run would refuse is refused with the same sentence, without torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weftune.base.architecture import refuse_shards
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError

LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
SPEC = BaseSpec(model="base")


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_heads_and_widths_that_divide_are_accepted(shards):
    refuse_shards(SPEC, LLAMA, shards)


@pytest.mark.parametrize(
    ("config", "shards", "words"),
    [
        (
            LLAMA,
            3,
            "8 attention heads, 2 key/value heads and a feed-forward of width 96, which 3 shards cannot",
        ),
        ({**LLAMA, "intermediate_size": 90}, 4, "feed-forward of width 90, which 4 shards cannot divide"),
        ({"model_type": "gpt2"}, 2, r"base \(gpt2\) cannot be divided into shards; Weftune knows how"),
        ({"model_type": "mixtral"}, 2, r"base \(mixtral\) cannot be divided into shards"),
    ],
)
def test_a_base_that_shards_cannot_divide_gets_a_sentence(config, shards, words):
    with pytest.raises(BaseModelError, match=words):
        refuse_shards(SPEC, config, shards)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_formats_with_plain_products_are_accepted(quantize):
    refuse_shards(replace(SPEC, quantize=quantize), LLAMA, 2)


def test_fp8_gets_a_sentence():
    with pytest.raises(BaseModelError, match="base in fp8 cannot be divided into shards: activations are"):
        refuse_shards(replace(SPEC, quantize="fp8"), LLAMA, 2)
