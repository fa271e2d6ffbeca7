"""The training process of a service as a real process, and the store as the HTTP process writes it."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import weftune
from tests import bench, oracle
from tests.outputs import jobs_folder
from tests.run.processes import context
from tests.service.stores import create_tables
from weftune.base.spec import BaseSpec
from weftune.jobs.store.status import State
from weftune.service.ids import new_id
from weftune.service.settings import Envelope, Quotas, ServiceSettings
from weftune.service.store.database import open_requests, open_training
from weftune.service.store.records import JobRow, TrainingStore
from weftune.service.store.requests import RequestStore, Submission, Verb

SECONDS = 90.0
JOB: dict[str, Any] = {"batch_size": 4, "learning_rate": 1e-2, "save_every": 4, "adapter": {"rank": 4}}


def train(
    settings: ServiceSettings, log: Path, lease_seconds: float, cursed_seed: int | None, turn_seconds: float
) -> None:
    """In the forked child: the training process. It dies whenever a job with the cursed seed is attached."""
    import torch

    from weftune.run.executor import Executor
    from weftune.service import training
    from weftune.trainer import windows

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # Those of the process that it was forked from, with which it would not log where it prints.
    logging.getLogger().handlers.clear()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    training.LEASE_SECONDS, training.CHAT_REST_SECONDS = lease_seconds, math.inf
    windows.TURN_SECONDS = turn_seconds
    attach = Executor.attach

    def crashing(self: Executor, one: Any) -> None:
        if one.recipe.seed == cursed_seed:
            os._exit(99)
        attach(self, one)

    Executor.attach = crashing  # type: ignore[method-assign]
    training.main(settings)


class Serving:
    """A store, and its training process, which may be killed and started again."""

    def __init__(
        self,
        folder: Path,
        lease_seconds: float = 15.0,
        cursed_seed: int | None = None,
        quotas: Quotas | None = None,
        announce: str | None = None,
        turn_seconds: float = 0.1,
    ) -> None:
        self.folder = folder
        if not (folder / "model").exists():
            jobs_folder(folder, [])
        self.settings = ServiceSettings(
            base=BaseSpec(model=str(folder / "model"), dtype="float64"),
            store=folder / "store",
            device="cpu",
            envelope=Envelope(jobs=8, rank=8, sample_tokens=32),
            quotas=quotas or Quotas(),
            announce=announce,
        )
        create_tables(self.settings)
        self.requests = RequestStore(open_requests(self.settings, writable=True))
        self.training = TrainingStore(open_training(self.settings, writable=False))
        self.keys: dict[str, dict[str, Any]] = {}
        self._arguments = lease_seconds, cursed_seed, turn_seconds
        self.process: Any = None

    def start(self) -> Any:
        arguments = (self.settings, self.folder / "log", *self._arguments)
        self.process = context().Process(target=train, args=arguments)
        self.process.start()
        return self.process

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        if self.process.exitcode is None:
            os.kill(self.process.pid, number)
        self.process.join()
        return int(self.process.exitcode)

    def close(self) -> None:
        if self.process is not None:
            self.end()
        self.requests.close()
        self.training.close()

    def submit(self, tenant: str = "acme", *, prepared: bool = True, **keys: Any) -> str:
        """Submit a job as the HTTP process does; `prepared` also says that its rows are tokenised."""
        id = new_id("ftjob")
        budget = keys.pop("token_budget", None)
        job = {**JOB, "data": {"path": str(self.folder / "a.jsonl"), "max_length": 64}, "name": id, **keys}
        self.keys[id] = job
        submission = Submission(
            id=id, tenant=tenant, created_at=time.time(), request={}, job=job, training_file="file-1",
            suffix="mine", details={}, body_hash=id, token_budget=budget,
        )  # fmt: skip
        self.requests.submit(submission)
        if prepared:
            self.requests.mark_prepared(id)
        return id

    def command(self, job: str, verb: Verb, value: Any = None) -> None:
        self.requests.add_command("acme", job, verb, value)

    def row(self, job: str) -> JobRow:
        found = self.training.job(job)
        assert found is not None
        return found

    def state(self, job: str) -> State | None:
        return None if (row := self.training.job(job)) is None else row.state

    def step(self, job: str) -> int:
        return 0 if (row := self.training.job(job)) is None else row.status.step

    def until(self, true: Callable[[], bool], restart: bool = False) -> None:
        """Wait until something is true; `restart` starts the process again whenever it has died."""
        deadline = time.monotonic() + SECONDS
        while not true():
            if self.process.exitcode is not None:
                assert restart, (self.folder / "log").read_text()[-4000:]
                self.start()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-4000:]
            time.sleep(0.05)

    def until_state(self, job: str, *states: State, restart: bool = False) -> JobRow:
        self.until(lambda: self.state(job) in states, restart)
        return self.row(job)

    def losses(self, job: str) -> list[tuple[int, float]]:
        found = self.training.metrics(job)
        return [(one.step or 0, one.data["train_loss"]) for one in found if one.measured == "train"]

    def messages(self, job: str) -> list[str]:
        found = self.training.events(job, limit=None, order="asc", type="message")
        return [one.message for one in found]

    def assert_as_alone(self, *jobs: str) -> None:
        """Train the jobs by `weftune.train`, and compare every loss and every weight."""
        output = self.folder / new_id("alone")
        base = {"model": self.settings.base.model, "dtype": "float64"}
        weftune.train({"base": base, "jobs": [self.keys[job] for job in jobs]}, output=output, progress=False)
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        for job in jobs:
            own = [(one["step"], one["loss"]) for one in lines if one["job"] == job and "loss" in one]
            found = self.losses(job)
            assert [step for step, _ in found] == [step for step, _ in own]
            for (_, mine), (_, theirs) in zip(found, own, strict=True):
                assert abs(mine - theirs) <= 1e-9 * abs(theirs)
            folders = self.settings.jobs / job, output / job
            assert oracle.distance(*map(bench.adapter, folders)) <= 1e-8
