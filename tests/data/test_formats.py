"""Row formats are seen from the rows, and each becomes the samples it should."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from tests.data.conftest import supervised_runs, whole_text
from weftune.data.formats import (
    check_values,
    clean_messages,
    clean_sharegpt,
    clean_tools,
    detect_format,
    normalise_row,
    require_list,
    require_text,
)
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
    assert detect_format(row) == expected


@pytest.mark.parametrize("label", [True, None])
def test_preference_and_kto_rows_are_refused_with_a_sentence(label, smollm2, tmp_path):
    row = {"prompt": "a", "completion": "b", "label": label} if label else {"chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match="these rows are"):
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
    return normalise_row(row, detect_format(row), DataSpec(rows=[], **spec)).turns


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
        normalise_row(row, "prompt_completion", spec)
    sentence = "the row has no `answer`, which prompt_completion rows need (its columns: prompt, "
    assert str(error.value) == sentence + "x" * 192 + ")"
    with pytest.raises(BadRow, match=r"no `text`, which text rows need \(its columns: none\)"):
        normalise_row({}, "text", DataSpec(rows=[]))


def test_the_first_label_that_is_no_token_of_its_row_is_named():
    row = {"input_ids": [1, 2, 3, 4], "labels": [-100, 5, 6, 4]}
    with pytest.raises(BadRow, match=r"`labels\[1\]` must be -100 or repeat `input_ids\[1\]`"):
        normalise_row(row, "tokens", DataSpec(rows=[]))
    with pytest.raises(BadRow, match=r"`input_ids\[2\]` must be a whole number, not text"):
        normalise_row({"input_ids": [1, 2, "3", "4"]}, "tokens", DataSpec(rows=[]))
    with pytest.raises(BadRow, match="must be equally long"):
        normalise_row({"input_ids": [1, 2], "attention_mask": [1]}, "tokens", DataSpec(rows=[]))
    kept = normalise_row(
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
        normalise_row(row, "prompt_completion", DataSpec())


def test_what_alpaca_rows_leave_empty_is_left_out():
    row = {"instruction": "Hello", "output": "yes", "input": " ", "system": " "}
    assert [one["content"] for one in normalise_row(row, "alpaca", DataSpec()).messages] == ["Hello", "yes"]
    for name in ("input", "system"):
        with pytest.raises(BadRow, match=f"`{name}` must be text, not a number"):
            normalise_row({**row, name: 5}, "alpaca", DataSpec())


ASK = {"role": "user", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def cleaned(**message: Any) -> dict[str, Any]:
    (clean,) = clean_messages([{"role": "assistant", **message}], "messages")
    return clean


def refused(sentence: str) -> Any:
    return pytest.raises(BadRow, match=f"^{re.escape(sentence)}$")


def test_a_sound_message_is_kept_without_what_is_null():
    assert clean_messages([{**ASK, "name": None}], "messages") == (ASK,)
    assert cleaned(content="yes", name="Ann", weight=1) == {
        "role": "assistant",
        "content": "yes",
        "name": "Ann",
        "weight": 1,
    }
    assert cleaned(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])["content"] == "ab"


def test_beside_calls_content_may_be_null_or_absent_and_stays_so():
    assert cleaned(tool_calls=[CALL]) == {"role": "assistant", "tool_calls": [CALL]}
    assert cleaned(content=None, tool_calls=[CALL])["content"] is None
    assert cleaned(content=" ", tool_calls=[CALL])["content"] == " "
    assert cleaned(content="yes", tool_calls=[]) == {"role": "assistant", "content": "yes"}
    with refused("`messages[0].content` is missing"):
        cleaned(content=None, tool_calls=[])
    with refused("`messages[0].content` is missing"):
        clean_messages([{"role": "user", "tool_calls": [CALL]}], "messages")
    with refused("`messages[0].content` is empty: an assistant's message must say something"):
        cleaned(content=" ")
    assert clean_messages([{"role": "user", "content": ""}], "m") == ({"role": "user", "content": ""},)


def test_what_stands_beside_the_content_is_checked_too():
    with refused("`messages[0].name` holds a lone surrogate or a byte that is not UTF-8"):
        cleaned(content="yes", name="\ud800")
    with refused("`messages[1].note.score[1]` holds a number that is not finite"):
        clean_messages([ASK, {**ASK, "note": {"score": [1.0, math.inf]}}], "messages")
    with refused("`messages[0].tool_calls[0].function.arguments.a` holds a number that is not finite"):
        cleaned(tool_calls=[{"function": {"name": "f", "arguments": {"a": math.nan}}}])
    with refused("`messages[0].tool_calls[0].function.arguments.a` holds a number that is not finite"):
        cleaned(tool_calls=[{"function": {"name": "f", "arguments": '{"a": NaN}'}}])


def test_values_of_every_kind_are_checked_to_their_end():
    check_values({"a": ["b", 1, 2.5, None, True, ("c",)]}, "row")
    for value, place in ((["a", "\ud800"], "row[1]"), ({"a": ("\ud800",)}, "row.a[0]"), ("\ud800", "row")):
        with refused(f"`{place}` holds a lone surrogate or a byte that is not UTF-8"):
            check_values(value, "row")
    with refused("`row` must be text, not a number"):
        check_values({1: "a"}, "row")
    with refused("`text` must be text, not null"):
        require_text(None, "text")


def test_a_part_that_is_no_text_is_named_by_its_kind():
    with refused("`messages[0].content[1]` is 'image_url', but only text can be trained on"):
        cleaned(content=[{"type": "text", "text": "a"}, {"type": "image_url"}])
    with refused("`messages[0].content[0]` is 'text', but only text can be trained on"):
        cleaned(content=["a"])
    with refused("`messages[0].content[0]` is 'a number', but only text can be trained on"):
        cleaned(content=[5])
    with refused("`messages[0].content[0].text` must be text, not null"):
        cleaned(content=[{"type": "text"}])


def test_a_role_that_is_unknown_is_answered_with_the_nearest_or_with_all():
    def answer(role: Any) -> str:
        with pytest.raises(BadRow) as error:
            clean_messages([{"role": role, "content": "a"}], "messages")
        return str(error.value)

    start = "`messages[0].role` is {}, which is not a role; "
    assert answer("Asistant") == start.format("'Asistant'") + "did you mean 'assistant'?"
    known = "known are system, developer, user, assistant, tool"
    assert answer("xyz") == start.format("'xyz'") + known
    assert answer(["user"]) == start.format("['user']") + known
    assert answer("z" * 200) == start.format("'" + "z" * 79) + known
    with refused("`messages[0]` has no `role`"):
        clean_messages([{"content": "a"}], "messages")
    with refused("`messages[0]` must be an object with `role` and `content`, not text"):
        clean_messages(["a"], "messages")


@pytest.mark.parametrize("weight", [0, 1, 0.0, 1.0])
def test_a_weight_is_0_or_1(weight):
    assert cleaned(content="a", weight=weight)["weight"] == weight
    for wrong in (0.5, 2, -1, "1"):
        with refused("`messages[0].weight` must be 0 or 1"):
            cleaned(content="a", weight=wrong)


def test_thinking_has_every_name_that_templates_read():
    for name in ("reasoning_content", "thinking", "reasoning"):
        clean = cleaned(content="a", **{name: "hm"})
        assert clean["thinking"] == clean["reasoning_content"] == "hm"
    assert "thinking" not in cleaned(content="a")
    both = cleaned(content="a", thinking="one", reasoning_content="two")
    assert (both["thinking"], both["reasoning_content"]) == ("one", "two")


def test_sharegpt_speakers_become_roles():
    turns = [
        {"from": speaker, "value": "a", "weight": weight}
        for speaker, weight in (("system", None), ("human", None), ("gpt", 0), ("observation", 1))
    ]
    assert clean_sharegpt(turns, "conversations") == (
        {"role": "system", "content": "a"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a", "weight": 0},
        {"role": "tool", "content": "a", "weight": 1},
    )
    for turn in ("a", {"from": "gpt"}, {"value": "a"}):
        with refused("`conversations[1]` must be an object with `from` and `value`"):
            clean_sharegpt([turns[0], turn], "conversations")
    with refused("`conversations[0].value` must be text, not a number"):
        clean_sharegpt([{"from": "gpt", "value": 5}], "conversations")
    with pytest.raises(BadRow, match=r"`conversations\[0\]\.from` is 'humn', .* did you mean 'human'"):
        clean_sharegpt([{"from": "humn", "value": "a"}], "conversations")
    for clean in (clean_sharegpt, clean_messages):
        with refused("`rows` is empty"):
            clean([], "rows")


def test_a_list_may_stand_as_json_text_in_a_table():
    assert require_list(' [1, "a"]', "cells") == [1, "a"]
    assert require_list((1, 2), "cells") == (1, 2)
    for value, kind in (("a [1]", "text"), (None, "null"), ({}, "an object")):
        with refused(f"`cells` must be a list, not {kind}"):
            require_list(value, "cells")
    with refused("`cells` starts like a JSON list but is not one"):
        require_list("[1", "cells")
    with refused("`cells` is nested more than 64 levels deep"):
        require_list("[" * 65 + "]" * 65, "cells")
    with refused("`cells` starts like a JSON list but is not one"):
        require_list("[" * 100_000, "cells")


def test_tools_are_objects_or_there_are_none():
    assert [clean_tools(value) for value in (None, "", [], "[]")] == [None] * 4
    assert clean_tools('[{"name": "add"}]') == clean_tools(({"name": "add"},)) == [{"name": "add"}]
    with refused("`tools[1]` must be an object, not text"):
        clean_tools([{}, "add"])
    with refused("`tools[0].name` holds a lone surrogate or a byte that is not UTF-8"):
        clean_tools([{"name": "\ud800"}])


def arguments_of(arguments: Any) -> Any:
    return cleaned(tool_calls=[{"function": {"name": "f", "arguments": arguments}}])["tool_calls"][0][
        "function"
    ]["arguments"]


def test_arguments_that_stand_as_json_text_become_what_they_say():
    assert [arguments_of(text) for text in ('{"a": 1}', "[2]", "", " ", {"b": 3})] == [
        *({"a": 1}, [2], {}, {}, {"b": 3})
    ]
    assert cleaned(tool_calls=[{"name": "flat"}])["tool_calls"] == [{"name": "flat"}]
    for text in ("{", "[" * 100_000):
        with refused("`messages[0].tool_calls[0].function.arguments` is not valid JSON"):
            arguments_of(text)
    with refused("`messages[0].tool_calls[0].function.arguments` is nested more than 64 levels deep"):
        arguments_of("[" * 65 + "]" * 65)
    with refused("`messages[0].tool_calls[1]` must be an object, not text"):
        cleaned(tool_calls=[CALL, "add"])
    with refused("`messages[0].tool_calls[0].function.name` must be text, not null"):
        cleaned(tool_calls=[{"function": {}}])
