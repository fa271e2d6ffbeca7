"""Whatever is said in a chat, its sample is what the template printed, and only answers are supervised."""

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

from tests.data.conftest import supervised_runs, whole_text
from weftune.data.formats import Chat
from weftune.data.prepare import prepare
from weftune.data.row import BadRow
from weftune.data.spec import DataSpec
from weftune.data.turns import Rendered, Rendering, render_everything, render_turns, rendering_of

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
        "import sys, weftune.data.prepare, weftune.data.order\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def rendering(render: Callable[..., str], *contents: str, turns: tuple[int, ...] = (1,)) -> Rendering:
    """Of messages of a user and an assistant in turn; `render` prints them."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[at % 2], "content": text} for at, text in enumerate(contents))

    def printed(messages: Any, tools: Any, *, prompt: bool) -> str:
        return render(messages, prompt)

    return render_turns(Chat(messages, None, turns), SimpleNamespace(render=printed), ["<e>", "<f>"])


def spoken(messages: Any, prompt: bool) -> str:
    said = "".join(f"{one['role'][0]}:{one['content']}<e>\n" for one in messages)
    return said + ("a:" if prompt else "")


def supervised(made: Rendering) -> list[list[str]]:
    return [[sample.text[start:stop] for start, stop in sample.spans] for sample in made.samples]


def test_a_chat_is_one_sample_whose_answers_are_supervised_with_their_end():
    made = rendering(spoken, "hi", "yes", "and", "no", "so", turns=(1, 3))
    assert made.samples[0].text == "u:hi<e>\na:yes<e>\nu:and<e>\na:no<e>\nu:so<e>\n"
    assert supervised(made) == [["yes<e>", "no<e>"]]
    assert (made.split, made.parted, made.endless) == (False, False, False)
    assert supervised(rendering(spoken, "hi", "yes", "and", "no", turns=(3,))) == [["no<e>"]]


def test_what_follows_the_last_answer_is_left_out_where_it_changes_how_an_answer_is_printed():
    def changing(messages: Any, prompt: bool) -> str:
        return ("!" if len(messages) == 3 else "") + spoken(messages, prompt)

    made = rendering(changing, "hi", "yes", "and")
    assert made.samples[0].text == "u:hi<e>\na:yes<e>\n"
    assert not made.split


def test_answers_that_are_printed_differently_later_become_samples_of_their_own():
    def forgetful(messages: Any, prompt: bool) -> str:
        return spoken(messages[-1:] if prompt else messages[-2:], prompt)

    made = rendering(forgetful, "hi", "yes", "and", "no", turns=(1, 3))
    assert [sample.text for sample in made.samples] == ["u:hi<e>\na:yes<e>\n", "u:and<e>\na:no<e>\n"]
    assert supervised(made) == [["yes<e>"], ["no<e>"]]
    assert made.split


@pytest.mark.parametrize("asked", ["a:<think>", "[ask]"])
def test_a_turn_is_supervised_from_where_it_parts_from_the_prompt(asked):
    def thinking(messages: Any, prompt: bool) -> str:
        return spoken(messages, False) + (asked if prompt else "")

    made = rendering(thinking, "hi", "yes")
    assert supervised(made) == [["yes<e>" if asked.startswith("a:") else "a:yes<e>"]]
    assert (made.parted, made.endless) == (True, False)
    both = rendering(
        lambda messages, prompt: (
            spoken(messages, prompt and len(messages) == 1) + ("?" if prompt and len(messages) > 1 else "")
        ),
        *("hi", "yes", "and", "no"),
        turns=(1, 3),
    )
    assert both.parted


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
    assert made.endless

    def silent(messages: Any, prompt: bool) -> str:
        return "".join(f"u:{one['content']}<e>" for one in messages if one["role"] == "user")

    nothing = rendering(silent, "hi", "yes")
    assert (nothing.endless, supervised(nothing)) == (True, [[""]])
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
    assert mixed.endless


def test_the_end_of_a_whole_chat_is_no_part_of_a_turn_that_ends_before():
    def closing(messages: Any, prompt: bool) -> str:
        return spoken(messages, prompt) + ("" if prompt else "<f>")

    made = rendering(closing, "hi", "yes", "and", "no", turns=(1, 3))
    assert supervised(made) == [["yes<e>", "no<e>\n<f>"]]
    assert not made.split


def test_a_rendering_is_the_same_in_another_process():
    for made in (
        rendering(spoken, "hi", "yes", "and", "no", turns=(1, 3)),
        Rendering((Rendered("a", None), Rendered("b", ((0, 1),))), split=True, endless=True),
        render_everything(
            Chat((), None, ()), SimpleNamespace(render=lambda *_, prompt: f"prompt is {prompt}")
        ),
    ):
        assert rendering_of(json.loads(json.dumps(asdict(made)))) == made
    assert made.samples == (Rendered("prompt is False", None),)


def test_nothing_is_worth_telling_of_a_chat_that_is_printed_as_a_whole():
    template = SimpleNamespace(render=lambda messages, tools, *, prompt: f"{len(messages)} {prompt}")
    chat = Chat(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), None, (1,))
    made = render_everything(chat, template)
    assert (made.samples, made.split, made.parted, made.endless) == (
        (Rendered("2 False", None),),
        *(False, False, False),
    )
