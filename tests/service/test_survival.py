"""A service under kills: jobs of several tenants come, are paused and cancelled while its processes die."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.service_load import Service, running_service
from tests.base.folders import model_folder
from tests.outputs import write_rows
from tests.service.api.running import openai_client
from tests.service.forked import ForkedCommand
from weftune import JobSpec
from weftune.base.spec import BaseSpec
from weftune.service.processes import PIDS
from weftune.service.settings import ServiceSettings
from weftune.service.store.database import open_requests
from weftune.service.store.requests import RequestStore
from weftune.service.training import CRASHED
from weftune.trainer.trainer import Trainer

ENDED = {"succeeded", "failed", "cancelled"}
RETRIES = 20
"""Number of times that a client repeats a request: longer than a process needs to be started again."""
CLOSE = 1e-8


@dataclass
class Tenant:
    """A tenant that submits its jobs at random times, and cancels or pauses some of them."""

    name: str
    client: openai.OpenAI
    rows: Path
    count: int
    seed: int
    pause_seconds: float
    """Mean seconds between two submissions."""
    max_steps: int
    submitted: list[str] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)

    def run(self) -> None:
        chosen = random.Random(self.seed)
        file = self.client.files.create(file=self.rows, purpose="fine-tune")
        for number in range(self.count):
            time.sleep(chosen.uniform(0.0, 2 * self.pause_seconds))
            job = self.client.fine_tuning.jobs.create(
                model=self.client.models.list().data[0].id,
                training_file=file.id,
                seed=1000 * self.seed + number,
                suffix=f"{self.name}-{number}",
                extra_body={
                    "hyperparameters": {"batch_size": chosen.choice([2, 4])},
                    "weftune": {
                        "steps": chosen.randrange(20, self.max_steps),
                        "learning_rate": 1e-2,
                        "priority": chosen.choice([0, 0, 0, 1]),
                        "adapter": {"rank": chosen.choice([2, 3, 4]), "dropout": chosen.choice([0.0, 0.1])},
                    },
                },
            )
            self.submitted.append(job.id)
            fate = chosen.random()
            if fate < 0.15:
                self.cancelled.add(job.id)
                self._command("cancel", job.id)
            elif fate < 0.3:
                self._command("pause", job.id)
                time.sleep(chosen.uniform(0.0, 1.0))
                self._command("resume", job.id)

    def _command(self, verb: str, job: str) -> None:
        # The job may have ended meanwhile.
        with suppress(openai.BadRequestError):
            getattr(self.client.fine_tuning.jobs, verb)(job)

    def wait(self, seconds: float) -> dict[str, str]:
        """Return the states of all listed jobs once they have ended."""
        deadline = time.monotonic() + seconds
        while True:
            states = {job.id: job.status for job in self.client.fine_tuning.jobs.list(limit=7)}
            if set(states.values()) <= ENDED and len(states) >= self.count:
                return states
            assert time.monotonic() < deadline, f"{self.name}: {states}"
            time.sleep(0.5)


def kill_at_random(store: Path, kills: int, spread: float, ended: threading.Event) -> Counter[str]:
    """Kill each process of the service so many times with SIGKILL, at random moments."""
    chosen, done = random.Random(7), Counter[str]()
    victims = ["training", "http"] * kills
    for victim in victims:
        if ended.wait(chosen.uniform(0.3, 1.0) * spread):
            break
        with suppress(ProcessLookupError):
            os.kill(json.loads((store / PIDS).read_text())[victim], signal.SIGKILL)
            done[victim] += 1
    return done


@pytest.mark.parametrize(
    ("jobs", "kills", "spread", "max_steps"),
    [
        pytest.param(6, 1, 5.0, 50, id="6 jobs"),
        pytest.param(40, 3, 15.0, 120, id="40 jobs", marks=pytest.mark.slow),
    ],
)
def test_every_job_ends_as_it_would_alone_whichever_process_is_killed(
    tmp_path, jobs, kills, spread, max_steps
):
    # OPT's norms stay in float64, so that nothing but a real difference is larger than a rounding.
    base = BaseSpec(model=str(model_folder(tmp_path / "model", "opt", torch.float64)), dtype="float64")
    write_rows(tmp_path / "rows.jsonl", count=24)
    store = tmp_path / "store"
    store.mkdir()
    named = json.dumps({"model": base.model, "dtype": base.dtype})
    with running_service(store, named, ["--expect", "6xrank4x64"], ForkedCommand) as service:
        # Jobs arrive for as long as processes are killed, so that the kills meet jobs that train.
        pause_seconds = 2 * kills * 0.65 * spread / (jobs / 4)
        tenants = [
            Tenant(
                name,
                connect(service, name),
                tmp_path / "rows.jsonl",
                jobs // 4 + (at < jobs % 4),
                at + 1,
                pause_seconds,
                max_steps,
            )
            for at, name in enumerate(service.keys)
        ]
        ended = threading.Event()
        killed: list[Counter[str]] = []
        killer = threading.Thread(target=lambda: killed.append(kill_at_random(store, kills, spread, ended)))
        threads = [threading.Thread(target=tenant.run) for tenant in tenants]
        for thread in [killer, *threads]:
            thread.start()
        for thread in threads:
            thread.join()
        killer.join()
        states = {tenant.name: tenant.wait(300) for tenant in tenants}
        ended.set()
        interrupted = 0
        for tenant in tenants:
            assert_states(tenant, states[tenant.name])
            for job in tenant.submitted:
                interrupted += assert_events(tenant.client, job, states[tenant.name][job])
    print(f"{interrupted} times a job trained when its process was killed")
    assert interrupted or kills == 1, "kills have met jobs that trained"
    assert killed == [Counter(training=kills, http=kills)]
    succeeded = {job for own in states.values() for job, state in own.items() if state == "succeeded"}
    assert len(succeeded) >= jobs // 2
    assert_solo(store, base, succeeded, tmp_path / "solo")


def connect(service: Service, tenant: str) -> openai.OpenAI:
    return openai_client(service.url, service.keys[tenant], max_retries=RETRIES, timeout=30.0)


def assert_states(tenant: Tenant, states: dict[str, str]) -> None:
    """Each acknowledged job is there once, and none besides."""
    assert sorted(states) == sorted(tenant.submitted)
    assert len(set(tenant.submitted)) == tenant.count
    for job, state in states.items():
        assert state == "succeeded" or (state == "cancelled" and job in tenant.cancelled), (job, state)


def assert_events(client: openai.OpenAI, job: str, state: str) -> int:
    """Return how often the training process was killed while it trained the job."""
    events = list(client.fine_tuning.jobs.list_events(job, limit=50))[::-1]
    assert len({event.id for event in events}) == len(events)
    times = [event.created_at for event in events]
    assert times == sorted(times)
    steps = [
        event.data["step"]
        for event in events
        if event.type == "metrics" and "train_loss" in event.data  # type: ignore[index,operator]
    ]
    assert steps == list(range(1, len(steps) + 1)), f"{job}: every step once, in order"
    if state == "succeeded":
        assert len(steps) == client.fine_tuning.jobs.retrieve(job).weftune["steps"]  # type: ignore[attr-defined]
    return sum(CRASHED in event.message for event in events)


def assert_solo(store: Path, base: BaseSpec, jobs: set[str], output: Path) -> None:
    """The adapters are those that each job trains by itself."""
    requests = RequestStore(open_requests(ServiceSettings(base=base, store=store), writable=False))
    for tenant in ("ada", "bob", "cleo", "dan"):
        for submission in requests.submissions(tenant, limit=100):
            if submission.id not in jobs:
                continue
            trainer = Trainer(base, output=output / submission.id).add(JobSpec(**submission.job))
            assert trainer.run()[submission.id].state == "succeeded"
            alone = load_file(output / submission.id / submission.id / "adapter_model.safetensors")
            served = load_file(store / "jobs" / submission.id / "adapter_model.safetensors")
            assert alone.keys() == served.keys()
            for name, tensor in alone.items():
                assert torch.linalg.vector_norm(tensor - served[name]) <= CLOSE * torch.linalg.vector_norm(
                    tensor
                )
    requests.close()
