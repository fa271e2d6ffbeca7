"""Output folders as the trainer writes them, made without training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

START = 1_770_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    name: str
    rank: int = 16
    learning_rate: float = 2e-4
    path: str = "data/questions.jsonl"
    steps: int = 60
    done: int = 60
    floor: float = 1.2
    """Where its loss settles."""
    evaluate: bool = True
    state: str = "succeeded"
    reason: str | None = None
    notes: tuple[str, ...] = ()
    keep: str = "last"
    warning: str = ""
    base_loss: float | None = None
    quantize: str | None = None
    started: bool = True


SWEEP: tuple[Job, ...] = (
    Job(name="r8-slow", rank=8, learning_rate=1e-4, floor=1.42),
    Job(name="r16", rank=16, floor=1.25),
    Job(name="r64-best", rank=64, learning_rate=5e-4, floor=1.08, keep="best"),
    Job(name="no-validation", rank=32, evaluate=False, floor=1.3),
    Job(
        name="hot",
        learning_rate=1e9,
        done=4,
        state="failed",
        reason="the loss was not finite at step 4; the checkpoint of step 3 is kept",
    ),
    Job(name="late", rank=128, done=0, state="queued", reason="waits for 1.2 GiB of memory", started=False),
)


@dataclass(slots=True)
class Folder:
    """An output folder being written; `lines` go to metrics.jsonl."""

    output: Path
    lines: list[Mapping[str, Any]] = field(default_factory=list)

    def write(self, jobs: Sequence[Job], status: Mapping[str, Any]) -> Path:
        self.output.mkdir(parents=True, exist_ok=True)
        write_lines(self.output / "metrics.jsonl", self.lines)
        (self.output / "status.json").write_text(json.dumps(status), encoding="utf-8")
        for job in jobs:
            if job.started and "/" not in job.name:
                write_job_file(self.output, job)
        return self.output


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_example(output: Path, jobs: Sequence[Job] = SWEEP, windows: int = 30) -> Path:
    """A run of `jobs`, their losses falling towards their floors with the noise of real batches."""
    noise = random.Random(7)
    folder = Folder(output)
    for step in range(max(job.done for job in jobs) + 1):
        for job in jobs:
            if step <= job.done and job.started:
                folder.lines.extend(_lines(job, step, noise))
    status = {
        "version": 1,
        "base": "demo",
        "device": "cpu",
        "dtype": "float32",
        "started": START,
        "updated": START + 200,
        "seconds": 184.2,
        "solo_seconds": 412.0,
        "peak_bytes": 1_950_000_000,
        "notes": ["Out of memory once: the capacity was halved to 1,024 tokens."],
        "jobs": {job.name: _state(job) for job in jobs},
    }
    folder.write(jobs, status)
    write_lines(output / "windows.jsonl", [_window(number, noise) for number in range(windows)])
    return output


def with_status(output: Path, **changes: Any) -> Path:
    """The folder, after these keys of its status.json have changed."""
    file = output / "status.json"
    status = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(status), encoding="utf-8")
    return output


def write_job_file(output: Path, job: Job) -> None:
    spec = {
        "name": job.name,
        "adapter": {
            "kind": "lora",
            "rank": job.rank,
            "alpha": 32.0,
            "dropout": 0.0,
            "targets": "all-linear",
            "rank_pattern": {},
        },
        "data": {"path": job.path, "format": "auto", "max_length": 2048},
        "eval": {"path": None, "fraction": 0.1, "every": 0.1} if job.evaluate else None,
        "learning_rate": job.learning_rate,
        "keep": job.keep,
    }
    record = {
        "job": spec,
        "base": {"model": "demo", "dtype": "float32", "revision": None, "quantize": job.quantize},
        "data": {"fingerprint": "00ff", "samples": 960, "evaluation_samples": 96, "notes": []},
        "versions": {"weftune": "0.1.0"},
    }
    (output / job.name).mkdir(exist_ok=True)
    (output / job.name / "job.yaml").write_text(yaml.safe_dump(record), encoding="utf-8")


def _lines(job: Job, step: int, noise: random.Random) -> list[Mapping[str, Any]]:
    moment = START + 3 * step
    lines: list[Mapping[str, Any]] = []
    if step:
        diverged = job.state == "failed" and step == job.done
        grown = 40.0**step if job.state == "failed" else 1.0
        lines.append(
            {
                "job": job.name,
                "step": step,
                "epoch": step / job.steps,
                "loss": None if diverged else grown * (_loss(job, step) + noise.gauss(0, 0.09)),
                "tokens": 2048,
                "learning_rate": job.learning_rate * (1 - step / job.steps),
                "grad_norm": None if diverged else 0.8,
                "token_accuracy": 0.6,
                "time": moment,
            }
        )
    if job.evaluate and (step % 6 == 0):
        lines.append(
            {
                "job": job.name,
                "step": step,
                "eval_loss": _validation(job, step),
                "eval_tokens": 9000,
                "eval_token_accuracy": 0.55,
                "time": moment + 1,
            }
        )
    return lines


def _loss(job: Job, step: int) -> float:
    return job.floor + (2.4 - job.floor) * math.exp(-4 * step / job.steps)


def _validation(job: Job, step: int) -> float:
    """Past two thirds of the run it turns up again where the adapter is large."""
    return _loss(job, step) + 0.05 + 0.006 * job.rank * max(0.0, step / job.steps - 0.66)


def _state(job: Job) -> Mapping[str, Any]:
    evaluated = range(0, job.done + 1, 6) if job.evaluate and job.started else range(0)
    return {
        "state": job.state,
        "reason": job.reason,
        "step": job.done,
        "steps": job.steps,
        "trained_tokens": 2048 * job.done,
        "best_step": min(evaluated, key=lambda step: _validation(job, step), default=None),
        "eval_loss": _validation(job, evaluated[-1]) if evaluated else None,
        "notes": list(job.notes),
        "warning": job.warning,
        "base_loss": job.base_loss,
    }


def _window(number: int, noise: random.Random) -> Mapping[str, Any]:
    seconds = 6.1 + noise.gauss(0, 0.3)
    peak = 1_800_000_000 + 4_000_000 * number
    return {
        "window": number,
        "capacity": 2048,
        "tokens": 16_000 + noise.randrange(900),
        "microbatches": 8,
        "shared": 7 if number % 3 else 8,
        "jobs": 4,
        "seconds": seconds,
        "predicted_seconds": None if number == 0 else 6.0,
        "peak_bytes": peak,
        "predicted_peak_bytes": int(peak * 1.04),
        "time": START + 6 * number,
    }
