"""A service without a training process: tests write what training would have recorded, with its own store."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from numpy import zeros
from safetensors.numpy import save_file

from tests.service.stores import create_tables
from weftune.base.spec import BaseSpec
from weftune.jobs.store.status import JobStatus, State
from weftune.service.api.app import create_app
from weftune.service.chat import ChatClient
from weftune.service.ids import AdapterName, new_id
from weftune.service.keys import KeyFile
from weftune.service.settings import ServiceSettings
from weftune.service.store.database import open_requests, open_training
from weftune.service.store.records import (
    Changes,
    CheckpointRow,
    EventRow,
    JobRow,
    Receipt,
    TrainingStore,
    Transition,
    WindowRow,
)
from weftune.service.store.requests import FileRecord, RequestStore, Submission

ROW = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day."}]}


def rows(count: int = 16) -> str:
    return "".join(json.dumps(ROW) + "\n" for _ in range(count))


def different_rows(count: int) -> str:
    """Return rows of which a part can be held out, since no two are equal."""
    answers = ({"role": "assistant", "content": f"Day {number}."} for number in range(count))
    return "".join(json.dumps({"messages": [ROW["messages"][0], one]}) + "\n" for one in answers)


class Site:
    """A store with an application in front of it, and what training writes into it."""

    def __init__(self, folder: Path, base: str = "demo", **settings: Any) -> None:
        self.settings = ServiceSettings(
            base=BaseSpec(model=base), store=folder / "store", device="cpu", **settings
        )
        create_tables(self.settings)
        self.requests = RequestStore(open_requests(self.settings, writable=True))
        self.training = TrainingStore(open_training(self.settings, writable=True))
        self.training.acquire_lease("tests", 3600)
        self._reader = TrainingStore(open_training(self.settings, writable=False))
        keys = KeyFile(self.settings.keys)
        self.keys = {tenant: keys.create(tenant) for tenant in ("acme", "globex")}
        self.app: FastAPI = create_app(
            self.settings, self.requests, self._reader, keys, ChatClient(self.settings.chat_socket)
        )

    def close(self) -> None:
        for store in (self.requests, self.training, self._reader):
            store.close()

    def headers(self, tenant: str = "acme") -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[tenant]}"}

    # -- what the HTTP process writes --------------------------------------------------------------------

    def submit(
        self,
        suffix: str | None,
        tenant: str = "acme",
        id: str | None = None,
        sweep_id: str | None = None,
        trial: Mapping[str, Any] | None = None,
        **job: Any,
    ) -> str:
        """Submit a job, which is not known to training yet."""
        file, id = new_id("file"), id or new_id("ftjob")
        self.settings.files.mkdir(parents=True, exist_ok=True)
        path = self.settings.file_path(file)
        path.write_text(rows(), encoding="utf-8")
        self.requests.add_file(
            FileRecord(
                id=file,
                tenant=tenant,
                filename="tickets.jsonl",
                purpose="fine-tune",
                bytes=path.stat().st_size,
                rows=16,
                sha256="",
                created_at=time.time(),
            )
        )
        keys = {"name": id, "data": {"path": str(path)}, "adapter": {"rank": 8}, "objective": {"kind": "sft"}}
        keys |= {"epochs": 2, "batch_size": 4, "seed": 7, **job}
        request = {"model": self.settings.base_name, "training_file": file} | (
            {} if suffix is None else {"suffix": suffix}
        )
        self.requests.submit(
            Submission(
                id=id,
                tenant=tenant,
                created_at=time.time(),
                request=request,
                job=keys,
                training_file=file,
                suffix=suffix,
                details={},
                body_hash=id,
                sweep=sweep_id,
                trial=trial,
            )
        )
        return id

    def submit_sweep(self, suffix: str, key: str, values: Sequence[Any]) -> list[str]:
        """Submit a sweep over the values of a key, and return the ids of its job and of its trials."""
        sweep = new_id("ftjob")
        self.submit(suffix, id=sweep, sweep_id=sweep, sweep={"over": {key: list(values)}})
        found = enumerate(values)
        return [
            sweep,
            *(self.submit(f"{suffix}-{at}", sweep_id=sweep, trial={key: one}) for at, one in found),
        ]

    # -- what training writes ----------------------------------------------------------------------------

    def enter(self, id: str, steps: int = 40, priority: int = 0, reason: str = "") -> None:
        """Queue a submitted job."""
        submission = self.requests.submission(None, id)
        assert submission is not None
        row = JobRow(
            id=id,
            tenant=submission.tenant,
            priority=priority,
            created_at=submission.created_at,
            status=JobStatus(steps=steps, reason=reason),
        )
        self.training.write(
            Changes(jobs=[row], transitions=[Transition(job=id, at=time.time(), old=None, new=State.QUEUED)])
        )

    def add(self, suffix: str | None, tenant: str = "acme", steps: int = 40, **values: Any) -> str:
        """Submit and queue a job."""
        id = self.submit(suffix, tenant)
        self.enter(id, steps, **values)
        return id

    def move(self, id: str, state: State, reason: str = "", **values: Any) -> None:
        row = self.training.job(id)
        assert row is not None
        now = time.time()
        changed = replace(row, status=replace(row.status, state=state, reason=reason), **values)
        if state is State.RUNNING:
            changed = replace(changed, started_at=changed.started_at or now)
        if state.has_ended:
            changed = replace(changed, finished_at=now, estimated_finish=None)
        transition = Transition(job=id, at=now, old=row.state, new=state, reason=reason)
        self.training.write(Changes(jobs=[changed], transitions=[transition]))

    def train(self, id: str, until: int, held_out: bool = True) -> None:
        """Record the steps of a running job up to `until`, with an evaluation at every tenth."""
        row = self.training.job(id)
        assert row is not None
        found = []
        for step in range(row.status.step + 1, until + 1):
            found.append(self.metric(id, "train", step, {"train_loss": round(_loss(id, step), 4)}))
            if step % 10 == 0 and held_out:
                found.append(self.metric(id, "eval", step, {"valid_loss": round(_loss(id, step, 0.0), 4)}))
        status = replace(row.status, step=until, trained_tokens=until * 512)
        if held_out:
            status = replace(status, eval_loss=round(_loss(id, until, 0.0), 4), base_loss=2.31)
        left = (row.status.steps - until) * 1.7
        used = Receipt(
            job=id,
            tenant=row.tenant,
            tokens=until * 512,
            padding_tokens=until * 3,
            device_seconds=until * 0.61,
            passes=until * 2,
            shared_passes=until * 2 - until // 8,
        )
        self.training.write(
            Changes(
                jobs=[replace(row, status=status, estimated_finish=time.time() + left)],
                events=found,
                receipts=[used],
            )
        )

    def metric(self, id: str, measured: Any, step: int, data: Mapping[str, Any]) -> EventRow:
        return EventRow(
            id=new_id("ftevent"),
            job=id,
            at=time.time(),
            type="metrics",
            message=f"Step {step}",
            data=data,
            measured=measured,
            step=step,
        )

    def log(self, id: str, message: str, level: Any = "info") -> None:
        row = EventRow(id=new_id("ftevent"), job=id, at=time.time(), level=level, message=message)
        self.training.write(Changes(events=[row]))

    def model(self, id: str) -> str:
        submission = self.requests.submission(None, id)
        assert submission is not None
        return str(AdapterName(self.settings.base_name, submission.tenant, submission.suffix or "", id))

    def succeed(self, id: str) -> None:
        """End a job with an adapter in its folder."""
        row = self.training.job(id)
        assert row is not None
        self.train(id, row.status.steps)
        self._write_adapter(self.settings.jobs / id)
        self.move(id, State.SUCCEEDED, model=self.model(id))

    def checkpoint(self, id: str, step: int) -> None:
        self._write_adapter(self.settings.jobs / id / "kept" / str(step))
        row = CheckpointRow(
            id=new_id("ftckpt"),
            job=id,
            at=time.time(),
            step=step,
            model=f"{self.model(id)}:ckpt-step-{step}",
            folder=f"kept/{step}",
            metrics={"valid_loss": round(_loss(id, step, 0.0), 4)},
        )
        self.training.write(Changes(checkpoints=[row]))

    def _write_adapter(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}', encoding="utf-8")
        save_file(
            {"base_model.model.a.lora_A.weight": zeros((8, 1000), "float32")},
            folder / "adapter_model.safetensors",
        )

    def window(self, parts: Mapping[str, int], passes: int = 24, **values: Any) -> None:
        """Record a window whose passes these jobs share, with these tokens each."""
        tokens = sum(parts.values())
        found = []
        for at in range(passes):
            # The first job is in all passes, and each of the others in most of them.
            shared = {
                id: part + 7 * (at * (1 + number) % 9)
                for number, (id, part) in enumerate(parts.items())
                if number == 0 or (at + number) % 6
            }
            seconds, predicted = 0.21 + 0.01 * (at * 7 % 5), 0.23 + 0.005 * (at * 3 % 4)
            found.append(
                {
                    "jobs": shared,
                    "tokens": tokens,
                    "rows": tokens,
                    "training": at < passes - 2,
                    "seconds": seconds,
                    "predicted_seconds": predicted,
                }
            )
        whole = {
            "jobs": len(parts),
            "tokens": tokens * passes,
            "capacity": 1024,
            "microbatches": passes,
            "shared": max(0, passes - 4),
            "seconds": 5.64,
            "predicted_seconds": 5.48,
            "peak_bytes": 7 << 30,
            "predicted_peak_bytes": 7_700_000_000,
            "device": "cpu",
            "passes": found,
            "memory": {
                "budget_bytes": 12 << 30,
                "base_bytes": 4 << 30,
                "answer_bytes": 384 << 20,
                "jobs": {id: (180 + 40 * at) << 20 for at, id in enumerate(parts)},
            },
        }
        self.training.write(Changes(windows=[WindowRow(at=time.time(), values={**whole, **values})]))


def _loss(id: str, step: int, noise: float = 0.07) -> float:
    """A curve of its own for each job."""
    seed = sum(id.encode()) % 97
    wobble = noise * math.sin(step * (1.7 + seed / 40)) * math.cos(step * 0.9 + seed)
    return 0.45 + seed / 130 + (1.9 - seed / 200) * math.exp(-step / (9 + seed / 8)) + wobble


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Run the application behind a real port, and yield its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        app.state.streams.is_closing = True
        server.should_exit = True
        thread.join(20)
        listener.close()
