"""Preference rows become two adjacent samples each, with the tokens of TRL's DPOTrainer."""

from __future__ import annotations

import numpy as np
import pytest

from weftune.data.collate import Part, collate
from weftune.data.prepare import prepare
from weftune.data.spec import DataSpec, EvalSpec
from weftune.errors import DataError

USER = {"role": "user", "content": "What colour is the sky?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("It is blue.", "Green, I would say."))
TEXT = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green and yellow."}
CHAT = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
IMPLICIT = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
OPENAI = {"input": {"messages": [USER]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}
MERGED = {"prompt": "Hello th", "chosen": "ere.", "rejected": "anks."}
IMPLICIT_TEXT = {"chosen": "The sky is blue.", "rejected": "The sky is black."}
ROWS = {"text": TEXT, "chat": CHAT, "implicit": IMPLICIT, "merged": MERGED, "implicit text": IMPLICIT_TEXT}


def pairs_of(rows, tokenizer, folder, evaluation=None, **spec):
    return prepare(DataSpec(rows=rows, **spec), evaluation, tokenizer, folder / "cache", row_kind="pairs")


def sides(samples, index, tokenizer):
    """The supervised text of both samples of a pair."""
    found = []
    for number in (2 * index, 2 * index + 1):
        tokens, mask = samples.tokens_and_mask(number)
        found.append(tokenizer.decode(tokens[mask]))
    return found


def test_a_row_becomes_a_chosen_and_a_rejected_sample_with_their_answers_supervised(smollm2, tmp_path):
    train = pairs_of([TEXT], smollm2, tmp_path).train
    assert (len(train), train.rows, train.group_size) == (2, 1, 2)
    assert sides(train, 0, smollm2) == [" blue.<|im_end|>", " green and yellow.<|im_end|>"]
    prompts = [train.tokens(number)[~train.mask(number)].tolist() for number in (0, 1)]
    assert prompts[0] == prompts[1] == smollm2("The sky is")["input_ids"]


@pytest.mark.parametrize("row", [IMPLICIT, OPENAI, {**IMPLICIT, "prompt": USER["content"]}])
def test_other_ways_to_write_a_pair_of_chats_give_the_same_samples(row, smollm2, tmp_path):
    wanted, found = (pairs_of([one], smollm2, tmp_path).train for one in (CHAT, row))
    assert sides(found, 0, smollm2) == ["It is blue.<|im_end|>\n", "Green, I would say.<|im_end|>\n"]
    for number in (0, 1):
        assert np.array_equal(found.tokens(number), wanted.tokens(number))
        assert np.array_equal(found.mask(number), wanted.mask(number))


def test_an_answer_begins_with_the_token_that_it_shares_with_the_prompt(smollm2, tmp_path):
    prepared = pairs_of([MERGED], smollm2, tmp_path)
    assert sides(prepared.train, 0, smollm2) == [" there.<|im_end|>", " thanks.<|im_end|>"]
    assert any("the end of the prompt has other tokens" in one for one in prepared.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_tokens_are_those_of_trl(name, smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    config = trl.DPOConfig(output_dir=str(tmp_path), bf16=False, report_to=[])
    trainer = object.__new__(trl.DPOTrainer)
    trainer._tokenizer = smollm2
    (theirs,) = trainer._prepare_dataset(Dataset.from_list([ROWS[name]]), smollm2, config, "train")
    train = pairs_of([ROWS[name]], smollm2, tmp_path).train
    for number, side in enumerate(("chosen_ids", "rejected_ids")):
        assert train.tokens(number).tolist() == theirs["prompt_ids"] + theirs[side]
        assert (~train.mask(number)).sum() == len(theirs["prompt_ids"])


def test_batches_count_pairs_and_a_pair_is_held_out_as_a_whole(smollm2, tmp_path):
    rows = [{**TEXT, "rejected": f" number {number}."} for number in range(20)]
    prepared = pairs_of(rows, smollm2, tmp_path, EvalSpec(fraction=0.3))
    train, held_out = prepared.train, prepared.evaluation
    assert held_out is not None
    assert train.rows + held_out.rows == 20
    for samples in (train, held_out):
        assert all(sides(samples, index, smollm2)[0] == " blue.<|im_end|>" for index in range(samples.rows))
    batches = [
        train.sample_order(3, seed=1).batch(step).tolist() for step in range(1, -(-train.rows // 3) + 1)
    ]
    assert sorted(index for batch in batches for index in batch) == list(range(len(train)))
    assert all(batch[0::2] == [one - 1 for one in batch[1::2]] for batch in batches)
    assert (
        train.max_batch_tokens(1)
        == train.longest_row_tokens
        == max(train.lengths[0::2] + train.lengths[1::2])
    )


def test_prompts_of_chosen_samples_are_supervised_on_request(smollm2, tmp_path):
    train = pairs_of([TEXT], smollm2, tmp_path).train
    whole = train.supervise_prompts()
    assert whole.mask(0).all()
    assert np.array_equal(whole.mask(1), train.mask(1))
    assert whole.supervised.tolist() == [train.lengths[0] - 1, train.supervised[1]]
    microbatch = collate([Part("a", 1, whole, 0, 0), Part("a", 1, whole, 1, int(whole.lengths[0]))])
    assert microbatch.answer_tokens == tuple(int(train.mask(number).sum()) for number in (0, 1))
    prefixed = whole.add_prefix(2)
    assert prefixed.supervised.tolist() == [train.lengths[0], train.supervised[1]]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({**TEXT, "chosen": ""}, "`chosen` is empty"),
        ({**TEXT, "chosen": [GOOD]}, "`chosen` and `rejected` must both be text or both be lists"),
        ({**TEXT, "prompt": [USER]}, "must all be text or all be lists of messages"),
        ({**TEXT, "rejected": 5}, "`rejected` must be text or a list of messages, not a number"),
        ({**CHAT, "chosen": [USER]}, "it holds no assistant message to train on"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no list of messages as `prompt`, and its answers begin"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "one answer continues the other"),
        ({"chosen": "a b", "rejected": "a b c"}, "one answer continues the other"),
        ({**OPENAI, "input": "hello"}, "`input` must be an object with `messages`, not text"),
        ({**TEXT, "prompt": "word " * 300}, "the row has no supervised token within its first 64 tokens"),
    ],
)
def test_a_bad_pair_is_refused_with_its_place_or_skipped_and_counted(row, sentence, smollm2, tmp_path):
    with pytest.raises(DataError) as error:
        pairs_of([TEXT, row], smollm2, tmp_path, max_length=64, format="preference")
    assert str(error.value).startswith("rows:2")
    assert sentence in str(error.value)
    kept = pairs_of([TEXT, row], smollm2, tmp_path, max_length=64, format="preference", skip_bad_rows=True)
    assert kept.train.rows == 1
    assert "1 of 2 rows were skipped" in kept.notes[0]


def test_a_long_answer_is_cut_and_its_pair_stays_whole(smollm2, tmp_path):
    prepared = pairs_of([{**TEXT, "rejected": " no" * 100}], smollm2, tmp_path, max_length=16)
    assert prepared.train.lengths.max() == 16
    assert prepared.train.rows == 1
    assert "1 of 1 rows were truncated to 16 tokens." in prepared.notes


def test_rows_that_do_not_suit_the_objective_are_refused_with_the_remedy(smollm2, tmp_path):
    with pytest.raises(
        DataError, match="which objective sft cannot use; write objective: dpo, cpo, orpo or reward"
    ):
        prepare(DataSpec(rows=[TEXT]), None, smollm2, tmp_path)
    with pytest.raises(DataError, match="these are text rows, and the job's objective needs pref"):
        pairs_of([{"text": "a"}], smollm2, tmp_path)


def test_a_row_with_other_columns_is_a_pair_if_the_objective_needs_pairs(smollm2, tmp_path):
    row = {**IMPLICIT, "prompt": USER["content"], "messages": [USER, GOOD]}
    assert pairs_of([row], smollm2, tmp_path).train.rows == 1
    assert len(prepare(DataSpec(rows=[row]), None, smollm2, tmp_path).train) == 1
