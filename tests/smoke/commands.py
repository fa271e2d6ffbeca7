"""Commands as a user starts them, and what a run must have left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from safetensors.torch import load_file

from benchmarks.folder import read_lines

STEPS = 20
"""Of stories15M's jobs: more than a window of a pipeline has."""
SHARE_OF_NOISE = 0.03
"""How far losses of two ways of running in bfloat16 may be apart, of themselves."""


@dataclass(frozen=True, slots=True)
class Ended:
    exit_code: int
    said: str


def weftune(
    *words: str | Path,
    code: int = 0,
    cwd: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """Run one command to its end, which must be the exit code that is expected; `environment` is added."""
    asked = [sys.executable, "-m", "weftune", *map(str, words)]
    ended = subprocess.run(
        asked,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**surroundings(), **environment},
        timeout=200,
        check=False,
    )
    said = ended.stdout + ended.stderr + worker_logs(words)
    assert ended.returncode == code, f"{' '.join(map(str, words))} ended with {ended.returncode}:\n{said}"
    assert "Traceback" not in said, said
    return Ended(ended.returncode, said)


def worker_logs(words: tuple[str | Path, ...]) -> str:
    """What the processes of a run have written, which says why one of them ended."""
    output = next((Path(after) for word, after in pairwise(words) if word == "--output"), None)
    return "" if output is None else "".join(path.read_text() for path in output.glob("ranks/*.log"))


def surroundings() -> dict[str, str]:
    """Those of the tests, with this checkout to import from and compiled modules kept."""
    checkout = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (checkout, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "", "COLUMNS": "160"}


def jobs_file(folder: Path, base: Path, rows: Path, **defaults: object) -> Path:
    spec = {
        "base": {"model": str(base)},
        "defaults": {"data": str(rows), "steps": STEPS, "batch_size": 8, "learning_rate": 1e-3, **defaults},
        "jobs": [
            {"name": "small", "adapter": {"rank": 4}},
            {"name": "large", "seed": 1, "adapter": {"rank": 16, "dropout": 0.05}},
        ],
    }
    path = folder / "jobs.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def losses(output: Path) -> dict[str, list[float]]:
    found: dict[str, dict[int, float]] = {}
    for one in read_lines(output / "metrics.jsonl"):
        if "loss" in one:
            found.setdefault(one["job"], {})[one["step"]] = one["loss"]
    return {job: [by_step[step] for step in sorted(by_step)] for job, by_step in found.items()}


def notes(output: Path) -> str:
    return " ".join(json.loads((output / "status.json").read_text())["notes"])


def assert_trained(output: Path, like: Path | None = None, steps: int = STEPS) -> None:
    """Every job succeeded and left an adapter; its losses are those of another run."""
    states = {
        name: job["state"] for name, job in json.loads((output / "status.json").read_text())["jobs"].items()
    }
    assert states == {"small": "succeeded", "large": "succeeded"}
    for name, found in losses(output).items():
        assert len(found) == steps, name
        tensors = load_file(output / name / "adapter_model.safetensors")
        assert all(bool(value.isfinite().all()) for value in tensors.values())
        assert any(bool(value.any()) for key, value in tensors.items() if "lora_B" in key)
        if like is not None:
            assert found == pytest.approx(losses(like)[name], rel=SHARE_OF_NOISE), name
    assert (output / "report.html").stat().st_size > 10_000
