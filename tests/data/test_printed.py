"""What a chat template drops of a row is a mistake of the user's; what it prints otherwise is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.data import families
from tests.data.conftest import SHARED, supervised_runs, whole_text
from weftune.data.encode import Encoder
from weftune.data.prepare import prepare
from weftune.data.spec import DataSpec
from weftune.errors import DataError

ASK = {"role": "user", "content": "What is 4 + 4?"}
ANSWER = {"role": "assistant", "content": "It is 8."}
CALL = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"a": 4, "b": "é\n"}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"sum": "4"}', "tool_call_id": "123456789"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WITH_CALLS = {"messages": [ASK, CALLS, RESULT, ANSWER], "tools": TOOLS}


def chatml(before: str = "", body: str = "{{- message.content }}", after: str = "") -> str:
    """A template in the manner of ChatML; `body` is what it prints of a message."""
    return (
        before
        + "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
        + body
        + "{{- '<|im_end|>\n' }}{%- endfor %}"
        + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
        + after
    )


def with_calls(call: str, content: str = "{{- message.content or '' }}") -> str:
    return chatml(
        body=content + "{%- for call in message.tool_calls or [] %}" + call + "{%- endfor %}",
    )


@pytest.fixture
def prepared(tmp_path):
    def make(source: str, *rows: Any, **spec: Any):
        tokenizer = families.smollm2()
        tokenizer.chat_template = source
        return prepare(DataSpec(rows=list(rows), **spec), None, tokenizer, tmp_path / "cache")

    return make


PRINTS = {
    "as JSON": with_calls("{{- call | tojson }}"),
    "name and JSON": with_calls("{{- call.function.name + ' ' + call.function.arguments | tojson }}"),
    "sorted, indented, ASCII": with_calls(
        "{{- call.function | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}"
    ),
    "argument by argument": with_calls(
        "{{- '<function=' + call.function.name + '>' }}"
        "{%- for key, value in call.function.arguments.items() %}"
        "{{- '<' + key + '>' + value | string | trim + '</' + key + '>' }}{%- endfor %}"
    ),
    "arguments as text": with_calls(
        "{{- call.function.name + '```json\n' + call.function.arguments + '```' }}"
    ),
    "results escaped": with_calls(
        "{{- call.function | tojson }}",
        "{{- message.content | tojson if message.role == 'tool' else (message.content or '') | trim }}",
    ),
    "in capitals": with_calls(
        "{{- call | tojson | upper }}", "{{- message.content | upper if message.content }}"
    ),
    "calls where content is null": chatml(
        body="{%- if message.content is none %}{{- message.tool_calls | tojson }}"
        "{%- else %}{{- message.content }}{%- endif %}"
    ),
    "calls where content is no key": with_calls("{{- call | tojson }}", "{{- message['content'] }}"),
}


@pytest.mark.parametrize("way", PRINTS)
def test_a_template_may_print_calls_and_results_in_any_way(way, prepared):
    assert len(prepared(PRINTS[way], WITH_CALLS, train_on="all").train) == 1


@pytest.mark.parametrize("form", ["object", "text", "no content", "empty content"])
def test_calls_in_any_form_are_printed_by_chatml(form, samples_of, smollm2):
    calls = {
        "object": CALLS,
        "text": {**CALLS, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": 4}'}}]},
        "no content": {key: value for key, value in CALLS.items() if key != "content"},
        "empty content": {**CALLS, "content": ""},
    }[form]
    samples = samples_of([{"messages": [ASK, calls]}], smollm2, chat_template="chatml")
    (said,) = supervised_runs(samples, 0, smollm2)
    assert said.startswith('\n<tool_call>\n{"name": "add", "arguments": {"a": 4')


DROPS = {
    "tool calls": (chatml(body="{{- message.content or '' }}"), "tool calls of message 2 (assistant)"),
    "a call's name": (
        with_calls("{{- call.function.arguments | tojson }}"),
        "tool calls of message 2 (assistant)",
    ),
    "arguments": (with_calls("{{- call.function.name }}"), "tool calls of message 2 (assistant)"),
    "tool results": (
        with_calls("{{- call | tojson }}", "{{- message.content or '' if message.role != 'tool' }}"),
        "content of message 3 (tool)",
    ),
    "answers": (
        with_calls("{{- call | tojson }}", "{{- message.content or '' if message.role != 'assistant' }}"),
        "content of message 4 (assistant)",
    ),
    "questions": (
        with_calls("{{- call | tojson }}", "{{- message.content or '' if message.role != 'user' }}"),
        "content of message 1 (user)",
    ),
    "all but the first words": (
        with_calls("{{- call | tojson }}", "{{- (message.content or '')[:9] }}"),
        "content of message 1 (user)",
    ),
}


@pytest.mark.parametrize("what", DROPS)
def test_what_a_template_drops_is_a_mistake_with_line_and_remedy(what, tmp_path, write_lines):
    source, named = DROPS[what]
    tokenizer = families.smollm2()
    tokenizer.chat_template = source
    path = write_lines(
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    )
    with path.open("a") as file:
        file.write(json.dumps(WITH_CALLS) + "\n")
    if what in ("answers", "questions"):
        path.write_text("\n" + json.dumps(WITH_CALLS) + "\n")
    with pytest.raises(DataError) as error:
        prepare(DataSpec(path=str(path)), None, tokenizer, tmp_path / "cache")
    assert str(error.value) == (
        f"rows.jsonl:2: the chat template does not print the {named}; name a template that does with "
        "`data.chat_template` (a Jinja file, or `chatml`, which prints all of them), or leave such rows "
        "out with `data.skip_bad_rows: true`"
    )


def test_rows_of_which_calls_are_dropped_are_told_once_and_can_be_skipped(prepared):
    plain = {"messages": [ASK, ANSWER]}
    source = chatml(body="{{- message.content or '' }}")
    with pytest.raises(
        DataError, match=r"^rows:2: .* \(300 such rows: rows:2, rows:3, rows:4, …\); name a"
    ) as error:
        prepared(source, plain, *[WITH_CALLS] * 300)
    assert len(error.value.mistakes) == 1
    skipped = prepared(source, plain, *[WITH_CALLS] * 300, skip_bad_rows=True)
    assert len(skipped.train) == 1
    assert (
        "300 of 301 rows were skipped: rows:2: the chat template does not print the tool calls"
        in skipped.notes[0]
    )


def test_a_short_text_that_stands_elsewhere_is_missed_all_the_same(prepared):
    source = with_calls("{{- call | tojson }}", "{{- message.content or '' if message.role != 'tool' }}")
    row = {"messages": [ASK, CALLS, {**RESULT, "content": "4"}, ANSWER]}
    with pytest.raises(DataError, match=r"content of message 3 \(tool\)"):
        prepared(source, row)


def test_a_system_message_that_is_dropped_is_a_mistake(prepared):
    source = chatml(body="{{- message.content if message.role != 'system' }}")
    with pytest.raises(DataError, match=r"content of message 1 \(system\)"):
        prepared(source, {"messages": [{"role": "system", "content": "fine"}, ASK, ANSWER]})


def test_a_system_message_may_be_printed_elsewhere(samples_of):
    tokenizer = families.gemma3()
    row = {"messages": [{"role": "system", "content": "fine"}, ASK, ANSWER]}
    assert "user\nfine\n\nWhat" in whole_text(samples_of([row], tokenizer), 0, tokenizer)


THOUGHT = {"role": "assistant", "content": "<think>\nI should add.\n</think>\n\nIt is 8."}


@pytest.mark.parametrize("train_on", ["assistant", "completion", "all"])
def test_old_thinking_may_be_dropped(train_on, samples_of):
    row = {"messages": [ASK, THOUGHT, ASK, {**THOUGHT, "weight": 0}, ASK, ANSWER]}
    assert len(samples_of([row], families.qwen3(), train_on=train_on)) > 0


def test_thinking_that_is_to_be_learned_may_not_be_dropped(prepared):
    source = chatml(body="{{- message.content.split('</think>')[-1] }}")
    with pytest.raises(DataError, match=r"the thinking of message 2 \(assistant\)"):
        prepared(source, {"messages": [ASK, THOUGHT]})
    assert len(prepared(source, {"messages": [ASK, {**THOUGHT, "weight": 0}, ASK, ANSWER]}).train) == 1
    empty = {**THOUGHT, "content": "<think>\n\n</think>\n\nIt is 8."}
    assert len(prepared(source, {"messages": [ASK, empty]}).train) == 1


def test_what_is_said_beside_a_call_may_be_dropped_once_the_chat_goes_on_but_not_at_once(prepared):
    beside = {"messages": [ASK, {**CALLS, "content": "Let me see."}, RESULT, ANSWER]}
    kept = "{{- message.content or '' if loop.last or not message.tool_calls }}"
    assert len(prepared(with_calls("{{- call | tojson }}", kept), beside).train) == 2
    never = "{{- message.content or '' if not message.tool_calls }}"
    with pytest.raises(DataError, match=r"content of message 2 \(assistant\)"):
        prepared(with_calls("{{- call | tojson }}", never), beside)


@pytest.mark.parametrize("space", ["", " ", "\n\n", "\t "])
@pytest.mark.parametrize(
    "make",
    [families.llama3, families.llama2, families.gemma3, families.qwen3, families.phi3, families.mistral],
)
def test_a_template_may_trim_what_is_said(make, space, samples_of):
    row = {"messages": [{**ASK, "content": space + "a" + space}, {**ANSWER, "content": space + "b" + space}]}
    assert len(samples_of([row], make())) == 1


@pytest.mark.parametrize("thinking", ["reasoning_content", "thinking", "reasoning"])
def test_thinking_is_given_to_templates_under_every_name_that_they_read(thinking, prepared):
    answer = {**ANSWER, thinking: "I should add."}
    for name in ("reasoning_content", "thinking"):
        samples = prepared(
            chatml(body="{{- message." + name + " or '' }}{{- message.content }}"),
            {"messages": [ASK, answer]},
        ).train
        assert "I should add.It is 8." in whole_text(samples, 0, families.smollm2())


@pytest.mark.parametrize(
    ("make", "chosen"),
    [
        (families.llama3, None),
        (families.qwen25, None),
        (families.qwen3, None),
        (families.gemma3, None),
        (families.smollm2, None),
        (families.gpt2, "chatml"),
    ],
)
def test_real_conversations_with_tools_raise_no_alarm(make, chosen, tmp_path):
    path = SHARED / "data" / "glaive_toolcall.jsonl"
    if not path.exists():
        pytest.skip("glaive_toolcall.jsonl is not here")
    spec = DataSpec(path=str(path), chat_template=chosen, limit=100, max_length=100_000)
    prepared = prepare(spec, None, Encoder(make()), tmp_path)
    assert len(prepared.train) >= 100
    assert not any("skipped" in note for note in prepared.notes)
