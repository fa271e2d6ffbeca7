"""Messages as rows hold them, brought to the form that chat templates expect, or refused by name."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from weftune.data.messages import (
    check_values,
    clean_messages,
    clean_sharegpt,
    clean_tools,
    list_of,
    text_of,
)
from weftune.data.row import BadRow

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
        text_of(None, "text")


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
    assert list_of(' [1, "a"]', "cells") == [1, "a"]
    assert list_of((1, 2), "cells") == (1, 2)
    for value, kind in (("a [1]", "text"), (None, "null"), ({}, "an object")):
        with refused(f"`cells` must be a list, not {kind}"):
            list_of(value, "cells")
    with refused("`cells` starts like a JSON list but is not one"):
        list_of("[1", "cells")
    with refused("`cells` is nested more than 64 levels deep"):
        list_of("[" * 65 + "]" * 65, "cells")
    with refused("`cells` starts like a JSON list but is not one"):
        list_of("[" * 100_000, "cells")


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
