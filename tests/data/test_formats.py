"""Row formats are seen from the rows, and each becomes the samples it should."""

from __future__ import annotations

import json

import pytest

from tests.data.conftest import supervised_runs, whole_text
from weftune.data.formats import detect, normalise
from weftune.data.prepare import prepare
from weftune.data.row import BadRow
from weftune.data.spec import DataSpec
from weftune.errors import DataError

HEAD = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "yes"}]
SAME_CHAT = {
    "messages": {"messages": CHAT},
    "messages as JSON text": {"messages": json.dumps(CHAT)},
    "parts of text": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
            CHAT[1],
        ]
    },
    "prompt and completion as messages": {"prompt": CHAT[:1], "completion": CHAT[1:]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "yes"}]},
    "alpaca": {"instruction": "Hello", "input": "", "output": "yes", "text": "the whole in one"},
}


@pytest.mark.parametrize("name", SAME_CHAT)
def test_every_chat_format_gives_the_same_sample(name, smollm2, samples_of):
    samples = samples_of([SAME_CHAT[name]], smollm2)
    assert whole_text(samples, 0, smollm2) == HEAD + "yes<|im_end|>\n"
    assert supervised_runs(samples, 0, smollm2) == ["yes<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"input": {}, "preferred_output": [], "non_preferred_output": []}, "preference"),
        ({"prompt": "a", "completion": "b", "label": True}, "kto"),
        ({"prompt": "a", "completion": "b", "label": 3}, "prompt_completion"),
        ({"input_ids": [1], "labels": [1]}, "tokens"),
        ({"text": "a"}, "text"),
        ({"instruction": "a", "output": "b", "text": "c"}, "alpaca"),
        ({"question": "a"}, None),
    ],
)
def test_the_format_is_seen_from_the_columns(row, expected):
    assert detect(row) == expected


@pytest.mark.parametrize("label", [True, None])
def test_preference_and_kto_rows_are_refused_with_a_sentence(label, smollm2, tmp_path):
    row = {"prompt": "a", "completion": "b", "label": label} if label else {"chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match="the only objective so far is sft"):
        prepare(DataSpec(rows=[row]), None, smollm2, tmp_path)


def test_alpaca_input_and_system_are_part_of_what_is_given(smollm2, samples_of):
    row = {"instruction": "Hello", "input": "there", "output": "yes", "system": "fine"}
    text = whole_text(samples_of([row], smollm2), 0, smollm2)
    assert text.startswith("<|im_start|>system\nfine<|im_end|>\n<|im_start|>user\nHello\n\nthere<|im_end|>\n")


def test_text_rows_are_supervised_to_their_eos(gpt2, samples_of):
    samples = samples_of([{"text": "Hello there"}], gpt2)
    ids = gpt2("Hello there").input_ids
    assert samples.tokens(0).tolist() == [*ids, gpt2.eos_token_id]
    assert samples.mask(0).all()
    assert samples.supervised[0] == len(ids)


@pytest.mark.parametrize("train_on", ["assistant", "completion", "all"])
def test_the_prompt_is_supervised_only_with_all(train_on, gpt2, samples_of):
    samples = samples_of([{"prompt": "Hello ", "completion": "there"}], gpt2, train_on=train_on)
    prompt, completion = gpt2("Hello ").input_ids, gpt2("there").input_ids
    assert samples.tokens(0).tolist() == [*prompt, *completion, gpt2.eos_token_id]
    given = 0 if train_on == "all" else len(prompt)
    assert samples.mask(0).tolist() == [False] * given + [True] * (len(samples.tokens(0)) - given)


def test_an_assistant_in_the_prompt_is_not_supervised(smollm2, samples_of):
    samples = samples_of([{"prompt": CHAT, "completion": CHAT}], smollm2)
    assert supervised_runs(samples, 0, smollm2) == ["yes<|im_end|>"]
    assert whole_text(samples, 0, smollm2) == (HEAD + "yes<|im_end|>\n") * 2


def test_an_assistants_message_of_weight_0_is_not_supervised(smollm2, samples_of):
    unlearned = [CHAT[0], {**CHAT[1], "content": "no", "weight": 0}]
    learned = [CHAT[0], {**CHAT[1], "weight": 1}]
    for messages in (unlearned + CHAT, unlearned + learned, learned + unlearned):
        samples = samples_of([{"messages": messages}], smollm2)
        assert supervised_runs(samples, 0, smollm2) == ["yes<|im_end|>"]
        assert "no<|im_end|>" in whole_text(samples, 0, smollm2)


def test_messages_after_the_last_assistant_are_not_supervised(smollm2, samples_of):
    samples = samples_of([{"messages": [*CHAT, {"role": "user", "content": "there"}]}], smollm2)
    assert whole_text(samples, 0, smollm2) == HEAD + "yes<|im_end|>\n<|im_start|>user\nthere<|im_end|>\n"
    assert supervised_runs(samples, 0, smollm2) == ["yes<|im_end|>"]


def test_pretokenised_rows_are_taken_as_they_are_without_their_padding(smollm2, samples_of):
    row = {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}
    samples = samples_of([row], smollm2)
    assert samples.tokens(0).tolist() == [5, 6, 7]
    assert samples.mask(0).tolist() == [False, True, True]


def test_columns_are_renamed(smollm2, samples_of):
    row = {"question": "Hello", "answer": "yes", "prompt": "not this"}
    samples = samples_of([row], smollm2, columns={"prompt": "question", "completion": "answer"})
    assert whole_text(samples, 0, smollm2) == "Helloyes<|im_end|>"


def test_unknown_columns_are_answered_with_a_hint(smollm2, tmp_path):
    with pytest.raises(
        DataError, match=r"rows:1: no row format has these columns: question, answer; .*columns"
    ):
        prepare(DataSpec(rows=[{"question": "a", "answer": "b"}]), None, smollm2, tmp_path)
    with pytest.raises(DataError, match=r"data\.columns: 'promt' is no column of ours"):
        prepare(DataSpec(rows=[{"a": "b"}], columns={"promt": "a"}), None, smollm2, tmp_path)


def test_chats_without_a_template_are_answered_with_chatml(gpt2, tmp_path):
    with pytest.raises(DataError, match=r"write `data\.chat_template: chatml`"):
        prepare(DataSpec(rows=[{"messages": CHAT}]), None, gpt2, tmp_path)


def test_a_limit_takes_the_first_rows(smollm2, samples_of):
    assert len(samples_of([{"text": "Hello"}] * 5 + [{"text": 1}], smollm2, limit=5)) == 5


def turns_of(row: dict, **spec: object) -> tuple[int, ...]:
    return normalise(row, detect(row), DataSpec(rows=[], **spec)).turns


def test_the_turns_that_are_trained_on_are_the_assistants_with_weight_or_the_last_of_them():
    messages = [*CHAT, *CHAT, CHAT[0], {**CHAT[1], "weight": 0}]
    assert turns_of({"messages": messages}) == (1, 3)
    assert turns_of({"messages": messages}, train_on="completion") == (3,)
    assert turns_of({"prompt": CHAT, "completion": [*CHAT, *CHAT]}) == (3, 5)
    assert turns_of({"messages": CHAT[:1]}, train_on="all") == ()


def test_a_row_without_the_columns_of_its_format_says_which_and_what_it_has():
    spec = DataSpec(rows=[], columns={"completion": "answer"})
    row = {"prompt": "a", "x" * 300: 1}
    with pytest.raises(BadRow) as error:
        normalise(row, "prompt_completion", spec)
    sentence = "the row has no `answer`, which prompt_completion rows need (its columns: prompt, "
    assert str(error.value) == sentence + "x" * 192 + ")"
    with pytest.raises(BadRow, match=r"no `text`, which text rows need \(its columns: none\)"):
        normalise({}, "text", DataSpec(rows=[]))


def test_the_first_label_that_is_no_token_of_its_row_is_named():
    row = {"input_ids": [1, 2, 3, 4], "labels": [-100, 5, 6, 4]}
    with pytest.raises(BadRow, match=r"`labels\[1\]` must be -100 or repeat `input_ids\[1\]`"):
        normalise(row, "tokens", DataSpec(rows=[]))
    with pytest.raises(BadRow, match=r"`input_ids\[2\]` must be a whole number, not text"):
        normalise({"input_ids": [1, 2, "3", "4"]}, "tokens", DataSpec(rows=[]))
    with pytest.raises(BadRow, match="must be equally long"):
        normalise({"input_ids": [1, 2], "attention_mask": [1]}, "tokens", DataSpec(rows=[]))
    kept = normalise(
        {**row, "labels": row["input_ids"], "attention_mask": [0, 1, 1, 2]}, "tokens", DataSpec()
    )
    assert (kept.tokens.tolist(), kept.mask.tolist()) == ([2, 3, 4], [True] * 3)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": 1, "completion": "b"}, "`prompt` must be text or a list of messages, not a number"),
        ({"prompt": "a", "completion": {}}, "`completion` must be text or a list of messages, not an object"),
        ({"prompt": "a", "completion": []}, "must both be text or both be lists of messages"),
    ],
)
def test_prompts_and_completions_that_are_no_text_are_told_so(row, sentence):
    with pytest.raises(BadRow, match=sentence):
        normalise(row, "prompt_completion", DataSpec())


def test_what_alpaca_rows_leave_empty_is_left_out():
    row = {"instruction": "Hello", "output": "yes", "input": " ", "system": " "}
    assert [one["content"] for one in normalise(row, "alpaca", DataSpec()).messages] == ["Hello", "yes"]
    for name in ("input", "system"):
        with pytest.raises(BadRow, match=f"`{name}` must be text, not a number"):
            normalise({**row, name: 5}, "alpaca", DataSpec())
