"""A Hub id is asked for once: what the Hub says, or that it says nothing, is one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from weftune.base.config import read_config
from weftune.base.spec import BaseSpec
from weftune.core.hub import absence_reason
from weftune.data.tables import open_path
from weftune.errors import BaseModelError, DataError


class Hub(HTTPServer):
    """Answers everything with one status and counts the questions."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.status, self.code = status, code
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if "a/b" in self.path:  # the client also has questions of its own
            self.server.asked.append(self.path)
        content = json.dumps({"id": "a/b", "siblings": []}).encode()
        self.send_response(self.server.status)
        if self.server.code:
            self.send_header("X-Error-Code", self.server.code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub(status: int, code: str = "") -> Iterator[Hub]:
    with Hub(status, code) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def refused_by(server: Hub, monkeypatch: pytest.MonkeyPatch, revision: str | None = None) -> str:
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    with pytest.raises(BaseModelError) as refused:
        read_config(BaseSpec(model="a/b", revision=revision))
    return str(refused.value)


def test_an_id_that_the_hub_does_not_know_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(404, "RepoNotFound") as server:
        sentence = refused_by(server, monkeypatch)
        assert server.asked == ["/api/models/a/b"]
    assert sentence.startswith("There is no folder a/b here and no such model on the Hub; write the path")


def test_a_revision_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(404, "RevisionNotFound") as server:
        assert refused_by(server, monkeypatch, "v9") == "a/b has no revision v9 on the Hub."


def test_a_hub_that_is_out_of_order_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(503) as server:
        assert "the Hub does not give it to us" in refused_by(server, monkeypatch)
        assert len(server.asked) == 1


def test_no_network_is_one_sentence_and_not_a_row_of_retries(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with hub(200) as server:
        closed = server.url
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    with pytest.raises(BaseModelError, match="There is no folder a/b here, and the Hub cannot be reached"):
        read_config(BaseSpec(model="a/b"))
    with pytest.raises(DataError, match="There is no file or folder a/b here, and the Hub cannot be reached"):
        open_path("a/b", None, "a/b")
    assert slept == []
    assert capfd.readouterr() == ("", "")


def test_what_was_fetched_before_is_not_asked_for(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--a--b"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("c0ffee")
    (model / "snapshots" / "c0ffee").mkdir(parents=True)
    (model / "snapshots" / "c0ffee" / "config.json").write_text("{}")
    (tmp_path / "hub" / "datasets--a--c").mkdir()
    constants.HF_HUB_OFFLINE = True
    assert absence_reason("a/b", "model") is None
    assert absence_reason("a/c", "dataset") is None
    assert "HF_HUB_OFFLINE is set" in (absence_reason("a/d", "model") or "")
