"""A chat template from a stranger ends in a sentence, however it loops or swells."""

from __future__ import annotations

import time

import pytest

from tests.data import families
from weftune.data.prepare import prepare
from weftune.data.row import BadRow
from weftune.data.spec import DataSpec
from weftune.data.template import Template
from weftune.errors import DataError

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "yes"}]


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
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_a_sentence_within_ten_seconds(name):
    source, expected = HOSTILE[name]
    started = time.monotonic()
    with pytest.raises((DataError, BadRow)) as caught:
        Template(source, {}).render(CHAT, None, prompt=False)
    assert time.monotonic() - started < 10
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["empty nested loops", "text doubled by ~", "a wide field", "a division by zero"]
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
