"""The quick way to tokens against the tokenizer's own."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.data import families
from weftune.data.encode import Encoded, Encoder, contains_control_token, replace_control_tokens
from weftune.data.prepare import SharedData, prepare
from weftune.data.row import BadRow
from weftune.data.spec import DataSpec
from weftune.errors import DataError

MAKERS = (families.llama3, families.qwen3, families.gemma3, families.smollm2, families.gpt2, families.opt)
TEXTS = ("", "Hello there", " the cat\n\nsat", "two <|im_end|> plus </s> two", "naïve 🙂 x", "1234")


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_text_becomes_the_tokens_that_the_tokenizer_itself_gives(make):
    tokenizer = make()
    encoder = Encoder(tokenizer)
    tokenizer(
        ["left over"], truncation=True, max_length=2, padding="max_length" if tokenizer.pad_token else False
    )
    wanted = make()(list(TEXTS), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert [tokens.tolist() for tokens in encoder.encode_texts(TEXTS)] == wanted
    assert encoder.encode_texts([]) == []


def test_many_calls_may_share_an_encoder(tmp_path):
    rows = [{"text": "Hello there"}, {"text": "the cat sat on mats"}]
    encoder, spec = Encoder(families.smollm2()), DataSpec(rows=rows)
    alone = prepare(spec, None, families.smollm2(), tmp_path / "alone").train
    assert not SharedData(encoder, tmp_path / "shared").is_prepared(spec, None)
    shared = prepare(spec, None, encoder, tmp_path / "shared").train
    assert SharedData(families.smollm2(), tmp_path / "shared").is_prepared(spec, None)
    assert shared.fingerprint == alone.fingerprint
    assert [shared.tokens(i).tolist() for i in range(2)] == [alone.tokens(i).tolist() for i in range(2)]


def melting() -> PreTrainedTokenizerFast:
    """It puts a space before a text, and joins some letters with what stands before them."""
    vocabulary = ["<unk>", "▁", "\n", "a", "b", "t", "x", "\na", "xt", "▁b"]
    made = Tokenizer(
        models.BPE(
            vocab={text: number for number, text in enumerate(vocabulary)},
            merges=[("\n", "a"), ("x", "t"), ("▁", "b")],
            unk_token="<unk>",
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def pieces_of(encoder: Encoder, tokens: np.ndarray) -> list[str]:
    return encoder.tokenizer.convert_ids_to_tokens(tokens.tolist())


def test_a_text_that_goes_on_after_another_has_no_space_put_before_it():
    encoder = Encoder(families.llama2())
    texts = ["yes no", " yes", "\n\nyes", "猫", ""]
    assert [pieces_of(encoder, tokens) for tokens in encoder.encode_continuations(texts)] == [
        ["y", "es", "▁no"],
        ["▁yes"],
        ["\n\n", "y", "es"],
        ["<0xE7>", "<0x8C>", "<0xAB>"],
        [],
    ]
    plain = Encoder(families.gpt2())
    alike = zip(plain.encode_continuations(texts), plain.encode_texts(texts), strict=True)
    assert all(one.tolist() == other.tolist() for one, other in alike)


def test_a_text_that_would_melt_into_whatever_stands_before_it_is_taken_by_itself():
    encoder = Encoder(melting())
    texts = ["t", "tab", " b", "a", "t"]
    assert [pieces_of(encoder, tokens) for tokens in encoder.encode_continuations(texts)] == [
        ["t"],
        ["t", "a", "b"],
        ["▁b"],
        ["▁", "a"],
        ["t"],
    ]


def test_pieces_tell_the_characters_that_their_tokens_came_from():
    encoder = Encoder(melting())
    made = encoder.encode_with_placeholders("t\ue000t b\ue001", {"\ue000": "ab", "\ue001": "tx"})
    spans = zip(pieces_of(encoder, made.tokens), made.starts.tolist(), made.stops.tolist(), strict=True)
    assert list(spans) == [
        *(("▁", 0, 1), ("t", 0, 1)),
        *(("▁", 1, 2), ("a", 1, 2), ("b", 1, 2)),
        *(("t", 2, 3), ("▁b", 3, 5)),
        *(("t", 5, 6), ("x", 5, 6)),
    ]
    assert [
        len(part)
        for part in (
            encoder.encode_with_placeholders("", {}).tokens,
            encoder.encode_with_placeholders("", {}).starts,
        )
    ] == [0, 0]
    assert pieces_of(encoder, encoder.encode_with_placeholders("\ue000", {"\ue000": "t"}).tokens) == ["t"]


def test_what_a_template_printed_is_parsed_for_control_tokens_and_a_stand_in_is_not():
    encoder = Encoder(families.smollm2())
    end = encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
    made = encoder.encode_with_placeholders("yes<|im_end|>\ue000<|im_end|>", {"\ue000": "<|im_end|>"})
    assert made.tokens.tolist().count(end) == 2
    assert encoder.tokenizer.decode(made.tokens) == "yes" + "<|im_end|>" * 3
    assert [part.tokens.tolist().count(end) for part in encoder.encode_rendered(["yes<|im_end|>", "a"])] == [
        1,
        0,
    ]
    assert encoder.encode_rendered([]) == []


def test_a_token_is_told_to_begin_before_a_cut_if_it_holds_characters_of_both_sides():
    encoder = Encoder(families.smollm2())
    spaced, bare = encoder.tokenizer.convert_tokens_to_ids(["Ġthe", "h"])
    assert None not in (spaced, bare)

    def splits_token(cut: int, *spans: tuple[int, int], tokens: tuple[int, ...]) -> bool:
        starts, stops = np.array(spans).T
        return bool(encoder.splits_token(Encoded(np.array(tokens), starts, stops), cut))

    assert splits_token(3, (0, 2), (2, 5), tokens=(bare, bare))
    assert splits_token(1, (0, 2), (2, 5), tokens=(bare, bare))
    assert not splits_token(2, (0, 2), (2, 5), tokens=(bare, spaced))
    assert not splits_token(5, (0, 2), (2, 5), tokens=(bare, bare))
    assert not splits_token(0, (0, 2), (2, 5), tokens=(spaced, bare))
    # Offsets that leave a token's own space out: the space stands before the cut, and is the token's.
    assert splits_token(3, (0, 2), (3, 5), tokens=(bare, spaced))
    assert not splits_token(3, (0, 2), (3, 5), tokens=(bare, bare))
    assert not splits_token(3, (0, 2), (4, 5), tokens=(bare, spaced))
    assert splits_token(6, (0, 2), (2, 5), (6, 8), tokens=(spaced, bare, spaced))
    assert not splits_token(0, (0, 2), (2, 5), (5, 8), tokens=(spaced, spaced, spaced))


def test_what_the_tokenizer_puts_before_a_text_is_found_whatever_it_puts_behind():
    assert Encoder(families.gpt2()).prefix_tokens == ()
    llama = families.llama3()
    assert Encoder(llama).prefix_tokens == (llama.bos_token_id,)
    backend = llama.backend_tokenizer
    begin, end = "<|begin_of_text|>", "<|eot_id|>"
    both = [(text, backend.token_to_id(text)) for text in (begin, end)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} {begin} $A {end}", special_tokens=both
    )
    assert Encoder(llama).prefix_tokens == (llama.bos_token_id,) * 2


def test_a_text_longer_than_the_tokenizer_expects_is_not_warned_of():
    heard: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = heard.append
    tokenizer = families.llama3()
    tokenizer.model_max_length = 3
    logging.getLogger("transformers").addHandler(listener)
    try:
        Encoder(tokenizer).encode_rendered(["the cat sat on mats"])
        assert heard == []
        tokenizer("the cat sat on mats")
    finally:
        logging.getLogger("transformers").removeHandler(listener)
    assert len(heard) == 1


def test_a_tokenizer_that_says_nothing_of_being_fast_is_refused():
    with pytest.raises(DataError, match="needs a fast tokenizer"):
        Encoder(object())


def test_a_fingerprint_is_that_of_the_vocabulary_the_special_tokens_and_what_is_put_around_a_text():
    prints = {Encoder(make()).fingerprint for make in (*MAKERS, families.llama2)}
    assert len(prints) == len(MAKERS) + 1
    assert all(len(made) == 32 for made in prints)
    other = families.smollm2()
    other.eos_token = "<|endoftext|>"
    assert Encoder(other).fingerprint not in prints
    assert Encoder(families.smollm2()).fingerprint in prints


def test_the_longest_control_token_is_found_where_one_begins_like_another():
    tokenizer = families.byte_level(["<s>", "<s>x", "<s>xy"], eos_token="<s>")
    encoder = Encoder(tokenizer)
    assert encoder.control.findall("a<s>xyb<s>x<s>") == ["<s>xy", "<s>x", "<s>"]
    assert Encoder(melting()).control.findall("<unk>") == ["<unk>"]


def test_control_tokens_are_found_in_keys_values_and_lists_and_hidden_in_all_of_them():
    control = Encoder(families.smollm2()).control
    row = [{"<|im_end|>": ["a", ("<|im_start|>", 5)]}, None, "<|im_end|>b"]
    assert contains_control_token(row, control)
    for clean in ("im_end", {"a": 1}, [], ["a", {"b": ("c",)}], 5, None):
        assert not contains_control_token(clean, control)
    for one in ({"<|im_end|>": 1}, {"a": "<|im_end|>"}, ["a", "<|im_end|>"], ({"a": ["<|im_end|>"]},)):
        assert contains_control_token(one, control)
    hidden, placeholders = replace_control_tokens(row, control)
    assert hidden == [{"\ue000": ["a", ["\ue001", 5]]}, None, "\ue000b"]
    assert placeholders == {"\ue000": "<|im_end|>", "\ue001": "<|im_start|>"}


def test_every_private_use_character_that_a_row_does_not_hold_can_stand_in():
    control = Encoder(families.smollm2()).control
    private = "".join(map(chr, range(0xE000, 0xF900)))
    _, placeholders = replace_control_tokens([private[:-1], "<|im_end|>"], control)
    assert placeholders == {private[-1]: "<|im_end|>"}
    with pytest.raises(BadRow, match="control tokens and every private-use character"):
        replace_control_tokens([private, "<|im_end|>"], control)
    assert replace_control_tokens([private, "a"], control) == ([private, "a"], {})


def test_control_tokens_in_what_goes_on_after_another_text_stay_text():
    encoder = Encoder(families.llama2())
    (tokens,) = encoder.encode_continuations(["yes</s> no"])
    assert encoder.eos not in tokens.tolist()
    assert encoder.tokenizer.decode(tokens.tolist()).strip() == "yes</s> no"


def test_a_text_that_begins_with_a_space_goes_on_with_one_space():
    """In a tokenizer that puts a space before every text, and joins a line break with a space behind it."""
    vocabulary = {token: number for number, token in enumerate(("<unk>", "▁", "x", "a", "\n", "\n▁"))}
    made = Tokenizer(models.BPE(vocabulary, [("\n", "▁")], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    found = [
        tokenizer.convert_ids_to_tokens(tokens.tolist())
        for tokens in Encoder(tokenizer).encode_continuations([" a", "a", "  a"])
    ]
    assert found == [["▁", "a"], ["a"], ["▁", "▁", "a"]]
