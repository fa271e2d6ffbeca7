"""Rows with one answer and a label become samples with the tokens of TRL's KTOTrainer."""

from __future__ import annotations

import pytest

from weftune.data.collate import Part, collate
from weftune.data.prepare import check_rows, prepare
from weftune.data.spec import DataSpec, EvalSpec
from weftune.errors import DataError

USER = {"role": "user", "content": "What colour is the sky?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("It is blue.", "Green, I would say."))
TEXT = {"prompt": "The sky is", "completion": " blue.", "label": True}
CHAT = {"prompt": [USER], "completion": [BAD], "label": False}
MERGED = {"prompt": "Hello th", "completion": "ere.", "label": False}


def labelled(rows, tokenizer, folder, evaluation=None, **spec):
    return prepare(DataSpec(rows=rows, **spec), evaluation, tokenizer, folder / "cache", row_kind="labelled")


def test_a_row_becomes_a_sample_with_its_answer_supervised_and_its_label(smollm2, tmp_path):
    train = labelled([TEXT, CHAT, MERGED], smollm2, tmp_path).train
    assert (len(train), train.rows, train.group_size) == (3, 3, 1)
    assert train.desirable.tolist() == [True, False, False]
    answers = [smollm2.decode(train.tokens(row)[train.mask(row)]) for row in range(3)]
    assert answers == [" blue.<|im_end|>", "Green, I would say.<|im_end|>\n", " there.<|im_end|>"]
    again = labelled([TEXT, CHAT, MERGED], smollm2, tmp_path).train
    assert again.desirable.tolist() == [True, False, False], "read from the cache"


def test_labels_follow_their_rows_into_held_out_samples_and_microbatches(smollm2, tmp_path):
    rows = [{**TEXT, "completion": f" {word}.", "label": word == "one"} for word in ("one", "two", "three")]
    prepared = labelled(rows, smollm2, tmp_path, EvalSpec(fraction=0.3))
    for part in prepared.parts:
        texts = [smollm2.decode(part.tokens(row)) for row in range(len(part))]
        assert part.desirable.tolist() == ["one" in text for text in texts]
    train = prepared.train
    microbatch = collate([Part("job", 1, train, row, 0) for row in range(len(train))])
    assert microbatch.desirable == tuple(train.desirable.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("row", [TEXT, CHAT, MERGED])
def test_the_tokens_are_those_of_trl(row, smollm2, tmp_path):
    pytest.importorskip("trl")
    from trl.data_utils import common_prefix_length, is_conversational

    if is_conversational(row):
        given = smollm2.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        whole = smollm2.apply_chat_template(row["prompt"] + row["completion"], return_dict=False)
    else:
        given = smollm2(row["prompt"])["input_ids"]
        whole = smollm2(row["prompt"] + row["completion"] + smollm2.eos_token)["input_ids"]
    prompt = common_prefix_length(given, whole)
    train = labelled([row], smollm2, tmp_path).train
    assert train.tokens(0).tolist() == whole
    assert train.mask(0).tolist() == [False] * prompt + [True] * (len(whole) - prompt)


@pytest.mark.parametrize(("label", "kind"), [("1", "a number"), ('"yes"', "text")])
def test_a_label_that_is_no_boolean_is_one_sentence_with_the_line(label, kind, smollm2, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"prompt": "a", "completion": "b", "label": true}\n'
        f'{{"prompt": "a", "completion": "b", "label": {label}}}\n'
    )
    sentence = f"rows.jsonl:2: `label` must be true or false, not {kind}"
    with pytest.raises(DataError, match=sentence):
        check_rows(DataSpec(path=str(file)), None, 10**6, "labelled")
    with pytest.raises(DataError, match=sentence):
        prepare(DataSpec(path=str(file)), None, smollm2, tmp_path, row_kind="labelled")
    kept = prepare(DataSpec(path=str(file), skip_bad_rows=True), None, smollm2, tmp_path, row_kind="labelled")
    assert len(kept.train) == 1
    assert any("1 of 2 rows were skipped" in note for note in kept.notes)


def test_rows_that_do_not_suit_the_objective_are_refused_with_the_remedy(smollm2, tmp_path):
    with pytest.raises(DataError, match="which objective sft cannot use; write objective: kto in the job"):
        prepare(DataSpec(rows=[TEXT]), None, smollm2, tmp_path)
    with pytest.raises(DataError, match="these are text rows, and the job's objective needs labelled"):
        labelled([{"text": "a"}], smollm2, tmp_path)
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match="these are preference pairs, and the job's objective needs labelled"):
        labelled([pair], smollm2, tmp_path)
    with pytest.raises(DataError, match="these are labelled answers, and the job's objective needs pref"):
        prepare(DataSpec(rows=[TEXT]), None, smollm2, tmp_path, row_kind="pairs")
