"""The HTTP process of a service as a real process, and rows as the training process writes them."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.service.stores import create_tables
from weftune.base.spec import BaseSpec
from weftune.jobs.store.status import JobStatus, State
from weftune.service.ids import AdapterName, new_id
from weftune.service.keys import KeyFile
from weftune.service.settings import Quotas, ServiceSettings
from weftune.service.store.database import open_requests, open_training
from weftune.service.store.records import (
    Changes,
    CheckpointRow,
    EventRow,
    JobRow,
    TrainingStore,
    Transition,
    process_name,
)
from weftune.service.store.requests import PreparedSubmission, RequestStore, Submission

ANSWER = '{"role": "assistant", "content": "It is %d."}'
QUESTION = '{"role": "user", "content": "Say %d."}'
ROW = f'{{"messages": [{QUESTION}, {ANSWER}]}}\n'
PAIR = (
    f'{{"input": {{"messages": [{QUESTION}]}}, "preferred_output": [{ANSWER}], '
    '"non_preferred_output": [{"role": "assistant", "content": "No."}]}\n'
)
LEASE_SECONDS = 3600.0


def rows(count: int = 20, row: str = ROW) -> bytes:
    return "".join(row % (number, number) for number in range(count)).encode()


def settings_of(store: Path, port: int, base: str, quotas: Mapping[str, Any]) -> ServiceSettings:
    return ServiceSettings(base=BaseSpec(model=base), store=store, port=port, quotas=Quotas(**quotas))


@dataclass(slots=True)
class Running:
    """A running HTTP process with two tenants."""

    settings: ServiceSettings
    log: Path
    process: Any
    """A process of multiprocessing."""
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    def client(self, tenant: str = "acme", **more: Any) -> Any:
        return openai_client(self.url, self.keys[tenant], **{"max_retries": 0, "timeout": 60, **more})

    def call(
        self,
        method: str,
        path: str,
        body: bytes | Any = None,
        tenant: str | None = "acme",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request, and return status, headers and body."""
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        whole = {} if body is None else {"Content-Type": "application/json"}
        whole |= {} if tenant is None else {"Authorization": f"Bearer {self.keys[tenant]}"}
        request = urllib.request.Request(self.url + path, content, whole | dict(headers or {}), method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, dict(answer.headers.items()), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers.items()), error.read()

    def stop(self) -> None:
        self.process.terminate()
        self._wait()

    def kill(self) -> None:
        self.process.kill()
        self._wait()

    def _wait(self) -> None:
        self.process.join(20)
        assert self.process.exitcode is not None

    def restart(self) -> None:
        self.process = _start(self.settings, self.log)
        wait_until_healthy(self)


def openai_client(url: str, key: str, **more: Any) -> Any:
    """Return OpenAI's client without certificates, which take 75 ms to read: no test speaks HTTPS."""
    import openai

    unencrypted = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, http_client=unencrypted, **more)


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def start_service(
    folder: Path,
    base: str = "demo",
    quotas: Mapping[str, Any] | None = None,
    body_seconds: float = 30.0,
    anew: bool = False,
) -> Running:
    """Start an HTTP process: a fork, or `anew` in a new interpreter, which `weftune serve` uses."""
    settings = settings_of(folder / "store", free_port(), base, quotas or {})
    create_tables(settings)
    keys = KeyFile(settings.keys)
    log = folder / "http.log"
    running = Running(settings, log, _start(settings, log, body_seconds, anew))
    running.keys = {tenant: keys.create(tenant) for tenant in ("acme", "other")}
    wait_until_healthy(running)
    return running


def _start(settings: ServiceSettings, log: Path, body_seconds: float = 30.0, anew: bool = False) -> Any:
    from tests.run.processes import context

    made = multiprocessing.get_context("spawn") if anew else context()
    process = made.Process(target=serve, args=(settings, log, body_seconds, anew, dict(os.environ)))
    process.start()
    return process


def wait_until_healthy(running: Running, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if running.call("GET", "/healthz", tenant=None)[0] == 200:
                return
        except OSError:
            time.sleep(0.1)
        assert running.process.exitcode is None, running.log.read_text()
    raise AssertionError(running.log.read_text())


@dataclass(slots=True)
class Training:
    """The training tables of a service, written by a test in the place of the training process."""

    settings: ServiceSettings
    store: TrainingStore
    requests: RequestStore

    @classmethod
    def open(cls, settings: ServiceSettings) -> Training:
        store = TrainingStore(open_training(settings, writable=True))
        store.acquire_lease(process_name(), LEASE_SECONDS)
        return cls(settings, store, RequestStore(open_requests(settings, writable=False)))

    def close(self) -> None:
        self.store.release_lease()
        self.store.close()
        self.requests.close()

    def submission(self, id: str) -> Submission:
        found = self.requests.submission(None, id)
        assert found is not None
        return found

    def wait_until_prepared(self, id: str, seconds: float = 240.0) -> PreparedSubmission:
        """The record of a prepared job. The process that prepares it has a low priority and long imports."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for one in self.requests.prepared_after(0):
                if one.submission.id == id:
                    return one
            time.sleep(0.05)
        raise AssertionError(f"{id} was not prepared in {seconds} s")

    def enter(self, id: str, *states: State, **status: Any) -> JobRow:
        """Record a job in the last of the states, having moved through all of them."""
        submission = self.submission(id)
        path = [None, State.QUEUED, *states]
        row = JobRow(
            id=id,
            tenant=submission.tenant,
            created_at=submission.created_at,
            status=JobStatus(state=path[-1] or State.QUEUED, **status),
        )
        if row.state.has_ended:
            row = replace(row, finished_at=time.time())
        if row.state is State.SUCCEEDED:
            row = replace(row, model=str(self.model(submission)))
        if row.state is State.FAILED:
            row = replace(
                row, error={"code": "diverged", "message": "The loss is not finite.", "param": None}
            )
        moves = [
            Transition(job=id, at=time.time(), old=old, new=new)
            for old, new in pairwise(path)
            if new is not None
        ]
        self.store.write(Changes(jobs=[row], transitions=moves))
        return row

    def model(self, submission: Submission, step: int | None = None) -> AdapterName:
        return AdapterName(
            self.settings.base_name, submission.tenant, submission.suffix or "", submission.id, step
        )

    def add_metrics(self, id: str, steps: int) -> None:
        found = [
            EventRow(
                id=new_id("ftevent"),
                job=id,
                at=time.time(),
                type="metrics",
                message=f"Step {step}: loss {1 / step:.3f}",
                data={"train_loss": 1 / step, "train_mean_token_accuracy": 0.5},
                measured="train",
                step=step,
            )
            for step in range(1, steps + 1)
        ]
        self.store.write(Changes(events=found))

    def add_checkpoint(self, id: str, step: int) -> CheckpointRow:
        row = CheckpointRow(
            id=new_id("ftckpt"),
            job=id,
            at=time.time(),
            step=step,
            model=str(self.model(self.submission(id), step)),
            folder=f"checkpoints/{step}",
            metrics={"train_loss": 0.5, "valid_loss": 0.75},
        )
        self.store.write(Changes(checkpoints=[row]))
        return row


def serve(
    settings: ServiceSettings, log: Path, body_seconds: float, anew: bool, environment: Mapping[str, str]
) -> None:
    from weftune.service import preparer, server
    from weftune.service.api.files import MULTIPART_BYTES
    from weftune.service.api.guard import RequestLimits

    os.environ |= environment
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for handle in (1, 2):
        os.dup2(output, handle)
    if anew:
        assert not {"torch", "transformers"} & sys.modules.keys(), "the HTTP process imports no torch"
    else:
        from tests.forks import PipedFork

        preparer.start_server = PipedFork  # type: ignore[assignment]
        # Those of pytest, instead of which the HTTP process sets up its own.
        logging.getLogger().handlers.clear()
    server.serve(settings, RequestLimits(body_seconds, settings.quotas.file_bytes + MULTIPART_BYTES))
