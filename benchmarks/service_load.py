"""Reads from a service that trains: `python -m benchmarks.service_load [--rate 50] [--seconds 60]`.

It starts `weftune serve` with a store of its own, submits jobs of several tenants, and measures their
optimizer steps per second. Then it sends mixed reads at a fixed rate, whether or not earlier ones have been
answered, and measures latencies and steps again. At last it measures the steps without load once more, since
other programs may share the machine. The load generator runs on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx2 as httpx

from weftune.bench.table import aligned
from weftune.service.keys import KeyFile
from weftune.service.settings import KEYS

TENANTS = ("ada", "bob", "cleo", "dan")
START_SECONDS = 300.0
"""Maximum seconds until the service is ready, and until its jobs train."""
REQUEST_SECONDS = 10.0


@dataclass(slots=True)
class Service:
    url: str
    keys: dict[str, str]
    """Maps tenants to their API keys."""
    jobs: dict[str, str] = field(default_factory=dict)
    """Maps jobs to their tenants."""
    files: dict[str, str] = field(default_factory=dict)
    """Maps tenants to their training files."""

    def client(self, tenant: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60.0, trust_env=False)

    def steps(self) -> int:
        """Return the optimizer steps that all jobs have made."""
        found = 0
        for tenant in TENANTS:
            with self.client(tenant) as client:
                jobs = client.get("/v1/fine_tuning/jobs", params={"limit": 100}).raise_for_status().json()
                found += sum(job["weftune"]["step"] for job in jobs["data"])
        return found


@dataclass(slots=True)
class Load:
    seconds: list[float] = field(default_factory=list)
    """Seconds from the time at which each request was due to the end of its answer."""
    statuses: Counter[str] = field(default_factory=Counter)

    def quantile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_command(words: Sequence[str], log: IO[str]) -> subprocess.Popen[bytes]:
    """Start `weftune` with these words in a new interpreter."""
    return subprocess.Popen([sys.executable, "-m", "weftune", *words], stdout=log, stderr=subprocess.STDOUT)


@contextmanager
def running_service(
    store: Path,
    base: str,
    arguments: Sequence[str],
    start: Callable[[Sequence[str], IO[str]], Any] = start_command,
) -> Iterator[Service]:
    """Start `weftune serve` and yield it when it is ready."""
    file = KeyFile(store / KEYS)
    keys = {tenant: file.create(tenant) for tenant in TENANTS}
    port = free_port()
    service = Service(f"http://127.0.0.1:{port}", keys)
    with (store / "serve.log").open("w") as log:
        words = ["serve", "--base", base, "--port", str(port), "--store", str(store), *arguments]
        process = start(words, log)
        try:
            await_ready(service, process, store / "serve.log")
            yield service
        finally:
            process.terminate()
            process.wait(60)


def await_ready(service: Service, process: Any, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"weftune serve ended with code {process.returncode}:\n{log.read_text()}")
        try:
            if httpx.get(f"{service.url}/readyz", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"weftune serve was not ready after {START_SECONDS:.0f} s:\n{log.read_text()}")


def submit_jobs(service: Service, jobs: int, rank: int) -> None:
    """Submit jobs that train much longer than the benchmark takes, and wait until all of them train."""
    chosen = random.Random(0)
    sums = [(chosen.randrange(1000), chosen.randrange(1000)) for _ in range(200)]
    rows = "\n".join(json.dumps({"prompt": f"{a} + {b} =", "completion": f" {a + b}"}) for a, b in sums)
    for number in range(jobs):
        tenant = TENANTS[number % len(TENANTS)]
        with service.client(tenant) as client:
            if tenant not in service.files:
                sent = client.post(
                    "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("rows.jsonl", rows)}
                )
                service.files[tenant] = sent.raise_for_status().json()["id"]
            extension = {"steps": 100_000, "adapter": {"rank": rank}}
            body = {
                "model": client.get("/v1/models").json()["data"][0]["id"],
                "training_file": service.files[tenant],
                "hyperparameters": {"batch_size": 4},
                "weftune": extension,
            }
            created = client.post("/v1/fine_tuning/jobs", json=body)
            if created.is_error:
                raise SystemExit(f"the job was refused: {created.text}")
            service.jobs[created.json()["id"]] = tenant
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        states = []
        for job, tenant in service.jobs.items():
            with service.client(tenant) as client:
                found = client.get(f"/v1/fine_tuning/jobs/{job}").raise_for_status().json()
                states.append(found["weftune"]["step"] > 1)
        if all(states):
            return
        time.sleep(1.0)
    raise SystemExit("not all jobs have begun to train")


def steps_per_second(service: Service, seconds: float) -> float:
    first, began = service.steps(), time.monotonic()
    time.sleep(seconds)
    return (service.steps() - first) / (time.monotonic() - began)


def paths(service: Service, job: str, tenant: str) -> list[str]:
    """Return the mix of reads; what a client polls is most frequent."""
    return [
        *[f"/v1/fine_tuning/jobs/{job}"] * 4,
        *[f"/v1/fine_tuning/jobs/{job}/events?limit=20"] * 3,
        "/v1/fine_tuning/jobs?limit=20",
        f"/v1/fine_tuning/jobs/{job}/checkpoints",
        "/v1/files?limit=20",
        f"/v1/files/{service.files[tenant]}",
        "/v1/models",
        "/healthz",
    ]


async def send_reads(service: Service, rate: float, seconds: float) -> Load:
    """Send reads at a fixed rate; a slow answer delays no later request."""
    load, chosen = Load(), random.Random(1)
    targets = [(path, tenant) for job, tenant in service.jobs.items() for path in paths(service, job, tenant)]
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=service.url, timeout=REQUEST_SECONDS, limits=limits, trust_env=False
    ) as client:

        async def send(due: float, path: str, tenant: str) -> None:
            headers = {"Authorization": f"Bearer {service.keys[tenant]}"}
            try:
                answer = await client.get(path, headers=headers)
                load.statuses[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                load.statuses[type(error).__name__] += 1
            load.seconds.append(time.monotonic() - due)

        began, sent = time.monotonic(), []
        for number in range(int(rate * seconds)):
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            sent.append(asyncio.create_task(send(due, *chosen.choice(targets))))
        await asyncio.gather(*sent)
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", default="demo")
    parser.add_argument("--rate", type=float, default=50.0, help="Requests per second.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("rest", nargs="*", help="Further options of weftune serve, behind --.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weftune-load-") as folder:
        with running_service(Path(folder), asked.base, asked.rest) as service:
            submit_jobs(service, asked.jobs, asked.rank)
            busy = os.getloadavg()[0]
            before = steps_per_second(service, asked.seconds)
            first, began = service.steps(), time.monotonic()
            load = asyncio.run(send_reads(service, asked.rate, asked.seconds))
            loaded = (service.steps() - first) / (time.monotonic() - began)
            after = steps_per_second(service, asked.seconds)
    alone = (before + after) / 2
    errors = sum(count for status, count in load.statuses.items() if status != "200")
    print(
        aligned(
            ("", "measured"),
            [
                ("cores", str(os.cpu_count())),
                ("programs that run, on average over a minute", f"{busy:.1f}"),
                ("requests", f"{len(load.seconds):,} at {asked.rate:g}/s"),
                ("errors", f"{errors} ({', '.join(f'{name}: {n}' for name, n in load.statuses.items())})"),
                *((f"p{share}", f"{1e3 * load.quantile(share / 100):.1f} ms") for share in (50, 95, 99)),
                ("steps/s without load", f"{before:.3f} before, {after:.3f} afterwards"),
                ("steps/s with load", f"{loaded:.3f}"),
                ("training slowed by", f"{1 - loaded / alone:.1%}"),
            ],
        )
    )


if __name__ == "__main__":
    main()
