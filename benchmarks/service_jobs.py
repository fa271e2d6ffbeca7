"""Jobs of four tenants that arrive at a service while it trains, beside `weftune train` with the same jobs.

    python -m benchmarks.service_jobs [--shape 8b] [--base FOLDER] [--jobs 64] [--arrival-seconds 120]
        [--measured-seconds 20] [--chats 4] [--only service,train] [--json FILE] [--toy]

FOLDER receives a base with random weights in the real shape, unless it is there already. A real `weftune
serve` process trains it; jobs of `--batch` samples of `--length` tokens are submitted through its HTTP API at
random times, and none ends. `--chats` clients ask for streamed answers of `--answer` tokens, one after
another, half of them from the base and half from an adapter that trains. They pause for a minute before the
last job arrives, since a service keeps microbatches small for a minute after an answer. Then the optimizer
steps of all jobs are counted without chats, and again with chats. At last the service ends, and `weftune
train` trains the same jobs from the start, until its steps have been counted, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np

from benchmarks.folder import SPECIAL, lines_of, write_base, write_jobs
from benchmarks.service_load import TENANTS, Service, running_service
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, toy_size
from weftune.bench.table import aligned
from weftune.bench.timing import Hardware, bench_hardware, reset_memory

CHAT_REST_SECONDS = 62.0
"""Seconds after the last answer in which a service keeps microbatches small, and two more."""
STARTING_SECONDS = 180.0
"""Maximum seconds until all jobs train."""
PROMPT_WORDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceWork:
    """What is trained and asked."""

    jobs: int
    rank: int
    batch: int
    length: int
    rows: int
    chats: int
    answer: int
    arrival_seconds: float
    measured_seconds: float

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length


@dataclass(slots=True)
class ChatTimes:
    """Measured seconds of the answers of all clients."""

    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def words(count: int, size: Size, chosen: random.Random) -> str:
    return " ".join(f"w{chosen.randrange(len(SPECIAL), size.vocabulary)}" for _ in range(count))


def training_rows(work: ServiceWork, size: Size, seed: int) -> str:
    """Return rows of random words as JSON lines. A row has `--length` tokens, with the end of its answer."""
    chosen = random.Random(seed)
    half = work.length // 2
    rows = (
        {"prompt": words(half, size, chosen), "completion": " " + words(half - 1, size, chosen)}
        for _ in range(work.rows)
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def job_keys(work: ServiceWork) -> dict[str, Any]:
    """Return the keys of a job that the API and a jobs file share."""
    return {"steps": 1_000_000, "adapter": {"rank": work.rank}, "learning_rate": 1e-4}


# -- the service -------------------------------------------------------------------------------------------


async def upload_rows(service: Service, work: ServiceWork, size: Size) -> None:
    for seed, tenant in enumerate(TENANTS):
        rows = training_rows(work, size, seed)
        async with open_client(service, tenant) as client:
            sent = await client.post(
                "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("rows.jsonl", rows)}
            )
            service.files[tenant] = sent.raise_for_status().json()["id"]


def open_client(service: Service, tenant: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {service.keys[tenant]}"}
    return httpx.AsyncClient(base_url=service.url, headers=headers, timeout=120.0, trust_env=False)


async def submit_jobs(service: Service, work: ServiceWork, base: str) -> None:
    """Submit jobs at random times, the first one now and the last one after `arrival_seconds`."""
    chosen = random.Random(0)
    middle = [chosen.uniform(0, work.arrival_seconds) for _ in range(work.jobs - 2)]
    due = sorted([0.0, *middle, work.arrival_seconds])[-work.jobs :]
    began = time.monotonic()
    for number, at in enumerate(due):
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        tenant = TENANTS[number % len(TENANTS)]
        body = {
            "model": base,
            "training_file": service.files[tenant],
            "suffix": f"job{number}",
            "hyperparameters": {"batch_size": work.batch},
            "weftune": job_keys(work),
        }
        async with open_client(service, tenant) as client:
            created = await client.post("/v1/fine_tuning/jobs", json=body)
        if created.is_error:
            raise SystemExit(f"the job was refused: {created.text}")
        service.jobs[created.json()["id"]] = tenant


async def summaries(service: Service) -> list[dict[str, Any]]:
    """Return the jobs of all tenants, as the dashboard shows them."""
    found = []
    for tenant in TENANTS:
        async with open_client(service, tenant) as client:
            page = await client.get("/api/jobs", params={"limit": 100})
            found += page.raise_for_status().json()["data"]
    return found


async def wait_until_all_train(service: Service, work: ServiceWork) -> list[dict[str, Any]]:
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline:
        found = await summaries(service)
        if failed := [job["error"] or job["reason"] for job in found if job["state"] == "failed"]:
            raise SystemExit(f"a job has failed: {failed[0]}")
        if len(found) == work.jobs and all(job["step"] > 0 for job in found):
            return found
        await asyncio.sleep(1.0)
    found = await summaries(service)
    waiting = [job for job in found if not job["step"]]
    progress(f"{len(waiting)} of {len(found)} jobs do not train, the first one since: {waiting[0]['reason']}")
    return found


async def chat(
    service: Service, work: ServiceWork, size: Size, base: str, number: int, times: ChatTimes
) -> None:
    """Ask one question after another until the task is cancelled."""
    tenant, chosen = TENANTS[number % len(TENANTS)], random.Random(1000 + number)
    async with open_client(service, tenant) as client:
        while True:
            model = base
            if number % 2:
                jobs = (await client.get("/api/jobs", params={"limit": 100})).json()["data"]
                model = next((job["answers_as"] for job in jobs if job["answers_as"]), base)
            body = {
                "model": model,
                "prompt": words(PROMPT_WORDS, size, chosen),
                "max_tokens": work.answer,
                "temperature": 0.8,
                "stream": True,
            }
            await ask(client, body, times)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], times: ChatTimes) -> None:
    last, is_first = time.monotonic(), True
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.is_error:
            times.errors.append((await answer.aread()).decode()[:200])
            await asyncio.sleep(1.0)
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: {") or not _has_text(line):
                continue
            now = time.monotonic()
            (times.first_token if is_first else times.between_tokens).append(now - last)
            last, is_first = now, False


def _has_text(line: str) -> bool:
    choices = json.loads(line.removeprefix("data: ")).get("choices")
    return bool(choices and choices[0].get("text"))


async def chat_for(
    service: Service, work: ServiceWork, size: Size, base: str, seconds: float, times: ChatTimes
) -> None:
    tasks = [asyncio.create_task(chat(service, work, size, base, one, times)) for one in range(work.chats)]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            times.errors.append(repr(ended))


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


async def rate(service: Service, seconds: float) -> float:
    """Return the optimizer steps per second of all jobs."""
    first, began = await count_steps(service), time.monotonic()
    await asyncio.sleep(seconds)
    return (await count_steps(service) - first) / (time.monotonic() - began)


async def count_steps(service: Service) -> int:
    return sum(job["step"] for job in await summaries(service))


async def use_service(service: Service, work: ServiceWork, size: Size) -> dict[str, Any]:
    """Submit, chat and measure. Return the numbers."""
    async with open_client(service, TENANTS[0]) as client:
        base = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    progress("the service is ready")
    await upload_rows(service, work, size)
    warm, early, late = ChatTimes(), ChatTimes(), ChatTimes()
    async with open_client(service, TENANTS[0]) as client:
        await ask(client, {"model": base, "prompt": "w5 w6", "max_tokens": 8, "stream": True}, warm)
    progress("the base has answered")
    arriving = asyncio.create_task(submit_jobs(service, work, base))
    await chat_for(service, work, size, base, max(2.0, work.arrival_seconds - CHAT_REST_SECONDS), early)
    progress(f"chats while jobs arrive: {chat_numbers(early)}")
    await arriving
    progress("the last job has arrived")
    jobs = await wait_until_all_train(service, work)
    progress(f"{sum(job['step'] > 0 for job in jobs)} jobs train")
    waits = [job["started_at"] - job["created_at"] for job in jobs if job["started_at"] is not None]
    quiet = await rate(service, work.measured_seconds)
    progress(f"{quiet:.2f} steps/s without chats")
    chatting = asyncio.create_task(chat_for(service, work, size, base, work.measured_seconds + 5.0, late))
    await asyncio.sleep(5.0)
    busy = await rate(service, work.measured_seconds)
    await chatting
    progress(f"{busy:.2f} steps/s with chats")
    async with open_client(service, TENANTS[0]) as client:
        windows = (await client.get("/api/windows", params={"limit": 200})).raise_for_status().json()
    return {
        "started": len(waits),
        "start_seconds": quantiles(waits),
        "tokens_per_second": quiet * work.tokens_per_step,
        "tokens_per_second_with_chats": busy * work.tokens_per_step,
        "chat_while_jobs_arrive": chat_numbers(early),
        "chat_beside_all_jobs": chat_numbers(late),
        "window_seconds": quantiles([one["seconds"] for one in windows["data"]]),
        "window_capacities": sorted({one["capacity"] for one in windows["data"]}),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {
        "p50": statistics.median(seconds),
        "p95": float(np.quantile(seconds, 0.95)),
        "max": max(seconds),
    }


def chat_numbers(times: ChatTimes) -> dict[str, Any]:
    return {
        "answers": len(times.first_token),
        "first_token": quantiles(times.first_token),
        "between_tokens": quantiles(times.between_tokens),
        "errors": times.errors[:10],
    }


# -- weftune train -----------------------------------------------------------------------------------------


def train(folder: Path, work: ServiceWork, size: Size, base: Path, hardware: Hardware) -> dict[str, Any]:
    """Train the same jobs with `weftune train` until their steps have been counted, and end it."""
    for seed, tenant in enumerate(TENANTS):
        (folder / f"{tenant}.jsonl").write_text(training_rows(work, size, seed))
    jobs = [
        {"name": f"job{number}", "data": {"path": f"{TENANTS[number % len(TENANTS)]}.jsonl"}, "seed": number}
        for number in range(work.jobs)
    ]
    write_jobs(folder / "jobs.yaml", base, hardware, jobs, batch_size=work.batch, **job_keys(work))
    output, log = folder / "output", (folder / "train.log").open("w")
    command = [sys.executable, "-m", "weftune", "train", str(folder / "jobs.yaml"), "--output", str(output)]
    process = subprocess.Popen(
        [*command, "--device", hardware.device.type], stdout=log, stderr=subprocess.STDOUT
    )
    try:
        steps_per_second = train_rate(output / "metrics.jsonl", process, work)
    except TimeoutError as error:
        raise SystemExit(f"{error}:\n{(folder / 'train.log').read_text()[-4000:]}") from None
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    return {"tokens_per_second": steps_per_second * work.tokens_per_step}


def train_rate(metrics: Path, process: subprocess.Popen[bytes], work: ServiceWork) -> float:
    """Return the optimizer steps per second of all jobs, some windows after each has made its first one."""
    deadline = time.monotonic() + STARTING_SECONDS
    while trained_jobs(metrics) < work.jobs:
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError("weftune train did not train all jobs")
        time.sleep(1.0)
    time.sleep(min(15.0, work.measured_seconds))  # The first passes compile kernels and are captured.
    first, began = count_lines(metrics), time.monotonic()
    time.sleep(work.measured_seconds)
    return (count_lines(metrics) - first) / (time.monotonic() - began)


def loss_lines(metrics: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines_of(metrics) if line.endswith("}")] if metrics.exists() else []
    return [line for line in found if "loss" in line]


def trained_jobs(metrics: Path) -> int:
    return len({line["job"] for line in loss_lines(metrics)})


def count_lines(metrics: Path) -> int:
    return len(loss_lines(metrics))


# -- the command -------------------------------------------------------------------------------------------


def rows_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    service, alone = found.get("service"), found.get("train")
    if service:
        rows += [(f"s to start, {name}", f"{value:.2f}") for name, value in service["start_seconds"].items()]
        rows += [
            (f"s per window, {name}", f"{value:.2f}") for name, value in service["window_seconds"].items()
        ]
        rows.append(("jobs that trained", str(service["started"])))
        rows.append(("tokens/s after the last arrival", f"{service['tokens_per_second']:,.0f}"))
        rows.append(("tokens/s with chats", f"{service['tokens_per_second_with_chats']:,.0f}"))
        for part in ("chat_while_jobs_arrive", "chat_beside_all_jobs"):
            chats, name = service[part], part.replace("_", " ")
            for key in ("first_token", "between_tokens"):
                values = ", ".join(f"{which} {1e3 * one:,.0f}" for which, one in chats[key].items())
                rows.append((f"{name}: ms {key.replace('_', ' ')}", values))
            rows.append((f"{name}: answers, errors", f"{chats['answers']}, {len(chats['errors'])}"))
    if alone:
        rows.append(("tokens/s of weftune train", f"{alone['tokens_per_second']:,.0f}"))
    if service and alone:
        rows.append(("service / train", f"{service['tokens_per_second'] / alone['tokens_per_second']:.3f}"))
    return rows


def parse_work(options: argparse.Namespace) -> ServiceWork:
    if options.toy:
        return ServiceWork(
            jobs=4,
            rank=2,
            batch=1,
            length=16,
            rows=16,
            chats=2,
            answer=8,
            arrival_seconds=4.0,
            measured_seconds=3.0,
        )
    return ServiceWork(
        jobs=options.jobs,
        rank=options.rank,
        batch=options.batch,
        length=options.length,
        rows=options.rows,
        chats=options.chats,
        answer=options.answer,
        arrival_seconds=options.arrival_seconds,
        measured_seconds=options.measured_seconds,
    )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", choices=[name for name in SIZES if name != "toy"], default="8b")
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="where the base is, or will be written")
    parser.add_argument("--only", default="service,train", help="service, train or both")
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1, help="samples in a job's step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--rows", type=int, default=256, help="rows of a tenant's file")
    parser.add_argument("--chats", type=int, default=4, help="clients that ask at the same time")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--arrival-seconds", type=float, default=120.0)
    parser.add_argument("--measured-seconds", type=float, default=20.0)
    parser.add_argument("--toy", action="store_true", help="a tiny base on the CPU: does it run at all")
    options = parser.parse_args()
    if (hardware := bench_hardware(options.toy)) is None:
        parser.error("no GPU is found here; --toy runs on the CPU")
    size, work, only = SIZES[options.shape], parse_work(options), options.only.split(",")
    size = toy_size(size) if options.toy else size
    found: dict[str, Any] = {"size": asdict(size), "work": asdict(work)}
    with tempfile.TemporaryDirectory(prefix="weftune-service-") as name:
        folder = Path(name)
        base = options.base or folder / "base"
        if not (base / "config.json").exists():
            write_base(base, size, hardware)
            reset_memory(hardware.device)
        os.environ.setdefault("WEFTUNE_CACHE", str(folder / "cache"))
        if "service" in only:
            (folder / "store").mkdir()
            words = [
                "--expect",
                f"{work.jobs}xrank{work.rank}x{work.length}",
                "--device",
                hardware.device.type,
            ]
            with running_service(folder / "store", str(base), words) as service:
                found["service"] = asyncio.run(use_service(service, work, size))
        if "train" in only:
            found["train"] = train(folder, work, size, base, hardware)
    print(aligned(("", "measured"), rows_of(found)))
    finish(found, options.json)


if __name__ == "__main__":
    main()
