"""A training process announces its adapters to an HTTP server that answers as vLLM does."""

from __future__ import annotations

import json
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.service.api.running import free_port
from tests.service.serving import Serving
from weftune.adapters.folder import CONFIG
from weftune.base.spec import BaseSpec
from weftune.cli.serve import parse_announce_url
from weftune.errors import UserError
from weftune.jobs.store.status import State
from weftune.service import announcer as module
from weftune.service.announcer import Announcer
from weftune.service.store.records import JobRow


class Vllm:
    """A server that answers with the given statuses, one after another, and then with 200."""

    def __init__(self, port: int, *statuses: int) -> None:
        self.requests: list[tuple[str, dict[str, str], str | None]] = []
        self.statuses = list(statuses)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, body, self.headers.get("Authorization")))
                status = outer.statuses.pop(0) if outer.statuses else 200
                loaded = any(one[1] == body for one in outer.requests[:-1])
                words = "has already been loaded" if status == 400 and loaded else f"/srv/secret {status}"
                if self.path == "/v1/unload_lora_adapter" and status == 404:
                    words = "The lora adapter 'x' cannot be found."
                self.send_response(status)
                self.end_headers()
                self.wfile.write(words.encode())

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def start():
    running = []

    def begin(port, *statuses):
        running.append(Vllm(port, *statuses))
        return running[-1]

    yield begin
    for one in running:
        one.close()


def outcome(serving, job, count=1):
    """Return the newest outcome of announcing a job's adapter, once there are `count` of them."""
    found = [event for event in serving.training.events(job) if "announced" in event.data]
    assert len(found) <= count
    if len(found) < count:
        return None
    return (found[0].data["announced"], found[0].level, found[0].message)


def test_adapters_that_vllm_loads_are_announced_while_training_continues(tmp_path, start):
    port = free_port()
    serving = Serving(tmp_path, announce=f"http://127.0.0.1:{port}")
    try:
        serving.start()
        # vLLM does not run yet, and no job waits for it.
        first = serving.submit(steps=3)
        dora = serving.submit("umbrella", steps=3, adapter={"kind": "dora", "rank": 4})
        rows = [serving.until_state(job, State.SUCCEEDED) for job in (first, dora)]
        vllm = start(port, 503)
        serving.until(lambda: outcome(serving, first) is not None and outcome(serving, dora) is not None)
        loaded = f"vLLM answers with the adapter as {rows[0].model}"
        assert outcome(serving, first) == (True, "info", loaded)
        assert outcome(serving, dora)[:2] == (False, "info")
        expected = {"lora_name": rows[0].model, "lora_path": str(serving.settings.jobs / first)}
        assert vllm.requests == [("/v1/load_lora_adapter", expected, None)] * 2
        # An adapter whose outcome is unknown when the process ends is announced by the next one.
        vllm.close()
        second = serving.submit(steps=2, seed=1)
        serving.until_state(second, State.SUCCEEDED)
        assert serving.end(signal.SIGTERM) == 0
        assert outcome(serving, second) is None
        vllm = start(port)
        serving.start()
        serving.until(lambda: outcome(serving, second) is not None)
        assert outcome(serving, second)[0]
        model = serving.row(second).model
        assert [body["lora_name"] for _, body, _ in vllm.requests] == [model]
        # Deleted adapters are unloaded, also by the next process if vLLM cannot be reached before.
        serving.command(first, "delete")
        serving.until(lambda: outcome(serving, first, 2) is not None)
        assert outcome(serving, first, 2) == (False, "info", "vLLM does not answer with the deleted adapter")
        vllm.close()
        serving.command(second, "delete")
        serving.until(lambda: serving.row(second).model is None)
        assert serving.end(signal.SIGTERM) == 0
        vllm = start(port, 404)
        serving.start()
        serving.until(lambda: outcome(serving, second, 2) is not None)
        assert vllm.requests == [("/v1/unload_lora_adapter", {"lora_name": model}, None)]
    finally:
        serving.close()


def test_what_vllm_refuses_is_not_repeated_and_names_nothing_of_the_operator(
    tmp_path, start, monkeypatch, caplog
):
    monkeypatch.setattr(module, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(module, "MAX_DELAY", 0.01)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    told = []
    port = free_port()
    announcer = Announcer(
        f"http://127.0.0.1:{port}", BaseSpec(model="demo"), tmp_path, lambda *one: told.append(one)
    )
    deleted, job = (
        JobRow(id="a", tenant="t", created_at=0.0),
        JobRow(id="b", tenant="t", created_at=0.0, model="ft:b"),
    )

    def tell(announced=True):
        if announced:
            announcer.announce(deleted)
            announcer.announce(job)
        deadline = time.monotonic() + 30
        while not told:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return told.pop()

    assert tell() == ("b", "vLLM could not be reached in 10 attempts", "warn", False)
    vllm = start(port, 404, 500, 429, 200, 400)
    assert tell() == ("b", "vLLM has refused the adapter with status 404", "warn", False)
    assert "/srv/secret 404" in caplog.text, "the operator reads the reason"
    assert tell() == ("b", "vLLM answers with the adapter as ft:b", "info", True)
    assert tell() == ("b", "vLLM answers with the adapter as ft:b", "info", True), "it is loaded already"
    vllm.statuses = [404]
    announcer.withdraw("b", "ft:b")
    assert tell(announced=False) == ("b", "vLLM does not answer with the deleted adapter", "info", False)
    vllm.statuses = [403]
    announcer.withdraw("b", "ft:b")
    assert tell(announced=False) == ("b", "vLLM has refused the adapter with status 403", "warn", True)
    assert [key for _, _, key in vllm.requests] == ["Bearer sesame"] * 7
    announcer.close()


@pytest.mark.parametrize("url", ["localhost:8001", "ftp://host", "http://", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(UserError, match="write http://HOST:PORT"):
        parse_announce_url(url)


def test_the_address_may_end_as_that_of_a_client():
    assert parse_announce_url("http://127.0.0.1:8001/v1/") == "http://127.0.0.1:8001"
