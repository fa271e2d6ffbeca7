"""Chat and text completions over HTTP, with a real chat server of a tiny base behind the socket."""

from __future__ import annotations

import threading
from contextlib import closing

import openai
import pytest
import torch

from tests.base.folders import word_tokenizer
from tests.base.packs import base_of
from tests.families import VOCABULARY, tiny
from tests.service.api.running import start_service
from weftune.run.passes.adapted import AdaptedBase
from weftune.service.chat import ChatServer

MIB = 1 << 20
QUESTION = [{"role": "user", "content": "w10 w20"}]
KEYS = {"model": "demo", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """An HTTP process, and in a thread of this one what the training process does while it is idle."""
    found = start_service(tmp_path_factory.mktemp("chat"))
    settings = found.settings
    settings.jobs.mkdir(parents=True)
    ended = threading.Event()
    with closing(
        ChatServer(
            AdaptedBase(base_of(tiny("llama", torch.float32))),
            word_tokenizer(),
            settings.jobs,
            settings.chat_socket,
            MIB,
            MIB,
        )
    ) as server:

        def work() -> None:
            while not ended.is_set():
                if not server.take_turn():
                    server.wait(0.05)

        thread = threading.Thread(target=work)
        thread.start()
        yield found
        ended.set()
        thread.join()
    found.stop()


def test_a_chat_is_answered_whole_and_streamed_with_the_same_text(running):
    client = running.client()
    whole = client.chat.completions.create(messages=QUESTION, **KEYS)
    (choice,) = whole.choices
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            messages=QUESTION, stream=True, stream_options={"include_usage": True}, **KEYS
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == choice.finish_reason
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_text_is_continued_without_a_chat_template(running):
    client = running.client()
    whole = client.completions.create(prompt="w10 w20", **KEYS)
    assert whole.usage.prompt_tokens in (2, 3)
    text = "".join(
        chunk.choices[0].text for chunk in client.completions.create(prompt="w10 w20", stream=True, **KEYS)
    )
    assert text == whole.choices[0].text


def test_an_earlier_answer_is_a_message_of_the_next_request(running):
    client = running.client()
    answer = client.chat.completions.create(messages=QUESTION, **KEYS).choices[0].message
    more = [*QUESTION, answer.model_dump(), {"role": "user", "content": [{"type": "text", "text": "w30"}]}]
    assert client.chat.completions.create(messages=more, **KEYS).usage.prompt_tokens > 5


def test_max_completion_tokens_and_stop_are_obeyed(running):
    client = running.client()
    keys = {"model": "demo", "messages": QUESTION, "temperature": 0}
    two = client.chat.completions.create(max_completion_tokens=2, **keys)
    assert two.usage.completion_tokens <= 2
    words = client.chat.completions.create(max_tokens=6, **keys).choices[0].message.content.split()
    if len(words) > 1:
        stopped = client.chat.completions.create(max_tokens=6, stop=words[1], **keys)
        assert words[1] not in stopped.choices[0].message.content


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"n": 2}, "n is not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"top_k": 3}}, "top_k"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "w1"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(keys, param, running):
    with pytest.raises(openai.BadRequestError) as error:
        running.client().chat.completions.create(**{**KEYS, "messages": QUESTION, **keys})
    assert param in error.value.body["message"]


def test_a_model_that_the_tenant_does_not_have_is_404(running):
    for name in ("gpt-4o", "ft:HuggingFaceTB/SmolLM2-135M-Instruct:acme::ftjob-none"):
        with pytest.raises(openai.NotFoundError):
            running.client().chat.completions.create(**{**KEYS, "messages": QUESTION, "model": name})


def test_a_prompt_that_is_too_long_is_a_typed_refusal(running):
    long = [{"role": "user", "content": "w10 " * (VOCABULARY * 2)}]
    with pytest.raises(openai.BadRequestError):
        running.client().chat.completions.create(messages=long, **KEYS)


def test_without_a_training_process_chat_is_503_with_retry_after(service):
    with pytest.raises(openai.InternalServerError) as error:
        service.client().chat.completions.create(messages=QUESTION, **KEYS)
    assert error.value.status_code == 503
    assert int(error.value.response.headers["retry-after"]) > 0
