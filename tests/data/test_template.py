from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.cases import is_within, slow_but
from tests.data import families
from tests.data.conftest import supervised_runs, whole_text
from weftune.core.limited import SECONDS, LimitExceeded, limit_seconds
from weftune.data import template as templates
from weftune.data.formats import Chat
from weftune.data.prepare import prepare
from weftune.data.row import BadRow
from weftune.data.spec import DataSpec
from weftune.data.template import (
    SandboxedTemplate,
    Template,
    compile_template,
    print_check,
    render_one,
    render_rows,
    template_properties,
    template_source,
)
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
    assert is_within(time.process_time() - started, 10)


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
    assert template.render(CHAT, None, prompt=True, uses_current_date=True) == datetime.now().strftime(
        "%d %b %Y"
    )


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
        raise LimitExceeded("memory", 2.0)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("asked again")

    assert Template(sound, {}).prints_tools
    for process in (stops, never):
        monkeypatch.setattr("weftune.data.template.run_limited", process)
        with pytest.raises(DataError, match="needed more than 256 MiB of memory for one row and was stopped"):
            Template(hostile, {})
        assert Template(sound, {}).prints_tools


def test_no_rows_ask_nothing_of_a_template():
    assert Template("{{ messages }}", {}).render_chats([], None) == []


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


MESSAGES = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "yes"})


@pytest.fixture(autouse=True)
def _no_limit() -> Iterator[None]:
    """A render limits the time of its process, which is this one here."""
    yield
    limit_seconds(0.0)


@pytest.fixture
def shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred characters are the most that may be printed."""
    monkeypatch.setattr(templates, "MAX_PRINTED_CHARACTERS", 100)


def render(source: str, messages: Any = MESSAGES, tools: Any = None, **special: Any) -> str:
    return SandboxedTemplate(source, special).render(messages, tools, prompt=False)


def test_blocks_leave_no_line_break_and_no_indentation_behind_as_in_transformers():
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert render("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}") == "user"


def test_a_date_is_that_of_all_rows_unless_it_is_asked_for_now():
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


def test_special_tokens_are_at_hand_by_their_names_and_those_that_are_no_text_are_not():
    assert render("{{ bos_token }}|{{ more }}", bos_token="<s>", more=["a"]) == "<s>|"
    assert render("{{ tools }}|{{ documents }}|{{ messages | length }}") == "None|None|2"


def test_json_is_printed_as_models_were_trained_on_it():
    printed = "{{ messages[0] | tojson }}{{ messages[0] | tojson(indent=1, sort_keys=true) }}"
    assert render(printed, [{"b": "<é>", "a": 1}]) == '{"b": "<é>", "a": 1}{\n "a": 1,\n "b": "<é>"\n}'
    compact = "{{ messages[0] | tojson(ensure_ascii=true, separators=(',', ':')) }}"
    assert render(compact, [{"b": "é", "a": {1}}]) == '{"b":"\\u00e9","a":"{1}"}'


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("\n\n{% for %}", r"Expected .* \(its line 3\)"),
        ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", "it is nested too deeply"),
        ("{% break %}", "'break' outside loop"),
    ],
)
def test_a_template_that_does_not_compile_says_why(source, reason):
    with pytest.raises(
        DataError, match=f"^data.chat_template: the chat template does not compile: {reason}$"
    ):
        SandboxedTemplate(source, {})


def test_a_template_is_known_to_print_tools_before_any_row_is_rendered():
    assert template_properties("{{ tools }}", "{}") == {"prints_tools": True}
    assert template_properties("{{ messages }}{% set tools = 1 %}{{ tools }}", "{}") == {
        "prints_tools": False
    }


def test_a_print_may_be_as_long_as_the_limit_and_no_longer(shortest):
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert len(render(text, [{"content": "x" * 50}] * 2)) == 100
    with pytest.raises(DataError, match="printed more than 100 characters for one row"):
        render(text, [{"content": "x" * 50}, {"content": "x" * 51}])


@pytest.mark.parametrize(
    "product", ["'x' * {}", "{} * 'x'", "[1] * {}", "{} * (1,)", "'ab' * ({} // 2 + {} % 2)"]
)
def test_a_product_may_be_as_long_as_the_limit_and_is_not_made_beyond(product, shortest):
    def length(count: int) -> str:
        counted = product.replace("{}", f"(messages | length + {count - 2})")
        return render("{% set made = " + counted + " %}{{ made | length }}")

    assert length(100) == "100"
    with pytest.raises(DataError, match="printed more than 100 characters"):
        length(101)


def test_numbers_are_no_texts_and_may_be_multiplied_and_added(shortest):
    assert render("{{ (messages | length) * 1000 + 1 }}") == "2001"
    assert render("{{ (messages + messages) | length }}", [1] * 90) == "180"


def test_a_text_is_not_added_to_once_it_is_longer_than_the_limit(shortest):
    source = "{% set all = messages[0] + 'x' %}{{ all | length }}"
    assert render(source, ["x" * 100]) == "101"
    with pytest.raises(DataError, match="printed more than 100 characters"):
        render(source, ["x" * 101])


class _Fails(dict):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def __getitem__(self, name: str) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RecursionError("deep"), "the chat template nests too deeply on this row"),
        (ArithmeticError("odd"), "the chat template refuses this row: ArithmeticError: odd"),
    ],
)
def test_what_a_row_raises_in_a_template_is_a_sentence_about_the_row(error, sentence):
    with pytest.raises(BadRow, match=f"^{re.escape(sentence)}$"):
        render("{{ messages[0].content }}", [_Fails(error)])
    with pytest.raises(MemoryError):
        render("{{ messages[0].content }}", [_Fails(MemoryError())])
    with pytest.raises(BadRow, match=r"^the chat template refuses this row: no such role$"):
        render("{{ raise_exception('no such role') }}")


def test_every_render_has_its_time_for_itself():
    template = SandboxedTemplate("{{ messages[0].content }}", {})
    limit_seconds(0.5)
    template.render(MESSAGES, None, prompt=False)
    assert signal.getitimer(signal.ITIMER_PROF)[0] > SECONDS / 2


def test_a_template_is_compiled_once_and_remembers_the_shapes_that_it_prints():
    source = "{{ messages }}"
    assert compile_template(source, "{}") is compile_template(source, "{}")
    assert compile_template(source, "{}") is not compile_template(source, '{"a": "b"}')
    assert print_check(source, "{}") is print_check(source, "{}")


def test_one_render_gives_a_text_or_why_there_is_none():
    source = "{{ bos_token }}{{ 1 / (messages | length) }}{% if add_generation_prompt %}>{% endif %}"
    assert render_one(source, '{"bos_token": "<s>"}', MESSAGES, None, False, False) == {"text": "<s>0.5"}
    assert render_one(source, '{"bos_token": "<s>"}', MESSAGES, None, True, False) == {"text": "<s>0.5>"}
    bad = render_one(source, "{}", [], None, False, False)
    assert bad == {"bad": "the chat template refuses this row: ZeroDivisionError: division by zero"}


def rows_of(source: str, *chats: tuple[Any, ...], ends: Any = ("<|im_end|>",)) -> list[Any]:
    return render_rows(source, "{}", [Chat(messages, None, (len(messages) - 1,)) for messages in chats], ends)


def test_rows_are_rendered_beside_others_that_cannot_be():
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    good, bad, again = rows_of(families.CHATML, MESSAGES, ({"role": "user", "content": 5},), MESSAGES)
    start = text.index("yes")
    spans = ((start, start + len("yes<|im_end|>")),)
    assert good == [{"text": text, "spans": spans, "prompt_differs": False, "lacks_end_token": False}]
    assert again == good
    assert bad["bad"].startswith("the chat template refuses this row: TypeError: ")
    (whole,) = rows_of(families.CHATML, MESSAGES, ends=None)
    assert whole == [{"text": text, "spans": None, "prompt_differs": False, "lacks_end_token": False}]


def test_a_row_that_no_form_of_prints_says_what_is_dropped_before_what_is_refused():
    answer = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    (dropped,) = rows_of(families.CHATML, (MESSAGES[0], answer))
    assert dropped["bad"] == "the chat template does not print the tool calls of message 2 (assistant)"
    assert dropped["common"]["kind"] == "tool calls"
    refuses = "{{ raise_exception(messages[1].content or 'null') }}"
    (refused,) = rows_of(refuses, (MESSAGES[0], answer))
    assert refused["bad"] == "the chat template refuses this row: null"


def test_the_first_form_that_is_printed_whole_is_taken():
    developer = ({"role": "developer", "content": "fine"}, *MESSAGES)
    (any_role,) = rows_of(families.CHATML, developer)
    assert any_role[0]["text"].startswith("<|im_start|>developer\nfine<|im_end|>")
    known = families.CHATML.replace(
        "message.content", "(message.content if message.role != 'developer' else '')"
    )
    (only_known,) = rows_of(known, developer)
    assert only_known[0]["text"].startswith("<|im_start|>system\nfine<|im_end|>")


def doubling(step: str) -> str:
    return "{% set n = namespace(t='x' * 1000) %}{% for a in range(99) %}" + step + "{% endfor %}{{ n.t }}"


HOSTILE = {
    "empty nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "took more than 2 s of processor time",
    ),
    "words without end": ("{{ lipsum(n=100000) }}", "'lipsum' is undefined"),
    "text doubled by ~": (doubling("{% set n.t = n.t ~ n.t %}"), "needed more than 256 MiB"),
    "text doubled by +": (doubling("{% set n.t = n.t + n.t %}"), "printed more than"),
    "text doubled by a filter": (doubling("{% set n.t = [n.t, n.t] | join %}"), "needed more than 256 MiB"),
    "text doubled by a block": (
        doubling("{% set q %}{{ n.t }}{{ n.t }}{% endset %}{% set n.t = q %}"),
        "needed more than 256 MiB",
    ),
    "a wide field": ("{{ 'x' | center(4000000000) }}", "needed more than 256 MiB"),
    "a method of text": ("{{ 'x'.ljust(4000000000) }}", "needed more than 256 MiB"),
    "a format": ("{{ '%400000000d' % 1 }}", "needed more than 256 MiB"),
    "a large number": ("{{ 9 ** (9 ** 9) }}", "took more than 2 s of processor time"),
    "a list without end": ("{{ [1] | batch(4000000000, 'x') | list }}", "needed more than 256 MiB"),
    "an endless macro": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "nests too deeply"),
    "a division by zero": ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    "5000 parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    "5000 conditions": ("{% if x %}" * 5000 + "{% endif %}" * 5000, "does not compile"),
    "50 loops": ("{% for x in messages %}" * 50 + "{% endfor %}" * 50, "does not compile"),
    "a break outside of loops": ("{% break %}", "does not compile: 'break' outside loop"),
    "a number of 5000 digits": ("{{ (10 ** 5000) | string }}", "Exceeds the limit"),
}


@pytest.mark.timed
@pytest.mark.parametrize("name", slow_but(HOSTILE, [one for one in HOSTILE if one != "empty nested loops"]))
def test_a_hostile_template_is_a_sentence_within_ten_seconds(name):
    source, expected = HOSTILE[name]
    started = time.monotonic()
    with pytest.raises((DataError, BadRow)) as caught:
        Template(source, {}).render(CHAT, None, prompt=False)
    assert time.monotonic() - started < 10
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["empty nested loops", "text doubled by ~", "a wide field", "a division by zero"],
        ["text doubled by ~", "a wide field", "a division by zero"],
    ),
)
def test_rows_under_a_hostile_template_are_refused(name, tmp_path):
    tokenizer = families.smollm2()
    tokenizer.chat_template, expected = HOSTILE[name]
    with pytest.raises(DataError, match=expected):
        prepare(DataSpec(rows=[{"messages": CHAT}] * 3), None, tokenizer, tmp_path)


def test_a_template_that_was_stopped_once_is_not_waited_for_again():
    source = "{# again #}" + HOSTILE["empty nested loops"][0]
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(DataError, match="and was stopped; use another template"):
            Template(source, {}).render(CHAT, None, prompt=False)
    assert time.monotonic() - started < 1


def test_one_row_that_a_template_refuses_does_not_spoil_the_others(tmp_path):
    tokenizer = families.smollm2()
    tokenizer.chat_template = "{{ 1 / (messages[0].content | length - 3) }}" + families.CHATML
    rows = [{"messages": [{"role": "user", "content": word}, CHAT[1]]} for word in ("one", "five", "two")]
    prepared = prepare(DataSpec(rows=rows, skip_bad_rows=True), None, tokenizer, tmp_path)
    assert len(prepared.train) == 1
    assert "rows:1: the chat template refuses this row: ZeroDivisionError" in prepared.notes[0]
