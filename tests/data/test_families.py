"""Golden samples: for every family the exact text, the exact tokens and the exact supervised runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.data import families
from tests.data.conftest import supervised_runs, whole_text
from weftune.data.template import Template

CHAT = [
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "yes?"},
    {"role": "assistant", "content": "yes\n\nno"},
]


@dataclass(frozen=True, slots=True)
class Golden:
    make: Any
    text: str
    runs: tuple[str, ...]
    chat_template: str | None = None


LLAMA_HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
GOLDEN = {
    "llama3": Golden(
        families.llama3,
        "<|begin_of_text|>"
        + LLAMA_HEAD.format("user")
        + "What is two plus two?<|eot_id|>"
        + LLAMA_HEAD.format("assistant")
        + "It is four.<|eot_id|>"
        + LLAMA_HEAD.format("user")
        + "yes?<|eot_id|>"
        + LLAMA_HEAD.format("assistant")
        + "yes\n\nno<|eot_id|>",
        ("It is four.<|eot_id|>", "yes\n\nno<|eot_id|>"),
    ),
    "qwen2.5": Golden(
        families.qwen25,
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWhat is two plus two?<|im_end|>\n<|im_start|>assistant\nIt is four.<|im_end|>\n"
        "<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\nyes\n\nno<|im_end|>\n",
        ("It is four.<|im_end|>", "yes\n\nno<|im_end|>"),
    ),
    "mistral": Golden(
        families.mistral,
        "<s>[INST] What is two plus two? [/INST] It is four.</s>[INST] yes? [/INST] yes\n\nno</s>",
        (" It is four.</s>", " yes\n\nno</s>"),
    ),
    "gemma3": Golden(
        families.gemma3,
        "<bos><start_of_turn>user\nWhat is two plus two?<end_of_turn>\n"
        "<start_of_turn>model\nIt is four.<end_of_turn>\n"
        "<start_of_turn>user\nyes?<end_of_turn>\n<start_of_turn>model\nyes\n\nno<end_of_turn>\n",
        ("It is four.<end_of_turn>", "yes\n\nno<end_of_turn>"),
    ),
    "smollm2": Golden(
        families.smollm2,
        "<|im_start|>user\nWhat is two plus two?<|im_end|>\n<|im_start|>assistant\nIt is four.<|im_end|>\n"
        "<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\nyes\n\nno<|im_end|>\n",
        ("It is four.<|im_end|>", "yes\n\nno<|im_end|>"),
    ),
    "gpt2 with chatml": Golden(
        families.gpt2,
        "<|im_start|>user\nWhat is two plus two?<|endoftext|>\n"
        "<|im_start|>assistant\nIt is four.<|endoftext|>\n"
        "<|im_start|>user\nyes?<|endoftext|>\n<|im_start|>assistant\nyes\n\nno<|endoftext|>\n",
        ("It is four.<|endoftext|>", "yes\n\nno<|endoftext|>"),
        "chatml",
    ),
    "opt with chatml": Golden(
        families.opt,
        "<|im_start|>user\nWhat is two plus two?</s>\n<|im_start|>assistant\nIt is four.</s>\n"
        "<|im_start|>user\nyes?</s>\n<|im_start|>assistant\nyes\n\nno</s>\n",
        ("It is four.</s>", "yes\n\nno</s>"),
        "chatml",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_chat_is_printed_and_supervised_as_its_family_does(name, samples_of):
    golden = GOLDEN[name]
    tokenizer = golden.make()
    samples = samples_of([{"messages": CHAT}], tokenizer, chat_template=golden.chat_template)
    assert len(samples) == 1
    assert whole_text(samples, 0, tokenizer) == golden.text
    assert supervised_runs(samples, 0, tokenizer) == list(golden.runs)
    # The text is what the tokenizer itself makes of the template's print.
    expected = tokenizer(golden.text, add_special_tokens=False).input_ids
    assert samples.tokens(0).tolist() == expected
    ends = np.flatnonzero(samples.mask(0))
    assert samples.supervised[0] == len(ends) == sum(len(_ids(tokenizer, run)) for run in golden.runs)
    assert samples.lengths[0] == len(expected)


@pytest.mark.parametrize("name", GOLDEN)
def test_only_the_last_turn_is_supervised_with_train_on_completion(name, samples_of):
    golden = GOLDEN[name]
    tokenizer = golden.make()
    samples = samples_of(
        [{"messages": CHAT}], tokenizer, chat_template=golden.chat_template, train_on="completion"
    )
    assert whole_text(samples, 0, tokenizer) == golden.text
    assert supervised_runs(samples, 0, tokenizer) == [golden.runs[-1]]


@pytest.mark.parametrize("name", GOLDEN)
def test_every_token_but_bos_is_supervised_with_train_on_all(name, samples_of):
    golden = GOLDEN[name]
    tokenizer = golden.make()
    samples = samples_of([{"messages": CHAT}], tokenizer, chat_template=golden.chat_template, train_on="all")
    assert whole_text(samples, 0, tokenizer) == golden.text
    first_is_bos = samples.tokens(0)[0] == tokenizer.bos_token_id
    assert samples.mask(0).tolist() == [not first_is_bos] + [True] * (int(samples.lengths[0]) - 1)


@pytest.mark.parametrize(
    "make",
    [families.llama3, families.qwen25, families.qwen3, families.mistral, families.gemma3, families.phi3],
)
def test_our_sandbox_prints_what_transformers_prints(make):
    tokenizer = make()
    template = Template(tokenizer.chat_template, tokenizer.special_tokens_map)
    for prompt in (False, True):
        messages = CHAT[:3] if prompt else CHAT
        theirs = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert template.render(messages, None, prompt=prompt) == theirs


def test_phi3_turns_end_where_its_end_token_is_though_it_swallows_the_line_break(samples_of):
    tokenizer = families.phi3()
    row = {"messages": CHAT[:2]}
    samples = samples_of([row], tokenizer)
    tokens, mask = samples.tokens(0).tolist(), samples.mask(0).tolist()
    ids = tokenizer.convert_tokens_to_ids
    assert tokens[0] == ids("<|user|>")
    start = tokens.index(ids("<|assistant|>"))
    spoken = _ids(tokenizer, "It is four.")
    assert tokens[start:] == [ids("<|assistant|>"), *spoken, ids("<|end|>"), ids("<|endoftext|>")]
    # Phi-3 prints its end of text after the end of a finished chat; it is the last that a turn says.
    assert mask[start:] == [False] + [True] * (len(spoken) + 2)


def test_a_chat_of_two_phi3_turns_is_one_sample_though_eos_follows_only_the_last(samples_of):
    tokenizer = families.phi3()
    samples = samples_of([{"messages": CHAT}], tokenizer)
    assert len(samples) == 1
    assert supervised_runs(samples, 0, tokenizer) == ["It is four.<|end|>", "yes\n\nno<|end|><|endoftext|>"]


def test_qwen3_turns_become_samples_of_their_own_as_at_inference(tmp_path):
    from weftune.data.prepare import prepare
    from weftune.data.spec import DataSpec

    tokenizer = families.qwen3()
    messages = [
        {"role": "user", "content": "What is two plus two?"},
        {"role": "assistant", "content": "<think>\nI should add.\n</think>\n\nIt is four."},
        {"role": "user", "content": "yes?"},
        {"role": "assistant", "content": "yes"},
    ]
    prepared = prepare(DataSpec(rows=[{"messages": messages}]), None, tokenizer, tmp_path)
    samples = prepared.train
    assert len(samples) == 2
    asked = "<|im_start|>user\nWhat is two plus two?<|im_end|>\n<|im_start|>assistant\n"
    assert (
        whole_text(samples, 0, tokenizer)
        == asked + "<think>\nI should add.\n</think>\n\nIt is four.<|im_end|>\n"
    )
    assert supervised_runs(samples, 0, tokenizer) == [
        "<think>\nI should add.\n</think>\n\nIt is four.<|im_end|>"
    ]
    assert whole_text(samples, 1, tokenizer) == (
        asked + "It is four.<|im_end|>\n<|im_start|>user\nyes?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nyes<|im_end|>\n"
    )
    assert supervised_runs(samples, 1, tokenizer) == ["<think>\n\n</think>\n\nyes<|im_end|>"]
    assert any("each assistant turn became its own sample" in note for note in prepared.notes)
    # Marks of thinking are ordinary tokens, not control tokens: in the assistant's text they are parsed.
    assert tokenizer.convert_tokens_to_ids("</think>") in samples.tokens(0).tolist()


def test_a_single_turn_of_qwen3_is_one_sample(samples_of):
    tokenizer = families.qwen3()
    samples = samples_of([{"messages": CHAT[:2]}], tokenizer)
    assert len(samples) == 1
    assert supervised_runs(samples, 0, tokenizer) == ["<think>\n\n</think>\n\nIt is four.<|im_end|>"]


def test_the_real_stories_tokenizer_gives_no_bos_that_its_template_does_not_print(stories, samples_of):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Tell"},
                {"role": "assistant", "content": "Once upon a time"},
            ]
        }
    ]
    samples = samples_of(rows, stories)
    tokens = samples.tokens(0).tolist()
    assert tokens == stories("user: Tell\nassistant: Once upon a time\n", add_special_tokens=False).input_ids
    taught = [stories.convert_ids_to_tokens(t) for t, m in zip(tokens, samples.mask(0), strict=True) if m]
    assert taught == ["▁Once", "▁upon", "▁a", "▁time", "<0x0A>"]


def test_a_completion_goes_on_after_its_prompt_without_an_added_space(stories, samples_of):
    samples = samples_of([{"prompt": "Once upon ", "completion": "a time"}], stories)
    pieces = stories.convert_ids_to_tokens(samples.tokens(0).tolist())
    assert pieces == ["<s>", "▁Once", "▁upon", "▁", "a", "▁time", "</s>"]
    assert samples.mask(0).tolist() == [False] * 4 + [True] * 3


def test_tools_go_through_the_template(samples_of):
    tokenizer = families.qwen25()
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "user", "content": "two plus two?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "four"},
        {"role": "assistant", "content": "It is four."},
    ]
    samples = samples_of([{"messages": messages, "tools": [tool]}], tokenizer)
    assert '{"type": "function", "function": {"name": "add", "parameters": {}}}' in whole_text(
        samples, 0, tokenizer
    )
    assert supervised_runs(samples, 0, tokenizer) == [
        '<tool_call>add {"a": 2}</tool_call><|im_end|>',
        "It is four.<|im_end|>",
    ]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids
