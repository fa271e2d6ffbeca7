"""Output folders of sweeps as the trainer writes them, made without training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tests.report.example import START, Folder, Job, write_job_file, write_lines
from weftune.jobs.sweeps.halving import Decision, kept_trial_count
from weftune.jobs.sweeps.record import BEST, SampleCount, SweepRecord, TrialRecord, number_text, write_record

STEPS, RUNGS, SHARE = 200, (20, 60), 0.33
BATCH = 8
RANKS = (8, 64, 16)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A trial before anything is trained."""

    name: str
    rank: int
    rate: float
    dropout: float

    def loss(self, step: int) -> float:
        """Falls faster with a better rate, and lower with a larger rank."""
        off = abs(math.log10(self.rate) - math.log10(4e-4))
        floor = 1.25 + 0.22 * off**2 + 0.6 / self.rank + 0.3 * self.dropout
        return floor + (2.6 - floor) * math.exp(-(6 - 2.5 * off) * step / STEPS)


def draw(count: int, name: str = "sql") -> list[Drawn]:
    dice = random.Random(3)
    found = []
    for number in range(count):
        rank, rate = RANKS[number % len(RANKS)], 10 ** dice.uniform(-5, -2.6)
        told = f"{name}-r{rank}-lr{number_text(rate)}"
        told += "-2" * any(one.name == told for one in found)
        found.append(Drawn(told, rank, rate, round(dice.uniform(0, 0.2), 3)))
    return found


def sweep_record(
    count: int = 24, *, failed: int | None = 5, until: int = STEPS, name: str = "sql"
) -> SweepRecord:
    """A sweep with two rungs; `until` is the step that all have reached who may."""
    drawn = draw(count, name)
    trials = {one.name: _trial(one) for one in drawn}
    by_name = {one.name: one for one in drawn}
    lost = {drawn[failed].name} if failed is not None else set()
    for name_ in lost:
        trials[name_] = replace(
            trials[name_], state="failed", left_at=4, reason="the loss was not finite at step 4"
        )
    decisions, began = [], [one.name for one in drawn]
    for number, step in enumerate(RUNGS):
        if until < step:
            break
        here = [one for one in began if one not in lost]
        for one in here:
            value = round(by_name[one].loss(step), 4)
            at = {**trials[one].at_rungs, str(step): value}
            trials[one] = replace(trials[one], at_rungs=at, score=value, state="running")
        order = sorted(here, key=lambda one: by_name[one].loss(step))
        kept = order[: kept_trial_count(SHARE, len(began))]
        decision = Decision(number, number, step, tuple(kept), tuple(order[len(kept) :]), len(began))
        decisions.append(replace(decision, generation=0))
        for one in decision.left:
            trials[one] = replace(trials[one], state="left", left_at=step, reason=decision.reason(one, step))
        began = kept
    if until >= STEPS:
        for one in began:
            value = round(by_name[one].loss(STEPS), 4)
            trials[one] = replace(trials[one], state="finished", score=value)
    best = sorted(began, key=lambda one: by_name[one].loss(STEPS))[:3] if until >= STEPS else []
    steps = sum(_steps(trial, until) for trial in trials.values())
    return SweepRecord(
        name=name,
        search="random",
        metric="eval_loss",
        mode="min",
        keep=3,
        at=(0.1, 0.3),
        share=SHARE,
        judge="mean",
        steps=STEPS,
        rungs=(*RUNGS, STEPS),
        trials=tuple(trials.values()),
        decisions=tuple(decisions),
        best=tuple(best),
        samples=SampleCount(BATCH * steps, BATCH * STEPS * count),
    )


def _trial(one: Drawn) -> TrialRecord:
    values = {"adapter": {"rank": one.rank, "dropout": one.dropout}, "learning_rate": one.rate}
    return TrialRecord(name=one.name, values=values, steps=STEPS)


def _steps(trial: TrialRecord, until: int) -> int:
    return trial.left_at if trial.left_at is not None else until


JOB_STATES: Mapping[str, str] = {
    "waiting": "queued", "running": "running", "resting": "queued", "left": "cancelled", "failed": "failed",
    "finished": "succeeded",
}  # fmt: skip


def write_sweep(
    output: Path, record: SweepRecord | None = None, others: Sequence[Job] = (), every: int = 20
) -> Path:
    """The output folder of a run with this sweep, and `others` beside it that never started."""
    record = record or sweep_record()
    drawn = {one.name: one for one in draw(len(record.trials), record.name)}
    noise, folder = random.Random(5), Folder(output)
    jobs: dict[str, Any] = {}
    for trial in record.trials:
        done = _steps(trial, STEPS if record.best else max(map(int, trial.at_rungs), default=0))
        folder.lines.extend(_lines(drawn[trial.name], done, every, noise))
        jobs[trial.name] = {
            "state": JOB_STATES[trial.state],
            "reason": trial.reason or None,
            "step": done,
            "steps": STEPS,
            "trained_tokens": 512 * done,
            "best_step": done // every * every,
            "eval_loss": trial.score,
            "notes": [],
        }
    for job in others:
        jobs[job.name] = {"state": job.state, "step": job.done, "steps": job.steps, "notes": []}
    status = {
        "version": 1, "base": "demo", "device": "cpu", "dtype": "float32", "started": START,
        "updated": START + 900, "seconds": 884.2, "solo_seconds": None, "peak_bytes": 1_950_000_000,
        "notes": [], "jobs": jobs,
    }  # fmt: skip
    folder.write([], status)
    for job in others:
        write_job_file(output, job)
    for one in drawn.values():
        _write_job_file(output, one)
    write_lines(output / "windows.jsonl", [])
    write_record(output / record.name, record)
    for name in record.best:
        (output / record.name / BEST / name).mkdir(parents=True)
    return output


def _lines(one: Drawn, done: int, every: int, noise: random.Random) -> list[Mapping[str, Any]]:
    lines: list[Mapping[str, Any]] = []
    for step in range(done + 1):
        moment = START + step
        if step:
            loss = one.loss(step) + noise.gauss(0, 0.08)
            lines.append({"job": one.name, "step": step, "loss": loss, "tokens": 512, "time": moment})
        if step % every == 0:
            evaluated = {"eval_loss": one.loss(step), "eval_tokens": 900, "time": moment}
            lines.append({"job": one.name, "step": step, **evaluated})
    return lines


def _write_job_file(output: Path, one: Drawn) -> None:
    write_job_file(output, Job(name=one.name, rank=one.rank, learning_rate=one.rate))
    file = output / one.name / "job.yaml"
    record = yaml.safe_load(file.read_text(encoding="utf-8"))
    record["job"]["adapter"]["dropout"] = one.dropout
    file.write_text(yaml.safe_dump(record), encoding="utf-8")


def as_json(output: Path, sweep: str = "sql") -> dict[str, Any]:
    return json.loads((output / sweep / "sweep.json").read_text(encoding="utf-8"))
