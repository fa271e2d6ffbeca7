from __future__ import annotations

import time
from datetime import datetime

import pytest

from tests.data import families
from tests.data.conftest import supervised_runs, whole_text
from weftune.core.limited import Stopped
from weftune.data.prepare import prepare
from weftune.data.row import BadRow
from weftune.data.spec import DataSpec
from weftune.data.template import Template, template_source
from weftune.errors import DataError

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.timed
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 100000000 }}",
        "{{ 100000000 * 'x' }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{% set n = namespace(t='x' * 10000) %}{% for a in range(99) %}{% set n.t = n.t + n.t %}{% endfor %}",
    ],
)
def test_a_template_that_prints_without_end_is_stopped(source):
    started = time.process_time()
    with pytest.raises(DataError, match="printed more than"):
        Template(source, {}).render(CHAT, None, prompt=False)
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    "source", ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}"]
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(BadRow, match="refuses this row"):
        Template(source, {}).render(CHAT, None, prompt=False)


def test_a_template_that_does_not_compile_is_a_sentence():
    with pytest.raises(
        DataError, match=r"data\.chat_template: the chat template does not compile: .* \(its line 2\)"
    ):
        Template("\n{% for %}", {})


def test_a_generation_mark_prints_its_body():
    assert Template("a{% generation %}b{% endgeneration %}c", {}).render(CHAT, None, prompt=False) == "abc"


def test_a_date_in_a_template_is_the_same_every_day_but_for_who_asks_now():
    template = Template("{{ strftime_now('%d %b %Y') }}", {})
    assert template.render(CHAT, None, prompt=False) == "26 Jul 2024"
    assert template.render(CHAT, None, prompt=True, now=True) == datetime.now().strftime("%d %b %Y")


def test_a_template_comes_from_a_file(gpt2, tmp_path, samples_of):
    path = tmp_path / "own.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    samples = samples_of([{"messages": CHAT}], gpt2, chat_template=str(path))
    assert whole_text(samples, 0, gpt2) == "user: Hello<|endoftext|>assistant: yes<|endoftext|>"
    # The prompt's last space and the answer are one token, which is supervised: else no answer would begin.
    assert supervised_runs(samples, 0, gpt2) == [" yes<|endoftext|>"]
    with pytest.raises(DataError, match="cannot be read: No such file"):
        template_source(gpt2, str(tmp_path / "absent.jinja"))


def test_chatml_ends_a_turn_with_its_own_token_if_the_vocabulary_has_it_and_else_with_eos(gpt2, smollm2):
    own = template_source(smollm2, "chatml")
    assert "<|im_end|>" in own
    assert template_source(gpt2, "chatml") == own.replace("<|im_end|>", "<|endoftext|>")
    assert template_source(families.byte_level(["<s>"]), "chatml") == own


def test_a_template_is_looked_at_once_whether_it_can_be_compiled_or_not(monkeypatch):
    sound, hostile = "{# once #}{{ tools }}", "{# once #}{{ 9 ** (9 ** 9) }}"

    def stops(*_: object, **__: object) -> None:
        raise Stopped("memory", 2.0)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("asked again")

    assert Template(sound, {}).prints_tools
    for process in (stops, never):
        monkeypatch.setattr("weftune.data.template.run_limited", process)
        with pytest.raises(DataError, match="needed more than 256 MiB of memory for one row and was stopped"):
            Template(hostile, {})
        assert Template(sound, {}).prints_tools


def test_no_rows_ask_nothing_of_a_template():
    assert Template("{{ messages }}", {}).renderings([], None) == []


def test_named_templates_give_their_default():
    tokenizer = families.smollm2()
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    assert template_source(tokenizer, None) == "a"
    assert template_source(tokenizer, None, tools=True) == "b"


def test_built_in_chatml_prints_tools_and_calls(smollm2, samples_of):
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "system", "content": "fine"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    samples = samples_of(
        [{"messages": messages, "tools": [{"name": "add"}]}], smollm2, chat_template="chatml"
    )
    assert whole_text(samples, 0, smollm2) == (
        '<|im_start|>system\nfine\n\nYou can call these functions:\n{"name": "add"}<|im_end|>\n'
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
    )


@pytest.mark.parametrize("otherwise", ["", "{{- raise_exception('no such role') }}"])
def test_a_developer_is_the_system_to_a_template_that_drops_or_refuses_one(otherwise, smollm2, samples_of):
    row = {"messages": [{"role": "developer", "content": "fine"}, *CHAT]}
    # One that prints any role prints this one, as it does for others.
    assert whole_text(samples_of([row], smollm2), 0, smollm2).startswith("<|im_start|>developer\nfine")
    tokenizer = families.smollm2()
    known = "{%- if message.role in ('system', 'user', 'assistant') %}\n"
    tokenizer.chat_template = families.CHATML.replace("messages %}\n", "messages %}\n" + known).replace(
        "{%- endfor %}", "{%- else %}" + otherwise + "{%- endif %}\n{%- endfor %}"
    )
    samples = samples_of([row], tokenizer)
    assert whole_text(samples, 0, tokenizer).startswith("<|im_start|>system\nfine<|im_end|>")


def test_what_a_template_does_silently_is_told_in_a_note(tmp_path):
    def notes(source: str, tools: list | None = None) -> tuple[str, ...]:
        tokenizer = families.smollm2()
        tokenizer.chat_template = source
        row = {"messages": CHAT, **({"tools": tools} if tools else {})}
        return prepare(DataSpec(rows=[row]), None, tokenizer, tmp_path).notes

    assert notes(families.CHATML) == ()
    assert "does not print tools" in notes(families.CHATML, [{"name": "add"}])[0]
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert (
        "without an end-of-turn token"
        in notes(plain + "{% if add_generation_prompt %}assistant:{% endif %}")[0]
    )
    spaced = families.CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant: '")
    spaced = spaced.replace("'\n' + message.content", "': ' + message.content")
    assert "one token holds the end of the prompt" in notes(spaced)[0]
    think = families.CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    assert "supervised from where they part" in notes(think)[0]


def test_a_template_that_rewrites_what_came_before_is_refused(tmp_path):
    tokenizer = families.smollm2()
    tokenizer.chat_template = "{{ messages | length }}" + families.CHATML
    with pytest.raises(DataError, match="rows:1: the chat template does not print message 2 after"):
        prepare(DataSpec(rows=[{"messages": CHAT}]), None, tokenizer, tmp_path)
