"""A folder as a user would have it, with a jobs file, and what is asked of an output folder."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests import bench, oracle
from tests.base.folders import model_folder
from weftune import JobSpec, Options
from weftune.base.model import Base


def write_rows(path: Path, count: int = 24, seed: int = 0, longest: int = 20, shortest: int = 4) -> None:
    rng = random.Random(seed)
    rows = [
        " ".join(f"w{rng.randrange(6, 97)}" for _ in range(rng.randrange(shortest, longest)))
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def jobs_folder(folder: Path, jobs: list[dict[str, Any]], **defaults: Any) -> Path:
    """A tiny float64 model, two files of rows, and `jobs.yaml`; `a.jsonl` is the data unless a job says."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        # OPT's norms stay in float64; Llama's compute in float32 and can jump by a rounding.
        model_folder(folder / "model", "opt", torch.float64)
        for seed, name in enumerate("ab"):
            write_rows(folder / f"{name}.jsonl", seed=seed)
    whole = {
        "base": {"model": "model", "dtype": "float64"},
        "output": "out",
        "defaults": {
            "batch_size": 4,
            "learning_rate": 1e-2,
            "save_every": 4,
            "data": {"path": "a.jsonl", "max_length": 64},
            **defaults,
        },
        "jobs": jobs,
    }
    (folder / "jobs.yaml").write_text(yaml.safe_dump(whole))
    return folder


FOUR_JOBS: list[dict[str, Any]] = [
    {"name": "best", "steps": 12, "adapter": {"rank": 4, "dropout": 0.1}, "keep": "best",
     "eval": {"fraction": 0.2, "every": 3}},
    {"name": "long", "steps": 24, "adapter": {"rank": 3, "targets": ["q_proj"]}, "schedule": "cosine"},
    {"name": "stops", "steps": 20, "adapter": {"rank": 6}, "seed": 5, "learning_rate": 0.1, "keep": "best",
     "early_stop": 2, "eval": {"fraction": 0.3, "every": 2}},
    {"name": "other", "steps": 9, "data": "b.jsonl", "adapter": {"rank": 2, "dropout": 0.1}, "save_every": 1},
]  # fmt: skip
"""Of different length, with dropout, evaluation, `keep: best` and an early stop."""
FIVE_JOBS = [*FOUR_JOBS, {"name": "fifth", "steps": 15, "data": "b.jsonl", "adapter": {"rank": 5}}]


def status(output: Path) -> dict[str, Any]:
    return json.loads((output / "status.json").read_text())


def states(output: Path) -> dict[str, str]:
    return {name: job["state"] for name, job in status(output)["jobs"].items()}


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def numbers(output: Path, job: str) -> list[tuple[int, str, float]]:
    """Every line of a job as (step, what, loss), in the order of the file."""
    whats = ("loss", "eval_loss")
    return [
        (x["step"], what, x[what]) for x in lines(output) if x["job"] == job for what in whats if what in x
    ]


def assert_whole(output: Path) -> None:
    """No torn file, no line twice, no line missing, nothing left of what was written on the way."""
    for path in output.rglob("*.json"):
        json.loads(path.read_text())
    for path in output.rglob("*.safetensors"):
        load_file(path)
    for name, job in status(output)["jobs"].items():
        assert job["state"] == "succeeded", f"{name} is {job['state']}: {job['reason']}"
        trained, looked = defaultdict(int), defaultdict(int)
        for line in lines(output):
            if line["job"] == name and "base_loss" not in line:
                (looked if "eval_loss" in line else trained)[line["step"]] += 1
        assert list(trained.items()) == [(step, 1) for step in range(1, job["step"] + 1)], name
        assert list(looked) == sorted(looked)
        assert set(looked.values()) <= {1}
        assert (output / name / "adapter_config.json").exists()
        assert not (output / name / "checkpoints").exists()
    assert list(output.rglob("*.partial")) == []


def assert_same_results(output: Path, undisturbed: Path) -> None:
    """DESIGN's *equal* in float64: every loss to 1e-9, every adapter to 1e-8 in relative norm."""
    assert states(output) == states(undisturbed)
    for name, state in states(undisturbed).items():
        if state == "failed":
            ours, theirs = (status(folder)["jobs"][name] for folder in (output, undisturbed))
            assert (ours["step"], ours["reason"]) == (theirs["step"], theirs["reason"])
            continue
        assert_same_job(output, undisturbed, name)
        assert state != "succeeded" or status(output)["jobs"][name]["step"] > 0


def assert_same_job(output: Path, undisturbed: Path, name: str) -> None:
    got, want = numbers(output, name), numbers(undisturbed, name)
    assert [item[:2] for item in got] == [item[:2] for item in want]
    for (step, what, mine), (_, _, theirs) in zip(got, want, strict=True):
        assert abs(mine - theirs) <= 1e-9 * abs(theirs), f"{name}: {what} at step {step}"
    weights = [load_file(folder / name / "adapter_model.safetensors") for folder in (output, undisturbed)]
    assert weights[0].keys() == weights[1].keys()
    assert oracle.distance(*weights) <= 1e-8, name
    for key in ("step", "steps", "trained_tokens", "best_step"):
        assert status(output)["jobs"][name][key] == status(undisturbed)["jobs"][name][key], (name, key)


class Crash(Exception):
    """What a bug would raise in the middle of a run."""


def rich_jobs() -> list[JobSpec]:
    """Dropout, evaluation, `keep: best`, early stop: all that a resumption could lose."""
    rows = bench.rows(bench.samples(20, seed=3))
    stops = {"eval": {"fraction": 0.3, "every": 2}, "early_stop": 2, "keep": "best", "learning_rate": 0.1}
    return [
        JobSpec(name="drops", data=rows, steps=9, batch_size=4, adapter={"rank": 4, "dropout": 0.1},
                eval={"fraction": 0.2, "every": 3}, save_every=4, learning_rate=1e-2),
        JobSpec(name="stops", data=rows, steps=14, batch_size=4, adapter={"rank": 3, "dropout": 0.1},
                save_every=3, seed=1, **stops),
    ]  # fmt: skip


def events_of(output: Path, model: Base, at: int | None = None, **options: Any) -> int:
    """Train `rich_jobs` until event number `at`, then crash; says how many events there were."""
    count = 0

    def callback(_event: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise Crash

    bench.trainer(model, output, rich_jobs(), options=Options(**options)).run(callback)
    return count


def rich_run(output: Path) -> tuple[Path, int]:
    """The undisturbed run of `rich_jobs` and how many events it had."""
    count = events_of(output, bench.base())
    stops = status(output)["jobs"]["stops"]
    assert stops["reason"].startswith("stopped early")
    assert 0 < stops["best_step"] < stops["step"]
    return output, count
