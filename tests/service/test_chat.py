"""Chat over a real socket with a tiny base, also while it trains."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.base.folders import CHATML, word_tokenizer
from tests.base.packs import CPU, base_of, cut_base
from tests.families import tiny
from tests.generate.test_answers import adapter_folder, spoken_by_peft
from tests.generate.test_decoder import MIB
from weftune.adapters.lora.spec import LoraSpec
from weftune.base.spec import BaseSpec
from weftune.bench.weftune_side import AttachedJobs, resident_jobs
from weftune.core.shapes import LayerRange
from weftune.generate.decoder import Decoder
from weftune.generate.sampling import Sampling
from weftune.run.passes.adapted import AdaptedBase
from weftune.service import chat as module
from weftune.service.chat import ChatClient, ChatServer
from weftune.service.chat_requests import ChatEnd, ChatError, ChatRequest, ChatSampling
from weftune.service.settings import adapter_folder as folder_of

HELLO = ({"role": "user", "content": "w10 w20"},)
GREEDY = ChatSampling(max_tokens=8, temperature=0)


def request(job: str | None = None, step: int | None = None, **keys: Any) -> ChatRequest:
    return ChatRequest(**{"id": "1", "job": job, "step": step, "messages": HELLO, "sampling": GREEDY} | keys)


@pytest.fixture
def jobs_folder(tmp_path: Path) -> Path:
    """Three finished jobs, and a checkpoint of the first."""
    for seed, name in enumerate(("ftjob-1", "ftjob-2", "ftjob-3")):
        adapter_folder(folder_of(tmp_path, name), seed)
    adapter_folder(folder_of(tmp_path, "ftjob-1", 20), seed=7)
    return tmp_path


@pytest.fixture
def adapted() -> AdaptedBase:
    return AdaptedBase(base_of(tiny("llama", torch.float32)))


@pytest.fixture
def server(adapted: AdaptedBase, jobs_folder: Path) -> Iterator[ChatServer]:
    with closing(server_of(adapted, jobs_folder)) as running:
        yield running


def server_of(adapted: AdaptedBase, folder: Path, **keys: Any) -> ChatServer:
    keys = {"adapter_bytes": MIB} | keys
    return ChatServer(adapted, word_tokenizer(), folder, folder / "chat.sock", MIB, **keys)


def while_served(
    server: ChatServer, client: Coroutine[Any, Any, Any], train: Callable[[], object] | None = None
) -> Any:
    """What the client returns, in a thread of its own, while this one trains or waits, as a service does."""
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(asyncio.run, client)
        until = time.monotonic() + 60
        while not done.done():
            assert time.monotonic() < until
            if train is not None:
                train()
            elif not server.take_turn():
                server.wait(0.02)
        return done.result()


async def heard(folder: Path, asked: ChatRequest) -> tuple[list[str], ChatEnd]:
    """The pieces of an answer, and its end."""
    items = [item async for item in ChatClient(folder / "chat.sock").ask(asked)]
    *pieces, end = items
    assert isinstance(end, ChatEnd)
    return [str(piece) for piece in pieces], end


async def refused(folder: Path, asked: ChatRequest) -> ChatError:
    with pytest.raises(ChatError) as raised:
        await heard(folder, asked)
    return raised.value


async def exchange(folder: Path, lines: list[bytes]) -> list[dict[str, Any]]:
    """The answers to raw lines."""
    reader, writer = await asyncio.open_unix_connection(str(folder / "chat.sock"))
    writer.write(b"".join(lines))
    answers = [json.loads(await reader.readline()) for _ in lines]
    writer.close()
    return answers


# -- answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "step"), [(None, None), ("ftjob-1", None), ("ftjob-2", None), ("ftjob-1", 20)]
)
def test_base_adapters_and_checkpoints_say_what_peft_says_in_pieces(server, jobs_folder, job, step):
    pieces, end = while_served(server, heard(jobs_folder, request(job, step)))
    folder = None if job is None else folder_of(jobs_folder, job, step)
    assert "".join(pieces) == spoken_by_peft(jobs_folder, folder, "w10 w20")
    assert len(pieces) > 2, "streamed"
    assert end == ChatEnd("length", prompt_tokens=7, completion_tokens=8)


def test_clients_are_answered_at_the_same_time_in_shared_passes(server, jobs_folder):
    names = [None, "ftjob-1", "ftjob-2"]

    async def all_at_once() -> list[tuple[list[str], ChatEnd]]:
        return await asyncio.gather(*(heard(jobs_folder, request(name)) for name in names))

    together = 0
    turn = server._base.run_pass

    def counted() -> Any:
        nonlocal together
        together = max(together, len(found := turn()))
        return found

    def turn_when_all_have_asked() -> None:
        if together or server._arrivals.qsize() == len(names):
            server.take_turn()
        else:
            time.sleep(0.01)

    server._base.run_pass = counted
    answers = while_served(server, all_at_once(), turn_when_all_have_asked)
    assert together == 3
    for name, (pieces, _) in zip(names, answers, strict=True):
        folder = None if name is None else jobs_folder / name
        assert "".join(pieces) == spoken_by_peft(jobs_folder, folder, "w10 w20")


def test_somebody_chats_for_some_time_after_the_last_answer(server, jobs_folder):
    assert not server.was_active_within(60)
    while_served(server, heard(jobs_folder, request()))
    assert server.was_active_within(60)
    until = time.monotonic() + 60
    while server.was_active_within(0):
        # The client's connection has been closed, or will be soon.
        assert time.monotonic() < until
        server.take_turn()


def test_stop_strings_and_seeds_are_obeyed(server, jobs_folder):
    pieces, _ = while_served(server, heard(jobs_folder, request()))
    stop = "".join(pieces).split()[3]
    sampling = ChatSampling(max_tokens=8, temperature=0, stop=(stop,))
    stopped, end = while_served(server, heard(jobs_folder, request(sampling=sampling)))
    assert end.finish_reason == "stop"
    assert "".join(pieces).startswith("".join(stopped))
    assert stop not in "".join(stopped).split()
    said = [
        while_served(server, heard(jobs_folder, request(sampling=ChatSampling(max_tokens=12, seed=seed))))[0]
        for seed in (1, 1, 2)
    ]
    assert said[0] == said[1] != said[2]


def test_a_prompt_is_rendered_by_the_template_saved_with_the_adapter(server, jobs_folder):
    word_tokenizer(CHATML.replace("<s>", "<s> <s>")).save_pretrained(jobs_folder / "ftjob-2")
    for job, tokens in (("ftjob-1", 7), ("ftjob-2", 9)):
        _, end = while_served(server, heard(jobs_folder, request(job)))
        assert end.prompt_tokens == tokens


# -- while it trains -------------------------------------------------------------------------------------


def training_jobs() -> AttachedJobs:
    jobs = resident_jobs(tiny("llama", torch.float32), CPU)
    for seed in range(2):
        jobs.join(f"running-{seed}", LoraSpec(rank=4, dropout=0.1), [[9, 14, 5], [20, 3]] * 2, seed)
    return jobs


@pytest.mark.slow
def test_training_has_the_same_bits_while_adapters_come_and_go_for_answers(jobs_folder):
    quiet, busy = training_jobs(), training_jobs()
    rounds = 0

    def train() -> None:
        nonlocal rounds
        rounds += 2
        busy.run(busy.plan(2, 32))

    size = 40_000
    with closing(server_of(busy.executor.adapted, jobs_folder, adapter_bytes=size)) as server:
        busy.executor.offer_turn = server.take_turn
        attached = set()

        async def client() -> None:
            names = ["ftjob-1", "running-0", "ftjob-2", None, "ftjob-3", "ftjob-1", "running-1"]
            for name in names:
                pieces, _ = await heard(jobs_folder, request(name))
                attached.update(name for name in busy.executor.banks.attached if name.startswith("chat:"))
                if name is None or name.startswith("ftjob"):
                    folder = None if name is None else jobs_folder / name
                    assert "".join(pieces) == spoken_by_peft(jobs_folder, folder, "w10 w20")

        while_served(server, client(), train)
        assert len(attached) == 3
    assert set(busy.executor.banks.attached) == {"running-0", "running-1"}
    for _ in range(rounds // 2):
        quiet.run(quiet.plan(2, 32))
    assert quiet.losses == busy.losses
    for name in quiet.losses:
        own, other = (jobs.executor.attached[name].master for jobs in (quiet, busy))
        assert torch.equal(own, other)


def test_a_job_that_trains_answers_with_its_weights_of_that_moment(jobs_folder):
    jobs = training_jobs()
    jobs.executor.attached["running-0"].master.normal_(generator=torch.Generator().manual_seed(0))
    said = set()
    with closing(server_of(jobs.executor.adapted, jobs_folder)) as server:
        for _ in range(2):
            jobs.executor.use_latest_weights("running-0")
            jobs.run(jobs.plan(2, 64))
            pieces, _ = while_served(server, heard(jobs_folder, request("running-0")))
            decoder = Decoder(jobs.executor.adapted, MIB)
            prompt = word_tokenizer()("<s> user w10 w20 </s> <s> assistant")["input_ids"]
            one = decoder.submit(prompt, Sampling(max_tokens=8), "running-0")
            decoder.run_until_idle()
            assert "".join(pieces) == word_tokenizer().decode(one.tokens, skip_special_tokens=True)
            said.add("".join(pieces))
            jobs.executor.attached["running-0"].master.neg_()
    assert len(said) == 2


def test_a_job_that_leaves_ends_its_answer_with_a_sentence_and_training_goes_on(jobs_folder):
    jobs = training_jobs()
    with closing(server_of(jobs.executor.adapted, jobs_folder)) as server:
        jobs.executor.offer_turn = server.take_turn
        pieces: list[Any] = []

        async def client() -> ChatError | None:
            asked = request("running-0", sampling=ChatSampling(max_tokens=50, temperature=0))
            try:
                async for piece in ChatClient(jobs_folder / "chat.sock").ask(asked):
                    pieces.append(piece)
            except ChatError as error:
                return error
            return None

        def train() -> None:
            if pieces and "running-0" in jobs.samples_by_job:
                jobs.leave("running-0")
            jobs.run(jobs.plan(1, 32))

        error = while_served(server, client(), train)
        assert error.code == "unavailable"
        assert "left the device" in str(error)
        assert pieces
        deadline = time.monotonic() + 60
        while server.is_active:  # The end of its connection may still have to be read.
            assert time.monotonic() < deadline
            server.take_turn()
        _, end = while_served(server, heard(jobs_folder, request("running-1")), train)
        assert end.finish_reason in ("length", "stop")
        gone = while_served(server, refused(jobs_folder, request("running-0")), train)
        assert gone.code == "model_not_found"


# -- clients that leave, and requests that are wrong -----------------------------------------------------


def test_a_closed_connection_cancels_its_answer_and_no_other(server, jobs_folder):
    long = ChatSampling(max_tokens=40, temperature=0)

    async def leave() -> None:
        async with aclosing(ChatClient(jobs_folder / "chat.sock").ask(request(sampling=long))) as pieces:
            async for _ in pieces:
                return

    async def both() -> ChatEnd:
        stays = asyncio.create_task(heard(jobs_folder, request("ftjob-1", sampling=long)))
        await leave()
        return (await stays)[1]

    assert while_served(server, both()).completion_tokens > 1
    until = time.monotonic() + 60
    while server.is_active:
        assert time.monotonic() < until
        if not server.take_turn():
            server.wait(0.02)
    assert server._base._decoder.is_idle
    assert server._base._decoder._cache.pool.pages > 0
    while_served(server, leave())
    generated = server._base._decoder
    for _ in range(5):
        server.wait(0.05)
        server.take_turn()
    assert generated.is_idle, "the sequence was ended before its 40 tokens"


WRONG = [
    (b"{", None, "invalid_request"),
    (b"[]", None, "invalid_request"),
    (b"\xff\xfe", None, "invalid_request"),
    (b"[" * 100_000, None, "invalid_request"),
    (b'{"id": 3}', 3, "invalid_request"),
    (b'{"id": "a"}', "a", "invalid_request"),
    (b'{"id": "a", "messages": "hello"}', "a", "invalid_request"),
    (b'{"id": "a", "messages": []}', "a", "invalid_request"),
    (b'{"id": "a", "messages": [3]}', "a", "invalid_request"),
    (b'{"id": "a", "messages": [{"role": 3}]}', "a", "invalid_request"),
    (b'{"id": "a", "messages": [{"role": "user", "content": "\\ud800"}]}', "a", "invalid_request"),
    (b'{"id": "a", "model": {"job": "../ftjob-1"}, "messages": [{}]}', "a", "model_not_found"),
    (b'{"id": "a", "model": {"job": "ftjob-1", "step": "x"}, "messages": [{}]}', "a", "model_not_found"),
    (b'{"id": "a", "model": "ftjob-1", "messages": [{}]}', "a", "model_not_found"),
]
SAMPLINGS: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": "8"},
    {"max_tokens": True},
    {"max_tokens": 1.5},
    {"temperature": -1},
    {"temperature": float("nan")},
    {"top_p": 0},
    {"seed": 1 << 70},
    {"stop": [""]},
    {"stop": 3},
    {"beam": 3},
]


def test_wrong_requests_are_answered_with_sentences_and_nothing_else_is_disturbed(server, jobs_folder):
    hello = {"messages": list(HELLO)}
    lines = [line for line, _, _ in WRONG]
    lines += [json.dumps({"id": "s", **hello, "sampling": one}).encode() for one in SAMPLINGS]
    answers = while_served(server, exchange(jobs_folder, [line + b"\n" for line in lines]))
    assert all(set(one) == {"id", "error", "code"} for one in answers)
    assert [one["code"] for one in answers if one["id"] == "s"] == ["invalid_request"] * len(SAMPLINGS)
    found = sorted((str(one["id"]), one["code"]) for one in answers if one["id"] != "s")
    assert found == sorted((str(id), code) for _, id, code in WRONG)
    assert all("\n" not in one["error"] and one["error"].endswith((".", "help.")) for one in answers), answers
    pieces, _ = while_served(server, heard(jobs_folder, request()))
    assert "".join(pieces) == spoken_by_peft(jobs_folder, None, "w10 w20")


@pytest.mark.parametrize(
    ("asked", "code", "sentence"),
    [
        (request("ftjob-unknown"), "model_not_found", "no such model"),
        (request("ftjob-1", step=21), "model_not_found", "no such model"),
        (
            request(messages=({"role": "user", "content": "w9 " * 70},)),
            "invalid_request",
            "has 75 tokens, and the base has 64 positions",
        ),
    ],
)
def test_an_unknown_model_and_a_prompt_too_long_are_told_apart(server, jobs_folder, asked, code, sentence):
    error = while_served(server, refused(jobs_folder, asked))
    assert error.code == code
    assert sentence in str(error)


def test_a_request_that_is_too_long_closes_its_connection_only(server, jobs_folder, monkeypatch):
    async def send() -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(str(jobs_folder / "chat.sock"))
        writer.write(b"x" * (module.LINE_BYTES + 2))
        answer = json.loads(await reader.readline())
        writer.close()
        return answer

    assert while_served(server, send())["code"] == "invalid_request"
    while_served(server, heard(jobs_folder, request()))


def test_a_pass_that_fails_ends_its_answers_with_a_sentence_and_the_next_is_answered(server, jobs_folder):
    def fail() -> None:
        raise RuntimeError("out of memory")

    server._base._decoder.run_pass = fail
    error = while_served(server, refused(jobs_folder, request("ftjob-1")))
    assert error.code == "unavailable"
    assert "memory" not in str(error)
    pieces, _ = while_served(server, heard(jobs_folder, request("ftjob-1")))
    assert "".join(pieces) == spoken_by_peft(jobs_folder, jobs_folder / "ftjob-1", "w10 w20")


def test_a_client_that_does_not_read_loses_its_connection_and_holds_up_nobody(server, jobs_folder):
    # Every piece repeats the id, so that a few of them are more than a client may leave unread.
    asked = {"id": "x" * (1 << 20), "messages": HELLO, "sampling": {"max_tokens": 40, "temperature": 0}}
    with closing(socket.socket(socket.AF_UNIX)) as reader:
        reader.connect(str(jobs_folder / "chat.sock"))
        reader.sendall(json.dumps(asked).encode() + b"\n")
        assert server.wait(10)
        while_served(server, heard(jobs_folder, request("ftjob-2", sampling=ChatSampling(max_tokens=40))))
        until = time.monotonic() + 60
        while server.is_active:
            assert time.monotonic() < until
            if not server.take_turn():
                server.wait(0.02)
        received = 0
        with suppress(ConnectionResetError):
            while piece := reader.recv(1 << 20):
                received += len(piece)
    assert 0 < received < module.UNREAD_BYTES


def test_a_damaged_adapter_is_an_error_of_its_request_alone(server, jobs_folder):
    path = jobs_folder / "ftjob-1" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    error = while_served(server, refused(jobs_folder, request("ftjob-1")))
    assert error.code == "model_not_found", error
    while_served(server, heard(jobs_folder, request("ftjob-2")))


def test_a_divided_base_refuses_to_chat_in_a_sentence(jobs_folder):
    stage = cut_base(tiny("llama", torch.float32), BaseSpec(model="tiny"), CPU, LayerRange(0, 1, 2))
    with closing(server_of(AdaptedBase(stage), jobs_folder)) as server:
        error = while_served(server, refused(jobs_folder, request()))
        assert "divides or streams" in str(error)


# -- adapters that stay attached -------------------------------------------------------------------------


def attached_for_answers(adapted: AdaptedBase) -> list[str]:
    return [name for name in adapted.banks.attached if name.startswith("chat:")]


def test_the_adapters_used_last_stay_attached_within_their_memory(adapted, jobs_folder):
    with closing(server_of(adapted, jobs_folder)) as server:
        while_served(server, heard(jobs_folder, request("ftjob-1")))
        weights = adapted.banks.attached["chat:ftjob-1:"].weights
        size = weights.numel() * weights.element_size()
        assert server._base._attached_bytes == {"chat:ftjob-1:": size}, "known before it is attached"
    assert not adapted.banks.attached
    with closing(server_of(adapted, jobs_folder, adapter_bytes=2 * size)) as server:
        for name in ("ftjob-1", "ftjob-2", "ftjob-1", "ftjob-3"):
            while_served(server, heard(jobs_folder, request(name)))
        assert attached_for_answers(adapted) == ["chat:ftjob-1:", "chat:ftjob-3:"]
        serial = adapted.banks.attached["chat:ftjob-1:"].serial
        while_served(server, heard(jobs_folder, request("ftjob-1")))
        assert adapted.banks.attached["chat:ftjob-1:"].serial == serial, "read once"
        while_served(server, heard(jobs_folder, request("ftjob-1", step=20)))
        assert attached_for_answers(adapted) == ["chat:ftjob-1:", "chat:ftjob-1:20"]
    with closing(server_of(adapted, jobs_folder, adapter_bytes=size - 1)) as server:
        error = while_served(server, refused(jobs_folder, request("ftjob-1")))
        assert error.code == "unavailable"
        assert f"{size:,} bytes" in str(error)


def test_an_adapter_that_answers_is_not_detached(adapted, jobs_folder):
    with closing(server_of(adapted, jobs_folder, adapter_bytes=40_000)) as server:

        async def two() -> tuple[Any, Any]:
            long = request("ftjob-1", sampling=ChatSampling(max_tokens=40, temperature=0))
            first = asyncio.create_task(heard(jobs_folder, long))
            await asyncio.sleep(0.05)
            return await asyncio.gather(first, heard(jobs_folder, request("ftjob-2")), return_exceptions=True)

        server._base._adapter_bytes = 1
        error = while_served(server, refused(jobs_folder, request("ftjob-1")))
        assert "is in use" in str(error)
        server._base._adapter_bytes = 40_000
        first, second = while_served(server, two())
        assert isinstance(first[1], ChatEnd)
        assert isinstance(second, ChatError) or isinstance(second[1], ChatEnd)


# -- sockets ---------------------------------------------------------------------------------------------


def test_only_this_user_may_connect_and_a_stale_socket_is_replaced(adapted, jobs_folder):
    path = jobs_folder / "chat.sock"
    with closing(socket.socket(socket.AF_UNIX)) as stale, module.socket_address(path) as address:
        stale.bind(address)
    with closing(server_of(adapted, jobs_folder)) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        while_served(server, heard(jobs_folder, request()))
    assert not path.exists()


def test_a_path_too_long_for_a_socket_works(adapted, jobs_folder):
    folder = jobs_folder / ("a" * 100) / ("b" * 100)
    path = folder / "chat.sock"
    assert len(os.fsencode(path)) > 200
    with closing(ChatServer(adapted, word_tokenizer(), jobs_folder, path, MIB, MIB)) as server:
        _, end = while_served(server, heard(folder, request("ftjob-1")))
        assert end.completion_tokens == 8


def test_without_a_training_process_the_client_gets_a_sentence(jobs_folder):
    assert asyncio.run(refused(jobs_folder, request())).code == "unavailable"


def test_a_server_that_stops_ends_its_answers_with_a_sentence(adapted, jobs_folder):
    before = threading.active_count()
    server = server_of(adapted, jobs_folder)
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(asyncio.run, refused(jobs_folder, request("ftjob-1")))
        assert server.wait(10)
        server.take_turn()
        server.close()
        assert done.result(10).code == "unavailable"
    assert not adapted.banks.attached
    assert threading.active_count() == before


def test_the_client_imports_no_torch():
    code = "import sys, weftune.service.chat; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
