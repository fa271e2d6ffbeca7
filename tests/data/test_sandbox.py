"""A template compiled and rendered in this process: what it may print, and what becomes of one that fails."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.data import families
from weftune.core.limited import SECONDS, allow_seconds
from weftune.data import sandbox
from weftune.data.formats import Chat
from weftune.data.row import BadRow
from weftune.data.sandbox import SandboxedTemplate, compiled, facts, print_check, render_one, render_rows
from weftune.errors import DataError

CHAT = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "yes"})


@pytest.fixture(autouse=True)
def _no_limit() -> Iterator[None]:
    """A render limits the time of its process, which is this one here."""
    yield
    allow_seconds(0.0)


@pytest.fixture
def shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred characters are the most that may be printed."""
    monkeypatch.setattr(sandbox, "LONGEST_PRINT", 100)


def render(source: str, messages: Any = CHAT, tools: Any = None, **special: Any) -> str:
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
    assert facts("{{ tools }}", "{}") == {"prints_tools": True}
    assert facts("{{ messages }}{% set tools = 1 %}{{ tools }}", "{}") == {"prints_tools": False}


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
    allow_seconds(0.5)
    template.render(CHAT, None, prompt=False)
    assert signal.getitimer(signal.ITIMER_PROF)[0] > SECONDS / 2


def test_a_template_is_compiled_once_and_remembers_the_shapes_that_it_prints():
    source = "{{ messages }}"
    assert compiled(source, "{}") is compiled(source, "{}")
    assert compiled(source, "{}") is not compiled(source, '{"a": "b"}')
    assert print_check(source, "{}") is print_check(source, "{}")


def test_one_render_gives_a_text_or_why_there_is_none():
    source = "{{ bos_token }}{{ 1 / (messages | length) }}{% if add_generation_prompt %}>{% endif %}"
    assert render_one(source, '{"bos_token": "<s>"}', CHAT, None, False, False) == {"text": "<s>0.5"}
    assert render_one(source, '{"bos_token": "<s>"}', CHAT, None, True, False) == {"text": "<s>0.5>"}
    bad = render_one(source, "{}", [], None, False, False)
    assert bad == {"bad": "the chat template refuses this row: ZeroDivisionError: division by zero"}


def rows_of(source: str, *chats: tuple[Any, ...], ends: Any = ("<|im_end|>",)) -> list[dict[str, Any]]:
    return render_rows(source, "{}", [Chat(messages, None, (len(messages) - 1,)) for messages in chats], ends)


def test_rows_are_rendered_beside_others_that_cannot_be():
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    good, bad, again = rows_of(families.CHATML, CHAT, ({"role": "user", "content": 5},), CHAT)
    start = text.index("yes")
    assert good["samples"] == ({"text": text, "spans": ((start, start + len("yes<|im_end|>")),)},)
    assert [good[told] for told in ("split", "parted", "endless")] == [False] * 3
    assert again == good
    assert bad["bad"].startswith("the chat template refuses this row: TypeError: ")
    (whole,) = rows_of(families.CHATML, CHAT, ends=None)
    assert whole["samples"] == ({"text": text, "spans": None},)


def test_a_row_that_no_form_of_prints_says_what_is_dropped_before_what_is_refused():
    answer = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    (dropped,) = rows_of(families.CHATML, (CHAT[0], answer))
    assert dropped["bad"] == "the chat template does not print the tool calls of message 2 (assistant)"
    assert dropped["common"]["kind"] == "tool calls"
    refuses = "{{ raise_exception(messages[1].content or 'null') }}"
    (refused,) = rows_of(refuses, (CHAT[0], answer))
    assert refused["bad"] == "the chat template refuses this row: null"


def test_the_first_form_that_is_printed_whole_is_taken():
    developer = ({"role": "developer", "content": "fine"}, *CHAT)
    (any_role,) = rows_of(families.CHATML, developer)
    assert any_role["samples"][0]["text"].startswith("<|im_start|>developer\nfine<|im_end|>")
    known = families.CHATML.replace(
        "message.content", "(message.content if message.role != 'developer' else '')"
    )
    (only_known,) = rows_of(known, developer)
    assert only_known["samples"][0]["text"].startswith("<|im_start|>system\nfine<|im_end|>")
