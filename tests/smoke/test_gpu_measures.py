"""Commands that measure a GPU, and a run from Python.

Run with `make smoke-gpu`. Each command is a process of its own, as a user starts it.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests import bench
from tests.smoke.commands import surroundings, weftune

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here"),
]


def test_doctor_finds_the_gpu_and_measures_a_profile(tmp_path):
    assert (
        "H200" in weftune("doctor").said
        or torch.cuda.get_device_name(0).split()[-1] in weftune("doctor").said
    )
    weftune("doctor", "--profile", "--base", bench.STORIES, "--output", tmp_path / "profile.json")
    assert json.loads((tmp_path / "profile.json").read_text())


def test_bench_compares_on_this_card(tmp_path):
    said = weftune("bench", "--quick", "--shape", "1b", cwd=tmp_path).said
    assert "Weftune, together" in said
    assert "frozen base" in said


def test_a_small_step_is_measured_with_its_memory(tmp_path):
    file = tmp_path / "found.json"
    words = "--shape 1b --jobs 2 --batch 2x64 --warmup 1 --blocks 1 --steps 1 --baselines frozen,processes"
    command = [sys.executable, "-m", "weftune.bench.gpu_step", *words.split(), "--json", str(file)]
    ended = subprocess.run(command, env=surroundings(), capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4
    weights = 2 * 1_100_000_000
    for row in rows:
        assert row["note"] == ""
        assert row["peak_bytes"] > weights
        assert 0 < row["rho"] < 1


PYTHON = """
import sys, weftune
trainer = weftune.Trainer(sys.argv[1], output=sys.argv[2])
rows = [{"prompt": f"There were {n} cats.", "completion": " Red hats."} for n in range(64)]
for name in ("kept", "cancelled"):
    trainer.add(weftune.JobSpec(name=name, data=rows, steps=12, batch_size=4, adapter={"rank": 4}))

def hear(event):
    if event.job == "cancelled" and event.step == 2:
        trainer.cancel("cancelled")

results = trainer.run(callback=hear)
assert results["kept"].state == "succeeded", results
assert results["cancelled"].state == "cancelled", results
"""


def test_from_python_a_job_is_cancelled_and_the_other_finishes(tmp_path):
    words = [sys.executable, "-c", PYTHON, str(bench.STORIES), str(tmp_path / "output")]
    ended = subprocess.run(words, env=surroundings(), capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
