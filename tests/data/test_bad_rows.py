"""Every bad row is refused with its place and a sentence, or counted when it is skipped; none is silent."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.cases import takes_less
from weftune.data.prepare import prepare
from weftune.data.spec import DataSpec
from weftune.errors import DataError

GOOD = '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "yes"}]}'
ASK = '{"role": "user", "content": "Hello"}'


def chat(*messages: str, rest: str = "") -> str:
    return f'{{"messages": [{", ".join(messages)}]{rest}}}'


def tail(message: str) -> str:
    return chat(ASK, message)


BAD = {
    "cut short": ('{"messages": [', "not valid JSON"),
    "no JSON": ("hello", "not valid JSON"),
    "two objects on a line": (GOOD + GOOD, "not valid JSON"),
    "trailing comma": ('{"messages": [],}', "not valid JSON"),
    "single quotes": ("{'messages': []}", "not valid JSON"),
    "NaN": (GOOD[:-1] + ', "score": NaN}', "NaN is not a number"),
    "Infinity": (GOOD[:-1] + ', "score": -Infinity}', "-Infinity is not a number"),
    "1e400": (GOOD[:-1] + ', "score": 1e400}', "too large"),
    "a duplicate key": (GOOD[:-1] + ', "messages": []}', "stands twice"),
    "a raw control character": ('{"messages": "a\x01b"}', "not valid JSON"),
    "an endless nest": ("[" * 100_000, "nested more than 64 levels deep"),
    "a nest of 450 lists": (GOOD[:-1] + ', "x": ' + "[" * 450 + "]" * 450 + "}", "64 levels deep"),
    "a nest of 900 objects": (GOOD[:-1] + ', "x": ' + '{"a": ' * 900 + "1" + "}" * 901, "64 levels deep"),
    "tools in a nest": (
        chat(ASK, '{"role": "assistant", "content": "a"}', rest=f', "tools": "{"[" * 500}{"]" * 500}"'),
        "`tools` is nested more than 64 levels deep",
    ),
    "arguments in a nest": (
        tail(
            '{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "'
            + "[" * 600
            + "]" * 600
            + '"}}]}'
        ),
        "arguments` is nested more than 64 levels deep",
    ),
    "a list": ("[1, 2]", "not a list"),
    "a number": ("17", "not a number"),
    "null": ("null", "not null"),
    "no columns": ("{}", "no `messages`"),
    "another format": ('{"text": "Hello"}', "no `messages`"),
    "messages null": ('{"messages": null}', "no `messages`"),
    "messages empty": ('{"messages": []}', "`messages` is empty"),
    "messages text": ('{"messages": "hello"}', "must be a list, not text"),
    "messages text like a list": ('{"messages": "[oops"}', "starts like a JSON list"),
    "messages object": ('{"messages": {"role": "user"}}', "must be a list, not an object"),
    "a message that is text": (tail('"yes"'), "`messages[1]` must be an object"),
    "no role": (tail('{"content": "yes"}'), "`messages[1]` has no `role`"),
    "an unknown role": (tail('{"role": "asistant", "content": "yes"}'), "did you mean 'assistant'?"),
    "a role in capitals": (tail('{"role": "Assistant", "content": "yes"}'), "did you mean 'assistant'?"),
    "a role that is a number": (tail('{"role": 1, "content": "yes"}'), "is 1, which is not a role"),
    "a role that is a list": (tail('{"role": ["assistant"], "content": "yes"}'), "is not a role"),
    "no content": (tail('{"role": "assistant"}'), "`messages[1].content` is missing"),
    "content null": (tail('{"role": "assistant", "content": null}'), "is missing"),
    "content a number": (tail('{"role": "assistant", "content": 4}'), "must be text, not a number"),
    "content an object": (tail('{"role": "assistant", "content": {}}'), "must be text, not an object"),
    "content true": (tail('{"role": "assistant", "content": true}'), "must be text, not true or false"),
    "content empty": (tail('{"role": "assistant", "content": " "}'), "is empty"),
    "an image": (tail('{"role": "assistant", "content": [{"type": "image_url"}]}'), "only text"),
    "a part without text": (tail('{"role": "assistant", "content": [{"type": "text"}]}'), "must be text"),
    "a lone surrogate": (tail('{"role": "assistant", "content": "a\\ud800"}'), "lone surrogate"),
    "no assistant": (chat(ASK), "no supervised token"),
    "an assistant of weight 0": (
        tail('{"role": "assistant", "content": "yes", "weight": 0}'),
        "no supervised",
    ),
    "a weight of a half": (tail('{"role": "assistant", "content": "yes", "weight": 0.5}'), "must be 0 or 1"),
    "a weight that is a list": (tail('{"role": "assistant", "content": "yes", "weight": []}'), "0 or 1"),
    "tools text": (chat(ASK, '{"role": "assistant", "content": "a"}', rest=', "tools": "x"'), "`tools`"),
    "a tool that is text": (
        chat(ASK, '{"role": "assistant", "content": "a"}', rest=', "tools": ["x"]'),
        "tools[0]",
    ),
    "tools with a surrogate": (
        chat(ASK, '{"role": "assistant", "content": "a"}', rest=', "tools": [{"name": "\\udc00"}]'),
        "lone surrogate",
    ),
    "tool calls text": (tail('{"role": "assistant", "tool_calls": "x"}'), "tool_calls"),
    "a tool call that is text": (tail('{"role": "assistant", "tool_calls": ["x"]}'), "tool_calls[0]"),
    "arguments that are no JSON": (
        tail('{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}'),
        "arguments` is not valid JSON",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_refused_with_its_line(name, smollm2, tmp_path, write_lines):
    line, expected = BAD[name]
    path = write_lines([GOOD, "", line, GOOD])
    with pytest.raises(DataError) as error:
        prepare(DataSpec(path=str(path)), None, smollm2, tmp_path / "cache")
    (mistake,) = error.value.mistakes
    assert mistake.location == "rows.jsonl:3"
    assert expected in mistake.sentence
    assert "\n" not in mistake.sentence


def test_every_kind_of_bad_row_is_skipped_and_counted_when_asked(smollm2, tmp_path, write_lines):
    path = write_lines([GOOD, *(line for line, _ in BAD.values()), GOOD])
    prepared = prepare(DataSpec(path=str(path), skip_bad_rows=True), None, smollm2, tmp_path / "cache")
    assert len(prepared.train) == 2
    (note,) = prepared.notes
    assert note.startswith(f"{len(BAD)} of {len(BAD) + 2} rows were skipped: rows.jsonl:2: ")
    assert note.endswith(f"; and {len(BAD) - 5} more.")


OTHERS = {
    "text that is a number": ([{"text": "a"}, {"text": 1}], "`text` must be text"),
    "text that is empty": ([{"text": "a"}, {"text": " "}], "`text` is empty"),
    "an empty completion": (
        [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}],
        "is empty",
    ),
    "half a list of messages": (
        [
            {"prompt": "a", "completion": "b"},
            {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]},
        ],
        "must both be",
    ),
    "alpaca without output": (
        [{"instruction": "a", "output": "b"}, {"instruction": "a", "output": None}],
        "no `output`",
    ),
    "alpaca with a number": (
        [{"instruction": "a", "output": "b"}, {"instruction": 4, "output": "b"}],
        "instruction",
    ),
    "an unknown speaker": (
        [
            {"conversations": [{"from": "gpt", "value": "a"}]},
            {"conversations": [{"from": "gptt", "value": "a"}]},
        ],
        "did you mean 'gpt'?",
    ),
    "a turn without value": (
        [{"conversations": [{"from": "gpt", "value": "a"}]}, {"conversations": [{"from": "gpt"}]}],
        "`from` and `value`",
    ),
    "a token that is text": ([{"input_ids": [1, 2]}, {"input_ids": [1, "2"]}], "must be a whole number"),
    "a token outside the vocabulary": (
        [{"input_ids": [1, 2]}, {"input_ids": [1, 10**6]}],
        "the vocabulary has",
    ),
    "a negative token": ([{"input_ids": [1, 2]}, {"input_ids": [1, -1]}], "the vocabulary has"),
    "a token beyond all numbers": ([{"input_ids": [1, 2]}, {"input_ids": [1, 10**30]}], "is no token"),
    "a token that is true": ([{"input_ids": [1, 2]}, {"input_ids": [1, True]}], "must be a whole number"),
    "no tokens": ([{"input_ids": [1, 2]}, {"input_ids": []}], "`input_ids` is empty"),
    "labels of another length": (
        [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}],
        "equally long",
    ),
    "labels of another text": (
        [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [1, 3]}],
        "must be -100",
    ),
    "labels all masked": (
        [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [-100] * 2}],
        "no supervised",
    ),
    "only the first token supervised": (
        [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [1, -100]}],
        "no supervised token",
    ),
    "a row that is no dict": ([{"text": "a"}, "text"], "must be an object"),
    "column names that are numbers": ([{"text": "a"}, {1: "a"}], "names of the columns"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_bad_row_of_any_format_is_refused_with_its_number(name, smollm2, tmp_path):
    rows, expected = OTHERS[name]
    with pytest.raises(DataError) as error:
        prepare(DataSpec(rows=rows), None, smollm2, tmp_path)
    (mistake,) = error.value.mistakes
    assert mistake.location == "rows:2"
    assert expected in mistake.sentence


def test_a_line_that_is_not_utf8_is_refused(smollm2, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"messages": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the line is not valid UTF-8"):
        prepare(DataSpec(path=str(path)), None, smollm2, tmp_path / "cache")


def test_many_bad_rows_are_listed_up_to_twenty_and_then_counted(smollm2, tmp_path, write_lines):
    path = write_lines([GOOD] + ["{"] * 50)
    with pytest.raises(DataError) as error:
        prepare(DataSpec(path=str(path)), None, smollm2, tmp_path / "cache")
    assert [mistake.location for mistake in error.value.mistakes] == [
        f"rows.jsonl:{n}" for n in range(2, 22)
    ] + [""]
    assert error.value.mistakes[-1].sentence == "and 30 more"


def long_row(words: int) -> str:
    return chat(
        '{"role": "user", "content": "' + "Hello " * words + '"}', '{"role": "assistant", "content": "yes"}'
    )


def first_supervised(words: int, tokenizer, folder) -> int:
    """How many tokens of a long row must be kept for one of them to be supervised."""
    samples = prepare(DataSpec(rows=[json.loads(long_row(words))]), None, tokenizer, folder).train
    return int(samples.mask(0).argmax()) + 1


def test_a_row_that_is_cut_before_its_answer_is_told_with_both_remedies(smollm2, tmp_path, write_lines):
    needed = first_supervised(50, smollm2, tmp_path / "whole")
    path = write_lines([GOOD, long_row(50)])
    with pytest.raises(DataError) as error:
        prepare(DataSpec(path=str(path), max_length=30), None, smollm2, tmp_path / "cache")
    assert str(error.value) == (
        "rows.jsonl:2: the row has no supervised token within its first 30 tokens; "
        f"raise `data.max_length` to {needed} or more, or leave such rows out with `data.skip_bad_rows: true`"
    )
    cut = prepare(DataSpec(path=str(path), max_length=needed), None, smollm2, tmp_path / "cache")
    assert cut.train.supervised.tolist()[1] == 1
    with pytest.raises(DataError, match=f"to {needed} or more"):
        prepare(DataSpec(path=str(path), max_length=needed - 1), None, smollm2, tmp_path / "cache")


def test_a_thousand_rows_that_are_cut_before_their_answer_are_told_once(smollm2, tmp_path, write_lines):
    needed = first_supervised(60, smollm2, tmp_path / "whole")
    path = write_lines([GOOD, *[long_row(50)] * 700, GOOD, *[long_row(60)] * 300])
    spec = DataSpec(path=str(path), max_length=30)
    with pytest.raises(DataError) as error:
        prepare(spec, None, smollm2, tmp_path / "cache")
    assert str(error.value) == (
        "rows.jsonl:2: the row has no supervised token within its first 30 tokens (1000 such rows: "
        "rows.jsonl:2, rows.jsonl:3, rows.jsonl:4, …); raise `data.max_length` to "
        f"{needed} or more, or leave such rows out with `data.skip_bad_rows: true`"
    )
    skipped = prepare(replace(spec, skip_bad_rows=True), None, smollm2, tmp_path / "cache")
    assert len(skipped.train) == 2
    assert skipped.notes[0] == (
        "1000 of 1002 rows were skipped: rows.jsonl:2: the row has no supervised token within its first 30 "
        "tokens (1000 such rows: rows.jsonl:2, rows.jsonl:3, rows.jsonl:4, …)."
    )


def test_rows_that_the_base_cannot_read_to_their_answer_are_not_told_to_raise_max_length(smollm2, tmp_path):
    rows = [json.loads(long_row(words)) for words in (40, 50, 60)]
    context = first_supervised(40, smollm2, tmp_path / "whole")
    with pytest.raises(DataError) as error:
        prepare(DataSpec(rows=rows, max_length=30), None, smollm2, tmp_path, context=context)
    shorter, longer = (mistake.sentence for mistake in error.value.mistakes)
    assert f"within its first 30 tokens; raise `data.max_length` to {context} or more" in shorter
    assert f"first {context} tokens, which is all that the base reads (2 such rows: rows:2, rows:3)" in longer
    assert "cannot be raised beyond that; shorten such rows, or leave" in longer


def test_other_mistakes_are_told_beside_rows_that_are_cut_before_their_answer(smollm2, tmp_path):
    rows = [{"input_ids": [1, 10**6]}, {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}] * 2
    with pytest.raises(DataError) as error:
        prepare(DataSpec(rows=rows, max_length=2), None, smollm2, tmp_path)
    assert [mistake.location for mistake in error.value.mistakes] == ["rows:1", "rows:2", "rows:3"]
    assert "(2 such rows: rows:2, rows:4)" in error.value.mistakes[1].sentence


def test_a_long_row_without_any_supervised_token_is_not_told_to_be_cut(smollm2, tmp_path):
    rows = [{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3], "labels": [-100] * 3}]
    with pytest.raises(DataError, match=r"rows:2: the row has no supervised token$"):
        prepare(DataSpec(rows=rows, max_length=2), None, smollm2, tmp_path)


def test_a_template_that_refuses_a_row_names_the_row(tmp_path, write_lines):
    from tests.data import families

    path = write_lines(
        [GOOD, chat('{"role": "system", "content": "a"}', '{"role": "assistant", "content": "b"}')]
    )
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: the chat template refuses this row: Only user and assistant"
    ):
        prepare(DataSpec(path=str(path)), None, families.mistral(), tmp_path / "cache")


@pytest.mark.timed
def test_ten_megabytes_of_bad_rows_are_found_within_two_seconds(smollm2, tmp_path):
    path = tmp_path / "rows.jsonl"
    bad = tail('{"role": "asistant", "content": "' + "yes " * 20 + '"}') + "\n"
    path.write_text(GOOD + "\n" + bad * (10_000_000 // len(bad)))

    def refuse() -> None:
        with pytest.raises(DataError) as error:
            prepare(DataSpec(path=str(path)), None, smollm2, tmp_path / "cache")
        assert len(error.value.mistakes) == 21

    assert takes_less(2, refuse)


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_an_empty_dataset_is_a_sentence(lines, smollm2, tmp_path, write_lines):
    path = write_lines(lines)
    with pytest.raises(DataError, match=r"rows\.jsonl: the dataset is empty"):
        prepare(DataSpec(path=str(path)), None, smollm2, tmp_path / "cache")


def test_a_dataset_of_which_every_row_is_skipped_is_a_sentence(smollm2, tmp_path, write_lines):
    path = write_lines([chat(ASK)])
    with pytest.raises(DataError, match="none of its 1 rows can be used"):
        prepare(DataSpec(path=str(path), skip_bad_rows=True), None, smollm2, tmp_path / "cache")


def test_sixty_kinds_of_bad_rows_are_known() -> None:
    assert len(BAD) + len(OTHERS) >= 60


@pytest.mark.timed
def test_ten_megabytes_of_every_kind_are_found_within_two_seconds(smollm2, tmp_path):
    lines = [line for name, (line, _) in BAD.items() if "nest" not in name]
    good = chat(ASK, '{"role": "assistant", "content": "' + "yes " * 60 + '"}')
    part = "".join(f"{line}\n{good}\n" for line in lines)
    path = tmp_path / "rows.jsonl"
    path.write_text(GOOD + "\n" + part * (10_000_000 // len(part)))

    def refuse() -> None:
        with pytest.raises(DataError) as error:
            prepare(DataSpec(path=str(path)), None, smollm2, tmp_path / "cache")
        assert len(error.value.mistakes) == 21

    assert takes_less(2, refuse)


TABLES = {
    "a bad quote in the header": ('te"xt,"b\na,b\n', "rows.csv:1", "the header is not valid CSV"),
    "an open quote in the header": ('"text\na\n', "rows.csv:1", "the header is not valid CSV"),
    "a bad quote": ('text,b\na,b\n"a"c,b\na,b\n', "rows.csv:3", "not valid CSV"),
    "a field too many": ("text,b\na,b\na,b,c\n", "rows.csv:3", "the row has 3 fields"),
    "two columns of one name": ("text,text\na,b\n", "rows.csv:1", "two columns have the same name"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_bad_line_of_a_table_is_refused_with_its_line(name, smollm2, tmp_path):
    text, place, expected = TABLES[name]
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        prepare(DataSpec(path=str(path)), None, smollm2, tmp_path / "cache")
    (mistake,) = error.value.mistakes
    assert mistake.location == place
    assert expected in mistake.sentence
