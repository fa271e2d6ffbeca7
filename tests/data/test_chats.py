"""What a chat template drops of a row is a mistake of the user's; what it prints otherwise is none."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data import families
from tests.data.conftest import SHARED, supervised_runs, whole_text
from weftune.core.limited import limit_seconds
from weftune.data import chats
from weftune.data.chats import Rendered, equivalent_chats, render_everything, render_turns
from weftune.data.encode import Encoder
from weftune.data.formats import Chat
from weftune.data.prepare import prepare
from weftune.data.row import BadRow, CommonBadRow
from weftune.data.spec import DataSpec
from weftune.data.template import SandboxedTemplate
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


class Checked:
    """A template in this process with its check; counts what the check renders."""

    def __init__(self, source: str) -> None:
        self._template = SandboxedTemplate(source, {})
        self._check = chats.PrintCheck(self)
        self.renders = 0

    def render(self, messages: Any, tools: Any, *, prompt: bool) -> str:
        self.renders += 1
        try:
            return self._template.render(messages, tools, prompt=prompt)
        finally:
            limit_seconds(0.0)

    def refuse(self, *messages: Any, tools: Any = None, turns: tuple[int, ...] = (1, 3)) -> int:
        """How often the check rendered, where it does not refuse the chat."""
        chat = Chat(messages, tools, turns)
        text = self.render(messages, tools, prompt=False)
        self.renders = 0
        self._check.refuse_dropped(chat, text)
        return self.renders


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_a_chat_of_a_shape_that_was_tried_is_not_tried_again_while_its_texts_are_found():
    checked = Checked(chatml(body="{{- message.content | trim }}"))
    assert checked.refuse(ASK, ANSWER) == 3
    assert checked.refuse(said("user", " a \n"), said("assistant", "b ")) == 0
    assert checked.refuse(ASK, ANSWER, ASK) == 2
    assert checked.refuse(ANSWER, ASK) > 0
    assert checked.refuse({**ASK, "name": "Ann"}, ANSWER) == 3
    assert checked.refuse(ASK, said("assistant", " ")) == 2
    assert checked.refuse(ASK, ANSWER, tools=TOOLS) == 3
    escaped = Checked(chatml(body="{{- message.content | tojson }}"))
    escaped.refuse(ASK, ANSWER)
    wrapped = Checked(chatml(body="{{- ('says ' + message.content) | tojson }}"))
    wrapped.refuse(ASK, ANSWER)
    assert wrapped.refuse(said("user", 'a "b"\né'), ANSWER) == 0
    assert escaped.refuse(said("user", 'a "b"\né'), ANSWER) == 0
    capitals = Checked(chatml(body="{{- message.content | upper }}"))
    capitals.refuse(ASK, ANSWER)
    assert capitals.refuse(ASK, ANSWER) == 3


def test_shapes_are_remembered_up_to_a_number_and_those_beyond_are_tried_each_time(monkeypatch):
    monkeypatch.setattr(chats, "MAX_SHAPES", 1)
    checked = Checked(chatml())
    assert [checked.refuse(ASK, ANSWER), checked.refuse(ASK, ANSWER)] == [3, 0]
    assert [checked.refuse(ANSWER), checked.refuse(ANSWER)] == [2, 2]


def test_a_text_that_is_dropped_is_missed_though_another_of_its_shape_was_printed():
    checked = Checked(chatml(body="{{- message.content if message.content | length > 4 }}"))
    checked.refuse(ASK, ANSWER)
    with pytest.raises(CommonBadRow, match=r"the content of message 2 \(assistant\)"):
        checked.refuse(said("user", "two plus two"), said("assistant", "4"))
    with_tools = Checked(chatml(body="{{- message.content if not tools or loop.first }}"))
    with_tools.refuse(ASK, said("assistant", "4"))
    with pytest.raises(CommonBadRow, match=r"the content of message 2 \(assistant\)"):
        with_tools.refuse(ASK, said("assistant", "4"), tools=TOOLS)


def test_what_follows_the_last_answer_may_not_be_dropped_either():
    checked = Checked(chatml(body="{{- message.content if not loop.last or loop.index % 2 == 0 }}"))
    checked.refuse(ASK, ANSWER)
    with pytest.raises(CommonBadRow, match=r"the content of message 3 \(user\)"):
        checked.refuse(ASK, ANSWER, ASK)
    with pytest.raises(CommonBadRow, match=r"the content of message 1 \(user\)"):
        checked.refuse(ASK)


def test_a_template_that_refuses_the_beginning_of_a_chat_is_tried_with_all_of_it():
    refuses = "{%- if messages | length < 4 %}{{- raise_exception('too short') }}{%- endif %}"
    chat = (ASK, ANSWER, said("user", "yes?"), said("assistant", "yes"))
    assert Checked(refuses + chatml()).refuse(*chat) > 0
    drops = Checked(refuses + chatml(body="{{- message.content if not loop.first }}"))
    with pytest.raises(CommonBadRow, match=r"the content of message 1 \(user\)"):
        drops.refuse(*chat)
    later = Checked(refuses + chatml(body="{{- message.content if loop.index != 3 }}"))
    with pytest.raises(CommonBadRow, match=r"the content of message 3 \(user\)"):
        later.refuse(*chat)


def test_a_text_that_is_printed_only_where_an_answer_is_asked_for_is_dropped_from_the_row():
    checked = Checked(chatml(body="{{- message.content if add_generation_prompt or loop.last }}"))
    with pytest.raises(CommonBadRow, match=r"the content of message 1 \(user\)"):
        checked.refuse(ASK, ANSWER)


def test_thinking_is_looked_for_where_it_is_supervised_and_the_assistants():
    spoken_only = "{{- message.content.split('</think>')[-1] }}"
    checked = Checked(chatml(body=spoken_only))
    checked.refuse(ASK, ANSWER)
    with pytest.raises(CommonBadRow, match=r"the thinking of message 2 \(assistant\)") as error:
        checked.refuse(ASK, THOUGHT)
    assert (error.value.kind, error.value.needed_tokens) == ("thinking", 0)
    checked.refuse(ASK, THOUGHT, turns=())
    checked.refuse(said("user", THOUGHT["content"]), ANSWER, turns=(0, 1))
    checked.refuse(ASK, said("assistant", "<think> \n</think>It is 8."))
    assert Checked(chatml()).refuse(ASK, THOUGHT) == 4
    # Everything before the last mark is thinking, so its end may not be dropped.
    first = "{{- message.content.split('</think>')[0] + message.content.split('</think>')[-1] }}"
    with pytest.raises(CommonBadRow, match="the thinking of message 2"):
        Checked(chatml(body=first)).refuse(ASK, said("assistant", "one</think>two</think>It is 8."))


def call(arguments: Any, name: str = "add") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def test_every_call_is_looked_for_by_its_name_and_its_arguments():
    dropped = r"the tool calls of message 2 \(assistant\)"
    names = Checked(with_calls("{{- call.function.name }}"))
    names.refuse(ASK, calling(call({})))
    with pytest.raises(CommonBadRow, match=dropped):
        names.refuse(ASK, calling(call({"a": 1})))
    first = "{{- message.tool_calls[0] | tojson if message.tool_calls }}{{- message.content }}"
    with pytest.raises(CommonBadRow, match=dropped):
        Checked(chatml(body=first)).refuse(ASK, calling(call({}), call({})))
    number = "{{- (message.tool_calls or []) | length }}{{- message.content }}"
    with pytest.raises(CommonBadRow, match=dropped):
        Checked(chatml(body=number)).refuse(ASK, calling(call({}), call({})))
    rest = "{{- message.tool_calls[1:] | tojson if message.tool_calls }}"
    with pytest.raises(CommonBadRow, match=dropped):
        Checked(chatml(body=number + rest)).refuse(ASK, calling(call({}), call({})))
    whole = Checked(with_calls("{{- call | tojson }}"))
    assert whole.refuse(ASK, calling(call({}), call({"a": 1}), call([2]))) == 7


@pytest.mark.parametrize(
    ("arguments", "use"),
    [
        ({"a": 1}, "{% for key, value in call.function.arguments.items() %}{% endfor %}"),
        ([1, 2], "{% set all = call.function.arguments + [3] %}"),
        ("text", "{% set all = call.function.arguments + 'x' %}"),
    ],
)
def test_arguments_of_any_kind_are_missed_by_a_template_that_takes_only_that_kind(arguments, use):
    source = with_calls("{{- call.function.name }}" + use)
    with pytest.raises(CommonBadRow, match="the tool calls of message 2"):
        Checked(source).refuse(ASK, calling(call(arguments)))
    printing = with_calls("{{- call.function.name }}" + use + "{{- call.function.arguments | string }}")
    assert Checked(printing).refuse(ASK, calling(call(arguments))) > 0


def test_a_call_without_a_function_of_its_own_is_looked_for_as_well():
    flat = {"name": "add", "arguments": {"a": 1}}
    assert Checked(with_calls("{{- call.name + call.arguments | tojson }}")).refuse(ASK, calling(flat)) == 4
    for printed_part in ("{{- call.name }}", "{{- call.arguments | tojson }}"):
        with pytest.raises(CommonBadRow, match="the tool calls of message 2"):
            Checked(with_calls(printed_part)).refuse(ASK, calling(flat))


def test_a_chat_is_put_to_a_template_as_it_is_and_then_with_every_choice_of_what_templates_want():
    developer, null = {"role": "developer", "content": "fine"}, {"role": "assistant", "content": None}
    plain = Chat((ASK, ANSWER), None, (1,))
    assert list(equivalent_chats(plain)) == [plain]
    one = Chat((developer, ASK, ANSWER), None, (2,))
    assert [form.messages[0]["role"] for form in equivalent_chats(one)] == ["developer", "system"]
    calls = {**null, "tool_calls": [call({"a": "é"}), call("{}"), {"name": "flat"}, call([1])]}
    every = list(equivalent_chats(Chat((developer, ASK, calls), None, (2,))))
    seen = [
        (
            form.messages[0]["role"],
            form.messages[2]["content"],
            form.messages[2]["tool_calls"][0]["function"]["arguments"],
        )
        for form in every
    ]
    as_text = '{"a": "é"}'
    assert seen == [
        ("developer", None, {"a": "é"}),
        ("system", None, {"a": "é"}),
        ("developer", "", {"a": "é"}),
        ("developer", None, as_text),
        ("system", "", {"a": "é"}),
        ("system", None, as_text),
        ("developer", "", as_text),
        ("system", "", as_text),
    ]
    assert every[-1].messages[1] == ASK
    assert every[-1].messages[2]["tool_calls"][1:] == [call("{}"), {"name": "flat"}, call("[1]")]
    absent = Chat((ASK, {"role": "assistant", "tool_calls": [call("{}")]}), None, (1,))
    assert [form.messages[1].get("content") for form in equivalent_chats(absent)] == [None, ""]


PIECES = [
    "Hello",
    " ",
    "\n",
    "\n\n",
    "<|im_end|>",
    "<|im_start|>",
    "<|im_",
    "end|>",
    "é",
    "猫",
    "🐈",
    "\ue000",
    "yes",
    ".",
]
SPOKEN = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=SPOKEN, answered=SPOKEN.filter(str.strip), again=SPOKEN.filter(str.strip))
def test_any_chat_survives_and_only_its_answers_are_supervised(smollm2, asked, answered, again):
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answered},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": again},
    ]
    with tempfile.TemporaryDirectory() as cache:
        samples = prepare(DataSpec(rows=[{"messages": messages}]), None, smollm2, Path(cache)).train
        said = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
        assert whole_text(samples, 0, smollm2) == "".join(said)
        runs = supervised_runs(samples, 0, smollm2)
        # The prompt's own line break may be one token with the answer's first.
        for run, spoken in zip(runs, (answered, again), strict=True):
            assert run in (f"{spoken}<|im_end|>", f"\n{spoken}<|im_end|>")
        tokens = samples.tokens(0).tolist()
        assert [
            tokens.count(smollm2.convert_tokens_to_ids(mark)) for mark in ("<|im_start|>", "<|im_end|>")
        ] == [4, 4]


def test_the_data_room_needs_neither_torch_nor_transformers():
    code = (
        "import sys, weftune.data.prepare, weftune.data.samples\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def rendering(
    render: Callable[..., str], *contents: str, turns: tuple[int, ...] = (1,)
) -> tuple[Rendered, ...]:
    """Of messages of a user and an assistant in turn; `render` prints them."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[at % 2], "content": text} for at, text in enumerate(contents))

    def printed(messages: Any, tools: Any, *, prompt: bool) -> str:
        return render(messages, prompt)

    return render_turns(Chat(messages, None, turns), SimpleNamespace(render=printed), ["<e>", "<f>"])


def spoken(messages: Any, prompt: bool) -> str:
    said = "".join(f"{one['role'][0]}:{one['content']}<e>\n" for one in messages)
    return said + ("a:" if prompt else "")


def supervised(made: tuple[Rendered, ...]) -> list[list[str]]:
    return [[sample.text[start:stop] for start, stop in sample.spans] for sample in made]


def test_a_chat_is_one_sample_whose_answers_are_supervised_with_their_end():
    made = rendering(spoken, "hi", "yes", "and", "no", "so", turns=(1, 3))
    assert made[0].text == "u:hi<e>\na:yes<e>\nu:and<e>\na:no<e>\nu:so<e>\n"
    assert supervised(made) == [["yes<e>", "no<e>"]]
    assert (len(made), made[0].prompt_differs, made[0].lacks_end_token) == (1, False, False)
    assert supervised(rendering(spoken, "hi", "yes", "and", "no", turns=(3,))) == [["no<e>"]]


def test_what_follows_the_last_answer_is_left_out_where_it_changes_how_an_answer_is_printed():
    def changing(messages: Any, prompt: bool) -> str:
        return ("!" if len(messages) == 3 else "") + spoken(messages, prompt)

    made = rendering(changing, "hi", "yes", "and")
    assert made[0].text == "u:hi<e>\na:yes<e>\n"
    assert len(made) == 1


def test_answers_that_are_printed_differently_later_become_samples_of_their_own():
    def forgetful(messages: Any, prompt: bool) -> str:
        return spoken(messages[-1:] if prompt else messages[-2:], prompt)

    made = rendering(forgetful, "hi", "yes", "and", "no", turns=(1, 3))
    assert [sample.text for sample in made] == ["u:hi<e>\na:yes<e>\n", "u:and<e>\na:no<e>\n"]
    assert supervised(made) == [["yes<e>"], ["no<e>"]]
    assert len(made) == 2


@pytest.mark.parametrize("asked", ["a:<think>", "[ask]"])
def test_a_turn_is_supervised_from_where_it_parts_from_the_prompt(asked):
    def thinking(messages: Any, prompt: bool) -> str:
        return spoken(messages, False) + (asked if prompt else "")

    made = rendering(thinking, "hi", "yes")
    assert supervised(made) == [["yes<e>" if asked.startswith("a:") else "a:yes<e>"]]
    assert (made[0].prompt_differs, made[0].lacks_end_token) == (True, False)
    both = rendering(
        lambda messages, prompt: (
            spoken(messages, prompt and len(messages) == 1) + ("?" if prompt and len(messages) > 1 else "")
        ),
        *("hi", "yes", "and", "no"),
        turns=(1, 3),
    )
    assert any(one.prompt_differs for one in both)


def test_a_prompt_that_is_printed_differently_from_its_beginning_is_refused():
    def marked(messages: Any, prompt: bool) -> str:
        return ("P" if prompt else "") + spoken(messages, prompt)

    with pytest.raises(BadRow, match="the chat template does not print message 2 after what it prints"):
        rendering(marked, "hi", "yes")


def test_a_turn_without_an_end_is_supervised_to_its_last_character_and_told():
    def endless(messages: Any, prompt: bool) -> str:
        return spoken(messages, prompt).replace("<e>", "")

    made = rendering(endless, "hi", "yes")
    assert supervised(made) == [["yes\n"]]
    assert made[0].lacks_end_token

    def silent(messages: Any, prompt: bool) -> str:
        return "".join(f"u:{one['content']}<e>" for one in messages if one["role"] == "user")

    nothing = rendering(silent, "hi", "yes")
    assert (nothing[0].lacks_end_token, supervised(nothing)) == (True, [[""]])
    mixed = rendering(
        lambda messages, prompt: (
            endless(messages[:2], prompt and len(messages) < 2)
            + spoken(messages[2:], prompt and len(messages) > 2)
        ),
        "hi",
        "yes",
        "and",
        "no",
        turns=(1, 3),
    )
    assert any(one.lacks_end_token for one in mixed)


def test_the_end_of_a_whole_chat_is_no_part_of_a_turn_that_ends_before():
    def closing(messages: Any, prompt: bool) -> str:
        return spoken(messages, prompt) + ("" if prompt else "<f>")

    made = rendering(closing, "hi", "yes", "and", "no", turns=(1, 3))
    assert supervised(made) == [["yes<e>", "no<e>\n<f>"]]
    assert len(made) == 1


def test_a_rendering_is_the_same_in_another_process():
    for made in (
        rendering(spoken, "hi", "yes", "and", "no", turns=(1, 3)),
        (Rendered("a", None), Rendered("b", ((0, 1),), lacks_end_token=True)),
        render_everything(
            Chat((), None, ()), SimpleNamespace(render=lambda *_, prompt: f"prompt is {prompt}")
        ),
    ):
        sent = json.loads(json.dumps([asdict(one) for one in made]))
        assert tuple(map(Rendered.from_json, sent)) == made
    assert made == (Rendered("prompt is False", None),)


def test_nothing_is_worth_telling_of_a_chat_that_is_printed_as_a_whole():
    template = SimpleNamespace(render=lambda messages, tools, *, prompt: f"{len(messages)} {prompt}")
    chat = Chat(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), None, (1,))
    assert render_everything(chat, template) == (
        Rendered("2 False", None, prompt_differs=False, lacks_end_token=False),
    )
